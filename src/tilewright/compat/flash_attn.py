"""The functions of flash-attn 2.8 that take and return tensors, with its signatures.

Import from here what code imports from ``flash_attn``. Masks, windows and lse mean the same in both
libraries, so these functions only rename. They run on any device, in float32 and float64 too, for
any head dim, with a v whose head dim differs, and with pages of any size.

An argument that has no counterpart raises NotImplementedError. Messages name tilewright's own
arguments: scale for softmax_scale, window for window_size, k_new and v_new for a cache's k and v,
block_table for cache_batch_idx.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewright.api import attention, attention_decode, attention_varlen
from tilewright.problem import check_lengths_tensor

Function = TypeVar("Function", bound=Callable[..., Any])
Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, None]

NO_WINDOW: Window = (-1, -1)


def _takes_options_of(function: Callable[..., Any]) -> Callable[[Function], Function]:
    """Give a packed function the signature it forwards: its own tensors, then these options."""
    parameters = list(inspect.signature(function).parameters.values())
    first = next(i for i, x in enumerate(parameters) if x.name == "dropout_p")

    def decorate(packed: Function) -> Function:
        own = inspect.signature(packed).parameters.values()
        tensors = [x for x in own if x.kind == x.POSITIONAL_OR_KEYWORD]
        signature = inspect.Signature([*tensors, *parameters[first:]], return_annotation="Result")
        packed.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        return packed

    return decorate


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`tilewright.attention` under flash-attn's name.

    Args:
        q: (batch, seqlen_q, heads_q, dim).
        k: (batch, seqlen_k, heads_k, dim).
        v: (batch, seqlen_k, heads_k, dim_v).
        dropout_p: only 0.
        softmax_scale: default 1 / sqrt(dim).
        causal: bottom-right aligned.
        window_size: (left, right), -1 for no bound.
        softcap: 0 for none.
        alibi_slopes: only None.
        deterministic: equal bits in the backward pass, run after run.
        return_attn_probs: return (out, lse, None). The probabilities themselves are a test aid of
            dropout, which does not exist here.

    Returns:
        out (batch, seqlen_q, heads_q, dim_v); lse (batch, heads_q, seqlen_q).

    Raises:
        NotImplementedError: dropout_p or alibi_slopes is given.
        TypeError, ValueError: as `tilewright.attention`.
    """
    _refuse_unsupported(dropout_p, alibi_slopes)
    options = _options(softmax_scale, causal, window_size, softcap)
    return _with_probs(
        attention(q, k, v, deterministic=deterministic, return_lse=return_attn_probs, **options)
    )


@_takes_options_of(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Result:
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, dim); no part is copied."""
    q, k, v = _unpack("qkv", qkv, "(batch, seqlen, 3, heads, dim)")
    return flash_attn_func(q, k, v, *options, **named)


@_takes_options_of(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Result:
    """`flash_attn_func` of kv (batch, seqlen_k, 2, heads_k, dim)."""
    k, v = _unpack("kv", kv, "(batch, seqlen, 2, heads, dim)")
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`tilewright.attention_varlen` under flash-attn's name.

    Args:
        q: (total_q, heads_q, dim).
        k: (total_k, heads_k, dim).
        v: (total_k, heads_k, dim_v).
        cu_seqlens_q: (batch + 1,) int32.
        cu_seqlens_k: (batch + 1,) int32.
        max_seqlen_q: the longest sequence of queries or more.
        max_seqlen_k: the longest sequence of keys or more.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in `flash_attn_func`.
        block_table: only None; paged keys go to `flash_attn_with_kvcache`.

    Returns:
        out (total_q, heads_q, dim_v); lse (heads_q, total_q).

    Raises:
        NotImplementedError: dropout_p, alibi_slopes or block_table is given.
        TypeError, ValueError: as `tilewright.attention_varlen`.
    """
    _refuse_unsupported(dropout_p, alibi_slopes)
    if block_table is not None:
        raise NotImplementedError(
            "block_table is given with packed queries; want None here, or queries of one length "
            "in flash_attn_with_kvcache"
        )
    options = _options(softmax_scale, causal, window_size, softcap)
    return _with_probs(
        attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            deterministic=deterministic,
            return_lse=return_attn_probs,
            **options,
        )
    )


@_takes_options_of(flash_attn_func)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Result:
    """`flash_attn_varlen_func` of qkv (total, 3, heads, dim)."""
    q, k, v = _unpack("qkv", qkv, "(total, 3, heads, dim)")
    layout = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *layout, *options, **named)


@_takes_options_of(flash_attn_func)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> Result:
    """`flash_attn_varlen_func` of kv (total_k, 2, heads_k, dim)."""
    k, v = _unpack("kv", kv, "(total, 2, heads, dim)")
    layout = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, *layout, *options, **named)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tilewright.attention_decode` under flash-attn's name.

    Args:
        q: (batch, seqlen_q, heads_q, dim).
        k_cache: (batch, capacity, heads_k, dim), with `cache_batch_idx` of any batch, with
            `block_table` (pages, page size, heads_k, dim), a page size of 1 or more.
        v_cache: the same with its own dim_v.
        k: (batch, seqlen_new, heads_k, dim), written in place after `cache_seqlens` rows.
        v: (batch, seqlen_new, heads_k, dim_v).
        rotary_cos, rotary_sin: only None; rotate q and k before the call.
        cache_seqlens: (batch,) int32, or one length for all; by default the whole capacity.
        cache_batch_idx: (batch,) int32, the cache's row of each sequence.
        cache_leftpad: only None.
        block_table: (batch, pages a sequence) int32.
        rotary_interleaved: without meaning, as there is no rotary embedding.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.
        num_splits: 0 for the backend's choice.
        return_softmax_lse: return (out, lse).

    Returns:
        out (batch, seqlen_q, heads_q, dim_v); lse (batch, heads_q, seqlen_q). Without `k` both are
        differentiable.

    Raises:
        NotImplementedError: a rotary embedding, cache_leftpad or alibi_slopes is given, or
            cache_batch_idx together with block_table.
        ValueError: the cache has no room for `k`; nothing was written then.
        TypeError, ValueError: as `tilewright.attention_decode`.
    """
    _refuse_unsupported(0.0, alibi_slopes)
    _refuse_rotary(rotary_cos, rotary_sin)
    if cache_leftpad is not None:
        raise NotImplementedError(
            "cache_leftpad is given; want None: sequences start at the cache's first slot"
        )
    if isinstance(cache_seqlens, int):
        cache_seqlens = _same_length(q, cache_seqlens)
    if cache_batch_idx is not None:
        if block_table is not None:
            raise NotImplementedError(
                "cache_batch_idx and block_table are both given; want one of them"
            )
        check_lengths_tensor("cache_batch_idx", cache_batch_idx, q.shape[0], q)
        # A contiguous cache is a set of pages as long as the capacity, one a sequence.
        block_table = cache_batch_idx[:, None]
        if cache_seqlens is None and k is None:
            cache_seqlens = _same_length(q, k_cache.shape[1])
    return attention_decode(
        q,
        k_cache,
        v_cache,
        k_new=k,
        v_new=v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        num_splits=num_splits or None,
        return_lse=return_softmax_lse,
        **_options(softmax_scale, causal, window_size, softcap),
    )


def _options(
    softmax_scale: float | None, causal: bool, window_size: Window, softcap: float
) -> dict[str, Any]:
    """The options of tilewright's own functions."""
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": window_size,
        "softcap": None if softcap == 0.0 else softcap,
    }


def _with_probs(result: Tensor | tuple[Tensor, Tensor]) -> Result:
    """flash-attn's three values where there are two."""
    return (*result, None) if isinstance(result, tuple) else result


def _refuse_unsupported(dropout_p: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; want 0, there is no dropout here")
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes is given; want None, a bias on the logits cannot be expressed"
        )


def _refuse_rotary(rotary_cos: Tensor | None, rotary_sin: Tensor | None) -> None:
    for name, table in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if table is not None:
            raise NotImplementedError(f"{name} is given; want None, and q and k already rotated")


def _same_length(q: Tensor, length: int) -> Tensor:
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _unpack(name: str, packed: Tensor, wanted: str) -> tuple[Tensor, ...]:
    """The parts along the third axis from the end, as views. `wanted` is the shape in words."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is of type {type(packed).__name__}; want a torch.Tensor")
    axes = wanted.strip("()").split(", ")
    if packed.ndim != len(axes) or packed.shape[-3] != int(axes[-3]):
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; want {wanted}")
    return packed.unbind(-3)
