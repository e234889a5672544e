"""The operators: `attend` and its backward, and `append_kv`.

`tilewright::attend` covers dense, packed and paged calls; which layout tensors are there tells them
apart. They are registered with the dispatcher directly: `torch.library.custom_op` would be shorter,
but costs 25 us a call, and 120 us with gradients, where this costs 10 and 25.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright import dispatch, portable
from tilewright.dispatch import Backend
from tilewright.masks import Mask
from tilewright.operands import Operands, Saved
from tilewright.problem import AttentionProblem, Scoring, default_scale

CALL_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor?[] layout, SymInt[] longest, "
    "SymInt[] window, float? scale, float? softcap, SymInt? num_splits, bool deterministic, "
    "str? backend"
)


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

    @property
    def operands(self) -> Operands:
        return Operands(self.q, self.k, self.v, self.sink, *self.layout)

    def plan(self) -> tuple[AttentionProblem, Backend]:
        """The problem and the backend that takes it. Raises as `dispatch.choose` does."""
        q, k, v = self.q, self.k, self.v
        cu_seqlens, block_table = self.layout[0], self.layout[4]
        batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        kind = "varlen" if cu_seqlens is not None else "dense" if block_table is None else "paged"
        is_ragged = any(x is not None for x in self.layout)
        return _plan(
            (kind, batch, *self.longest, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]),
            (q.dtype, q.device, is_ragged, self.sink is not None),
            tuple(self.window),
            self[7:],
        )


@lru_cache(maxsize=4096)
def _plan(
    sizes: tuple[Any, ...], facts: tuple[Any, ...], window: tuple[int, ...], rest: tuple[Any, ...]
) -> tuple[AttentionProblem, Backend]:
    """Kept for the sake of small calls, where making and judging a problem would dominate."""
    dtype, device, is_ragged, has_sink = facts
    scale, softcap, num_splits, deterministic, backend = rest
    dim = sizes[-2]
    problem = AttentionProblem(
        *sizes,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        scoring=Scoring(
            Mask.window(*window), default_scale(dim) if scale is None else scale, softcap
        ),
        ragged=is_ragged,
        has_sink=has_sink,
        deterministic=deterministic,
        num_splits=num_splits,
    )
    return problem, dispatch.choose(problem, backend)


@lru_cache(maxsize=4096)
def plan_backward(problem: AttentionProblem, forward: Backend) -> Backend:
    """Kept as `_plan` is."""
    return dispatch.choose_backward(problem, forward)[0]


def _attend(*args: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args)
    problem, backend = call.plan()
    out, lse = backend.forward(problem, call.operands)
    return out.contiguous(), lse.contiguous()


def _attend_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, v = args[0], args[2]
    *batch, rows, heads, _ = q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(
        *batch, heads, rows, dtype=lse_dtype
    )


def _attend_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    *args: Any,
) -> list[Tensor]:
    """Gradients of q, k, v and sink; one that `needs` does not ask for is an empty tensor."""
    call = Call(*args)
    problem, backend = call.plan()
    saved = Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
    grads = plan_backward(problem, backend).backward(problem, call.operands, saved, needs)
    return [
        x.contiguous() if need and x is not None else out.new_empty(0)
        for x, need in zip((grads.q, grads.k, grads.v, grads.sink), needs, strict=True)
    ]


def _attend_backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    *args: Any,
) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else out.new_empty(0)
        for x, need in zip(args[:4], needs, strict=True)
    ]


class _Attend(torch.autograd.Function):
    """The derivative of `attend`, once."""

    # `setup_context` would be the newer form, but with it `apply` inspects signatures on every
    # call, which takes longer than all else here.
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = _below_autograd(attend, _attend, args)
        call = Call(*args)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(call.q, call.k, call.v, call.sink, out, lse, *call.layout)
        ctx.rest = call[5:]
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        nothing = (None,) * len(Call._fields)
        if dout is None and dlse is None:
            return nothing
        q, k, v, sink, out, lse, *layout = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:4])
        grads = attend_backward(dout, dlse, out, lse, needs, q, k, v, sink, layout, *ctx.rest)
        return (
            tuple(x if need else None for x, need in zip(grads, needs, strict=True)) + nothing[4:]
        )


class _AttendBackward(torch.autograd.Function):
    """Stands where the second derivative would, so that asking for it fails and says so."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        return tuple(_below_autograd(attend_backward, _attend_backward, args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(
            "attention has no second derivative; want a loss that is differentiated once "
            "(torch.nn.functional.scaled_dot_product_attention under SDPBackend.MATH has one)"
        )


def _attend_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    if _wants_graph(args[:4]):
        return _Attend.apply(*args)
    return _below_autograd(attend, _attend, args)


def _attend_backward_autograd(*args: Any) -> list[Tensor]:
    if _wants_graph((args[0], args[1], *args[5:9])):
        return list(_AttendBackward.apply(*args))
    return _below_autograd(attend_backward, _attend_backward, args)


def _wants_graph(inputs: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _below_autograd(op: Any, compute: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Go on to the next key of the dispatcher.

    With plain tensors, and nobody listening below, the next key is the computation itself; another
    round through the dispatcher would take a fifth of a small call.
    """
    with torch._C._AutoDispatchBelowAutograd():
        if torch._C._len_torch_dispatch_stack() == 0 and all(map(_is_plain, args)):
            return compute(*args)
        return op(*args)


def _is_plain(x: Any) -> bool:
    return not isinstance(x, Tensor) or type(x) in (Tensor, torch.nn.Parameter)


def _append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
) -> None:
    """Write new rows after the `cache_seqlens` rows that each sequence has."""
    portable.append_rows((k_cache, v_cache), (k_new, v_new), cache_seqlens, block_table)


def _attend_autocast(device: str, *args: Any) -> tuple[Tensor, Tensor]:
    """Cast as PyTorch's own attention does: q, k and v, unless they are float64.

    Below, autocast is off: it must not reach into arithmetic that has its dtype for a reason.
    """
    call = Call(*args)
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (call.q, call.k, call.v))
    with torch.autocast(device, enabled=False):
        return attend(*call._replace(q=q, k=k, v=v))


def _attend_backward_autocast(device: str, *args: Any) -> list[Tensor]:
    with torch.autocast(device, enabled=False):
        return attend_backward(*args)


def _register() -> torch.library.Library:
    """Define the operators. They live as long as the library object that is returned."""
    library = torch.library.Library("tilewright", "DEF")
    compliant = (torch.Tag.pt2_compliant_tag,)
    library.define(f"attend({CALL_SCHEMA}) -> (Tensor out, Tensor lse)", tags=compliant)
    library.define(
        "attend_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, "
        f"{CALL_SCHEMA}) -> Tensor[]",
        tags=compliant,
    )
    library.define(
        "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, "
        "Tensor cache_seqlens, Tensor? block_table) -> ()",
        tags=compliant,
    )
    for name, compute, fake in (
        ("attend", _attend, _attend_fake),
        ("attend_backward", _attend_backward, _attend_backward_fake),
        ("append_kv", _append_kv, lambda *args: None),
    ):
        library.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tilewright::{name}", fake, lib=library)
    library.impl("attend", _attend_autograd, "Autograd")
    library.impl("attend_backward", _attend_backward_autograd, "Autograd")
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        library.impl("attend", partial(_attend_autocast, device), key)
        library.impl("attend_backward", partial(_attend_backward_autocast, device), key)
    return library


_library = _register()
attend = torch.ops.tilewright.attend.default
attend_backward = torch.ops.tilewright.attend_backward.default
append_kv = torch.ops.tilewright.append_kv.default
