"""The ways to compute a case: ours, and PyTorch's as a user would write it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import tilewright
from tilewright.bench.cases import Case
from tilewright.masks import Mask


class Contender:
    """A case's inputs, laid out as this way of computing wants them, and the computation."""

    def __init__(self, inputs: tuple[Tensor, ...], attend: Callable[..., Any]) -> None:
        self.inputs = inputs
        self.attend = attend
        with torch.no_grad():
            self.dout = torch.randn_like(attend(*inputs))

    def forward(self) -> None:
        with torch.no_grad():
            self.attend(*self.inputs)

    def forward_backward(self) -> None:
        torch.autograd.grad(self.attend(*self.inputs), self.inputs, self.dout)


def ours(case: Case) -> Contender:
    window = (case.mask.left, case.mask.right)
    if not case.lengths:
        return Contender(_dense_inputs(case), partial(tilewright.attention, window=window))
    bounds = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32)
    packed = partial(
        tilewright.attention_varlen,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=case.seqlen_q,
        max_seqlen_k=case.seqlen_k,
        window=window,
    )
    total = (sum(case.lengths),)
    return Contender(_random(case, total, total), packed)


def sdpa(case: Case) -> Contender:
    """`scaled_dot_product_attention`, with its causal flag or its biases where they say the mask,
    else with a boolean mask made once, outside of the timing."""
    bias = _bias(case)
    is_causal = bias is None and case.mask == Mask.causal()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(
            *heads_first,
            attn_mask=bias,
            is_causal=is_causal,
            enable_gqa=case.heads_q != case.heads_k,
        )
        return out.transpose(1, 2)

    return Contender(_dense_inputs(case), attend)


def _bias(case: Case) -> Tensor | None:
    seqlen_q, seqlen_k = case.seqlen_q, case.seqlen_k
    if case.lengths:
        keys = torch.arange(seqlen_k)
        is_real = keys < torch.tensor(case.lengths)[:, None]  # (batch, key)
        seen = is_real[:, None, None, :]
        if case.mask.right is not None:
            seen = seen & (keys <= torch.arange(seqlen_q)[:, None])
        return seen
    if case.mask.left is None and (case.mask.right is None or seqlen_q == seqlen_k):
        return None
    if case.mask == Mask.causal():
        return causal_lower_right(seqlen_q, seqlen_k)
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    return (distance >= -(case.mask.left or 0)) & (distance <= (case.mask.right or 0))


def _dense_inputs(case: Case) -> tuple[Tensor, ...]:
    return _random(case, (case.batch, case.seqlen_q), (case.batch, case.seqlen_k))


def _random(case: Case, rows_q: tuple[int, ...], rows_k: tuple[int, ...]) -> tuple[Tensor, ...]:
    dtype = getattr(torch, case.dtype)
    shapes = (
        (*rows_q, case.heads_q, case.head_dim),
        (*rows_k, case.heads_k, case.head_dim),
        (*rows_k, case.heads_k, case.head_dim),
    )
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
