"""From a user's arguments to an operator call: casts, checks, layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewright import dispatch, portable
from tilewright import problem as checks
from tilewright.dispatch import Explanation
from tilewright.torch_ops import Call, append_kv, attend


class Options(NamedTuple):
    """What every public function takes besides its tensors and their layout."""

    causal: bool = False
    window: Sequence[int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    deterministic: bool = False
    backend: str | None = None


def dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Call:
    q, k, v = _autocast(q, q, k, v)
    checks.check_qkv(q, k, v, ranks=(4, 4), names=("k", "v"))
    checks.check_same_batch("k", k, q.shape[0])
    return _call(q, k, v, options, [None] * 5, [q.shape[1], k.shape[1]])


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    longest: tuple[int | None, int | None],
    options: Options,
) -> Call:
    q, k, v = _autocast(q, q, k, v)
    checks.check_qkv(q, k, v, ranks=(3, 3), names=("k", "v"))
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = layout
    checks.check_lengths_tensor("cu_seqlens_q", cu_seqlens_q, None, q)
    batch = cu_seqlens_q.shape[0] - 1
    checks.check_lengths_tensor("cu_seqlens_k", cu_seqlens_k, batch + 1, q)
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            checks.check_lengths_tensor(name, used, batch, q)
    bounds = []
    for name, given, total in zip(("q", "k"), longest, (q.shape[0], k.shape[0]), strict=True):
        checks.check_count(f"max_seqlen_{name}", given, least=0)
        bounds.append(total if given is None else given)
    return _call(q, k, v, options, [*layout, None], bounds)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: tuple[Tensor | None, Tensor | None],
    num_splits: int | None,
    options: Options,
) -> Call:
    """`layout` holds cache_seqlens and block_table."""
    (q,) = _autocast(k_cache, q)
    cache_seqlens, block_table = layout
    checks.check_count("num_splits", num_splits, least=1)
    checks.check_qkv(q, k_cache, v_cache, ranks=(4, 4), names=("k_cache", "v_cache"))
    batch, capacity = q.shape[0], k_cache.shape[1]
    if block_table is None:
        checks.check_same_batch("k_cache", k_cache, batch)
    else:
        checks.check_block_table(block_table, batch, q)
        checks.check_page_size(capacity)
        capacity = capacity * block_table.shape[1]
        if cache_seqlens is None:
            raise ValueError("cache_seqlens is None; want (batch,) lengths with block_table")
    if cache_seqlens is not None:
        checks.check_lengths_tensor("cache_seqlens", cache_seqlens, batch, q)
    tensors = [None, None, None, cache_seqlens, block_table]
    call = _call(q, k_cache, v_cache, options, tensors, [q.shape[1], capacity])
    return call._replace(num_splits=num_splits)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    layout: list[Tensor | None],
    longest: list[int],
) -> Call:
    mask = checks.check_scoring(options.causal, options.window, options.scale, options.softcap)
    checks.check_sink(options.sink, q)
    checks.check_flag("deterministic", options.deterministic)
    checks.check_backend(options.backend)
    return Call(
        q=q,
        k=k,
        v=v,
        sink=options.sink,
        layout=layout,
        longest=longest,
        window=[-1 if bound is None else bound for bound in (mask.left, mask.right)],
        scale=options.scale,
        softcap=options.softcap,
        deterministic=options.deterministic,
        backend=options.backend,
    )


def append(call: Call, k_new: Tensor | None, v_new: Tensor | None) -> Call:
    """Write the new rows; returns the call over the longer sequences."""
    k_new, v_new, cache_seqlens = check_append(call, k_new, v_new)
    append_kv(call.k, call.v, k_new, v_new, cache_seqlens, call.layout[4])
    longer = cache_seqlens + k_new.shape[1]
    return call._replace(layout=[*call.layout[:3], longer, call.layout[4]])


def check_append(
    call: Call, k_new: Tensor | None, v_new: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Check what is to be appended; returns it, cast, and the lengths it goes after."""
    cache_seqlens = call.layout[3]
    if k_new is None or v_new is None:
        missing, there = ("k_new", "v_new") if k_new is None else ("v_new", "k_new")
        raise ValueError(f"{missing} is None and {there} is not; want both or neither")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens is None; want (batch,) lengths to write k_new after")
    k_new, v_new = _autocast(call.k, k_new, v_new)
    checks.check_new_rows(k_new, v_new, call.k, call.v, call.q)
    named = {"k_cache": call.k, "v_cache": call.v, "k_new": k_new, "v_new": v_new}
    for name, tensor in named.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} requires gradients and is part of an append in place, which has none; "
                "want tensors without gradients, torch.no_grad(), or attention_varlen"
            )
    _check_before_work(call)
    if may_read(call.q):
        portable.check_append(call.k, k_new.shape[1], cache_seqlens, call.layout[4])
    return k_new, v_new, cache_seqlens


def run(call: Call, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    _refuse_transforms(call)
    _check_before_work(call)
    out, lse = attend(*call)
    return (out, lse) if return_lse else out


def explain(call: Call) -> Explanation:
    _check_before_work(call)
    return dispatch.explain(call.plan()[0], call.backend)


def _check_before_work(call: Call) -> None:
    """What depends on tensors' contents or on the backend's abilities.

    The operator finds the same faults when it runs; here they surface in the caller's own frames.
    """
    if call.backend is not None and not torch.compiler.is_compiling():
        call.plan()
    if any(x is not None for x in call.layout) and may_read(call.q):
        portable.read_batch(call.plan()[0], call.operands)


def may_read(tensor: Tensor) -> bool:
    """Whether contents may be looked at: on the CPU, elsewhere if the user asks for it.

    A traced or fake call has no contents; there the operator itself looks when it runs.
    """
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if torch.compiler.is_compiling() or not is_plain:
        return False
    return tensor.device.type == "cpu" or os.environ.get("TILEWRIGHT_CHECK") == "1"


def _refuse_transforms(call: Call) -> None:
    """Only reverse mode, once, is there; say so before PyTorch fails somewhere inside."""
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0:
        for tensor in (call.q, call.k, call.v, call.sink):
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(
                    "attention has no forward-mode derivative (JVP); want reverse mode, or "
                    "torch.nn.functional.scaled_dot_product_attention under SDPBackend.MATH"
                )
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "attention has no rules for torch.func transforms (grad, vmap, jvp); want "
            "torch.autograd, and the batch dimension instead of vmap"
        )


def _autocast(like: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors that differ from `like` if autocast is on, so that they are not refused.

    What arrives with one dtype is left to the operator, which is told of autocast by PyTorch.
    """
    if not all(isinstance(x, Tensor) for x in (like, *tensors)):
        return tensors
    if all(x.dtype == like.dtype for x in tensors):
        return tensors
    device = like.device.type
    # PyTorch raises where a device has no autocast at all, such as "meta".
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )
