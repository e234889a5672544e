"""Putting together results over disjoint sets of keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two (out, lse) of the same queries over different keys.

    out is (batch, seqlen, heads, dim) and lse (batch, heads, seqlen). Two empty results give an
    empty one, (0, -inf), and no pair of lse overflows, since both weights are at most 1.
    Source: FlashAttention-2, arXiv 2307.08691, section 2.3 read with two blocks.
    """
    (out_a, lse_a), (out_b, lse_b) = a, b
    largest = torch.maximum(lse_a, lse_b)
    base = largest.masked_fill(largest == -math.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    total = weight_a + weight_b
    # Divided by their sum, not by exp(lse): the sum has no share of a large lse's rounding error.
    share = total.masked_fill(total == 0.0, 1.0)
    out = _weighted(out_a, weight_a / share) + _weighted(out_b, weight_b / share)
    return out.to(out_a.dtype), largest + torch.log(total)


def join_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Let one logit a head, without a value, join the denominator of a finished result."""
    nothing = torch.zeros((), dtype=out.dtype, device=out.device).expand_as(out)
    return merge((out, lse), (nothing, sink.to(lse.dtype)[None, :, None].expand_as(lse)))


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    """The weight is (batch, heads, seqlen)."""
    return out * weight.transpose(1, 2)[..., None]
