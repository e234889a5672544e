"""tilewright as an attention implementation of Hugging Face transformers.

    from tilewright.integrations.transformers import register

    register()
    model = AutoModel.from_pretrained(name, attn_implementation="tilewright")

Padding becomes lengths, so that padded positions cost nothing; windows, softcap, sinks and grouped
heads stay what they are. What cannot be expressed raises NotImplementedError.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from tilewright.api import attention, attention_varlen
from tilewright.integrations.transformers_masks import Side, Visibility, largest, visibility
from tilewright.masks import Mask

NAME = "tilewright"

# What an attention module's forward may take if all that it attends to comes from one sequence.
_SELF_ATTENTION = {
    "self",
    "hidden_states",
    "attention_mask",
    "position_ids",
    "position_embeddings",
    "past_key_values",
    "cache",
    "cache_position",
    "use_cache",
    "output_attentions",
    "kwargs",
}

# Arguments that change what attention computes and have no counterpart, each with what it is.
_REFUSED = {
    "position_bias": "a bias on the logits",
    "sinks": "a sink that has its own keys",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of blocks of keys for each query",
    "block_table": "a paged cache",
    "output_attentions": "the probabilities, which are never stored",
}


def register() -> None:
    """Register "tilewright" with transformers' attention and mask interfaces.

    From then on `attn_implementation="tilewright"` selects it, also in a model that exists already,
    by its `set_attn_implementation`. Calling it again does nothing new.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, visibility)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visibility | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call.

    Args:
        module: the attention module.
        query: (batch, heads_q, seqlen_q, dim).
        key: (batch, heads_k, seqlen_k, dim), the cached ones included.
        value: (batch, heads_k, seqlen_k, dim_v).
        attention_mask: what `visibility` made; None leaves it to `is_causal` and `sliding_window`.
        dropout: only 0.
        scaling: multiplies the logits; default 1 / sqrt(dim).
        softcap: as in `tilewright.attention`.
        s_aux: (heads_q,) sinks.
        kwargs: `is_causal` and `sliding_window`; `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`
            and `max_length_k` of sequences that lie packed in the batch; what is not about
            attention.

    Returns:
        (batch, seqlen_q, heads_q, dim_v), 0 at padding, and None in place of the probabilities.

    Raises:
        NotImplementedError: dropout, a dense mask, a bias, or anything else without a counterpart.
    """
    _refuse(dropout, attention_mask, kwargs)
    seen = attention_mask
    if not isinstance(seen, Visibility):
        seen = _without_mask(module, query, key, kwargs)
    _check_sizes(seen, query, key)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k, v = k[:, : seen.keys], v[:, : seen.keys]
    options = {
        "window": (seen.mask.left, seen.mask.right),
        "scale": scaling,
        "softcap": softcap,
        "sink": None if s_aux is None else s_aux.to(query.dtype),
    }
    sides = _sides(module, seen, query, kwargs)
    if sides is None:
        return cast(Tensor, attention(q, k, v, **options)), None
    return _attend_packed(q, k, v, sides, options), None


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, sides: tuple[Side, Side], options: dict[str, Any]
) -> Tensor:
    """Attention of the rows that count, put back to where they stood."""
    queries, keys = sides
    out = attention_varlen(
        _pack(q, queries),
        _pack(k, keys),
        _pack(v, keys),
        queries.cu_seqlens.to(q.device),
        keys.cu_seqlens.to(q.device),
        max_seqlen_q=queries.longest,
        max_seqlen_k=keys.longest,
        **options,
    )
    out = cast(Tensor, out)
    if queries.index is not None:
        rows = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:])
        out = rows.index_copy(0, queries.index.to(q.device), out)
    return out.unflatten(0, q.shape[:2])


def _pack(x: Tensor, side: Side) -> Tensor:
    """(batch, length, heads, dim) -> (total, heads, dim)."""
    rows = x.flatten(0, 1)
    return rows if side.index is None else rows.index_select(0, side.index.to(x.device))


def _sides(
    module: torch.nn.Module, seen: Visibility, query: Tensor, kwargs: dict[str, Any]
) -> tuple[Side, Side] | None:
    """The packed sequences of queries and keys; None for a dense problem."""
    given = _given_sides(kwargs)
    if given is not None:
        if seen.has_padding:
            raise NotImplementedError("cu_seq_lens_q and a mask with padding; want one of them")
        return given
    keys = seen.key_side
    if keys is None:
        return None
    if seen.query_side is not None:
        return seen.query_side, keys
    batch, length = seen.lengths[:2]
    # Bidirectional: padding names keys. It names the queries too if they are of the same sequence.
    if length == seen.keys and _is_self_attention(type(module)):
        return keys, keys
    return Side.whole(batch, length, query.device), keys


def _given_sides(kwargs: dict[str, Any]) -> tuple[Side, Side] | None:
    """Sequences that the caller says lie packed in the batch, in the words of flash-attn."""
    cu_seqlens_q = kwargs.get("cu_seq_lens_q")
    if cu_seqlens_q is None:
        return None
    cu_seqlens_k = kwargs.get("cu_seq_lens_k")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return (
        _given_side(cu_seqlens_q, kwargs.get("max_length_q")),
        _given_side(cu_seqlens_k, kwargs.get("max_length_k")),
    )


def _given_side(cu_seqlens: Tensor, longest: int | None) -> Side:
    if longest is None:
        longest = largest(cu_seqlens.diff())
    return Side(None, cu_seqlens.to(torch.int32), int(longest))


@lru_cache
def _is_self_attention(module: type[torch.nn.Module]) -> bool:
    """Whether queries and keys must be of one sequence, since forward takes no second one."""
    return set(inspect.signature(module.forward).parameters) <= _SELF_ATTENTION


def _without_mask(
    module: torch.nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any]
) -> Visibility:
    """What a module without a mask sees: all keys, or causally those of its window."""
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    window = kwargs.get("sliding_window")
    if window is not None and not is_causal:
        raise NotImplementedError(
            f"sliding_window is {window} in a module that is not causal and has no mask; want a "
            "mask, which says to which sides the window reaches"
        )
    mask = Mask.causal() if is_causal else Mask.full()
    if window is not None:
        mask &= Mask(window - 1, None)
    keys = key.shape[2]
    return Visibility((query.shape[0], query.shape[2], keys), keys, mask)


def _check_sizes(seen: Visibility, query: Tensor, key: Tensor) -> None:
    batch, queries, keys = seen.lengths
    matters = batch if seen.key_side is not None else query.shape[0]
    if (matters, queries, keys) != (query.shape[0], query.shape[2], key.shape[2]):
        raise NotImplementedError(
            f"the mask is for {queries} queries and {keys} keys in a batch of {batch}, and there "
            f"are {query.shape[2]} and {key.shape[2]} in {query.shape[0]}; want them equal"
        )


def _refuse(
    dropout: float, attention_mask: Visibility | Tensor | None, kwargs: dict[str, Any]
) -> None:
    if dropout != 0.0:
        raise NotImplementedError(
            f"dropout is {dropout}; want an attention dropout of 0 in the model's configuration, "
            "or model.eval()"
        )
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"{name} is given: {what}; 'tilewright' cannot express it")
    if attention_mask is not None and not isinstance(attention_mask, Visibility):
        raise NotImplementedError(
            f"attention_mask is a {type(attention_mask).__name__} of shape "
            f"{tuple(attention_mask.shape)}; want the mask that transformers makes of padding "
            "(batch, positions), or attn_implementation='sdpa' or 'eager'"
        )
