"""SDPA's function agrees with PyTorch's own, forward and backward, in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close

from tilewright.compat.sdpa import scaled_dot_product_attention


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_agree(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Same result and gradients as PyTorch's function."""

    def run(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = attend(q, k, v, **options)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        return out, *torch.autograd.grad((out * weights).sum(), (q, k, v))

    assert_close(run(scaled_dot_product_attention), run(F.scaled_dot_product_attention))


def test_signature_is_that_of_pytorch() -> None:
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert {name: x.default for name, x in parameters.items()} == {
        **dict.fromkeys(("query", "key", "value"), inspect.Parameter.empty),
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }


@pytest.mark.parametrize("lengths", [(6, 6), (3, 7), (7, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_is_top_left(lengths: tuple[int, int], is_causal: bool) -> None:
    rows, keys = lengths
    q, k, v = normal(2, 3, rows, 8), normal(2, 3, keys, 8, seed=1), normal(2, 3, keys, 5, seed=2)
    assert_agree(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("lengths", [(6, 6), (3, 7), (7, 3)])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_biases(lengths: tuple[int, int]) -> None:
    rows, keys = lengths
    q, k, v = normal(2, 3, rows, 8), normal(2, 3, keys, 8, seed=1), normal(2, 3, keys, 8, seed=2)
    assert_agree(q, k, v, attn_mask=causal_upper_left(rows, keys))
    assert_agree(q, k, v, attn_mask=causal_lower_right(rows, keys))


@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 1, 3)])
def test_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    q, k, v = normal(*leading, 4, 8), normal(*leading, 6, 8, seed=1), normal(*leading, 6, 8, seed=2)
    assert_agree(q, k, v, is_causal=True)


def test_leading_dimensions_are_broadcast() -> None:
    assert_agree(normal(4, 2, 3, 5, 8), normal(1, 3, 6, 8, seed=1), normal(2, 3, 6, 8, seed=2))


def test_grouped_heads() -> None:
    q, k, v = normal(2, 6, 4, 8), normal(2, 2, 5, 8, seed=1), normal(2, 2, 5, 8, seed=2)
    assert_agree(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="6 heads and key has 2.*enable_gqa"):
        scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("scale", [0.3, -1.0, 0.0])
def test_scale(scale: float) -> None:
    # PyTorch's own function gives NaN for a negative scale under a causal mask.
    q, k, v = (normal(1, 2, 4, 8, seed=seed) for seed in range(3))
    ours = scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True)
    assert_close(ours, F.scaled_dot_product_attention(q * scale, k, v, scale=1.0, is_causal=True))


def test_mask_that_hides_nothing() -> None:
    q, k, v = (normal(2, 2, 4, 8, seed=seed) for seed in range(3))
    assert_agree(q, k, v, attn_mask=torch.ones(4, 4, dtype=torch.bool))
    assert_agree(q, k, v, attn_mask=torch.zeros(2, 1, 1, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(4, 4, dtype=torch.bool).tril(),
        torch.zeros(4, 4).masked_fill(torch.eye(4, dtype=torch.bool), -math.inf),
        torch.full((4, 4), 0.5),
    ],
)
def test_mask_that_cannot_be_expressed_is_refused(mask: Tensor) -> None:
    q = normal(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="attn_mask is a .* tensor.*is_causal=True"):
        scaled_dot_product_attention(q, q, q, attn_mask=mask)


class TestBadInput:
    q = torch.zeros(1, 2, 4, 8)

    def test_dropout(self) -> None:
        with pytest.raises(NotImplementedError, match=r"dropout_p is 0.1"):
            scaled_dot_product_attention(self.q, self.q, self.q, dropout_p=0.1)

    def test_two_masks(self) -> None:
        mask = torch.ones(4, 4, dtype=torch.bool)
        with pytest.raises(ValueError, match="attn_mask is given and is_causal is True"):
            scaled_dot_product_attention(self.q, self.q, self.q, mask, is_causal=True)

    def test_bias_made_for_other_lengths(self) -> None:
        bias = causal_upper_left(3, 4)
        with pytest.raises(ValueError, match="attn_mask is for 3 queries and 4 keys"):
            scaled_dot_product_attention(self.q, self.q, self.q, bias)

    def test_leading_dimensions_that_do_not_match(self) -> None:
        with pytest.raises(ValueError, match="leading dimensions do not match: query"):
            scaled_dot_product_attention(
                self.q.expand(3, 2, 4, 8), self.q.expand(2, 2, 4, 8), self.q
            )

    def test_too_few_dimensions(self) -> None:
        with pytest.raises(ValueError, match=r"key has shape \(8,\)"):
            scaled_dot_product_attention(self.q, self.q[0, 0, 0], self.q)

    def test_no_tensor(self) -> None:
        with pytest.raises(TypeError, match="value is of type list"):
            scaled_dot_product_attention(self.q, self.q, [0.0])

    def test_nested_tensor(self) -> None:
        nested = torch.nested.nested_tensor([torch.zeros(2, 8)], layout=torch.jagged)
        with pytest.raises(NotImplementedError, match="query is nested.*attention_varlen"):
            scaled_dot_product_attention(nested, nested, nested)
