"""The custom operators, their fake implementations and their autograd formulas.

`tilewright::attend` covers dense, packed and paged calls; which layout tensors are there tells them
apart. Its arguments are flat because an operator schema knows no structures; `Call` is the
structure, and every function here that takes more than that is called by PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright import dispatch, portable
from tilewright.masks import Mask
from tilewright.operands import Operands, Saved
from tilewright.problem import AttentionProblem, Scoring, default_scale, dtype_name


class Call(NamedTuple):
    """The arguments of `tilewright::attend`, in the order of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    # cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table: the last fields of `Operands`
    layout: Sequence[Tensor | None]
    longest: Sequence[int]  # seqlen_q and seqlen_k of the longest sequences
    window: Sequence[int]  # left and right, -1 for no bound
    scale: float | None = None
    softcap: float | None = None
    num_splits: int | None = None
    deterministic: bool = False
    backend: str | None = None


def operands_of(call: Call) -> Operands:
    return Operands(call.q, call.k, call.v, call.sink, *call.layout)


def problem_of(call: Call) -> AttentionProblem:
    """What the call asks for, without its tensors."""
    operands = operands_of(call)
    q, k, v = operands.q, operands.k, operands.v
    cu_seqlens = operands.cu_seqlens_q
    is_paged = operands.block_table is not None
    scale = default_scale(q.shape[-1]) if call.scale is None else call.scale
    return AttentionProblem(
        layout="varlen" if cu_seqlens is not None else "paged" if is_paged else "dense",
        batch=q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        seqlen_q=call.longest[0],
        seqlen_k=call.longest[1],
        heads_q=q.shape[-2],
        heads_k=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=dtype_name(q),
        device=str(q.device),
        scoring=Scoring(Mask.window(*call.window), scale, call.softcap),
        ragged=any(x is not None for x in call.layout),
        has_sink=call.sink is not None,
        deterministic=call.deterministic,
        num_splits=call.num_splits,
    )


@torch.library.custom_op("tilewright::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    layout: Sequence[Tensor | None],
    longest: Sequence[int],
    window: Sequence[int],
    scale: float | None,
    softcap: float | None,
    num_splits: int | None,
    deterministic: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    call = Call(
        q, k, v, sink, layout, longest, window, scale, softcap, num_splits, deterministic, backend
    )
    problem = problem_of(call)
    with _without_autocast(q):
        out, lse = dispatch.choose(problem, backend).forward(problem, operands_of(call))
    return out.contiguous(), lse.contiguous()


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    *batch, rows, heads, _ = q.shape
    return out, q.new_empty(*batch, heads, rows, dtype=lse_dtype)


@torch.library.custom_op("tilewright::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    layout: Sequence[Tensor | None],
    longest: Sequence[int],
    window: Sequence[int],
    scale: float | None,
    softcap: float | None,
    num_splits: int | None,
    deterministic: bool,
    backend: str | None,
) -> list[Tensor]:
    """Gradients of q, k, v and sink; one that `needs` does not ask for is an empty tensor."""
    call = Call(
        q, k, v, sink, layout, longest, window, scale, softcap, num_splits, deterministic, backend
    )
    problem = problem_of(call)
    saved = Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
    with _without_autocast(q):
        chosen = dispatch.choose(problem, backend)
        grads = chosen.backward(problem, operands_of(call), saved, needs)
    return [
        x.contiguous() if need and x is not None else q.new_empty(0)
        for x, need in zip((grads.q, grads.k, grads.v, grads.sink), needs, strict=True)
    ]


@attend_backward.register_fake
def _(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    *call: Any,
) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else out.new_empty(0)
        for x, need in zip(call[:4], needs, strict=True)
    ]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = Call(*inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(call.q, call.k, call.v, call.sink, *output, *call.layout)
    ctx.rest = call[5:]


def _backward_of_attend(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    nothing_for_the_rest = (None,) * (len(Call._fields) - 4)
    if dout is None and dlse is None:
        return (None,) * 4 + nothing_for_the_rest
    q, k, v, sink, out, lse, *layout = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    grads = attend_backward(dout, dlse, out, lse, needs, q, k, v, sink, layout, *ctx.rest)
    asked_for = tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))
    return asked_for + nothing_for_the_rest


attend.register_autograd(_backward_of_attend, setup_context=_save_for_backward)


def _refuse_second_derivative(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "attention has no second derivative; want a loss that is differentiated once "
        "(torch.nn.functional.scaled_dot_product_attention under SDPBackend.MATH has one)"
    )


attend_backward.register_autograd(_refuse_second_derivative)


@torch.library.custom_op("tilewright::append_kv", mutates_args=("k_cache", "v_cache"))
def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
) -> None:
    """Write new rows after the `cache_seqlens` rows that each sequence has."""
    portable.append_rows((k_cache, v_cache), (k_new, v_new), cache_seqlens, block_table)


@append_kv.register_fake
def _(*args: Any) -> None:
    return None


def _without_autocast(q: Tensor) -> Any:
    """The operands have their dtype; autocast must not reach into the float32 arithmetic."""
    if not torch.is_autocast_enabled(q.device.type):
        return nullcontext()
    return torch.autocast(q.device.type, enabled=False)
