"""A short way for calls like earlier ones: what was decided once is not decided again.

A call's key is all that its checks, the choice of its backend and the backend's preparation look
at: shapes, strides, dtypes, devices and options. Only a plain eager call goes this way, one that
nothing in PyTorch watches or changes; any other goes through the operator. (torch.jit.trace finds
nothing here, because under it no shape equals another.) Its backward pass goes this way by the same
rule, and is prepared when the first gets there, because kernels may have to be compiled for it.

Options and operands are plain tuples here, because making a named one takes as long as finding a
key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import _C, Tensor, is_grad_enabled
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilewright import calls
from tilewright.calls import Options
from tilewright.dispatch import Backend, Prepared, PreparedBackward
from tilewright.operands import Gradients, Operands, Saved
from tilewright.problem import AttentionProblem
from tilewright.torch_ops import Call, attend_backward, plan_backward

Key = tuple[Any, ...]
Result = Tensor | tuple[Tensor, Tensor]

MOST = 4096
_prepared: dict[Key, Plan] = {}

_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = frozenset((*_TENSORS, NoneType))
# By type, because equal values of other types are refused: True is no scale, 1.0 no flag.
_NUMBERS = (NoneType, float, int)
_NAMES = (NoneType, str)
_INTEGERS = (NoneType, int)
_CAST_BY_AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)


class Plan:
    """What is decided for the calls of one key. `options` are the last fields of `Call`."""

    __slots__ = ("backend", "backward", "forward", "needs_graph", "options", "problem")

    def __init__(self, call: Call, needs_graph: bool) -> None:
        self.problem, self.backend = problem, backend = call.plan()
        self.needs_graph = needs_graph
        self.options = call[5:]
        if backend.prepare is not None:
            self.forward: Prepared = backend.prepare(problem, call.operands)
        else:
            self.forward = partial(_forward, problem, backend)
        self.backward: PreparedBackward | None = None

    def prepare_backward(self, like: Operands) -> PreparedBackward:
        backend = plan_backward(self.problem, self.backend)
        if backend.prepare_backward is not None:
            self.backward = backend.prepare_backward(self.problem, like)
        else:
            self.backward = partial(_backward, self.problem, backend)
        return self.backward


def dense(q: Tensor, k: Tensor, v: Tensor, options: Sequence[Any], return_lse: bool) -> Result:
    """`options` are the fields of `Options`."""
    if _is_autocast() and (cast := _autocast(q, k, v, options[4])):
        with _C._DisableAutocast():
            return dense(*cast, options, return_lse)
    operands = (q, k, v, options[4], None, None, None, None, None)
    key = _key(operands[:4], (), options)
    plan = None if key is None else _prepared.get(key)
    if plan is None:
        return _the_long_way(key, calls.dense(q, k, v, Options(*options)), return_lse)
    return _the_short_way(plan, operands, return_lse)


def varlen(
    qkv: tuple[Tensor, Tensor, Tensor],
    layout: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    longest: tuple[int | None, int | None],
    options: Sequence[Any],
    return_lse: bool,
) -> Result:
    """`layout` holds cu_seqlens and seqused. Where contents are checked, they are in every call."""
    if _is_autocast() and (cast := _autocast(*qkv, options[4])):
        with _C._DisableAutocast():
            return varlen(cast, layout, longest, options, return_lse)
    operands = (*qkv, options[4], *layout, None)
    key = None if calls.may_read(qkv[0]) else _key(operands, longest, options)
    plan = None if key is None else _prepared.get(key)
    if plan is None:
        call = calls.varlen(*qkv, layout, longest, Options(*options))
        return _the_long_way(key, call, return_lse)
    return _the_short_way(plan, operands, return_lse)


def _is_autocast() -> bool:
    """Whether it is on, for any device. While torch.compile looks on, that is the operator's."""
    return not is_compiling() and _C._is_any_autocast_enabled()


def _autocast(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """q, k and v as autocast wants them, so that it may be off from here on.

    None where the operator has to be told of autocast, or is to refuse the call.
    """
    for x in (q, k, v):
        if type(x) not in _TENSORS or x.dtype not in _CAST_BY_AUTOCAST:
            return None
    device = q.device.type
    if not (_C._is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    if q.dtype is dtype and k.dtype is dtype and v.dtype is dtype:
        return q, k, v
    # A sink in the dtype that q had is legal, and would not be in the one that q gets.
    if sink is not None and (type(sink) not in _TENSORS or sink.dtype is not torch.float32):
        return None
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _key(
    operands: Sequence[Tensor | None], longest: tuple[int | None, ...], options: Sequence[Any]
) -> Key | None:
    """None for a call that must go the long way."""
    if is_compiling() or _is_watched():
        return None
    causal, window, scale, softcap, _, deterministic, backend = options
    bounds = longest
    if window is not None:
        if type(window) not in (tuple, list):
            return None
        window = tuple(window)
        bounds += window
    if (
        type(causal) is not bool
        or type(deterministic) is not bool
        or type(scale) not in _NUMBERS
        or type(softcap) not in _NUMBERS
        or type(backend) not in _NAMES
    ):
        return None
    for bound in bounds:
        if type(bound) not in _INTEGERS:
            return None
    key: list[Any] = [causal, window, scale, softcap, deterministic, backend, longest]
    needs_graph, has_grad_mode = False, is_grad_enabled()
    for x in operands:
        if x is None:
            key.append(None)
        elif (
            type(x) not in _TENSORS
            or x.layout is not torch.strided
            or x.is_neg()
            or is_functorch_wrapped_tensor(x)  # which has outlived its transform
        ):
            return None
        else:
            needs_graph = needs_graph or (has_grad_mode and x.requires_grad)
            key.append((x.shape, x.stride(), x.dtype, x.device))
    key.append(needs_graph)
    return tuple(key)


def _is_watched() -> bool:
    """Whether PyTorch would do more with a call of an operator than compute it."""
    return (
        _C._is_any_autocast_enabled()
        or _C._are_functorch_transforms_active()
        or _C._len_torch_dispatch_stack() > 0
        or _C._len_torch_function_stack() > 0
        or _profiler_enabled()
        or forward_ad._current_level >= 0
    )


class _Attention(torch.autograd.Function):
    """The derivative of a call that went the short way, once."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = plan.forward(operands)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, out, lse)
        ctx.plan = plan
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * 10
        *operands, out, lse = saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:5]
        if _is_autocast():
            with _C._DisableAutocast():
                return _Attention.backward(ctx, dout, dlse)
        if (
            is_compiling()
            or is_grad_enabled()  # for a second derivative
            or _is_watched()
            or not _PLAIN.issuperset(map(type, (dout, dlse, *saved)))
            or (dout is not None and is_legacy_batchedtensor(dout))  # is_grads_batched
            or (dlse is not None and is_legacy_batchedtensor(dlse))
        ):
            grads = _through_the_operator(ctx.plan, operands, (dout, dlse, out, lse), needs)
        else:
            run = ctx.plan.backward or ctx.plan.prepare_backward(Operands(*operands))
            dout = torch.zeros_like(out) if dout is None else dout
            grads = run(operands, Saved(out, lse, dout, dlse), needs)
        return (None, *grads, None, None, None, None, None)


# Without what Function.apply does first, which takes as long as finding a key: it looks for
# transforms and for tensors that have outlived one, and no key is made of either.
_apply = super(torch.autograd.Function, _Attention).apply  # pyright: ignore[reportAttributeAccessIssue]


def _through_the_operator(
    plan: Plan, operands: Sequence[Any], saved: Sequence[Any], needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """`saved` holds dout, dlse, out and lse."""
    grads = attend_backward(*saved, list(needs), *operands[:4], list(operands[4:]), *plan.options)
    return [x if need else None for x, need in zip(grads, needs, strict=True)]


def _the_short_way(plan: Plan, operands: Sequence[Any], return_lse: bool) -> Result:
    if plan.needs_graph:
        out, lse = _apply(plan, *operands)
    else:
        out, lse = plan.forward(operands)
    return (out, lse) if return_lse else out


def _the_long_way(key: Key | None, call: Call, return_lse: bool) -> Result:
    """If the call is legal, the next like it goes the short way."""
    result = calls.run(call, return_lse)
    if key is not None:
        if len(_prepared) >= MOST:
            _prepared.clear()
        _prepared[key] = Plan(call, needs_graph=key[-1])
    return result


def _forward(
    problem: AttentionProblem, backend: Backend, operands: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    with _C._AutoDispatchBelowAutograd():
        out, lse = backend.forward(problem, Operands(*operands))
        return out.contiguous(), lse.contiguous()


def _backward(
    problem: AttentionProblem,
    backend: Backend,
    operands: Sequence[Any],
    saved: Saved,
    needs: Sequence[bool],
) -> Gradients:
    with _C._AutoDispatchBelowAutograd():
        grads = backend.backward(problem, Operands(*operands), saved, needs)
        return Gradients(*(None if x is None else x.contiguous() for x in grads))
