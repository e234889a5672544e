"""A short way for calls like earlier ones: what was decided once is not decided again.

A call's key is all that its checks, the choice of its backend and the backend's preparation look
at: shapes, strides, dtypes, devices and options. Only a plain eager call goes this way, one that
nothing in PyTorch watches or changes; any other goes through the operator. (torch.jit.trace finds
nothing here, because under it no shape equals another.)

Options and operands are plain tuples here, because making a named one takes as long as finding a
key.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch import _C, Tensor, is_grad_enabled
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilewright import calls
from tilewright.calls import Options
from tilewright.dispatch import Prepared
from tilewright.operands import Operands
from tilewright.torch_ops import Call

Key = tuple[Any, ...]
Result = Tensor | tuple[Tensor, Tensor]

MOST = 4096
_prepared: dict[Key, Prepared] = {}

_TENSORS = (Tensor, torch.nn.Parameter)
# By type, because equal values of other types are refused: True is no scale, 1.0 no flag.
_NUMBERS = (NoneType, float, int)
_NAMES = (NoneType, str)
_INTEGERS = (NoneType, int)


def dense(q: Tensor, k: Tensor, v: Tensor, options: Sequence[Any], return_lse: bool) -> Result:
    """`options` are the fields of `Options`."""
    operands = (q, k, v, options[4], None, None, None, None, None)
    key = _key(operands[:4], (), options)
    prepared = None if key is None else _prepared.get(key)
    if prepared is None:
        return _the_long_way(key, calls.dense(q, k, v, Options(*options)), return_lse)
    return _the_short_way(prepared, operands, return_lse)


def varlen(
    qkv: tuple[Tensor, Tensor, Tensor],
    layout: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    longest: tuple[int | None, int | None],
    options: Sequence[Any],
    return_lse: bool,
) -> Result:
    """`layout` holds cu_seqlens and seqused. Where contents are checked, they are in every call."""
    operands = (*qkv, options[4], *layout, None)
    key = None if calls.may_read(qkv[0]) else _key(operands, longest, options)
    prepared = None if key is None else _prepared.get(key)
    if prepared is None:
        call = calls.varlen(*qkv, layout, longest, Options(*options))
        return _the_long_way(key, call, return_lse)
    return _the_short_way(prepared, operands, return_lse)


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
    wants_graph = is_grad_enabled()
    for x in operands:
        if x is None:
            key.append(None)
        elif (
            type(x) not in _TENSORS
            or x.layout is not torch.strided
            or (wants_graph and x.requires_grad)
            or x.is_neg()
        ):
            return None
        else:
            key.append((x.shape, x.stride(), x.dtype, x.device))
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


def _the_short_way(prepared: Prepared, operands: Sequence[Any], return_lse: bool) -> Result:
    out, lse = prepared(operands)
    return (out, lse) if return_lse else out


def _the_long_way(key: Key | None, call: Call, return_lse: bool) -> Result:
    """If the call is legal, the next like it goes the short way."""
    result = calls.run(call, return_lse)
    if key is not None:
        if len(_prepared) >= MOST:
            _prepared.clear()
        _prepared[key] = _prepare(call)
    return result


def _prepare(call: Call) -> Prepared:
    problem, backend = call.plan()
    if backend.prepare is not None:
        return backend.prepare(problem, call.operands)

    def forward(operands: Sequence[Any]) -> tuple[Tensor, Tensor]:
        with _C._AutoDispatchBelowAutograd():
            out, lse = backend.forward(problem, Operands(*operands))
            return out.contiguous(), lse.contiguous()

    return forward
