"""The public functions: what a call means, and nothing of how it is computed.

Shapes follow FlashAttention: rows before heads, (batch, seqlen, heads, dim).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from tilewright import calls, lane
from tilewright.calls import Options
from tilewright.dispatch import Explanation
from tilewright.torch_ops import Call

Result = Tensor | tuple[Tensor, Tensor]


class OptionKeywords(TypedDict, total=False):
    """The keywords of `Options`, for type checkers."""

    causal: bool
    window: Sequence[int | None] | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    deterministic: bool
    backend: str | None


class VarlenKeywords(OptionKeywords, total=False):
    """What `attention_varlen` takes besides."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None


class DecodeKeywords(OptionKeywords, total=False):
    """What `attention_decode` takes besides."""

    cache_seqlens: Tensor | None
    block_table: Tensor | None
    k_new: Tensor | None
    v_new: Tensor | None
    num_splits: int | None


_ONLY_OF_DECODE = DecodeKeywords.__annotations__.keys() - OptionKeywords.__annotations__.keys()


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[OptionKeywords],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[OptionKeywords],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Result:
    """Exact attention, ``softmax(scale * q k^T) v``, of equally long sequences.

    Args:
        q: (batch, seqlen_q, heads_q, dim); float16, bfloat16, float32 or float64, any strides.
        k: (batch, seqlen_k, heads_k, dim); heads_q is a multiple of heads_k (GQA, MQA).
        v: (batch, seqlen_k, heads_k, dim_v).
        causal: query i sees key j iff ``j <= i + seqlen_k - seqlen_q``: aligned to the bottom
            right, so that the last query sees every key.
        window: (left, right); query i sees keys ``p - left`` to ``p + right``, both included, where
            ``p = i + seqlen_k - seqlen_q``. None or -1 leaves a side open. Masks intersect.
        scale: multiplies the logits; any finite number. Default 1 / sqrt(dim).
        softcap: logits become ``softcap * tanh(logit / softcap)`` after the scale, before the mask.
        sink: (heads_q,), q's dtype or float32: one more logit a row, which joins the softmax's
            denominator and has no value.
        return_lse: return (out, lse).
        deterministic: equal bits in the backward pass, run after run. The forward always has them.
        backend: a name that `explain` lists; by default the first that can compute the call.

    Returns:
        out, (batch, seqlen_q, heads_q, dim_v) in q's dtype; with `return_lse` also lse, (batch,
        heads_q, seqlen_q), the natural logarithm of the softmax's denominator in float32 (float64
        for float64 inputs). A row that sees no key has out 0 and lse -inf. Both are differentiable,
        once.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: `backend` cannot compute this call, or the call is under forward-mode
            differentiation.

    Source: FlashAttention-2, arXiv 2307.08691, sections 2.1 and 3.1.
    """
    options = (causal, window, scale, softcap, sink, deterministic, backend)
    return lane.dense(q, k, v, options, return_lse)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[VarlenKeywords],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Result:
    """Exact attention of sequences of unequal lengths, packed without padding.

    Sequence b has the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q, and likewise of k
    and v. A sequence may be empty. Rows past the last sequence, and past ``seqused_*``, are not
    part of the problem: they are never read, their out is 0, their lse -inf, their gradients 0.

    Args:
        q: (total_q, heads_q, dim).
        k: (total_k, heads_k, dim).
        v: (total_k, heads_k, dim_v).
        cu_seqlens_q: (batch + 1,) int32, from 0, never decreasing, at most total_q.
        cu_seqlens_k: (batch + 1,) int32, likewise for k and v.
        max_seqlen_q: the longest sequence of queries or more; by default the total.
        max_seqlen_k: the longest sequence of keys or more; by default the total.
        seqused_q: (batch,) int32, how many rows of each sequence count; by default all.
        seqused_k: (batch,) int32, likewise for the keys.
        causal, window, scale, softcap, sink, return_lse, deterministic, backend: as in `attention`,
            within each sequence.

    Returns:
        out, (total_q, heads_q, dim_v); with `return_lse` also lse, (heads_q, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: as in `attention`. What only the contents of a
            tensor can show is checked on the CPU; on an accelerator, where looking would wait for
            the device, it is checked if the environment has TILEWRIGHT_CHECK=1.

    Source: FlashAttention-2, arXiv 2307.08691; the packed layout is FlashAttention's.
    """
    options = (causal, window, scale, softcap, sink, deterministic, backend)
    layout = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    longest = max_seqlen_q, max_seqlen_k
    return lane.varlen((q, k, v), layout, longest, options, return_lse)


@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[DecodeKeywords],
) -> Tensor: ...


@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[DecodeKeywords],
) -> tuple[Tensor, Tensor]: ...


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    num_splits: int | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Result:
    """Exact attention of a few new queries to a cache of keys and values.

    The last query stands at the last key, so with `causal` each of several new tokens sees the
    cache and the new tokens up to itself. Slots past a sequence's length are never read.

    Args:
        q: (batch, seqlen_q, heads_q, dim).
        k_cache: (batch, capacity, heads_k, dim), or with `block_table` (pages, page size, heads_k,
            dim), a page size of 1 or more.
        v_cache: the same with its own dim_v.
        cache_seqlens: (batch,) int32, the keys that each sequence has before this call. By default
            the whole capacity; needed with `block_table` and with `k_new`.
        block_table: (batch, pages a sequence) int32: key j of sequence b is in page
            ``block_table[b, j // page size]``, slot ``j % page size``. Pages may be shared.
        k_new: (batch, seqlen_new, heads_k, dim), written in place after the keys that each sequence
            has, before attending. Goes with `v_new`.
        v_new: (batch, seqlen_new, heads_k, dim_v).
        num_splits: cut the keys into this many parts, attend to each, merge. By default the
            backend's choice, which `explain` names. The result agrees within rounding.
        causal, window, scale, softcap, sink, return_lse, deterministic, backend: as in `attention`.

    Returns:
        out, (batch, seqlen_q, heads_q, dim_v); with `return_lse` also lse, (batch, heads_q,
        seqlen_q). Without `k_new` both are differentiable, in the cache too.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `attention_varlen`.
        ValueError: a cache has no room for `k_new`; nothing was written then.
        NotImplementedError: `k_new` with a tensor that requires gradients, since what is written in
            place has none.

    Source: Flash-Decoding (FlashAttention-2's split over keys); pages as in vLLM, arXiv 2309.06180.
    """
    options = Options(causal, window, scale, softcap, sink, deterministic, backend)
    layout = (cache_seqlens, block_table)
    call = calls.decode(q, k_cache, v_cache, layout, num_splits, options)
    if k_new is not None or v_new is not None:
        call = calls.append(call, k_new, v_new)
    return calls.run(call, return_lse)


def explain(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend a call would take, and why each other one would not.

    Takes what `attention`, `attention_varlen` or `attention_decode` take; it is a varlen call if it
    has `cu_seqlens_q`, by position or by name, and a decode call if it has one of `cache_seqlens`,
    `block_table`, `k_new`, `v_new` and `num_splits`. Nothing is computed or written.

    Raises: what the call itself would raise.
    """
    is_varlen = bool(args) or "cu_seqlens_q" in kwargs
    is_decode = not _ONLY_OF_DECODE.isdisjoint(kwargs)
    function = attention_varlen if is_varlen else attention_decode if is_decode else attention
    inspect.signature(function).bind(q, k, v, *args, **kwargs)  # raises as the call would
    kwargs.pop("return_lse", None)
    if is_varlen:
        call = _varlen_to_explain(q, k, v, *args, **kwargs)
    elif is_decode:
        call = _decode_to_explain(q, k, v, **kwargs)
    else:
        call = calls.dense(q, k, v, Options(**kwargs))
    return calls.explain(call)


def _varlen_to_explain(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **kwargs: Any
) -> Call:
    longest = kwargs.pop("max_seqlen_q", None), kwargs.pop("max_seqlen_k", None)
    used = kwargs.pop("seqused_q", None), kwargs.pop("seqused_k", None)
    return calls.varlen(q, k, v, (cu_seqlens_q, cu_seqlens_k, *used), longest, Options(**kwargs))


def _decode_to_explain(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Call:
    layout = kwargs.pop("cache_seqlens", None), kwargs.pop("block_table", None)
    num_splits = kwargs.pop("num_splits", None)
    k_new, v_new = kwargs.pop("k_new", None), kwargs.pop("v_new", None)
    call = calls.decode(q, k, v, layout, num_splits, Options(**kwargs))
    if k_new is not None or v_new is not None:
        calls.check_append(call, k_new, v_new)
    return call
