"""What cannot be differentiated says so; numbers are never wrong in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tests.problems import cumulative, random_qkv
from tilewright import attention, attention_decode, attention_varlen

BACKENDS = [None, "portable"]


def leaves(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in random_qkv(1, 4, 6, dtype=dtype)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_an_error(backend: str | None) -> None:
    q, k, v = leaves()
    out = attention(q, k, v, backend=backend)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; want"):
        dq.sum().backward()


def test_a_gradient_penalty_is_an_error() -> None:
    """Where the first gradient does not depend on the loss's slope."""
    q, k, v = leaves()
    grads = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v), create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        sum(x.square().sum() for x in grads).backward()


def test_a_hessian_is_an_error() -> None:
    q, k, v = leaves()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.functional.hessian(lambda x: attention(x, k, v).sum(), q)


def test_a_vector_product_through_the_slope_is_an_error() -> None:
    """Reverse over reverse by way of dout, as functional.jvp does it."""
    q, k, v = leaves()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.functional.jvp(lambda x: attention(x, k, v), q, torch.ones_like(q))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_is_an_error(which: int) -> None:
    inputs = list(random_qkv(1, 4, 6))
    with forward_ad.dual_level():
        tangent = torch.ones_like(inputs[which])
        inputs[which] = forward_ad.make_dual(inputs[which], tangent)
        with pytest.raises(NotImplementedError, match=r"no forward-mode derivative \(JVP\); want"):
            attention(*inputs)


def test_forward_mode_elsewhere_is_no_error() -> None:
    q, k, v = random_qkv(1, 4, 6)
    with forward_ad.dual_level():
        forward_ad.make_dual(q, torch.ones_like(q))
        assert torch.equal(attention(q, k, v), attention(q, k, v))


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return attention_varlen(q[0], k[0], v[0], cumulative([1, 3]), cumulative([2, 4]))


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return attention_decode(q, k, v, cache_seqlens=torch.tensor([4], dtype=torch.int32))


@pytest.mark.parametrize("function", [attention, varlen, decode])
def test_every_layout_refuses_a_second_derivative_and_forward_mode(
    function: Callable[..., Any],
) -> None:
    q, k, v = leaves()
    (dq,) = torch.autograd.grad(function(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        function(forward_ad.make_dual(q.detach(), torch.ones_like(q)), k, v)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_torch_func_transforms_are_an_error(transform: Callable[..., Any]) -> None:
    q, k, v = random_qkv(2, 4, 6)
    call = (
        (lambda x: attention(x[None], k[:1], v[:1]).sum())
        if transform is torch.func.vmap
        else (lambda x: attention(x, k, v).sum())
    )
    with pytest.raises(NotImplementedError, match="torch.func transforms.*want"):
        transform(call)(q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_agree_with_finite_differences(backend: str | None) -> None:
    """Of the public function itself, in float64."""
    inputs = [x.requires_grad_() for x in random_qkv(1, 3, 4, (2, 1), 3, torch.float64)]
    options = {"causal": True, "return_lse": True, "backend": backend}
    assert torch.autograd.gradcheck(lambda *x: attention(*x, **options), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_result_is_left_out_of_the_graph(backend: str | None) -> None:
    """Out alone, lse alone, both, or neither may take part in a loss."""
    q, k, v = leaves(torch.float64)

    def of(weight_out: float | None, weight_lse: float | None) -> torch.Tensor:
        out, lse = attention(q, k, v, return_lse=True, backend=backend)
        terms = ((weight_out, out), (weight_lse, lse))
        loss = sum(w * x.square().sum() for w, x in terms if w is not None)
        return torch.autograd.grad(loss, q)[0]

    torch.testing.assert_close(of(1.0, 2.0), of(1.0, None) + 2.0 * of(None, 1.0))
    torch.testing.assert_close(of(1.0, 0.0), of(1.0, None))
