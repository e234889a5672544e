"""What the sanitizer is given: every kernel is called, by operands that are on its edges."""

from __future__ import annotations

import pytest
import sanitize
import torch

from tests.launch.standin import StandIn
from tilewright import explain
from tilewright.kernels import catalog
from tilewright.launch import fa3

KERNELS = [k for k in catalog.kernels(fa3.ARCH) if k.family == catalog.FA3_FORWARD]


def test_every_kernel_is_reached_by_its_calls() -> None:
    names = []
    for kernel in KERNELS:
        for call in sanitize.calls(kernel):
            problem = explain(*call.inputs("cpu"), **call.arguments("cpu")).problem
            assert fa3._why_not_so(problem) is None
            assert fa3.kernel(problem) == kernel, call.name
            assert max(problem.seqlen_q, problem.seqlen_k) < 2000
            names.append(call.name)
    assert len(set(names)) == len(names) == 2 * len(KERNELS)
    assert [call.name for call in sanitize.selected([])] == names


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_its_calls_run(hopper: StandIn, layout: str, backward: bool) -> None:
    """On the stand-in, which refuses what a kernel could not read."""
    chosen = sanitize.selected(f"{layout} bfloat16 d64 window".split())
    assert {call.name.split()[-1] for call in chosen} == {"whole", "cut"}
    for call in chosen[:2]:
        sanitize.run(call, "cpu", backward)
        assert [x for x in hopper.kernels if x.family == catalog.FA3_FORWARD][-1] == call.kernel
    forwards = hopper.calls_of(catalog.FA3_FORWARD)
    assert len(forwards) == 2 * (1 + backward)
    whole, cut = forwards[0], forwards[-1]
    spec = chosen[0].kernel.spec
    assert (whole["q"].shape[-1], cut["q"].shape[-1]) == (64, 56)
    assert not torch.isinf(cut["sink"]).any() and torch.isinf(whole["sink"]).all()
    if layout == "dense":
        assert whole["q"].shape[1] % spec.tile_q == 0 == whole["k"].shape[1] % spec.tile_kv
        assert cut["q"].shape[1] % spec.tile_q == 1


def test_words_select(capsys: pytest.CaptureFixture[str]) -> None:
    sanitize.main(["--list", "--select", "dense float16 d192 v128 causal"])
    found = capsys.readouterr().out.splitlines()
    assert found == [f"dense float16 d192 v128 causal {edge}" for edge in ("whole", "cut")]
    with pytest.raises(SystemExit) as refusal:
        sanitize.main(["--select", "sideways"])
    assert refusal.value.code == 2
