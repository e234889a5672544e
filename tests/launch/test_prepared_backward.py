"""A backward pass whose launches are prepared is, bit for bit, the one that is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launch.standin import StandIn
from tests.launch.test_fa3_backward import every_other, expanded, heads_first, negated, shifted
from tests.problems import cumulative, random_qkv
from tests.test_lane_gradients import is_the_short_ways
from tilewright import attention, attention_varlen
from tilewright.launch import device, fa3_backward

BF16 = torch.bfloat16


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each backward pass the short way for which nothing is prepared."""
    seen, backward = [], fa3_backward.backward

    def counted(*args: Any) -> Any:
        seen.append(1)
        return backward(*args)

    monkeypatch.setattr(fa3_backward, "backward", counted)
    return seen


def qkv() -> list[Tensor]:
    return [x.requires_grad_() for x in random_qkv(2, 5, 7, (4, 2), 16, BF16)]


def whole(leaves: list[Tensor], **options: Any) -> Any:
    return attention(*leaves, backend="fa3", return_lse=True, **options)


def packed(leaves: list[Tensor], **options: Any) -> Any:
    bounds, used = (cumulative([2, 3]), cumulative([4, 3])), torch.tensor([2, 1]).int()
    rows = [x[0] for x in leaves]
    return attention_varlen(
        *rows, *bounds, seqused_q=used, backend="fa3", return_lse=True, **options
    )


SINK = torch.linspace(-1, 1, 4)
# Options, and whether launches are prepared for them: not where an operand is always copied.
OPTIONS: list[tuple[dict[str, Any], bool]] = [
    ({"causal": True}, True),
    ({"deterministic": True, "window": (3, 2)}, True),
    ({"softcap": 2.0}, True),
    ({"scale": -0.5}, False),
    ({"sink": SINK}, True),
    ({"sink": SINK.to(BF16)}, False),
]


@pytest.mark.parametrize(("options", "is_prepared"), OPTIONS, ids=str)
@pytest.mark.parametrize("call", [whole, packed])
def test_gradients_are_those_of_the_first_call(
    hopper: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    unprepared: list[int],
    call: Callable[..., Any],
    options: dict[str, Any],
    is_prepared: bool,
) -> None:
    monkeypatch.setattr("tilewright.calls.may_read", lambda tensor: False)
    leaves = qkv()
    wanted = list(leaves)
    if "sink" in options:
        options = {"sink": options["sink"].clone().requires_grad_()}
        wanted.append(options["sink"])
    found = []
    for use_lse in (False, True) * 3:
        out, lse = call(leaves, **options)
        loss = out.float().square().sum() + (lse.exp().sum() if use_lse else 0.0)
        found.append(torch.autograd.grad(loss, wanted))
    assert len(unprepared) == (0 if is_prepared else 5), "the first goes the operator's way"
    for got, want in zip(found[2:], found, strict=False):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) and a.is_contiguous()


@pytest.mark.parametrize("needs", list(product([False, True], repeat=4))[1:], ids=str)
def test_no_kernel_runs_for_what_nobody_needs(hopper: StandIn, needs: tuple[bool, ...]) -> None:
    inputs = [*random_qkv(2, 5, 7, (4, 2), 16, BF16), torch.linspace(-1, 1, 4)]
    leaves = [x.requires_grad_(n) for x, n in zip(inputs, needs, strict=True)]
    runs = []
    for _ in range(2):
        before = len(hopper.kernels)
        attention(*leaves[:3], sink=leaves[3], backend="fa3").square().sum().backward()
        runs.append(hopper.kernels[before:])
    assert runs[0] == runs[1]
    for x, need in zip(leaves, needs, strict=True):
        assert (x.grad is not None) == need


@pytest.mark.parametrize("make", [expanded, every_other, heads_first, shifted, negated])
def test_what_flows_back_may_lie_anywhere(
    hopper: StandIn, make: Callable[[Tensor], Tensor]
) -> None:
    leaves = qkv()
    whole(leaves)
    out, lse = whole(leaves)
    assert is_the_short_ways(out)
    into = make(out), make(lse[..., None])[..., 0]
    plain = [x.resolve_neg().clone(memory_format=torch.contiguous_format) for x in into]
    got = torch.autograd.grad([out, lse], leaves, into, retain_graph=True)
    for a, b in zip(got, torch.autograd.grad([out, lse], leaves, plain), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("put", [heads_first, shifted])
def test_a_hook_may_put_other_memory_in_a_saved_tensors_place(
    hopper: StandIn, unprepared: list[int], put: Callable[[Tensor], Tensor]
) -> None:
    leaves = qkv()
    want = torch.autograd.grad(whole(leaves)[0].sum(), leaves)
    torch.autograd.grad(whole(leaves)[0].sum(), leaves)  # prepares it
    unprepared.clear()

    def unpack(x: Tensor) -> Tensor:
        return put(x).copy_(x) if x.ndim == 4 else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), unpack):
        out, _ = whole(leaves)
    assert is_the_short_ways(out)
    for a, b in zip(torch.autograd.grad(out.sum(), leaves), want, strict=True):
        assert torch.equal(a, b)
    assert unprepared


def test_another_current_device_is_left_for_the_launches(
    hopper: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = qkv()
    whole(leaves)
    torch.autograd.grad(whole(leaves)[0].sum(), leaves)
    out, _ = whole(leaves)
    entered, current = [], [3]

    class Guard:
        def __init__(self, where: torch.device) -> None:
            entered.append(where)

        def __enter__(self) -> None:
            current[0] = entered[-1].index

        def __exit__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(device, "current", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    torch.autograd.grad(out.sum(), leaves)
    assert entered == [torch.device("cpu")]


def test_launches_that_are_captured_share_nothing(
    hopper: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = qkv()
    outs = [whole(leaves, deterministic=True)[0] for _ in range(3)]
    monkeypatch.setattr(device, "is_capturing", lambda: True)
    monkeypatch.setattr(device, "stream", lambda where: 1)  # not the default one
    for out in outs[1:]:
        assert is_the_short_ways(out)
        out.sum().backward()
    first, second = hopper.calls_of("fa3_backward")
    for name in ("counter", "turns"):
        assert first[name].data_ptr() != second[name].data_ptr()
