"""Rules on gradients: which are computed, from what, and what the caller's strides may be.

Second derivatives and forward mode are in tests/torch_ops/test_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.paths import Path
from tests.problems import cumulative, random_qkv
from tilewright import attention, attention_varlen

SUBSETS = [x for x in product([False, True], repeat=4) if any(x)]


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda x: "".join("01"[i] for i in x))
@pytest.mark.parametrize("backend", [None, "portable"])
def test_only_inputs_that_need_a_gradient_get_one(
    device: str, backend: str | None, subset: tuple[bool, ...]
) -> None:
    inputs = [*random_qkv(2, 5, 7, (4, 2)), torch.linspace(-1, 1, 4)]
    inputs = [x.to(device) for x in inputs]

    def gradients(needs: tuple[bool, ...]) -> list[Tensor | None]:
        leaves = [x.clone().requires_grad_(n) for x, n in zip(inputs, needs, strict=True)]
        out = attention(*leaves[:3], sink=leaves[3], causal=True, backend=backend)
        out.square().sum().backward()
        return [x.grad for x in leaves]

    everything = gradients((True,) * 4)
    for got, want, needed in zip(gradients(subset), everything, subset, strict=True):
        if needed:
            torch.testing.assert_close(got, want)
        else:
            assert got is None


def test_a_gradient_that_nobody_needs_is_not_computed() -> None:
    """Products with k make dq; without dq one of the backward pass's products is gone."""
    q, k, v = random_qkv(1, 8, 8)
    counts = []
    for needs in ((True, True, True), (False, False, True)):
        leaves = [x.clone().requires_grad_(n) for x, n in zip((q, k, v), needs, strict=True)]
        out = attention(*leaves, backend="portable")
        with torch.profiler.profile() as profile:
            out.sum().backward()
        counts.append(sum(e.count for e in profile.key_averages() if e.key == "aten::bmm"))
    assert counts[1] <= counts[0] - 3  # dP, dQ and dK


def test_nothing_is_recorded_where_no_input_needs_a_gradient(path: Path) -> None:
    if path.name == "oracle":
        pytest.skip("the oracle has no autograd")
    q, k, v = (x.to(path.device) for x in random_qkv(1, 3, 4))
    assert not attention(q, k, v, backend=path.backend).requires_grad
    q.requires_grad_()
    with torch.no_grad():
        assert not attention(q, k, v, backend=path.backend).requires_grad


def expanded(out: Tensor) -> Tensor:
    """As ``out.sum().backward()`` makes it: all strides 0."""
    return torch.full((), 0.7, device=out.device).expand_as(out)


def transposed(out: Tensor) -> Tensor:
    return torch.randn(out.mT.shape, device=out.device).mT


def every_other(out: Tensor) -> Tensor:
    return torch.randn(*out.shape[:-1], 2 * out.shape[-1], device=out.device)[..., ::2]


def heads_first(out: Tensor) -> Tensor:
    shape = out.transpose(1, -2).shape
    return torch.randn(shape, device=out.device).transpose(1, -2)


@pytest.mark.parametrize("make", [expanded, transposed, every_other, heads_first])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_dout_may_have_any_strides(
    path: Path, make: Callable[[Tensor], Tensor], packed: bool
) -> None:
    if path.name == "oracle":
        pytest.skip("the oracle takes what PyTorch's matmul takes")
    leaves = [x.to(path.device).requires_grad_() for x in random_qkv(2, 70, 90)]
    if packed:
        q, k, v = (x.flatten(0, 1) for x in leaves)
        bounds = cumulative([70, 70]).to(path.device), cumulative([100, 80]).to(path.device)
        out = attention_varlen(q, k, v, *bounds, causal=True, backend=path.backend)
    else:
        out = attention(*leaves, causal=True, backend=path.backend)
    dout = make(out)
    got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    want = torch.autograd.grad(out, leaves, dout.clone(memory_format=torch.contiguous_format))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", [None, "cpu_fused", "portable"])
def test_the_sum_of_out_has_the_right_gradients(backend: str | None) -> None:
    leaves = [x.requires_grad_() for x in random_qkv(2, 6, 9, dtype=torch.float64)]
    attention(*leaves, causal=True, backend=backend).sum().backward()
    got = [x.grad for x in leaves]
    dout = torch.ones(2, 6, 2, 16, dtype=torch.float64)
    out = attention(*leaves, causal=True, backend=backend)
    for a, b in zip(got, torch.autograd.grad(out, leaves, dout), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", [None, "cpu_fused", "portable"])
def test_backward_may_run_twice_over_a_retained_graph(backend: str | None) -> None:
    leaves = [x.requires_grad_() for x in random_qkv(1, 6, 9)]
    out = attention(*leaves, backend=backend)
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", [None, "cpu_fused", "portable"])
def test_repeated_backward_equals_the_first_each_time(
    all_threads: None, backend: str | None
) -> None:
    """As B=300, Sq=2048, Sk=128, H=1, D=128 with inputs * 3, fewer and shorter."""
    leaves = [(3 * x).requires_grad_() for x in random_qkv(3, 600, 128, (1, 1), 64)]
    dout = torch.randn(3, 600, 1, 64, generator=torch.Generator().manual_seed(1))
    out = attention(*leaves, backend=backend)
    want = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(20):
        got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
