"""How gradients reach FA-3's backward kernels: stand-ins judge what they are passed, the oracle and
the portable path the results. Layouts, masks and sinks are in test_fa3.py, which goes both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launch.standin import StandIn
from tests.paths import Path
from tests.problems import cumulative, random_batch, random_qkv
from tests.tolerance import assert_accurate
from tilewright import attention, attention_varlen, explain, jit
from tilewright.kernels import catalog
from tilewright.kernels.catalog import Kernel
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec, RowsSpec
from tilewright.launch import device
from tilewright.launch.fa3 import ARCH

BF16 = torch.bfloat16
WINDOW = {"window": (3, 2)}  # which, on the CPU, no other backend than portable takes
PREPARE, MAIN, FINISH = catalog.FA3_PREPARE, catalog.FA3_BACKWARD, catalog.FA3_FINISH


def qkv(
    rows: int = 5, keys: int = 7, heads: tuple[int, int] = (4, 2), dim: int = 16
) -> list[Tensor]:
    return [x.requires_grad_() for x in random_qkv(2, rows, keys, heads, dim, BF16)]


def gradients(leaves: list[Tensor], backend: str = "fa3", **options: Any) -> list[Tensor]:
    out, lse = attention(*leaves, backend=backend, return_lse=True, **options)
    rng = torch.Generator().manual_seed(3)
    into = [torch.randn(x.shape, generator=rng).to(x.dtype) for x in (out, lse)]
    return list(torch.autograd.grad([out, lse], leaves, into))


@pytest.mark.parametrize(
    ("dims", "tiles"),
    [
        ((16, 24), (64, 64)),
        ((64, 64), (64, 64)),
        ((72, 40), (128, 128)),  # which were measured to be faster than tiles of 96
        ((64, 128), (128, 128)),
        ((128, 8), (128, 128)),
        ((136, 128), (192, 128)),
        ((8, 136), (192, 192)),
        ((8, 256), (256, 256)),
    ],
    ids=str,
)
def test_the_smallest_tiles_that_hold_the_head_dims_are_taken(
    hopper: StandIn, dims: tuple[int, int], tiles: tuple[int, int]
) -> None:
    batch = random_batch([(5, 9)] * 2, (4, 2), dims, BF16, with_sink=True, with_dlse=True)
    assert_accurate(Path("fa3").run(batch), batch)
    prepare, main, finish = hopper.kernels[-3:]
    assert (main.spec.head_dim, main.spec.head_dim_v) == tiles
    assert (prepare.spec.head_dim, finish.spec.head_dim) == (tiles[1], tiles[0])
    assert {prepare, main, finish} <= set(catalog.kernels("sm_90a"))


@pytest.mark.parametrize("needs", list(product([False, True], repeat=4))[1:], ids=str)
def test_no_kernel_runs_for_what_nobody_needs(hopper: StandIn, needs: tuple[bool, ...]) -> None:
    inputs = [*random_qkv(2, 5, 7, (4, 2), 16, BF16), torch.linspace(-1, 1, 4)]
    leaves = [x.requires_grad_(n) for x, n in zip(inputs, needs, strict=True)]
    attention(*leaves[:3], sink=leaves[3], backend="fa3").square().sum().backward()
    assert [x.grad is not None for x in leaves] == list(needs)
    wanted = [PREPARE, *[MAIN, FINISH] * any(needs[:3])]
    assert [x.family for x in hopper.kernels[1:]] == wanted


def expanded(out: Tensor) -> Tensor:
    return torch.full((), 0.7, dtype=out.dtype).expand_as(out)


def every_other(out: Tensor) -> Tensor:
    return torch.randn(*out.shape[:-1], 2 * out.shape[-1]).to(out.dtype)[..., ::2]


def heads_first(out: Tensor) -> Tensor:
    return torch.randn(out.transpose(1, 2).shape).to(out.dtype).transpose(1, 2)


def shifted(out: Tensor) -> Tensor:
    return torch.randn(out.numel() + 1).to(out.dtype)[1:].view(out.shape)


def negated(out: Tensor) -> Tensor:
    return torch._neg_view(torch.randn(out.shape).to(out.dtype))


@pytest.mark.parametrize("make", [expanded, every_other, heads_first, shifted, negated])
def test_what_flows_back_may_lie_anywhere(
    hopper: StandIn, make: Callable[[Tensor], Tensor]
) -> None:
    leaves = qkv()
    out, lse = attention(*leaves, backend="fa3", return_lse=True)
    into = make(out), make(lse[..., None])[..., 0]
    got = torch.autograd.grad([out, lse], leaves, into, retain_graph=True)
    plain = [x.resolve_neg().clone(memory_format=torch.contiguous_format) for x in into]
    for a, b in zip(got, torch.autograd.grad([out, lse], leaves, plain), strict=True):
        assert torch.equal(a, b)
    is_readable = make is heads_first
    first = hopper.calls_of(MAIN)[0]["dout"]
    assert (first.data_ptr() == into[0].data_ptr()) == is_readable


@pytest.mark.parametrize("of", [0, 1], ids=["out", "lse"])
def test_a_loss_may_use_one_result_only(hopper: StandIn, of: int) -> None:
    leaves = qkv()
    grads = [
        torch.autograd.grad(
            attention(*leaves, backend=name, causal=True, return_lse=True)[of].float().sum(), leaves
        )
        for name in ("fa3", "portable")
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    assert hopper.calls_of(PREPARE)[-1]["has_dlse"] == of


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.5])
def test_a_scale_without_a_sign_or_with_a_minus(
    hopper: StandIn, scale: float, softcap: float | None
) -> None:
    options = {"scale": scale, "softcap": softcap, "causal": True}
    got, want = (gradients(qkv(7, 7), name, **options) for name in ("fa3", "portable"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * b.abs().max().item())
    if scale == 0:
        assert not got[0].any() and not got[1].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fixed_order_is_another_kernel(hopper: StandIn, deterministic: bool) -> None:
    gradients(qkv(200, 7), deterministic=deterministic)
    (given,) = hopper.calls_of(MAIN)
    assert hopper.kernels[-2].spec.deterministic == deterministic
    assert (given["turns"] is not None) == deterministic


def test_a_softcap_always_has_a_fixed_order(hopper: StandIn) -> None:
    gradients(qkv(200, 7), softcap=3.0)
    assert hopper.kernels[-2].spec.deterministic


@pytest.mark.parametrize("which", range(3))
def test_finish_looks_after_what_the_main_kernel_wrote(hopper: StandIn, which: int) -> None:
    """Also where no gradient of q is wanted, and though it may find nothing to do."""
    leaves = [x.requires_grad_(i == which) for i, x in enumerate(qkv())]
    attention(*leaves, backend="fa3").sum().backward()
    (main,), (finish,) = (hopper.calls_of(x) for x in (MAIN, FINISH))
    for name in ("dk", "dv", "spoilt", "dq_sum"):
        assert finish[name].data_ptr() == main[name].data_ptr()


@pytest.mark.parametrize("deterministic", [False, True])
def test_whatever_the_forward_takes_has_a_backward(deterministic: bool) -> None:
    every = catalog.kernels(ARCH)
    features = {x.spec.features for x in every if x.family == catalog.FA3_FORWARD}
    for spec in features:
        mask = spec.bounded_left, spec.bounded_right, spec.has_softcap
        wanted = BackwardSpec(
            spec.dtype, spec.head_dim, spec.head_dim_v, *mask, spec.packed, deterministic
        )
        found = catalog.smallest(ARCH, MAIN, wanted)
        dims = spec.head_dim, spec.head_dim_v
        assert (found.head_dim, found.head_dim_v) == ((128, 128) if dims == (96, 96) else dims)
        dims = {PREPARE: found.head_dim_v, FINISH: found.head_dim}
        for family, dim in dims.items():
            rows = RowsSpec(spec.dtype, dim, spec.packed)
            assert Kernel(family, rows, ARCH) in every


@pytest.mark.parametrize("missing", [PREPARE, MAIN, FINISH])
def test_kernels_that_cannot_be_loaded_are_told(
    hopper: StandIn, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def why(kernel: Kernel) -> str | None:
        return f"nobody built {kernel}" if kernel.family == missing else None

    monkeypatch.setattr(jit, "why_unavailable", why)
    explanation = explain(*qkv(), **WINDOW)
    assert (explanation.backend, explanation.backward) == ("fa3", "portable")
    assert f"nobody built {missing}_bf16" in explanation.backward_rejected["fa3"]
    assert "its backward is that of portable" in str(explanation)
    got, want = (gradients(qkv(), name, **WINDOW) for name in ("fa3", "portable"))
    assert {x.family for x in hopper.kernels} == {catalog.FA3_FORWARD}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * b.abs().max().item())


def test_a_packed_batch_without_sequences_has_gradients_of_zero(hopper: StandIn) -> None:
    leaves = [x[0].detach().requires_grad_() for x in qkv()]
    sink = torch.ones(4, requires_grad=True)
    none = cumulative([])
    out, lse = attention_varlen(*leaves, none, none, sink=sink, return_lse=True, backend="fa3")
    into = [torch.full_like(x, torch.nan) for x in (out, lse)]
    for grad in torch.autograd.grad([out, lse], [*leaves, sink], into):
        assert not grad.any()
    assert not hopper.calls


def test_launches_that_are_captured_share_nothing(
    hopper: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_capturing", lambda: True)
    monkeypatch.setattr(device, "stream", lambda where: 1)  # not the default one
    for _ in range(2):
        gradients(qkv(), deterministic=True)
    first, second = hopper.calls_of(MAIN)
    for name in ("counter", "turns"):
        assert first[name].data_ptr() != second[name].data_ptr()
    assert not device._counters


def test_another_current_device_is_left_for_the_launches(
    hopper: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = qkv()
    out = attention(*leaves, backend="fa3")
    entered, current = [], [3]

    class Guard:
        def __init__(self, where: torch.device) -> None:
            entered.append(where)

        def __enter__(self) -> None:
            assert len(hopper.calls) == 1
            current[0] = entered[-1].index

        def __exit__(self, *_: Any) -> None:
            assert len(hopper.calls) == 4

    monkeypatch.setattr(device, "current", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    out.sum().backward()
    assert entered == [torch.device("cpu")]
