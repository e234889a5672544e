"""`torch.nn.functional.scaled_dot_product_attention`, with its signature and its conventions.

PyTorch aligns ``is_causal`` to the top left: query i sees key j iff ``j <= i``. tilewright's own
functions align to the bottom right. The two differ when the sequences differ in length.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from tilewright.api import attention
from tilewright.problem import dtype_name


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Exact attention under PyTorch's name and in its layout.

    Args:
        query: (..., heads_q, seqlen_q, dim), any number of leading dimensions.
        key: (..., heads_k, seqlen_k, dim).
        value: (..., heads_k, seqlen_k, dim_v).
        attn_mask: None; a `torch.nn.attention.bias.causal_upper_left` or `causal_lower_right`; or a
            tensor that hides nothing: a boolean one that is all True, a floating one that is all 0.
            A tensor's contents are read, which waits for an accelerator.
        dropout_p: only 0.
        is_causal: top-left aligned, as PyTorch has it.
        scale: default 1 / sqrt(dim).
        enable_gqa: let heads_q be a multiple of heads_k.

    Returns:
        (..., heads_q, seqlen_q, dim_v) in query's dtype. Where PyTorch has no key for a row, with
        `causal_lower_right`, it is 0.

    Raises:
        NotImplementedError: dropout_p is not 0, attn_mask hides something or adds a bias, or a
            tensor is nested.
        TypeError, ValueError: as `tilewright.attention`; `attn_mask` together with `is_causal`;
            unequal head counts without `enable_gqa`.
    """
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; want 0, there is no dropout here")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask is given and is_causal is True; want one of them")
    q, k, v, leading = _to_rows(query, key, value)
    if q.shape[2] != k.shape[2] and not enable_gqa:
        raise ValueError(
            f"query has {q.shape[2]} heads and key has {k.shape[2]}; "
            "want them equal, or enable_gqa=True"
        )
    mask: dict[str, Any] = {}
    if is_causal or _variant(attn_mask, q, k) == CausalVariant.UPPER_LEFT:
        k, v, mask = _top_left(q, k, v)
    elif _variant(attn_mask, q, k) == CausalVariant.LOWER_RIGHT:
        mask = {"causal": True}
    elif attn_mask is not None:
        _refuse_bias(attn_mask)
    out = cast(Tensor, attention(q, k, v, scale=scale, **mask)).transpose(1, 2)
    return out.reshape(*leading, *out.shape[-2:])


def _to_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """(batch, seqlen, heads, dim) operands, and what stands before (seqlen_q, dim_v) in the result.

    Leading dimensions are broadcast, as PyTorch does it; two dimensions are one head.
    """
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is of type {type(x).__name__}; want a torch.Tensor")
        if x.is_nested:
            raise NotImplementedError(f"{name} is nested; want tilewright.attention_varlen")
        if x.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; want (..., heads, seqlen, dim)")
    with_heads = [x[None] if x.ndim == 2 else x for x in named.values()]
    shapes = [x.shape[:-3] for x in with_heads]
    try:
        batch = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        seen = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise ValueError(f"leading dimensions do not match: {seen}; want them equal") from None
    q, k, v = (
        x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:]).transpose(1, 2)
        for x in with_heads
    )
    return q, k, v, [*batch, *query.shape[-3:-2]]


def _variant(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> CausalVariant | None:
    """Which corner a `CausalBias` is aligned to; None for what is none."""
    if not isinstance(attn_mask, CausalBias):
        return None
    made_for = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if made_for != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"attn_mask is for {made_for[0]} queries and {made_for[1]} keys and there are "
            f"{q.shape[1]} and {k.shape[1]}; want them equal"
        )
    return attn_mask.variant


def _top_left(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys and options that make ``j <= i`` of a bottom-right aligned mask."""
    rows, keys = q.shape[1], k.shape[1]
    if rows <= keys:
        return k[:, :rows], v[:, :rows], {"causal": True}
    # A right bound r means j <= i + keys - rows + r.
    return k, v, {"window": (None, rows - keys)}


def _refuse_bias(attn_mask: Tensor) -> None:
    """Raise for a tensor that changes a logit."""
    is_neutral = attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
    if not is_neutral.all():
        raise NotImplementedError(
            f"attn_mask is a {dtype_name(attn_mask)} tensor that hides keys or adds to logits; "
            "want None, is_causal=True, or torch.nn.attention.bias.causal_upper_left or "
            "causal_lower_right; tilewright.attention takes windows, attention_varlen lengths"
        )
