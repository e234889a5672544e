"""Kernels run from their files: arguments from the stated signature, and the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewright.emulator.invoke import Parameter, Problem, emulate, parameters

SIGNATURE = (
    "mQ: Tensor([n0, n1, n2, n3], bfloat16), mLSE: Tensor([n4, n5, n6], float32), "
    "softmax_scale: float32, mPage: None, aux: Tuple[None, None], max_seqlen_q: int32"
)


def test_a_signature_is_parsed() -> None:
    assert parameters(SIGNATURE) == [
        Parameter("mQ", "tensor", "bfloat16", 4),
        Parameter("mLSE", "tensor", "float32", 3),
        Parameter("softmax_scale", "number", "float32"),
        Parameter("mPage", "none"),
        Parameter("aux", "tuple", length=2),
        Parameter("max_seqlen_q", "number", "int32"),
    ]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """flash-attn-4's causal forward for sm_90a as kernel.o and kernel.ptx."""
    pytest.importorskip("torch", reason="the peer's Python code needs torch")
    pytest.importorskip("flash_attn.cute", reason="the peer, flash-attn-4, is not installed")
    import torch

    from tests.emulator import peers

    q = torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16)
    with peers.flash_attention("sm_90a") as peer:
        peer.forward(q, q, q, causal=True)
    ((ptx, exported),) = peer.files
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.ptx").write_text(ptx)
    (folder / "kernel.o").write_bytes(exported.read_bytes())
    return folder / "kernel.o"


def test_a_peer_runs_from_its_files(kernel: Path) -> None:
    problem = Problem(2, 200, 3, 128, key_length=200, is_causal=True)
    found = emulate(kernel, "sm_90a", problem)
    assert set(found.errors) == {"mO", "mLSE"}
    assert found.errors["mO"] < 2e-2 and found.errors["mLSE"] < 1e-5
    assert len(found.result.launches[0].ctas) == 2 * 3 * 2
    assert np.isfinite(found.tensors["mO"].astype(np.float32)).all()


def test_ptx_of_another_arch_is_refused(kernel: Path) -> None:
    problem = Problem(1, 128, 1, 128, key_length=128)
    with pytest.raises(ValueError, match="sm_90a, not for sm_100a"):
        emulate(kernel, "sm_100a", problem)


def test_the_command_prints_counters_and_errors(kernel: Path) -> None:
    typer = pytest.importorskip("typer", reason="the command line needs typer")
    testing = pytest.importorskip("typer.testing")
    from tilewright.cli.emulate import emulate as command

    app = typer.Typer()
    app.command()(command)
    options = ["--arch", "sm_90a", "--shape", "1,128,1,128", "--causal"]
    result = testing.CliRunner().invoke(app, [str(kernel), *options])
    assert result.exit_code == 0, result.output
    assert "MMA m64n128k16 bf16 FLOP" in result.output and "mO: largest difference" in result.output
    result = testing.CliRunner().invoke(app, [str(kernel), "--arch", "sm_70", "--shape", "1,2,3,4"])
    assert result.exit_code == 1 and "sm_70" in result.output
