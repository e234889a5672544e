"""Where operands lie in memory changes no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.layouts import place
from tests.problems import Batch
from tests.property.strategies import batches, options, views
from tilewright import attention, attention_varlen

BACKENDS = [None, "portable"]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Another stride may take another product of the same sums: a few units in the last place."""
    eps = torch.finfo(dtype).eps
    return {"rtol": 16 * eps, "atol": 16 * eps}


def run(operands: list[Tensor], dout: Tensor, dlse: Tensor, **asked: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in operands]
    if "cu_seqlens_q" in asked:
        out, lse = attention_varlen(*leaves, return_lse=True, **asked)
    else:
        out, lse = attention(*leaves, return_lse=True, **asked)
    return [out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["dense", "varlen"])
@given(data=st.data(), batch=batches(equal=True, longest=40), asked=options())
def test_any_view_of_any_operand(
    backend: str | None, layout: str, data: st.DataObject, batch: Batch, asked: dict[str, Any]
) -> None:
    placement = place(layout, batch)
    queries, keys = placement.queries, placement.keys
    sides = ((queries, "q"), (keys, "k"), (keys, "v"), (queries, "dout"))
    *operands, dout = (s.store([getattr(x, n) for x in batch.sequences]) for s, n in sides)
    asked = {**asked, **placement.arguments, "backend": backend}
    lse_shape = attention_lse(operands, asked)
    dlse = torch.linspace(-1, 1, lse_shape.numel(), dtype=lse_shape.dtype).view_as(lse_shape)
    want = run(operands, dout, dlse, **asked)
    moved = [data.draw(views(x)) for x in (*operands, dout, dlse)]
    got = run(moved[:3], *moved[3:], **asked)
    for a, b in zip(got, want, strict=True):
        scale = torch.nan_to_num(b.detach(), 0.0, 0.0, 0.0).abs().max().item() if b.numel() else 0.0
        limits = tolerance(batch.dtype)
        torch.testing.assert_close(a, b, rtol=0.0, atol=limits["atol"] * (1.0 + scale))


def attention_lse(operands: list[Tensor], asked: dict[str, Any]) -> Tensor:
    function = attention_varlen if "cu_seqlens_q" in asked else attention
    return function(*operands, return_lse=True, **asked)[1]


@given(batch=batches(equal=True, longest=40), asked=options(), offset=st.integers(0, 3))
def test_slices_of_one_projection(batch: Batch, asked: dict[str, Any], offset: int) -> None:
    """(batch, seqlen, 3 heads, dim) after a projection, q first, as models have it."""
    q = torch.stack([x.q for x in batch.sequences])
    heads, dim = q.shape[2:]
    rows = torch.randn(*q.shape[:2], offset + 3 * heads * dim, generator=torch.Generator())
    parts = rows.to(q.dtype)[..., offset:].unflatten(-1, (3, heads, dim)).unbind(2)
    got = attention(*parts, **asked)
    want = attention(*(x.contiguous() for x in parts), **asked)
    torch.testing.assert_close(got, want, **tolerance(q.dtype))


@given(batch=batches(equal=True, longest=40), asked=options())
def test_expanded_heads_are_grouped_heads(batch: Batch, asked: dict[str, Any]) -> None:
    q, k, v = (torch.stack([getattr(x, n) for x in batch.sequences]) for n in "qkv")
    group = q.shape[2] // k.shape[2]
    many = [x[:, :, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3) for x in (k, v)]
    torch.testing.assert_close(
        attention(q, *many, **asked), attention(q, k, v, **asked), **tolerance(q.dtype)
    )
