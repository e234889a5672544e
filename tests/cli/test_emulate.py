"""The emulate command: what it prints of a run, and what it says of input that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewright.cli import app

SHAPE = ["--shape", "1,128,1,64"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel of one parameter, mLSE (batch, heads, length), which it sets to zero."""
    pytest.importorskip("cutlass", reason="the kernel is a CuTe DSL program")
    from tests.emulator import dsl
    from tests.emulator.probes import zeros

    ptx, exported = dsl.compile_for("sm_90a", zeros.Zeros(), *zeros.arguments())
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.ptx").write_text(ptx)
    return exported.rename(folder / "kernel.o")


def test_counters_are_printed_and_progress_is_not(kernel: Path) -> None:
    result = CliRunner().invoke(app, ["emulate", str(kernel), "--arch", "sm_90a", *SHAPE])
    assert result.exit_code == 0, result.output
    assert "global store" in result.stdout
    assert "━" not in result.stdout


def test_json_is_all_there_is_on_standard_output(kernel: Path) -> None:
    result = CliRunner().invoke(app, ["emulate", str(kernel), "--arch", "sm_90a", *SHAPE, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["total"]["global store"] == 4 * 128


@pytest.mark.parametrize(
    ("arch", "said"),
    [("sm_100a", "is for sm_90a, not for sm_100a"), ("sm_70", "the emulator knows sm_80")],
)
def test_another_arch_is_refused(kernel: Path, arch: str, said: str) -> None:
    result = CliRunner().invoke(app, ["emulate", str(kernel), "--arch", arch, *SHAPE])
    assert result.exit_code == 1
    assert said in result.stderr and not result.stdout


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    command = ["emulate", str(tmp_path / "lost.o"), "--arch", "sm_90a", *SHAPE]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "lost.o is no file" in result.stderr.replace("\n", "")
    (tmp_path / "lost.o").touch()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "lost.ptx is no file" in result.stderr.replace("\n", "")


@pytest.mark.parametrize("shape", ["1,128,1", "1,128,one,64", "1,0,1,64"])
def test_a_wrong_shape_is_a_usage_error(shape: str) -> None:
    result = CliRunner().invoke(app, ["emulate", "x.o", "--arch", "sm_90a", "--shape", shape])
    assert result.exit_code == 2
    assert shape in result.stderr
