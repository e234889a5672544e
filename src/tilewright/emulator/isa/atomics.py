"""Atomic operations on global and shared memory (PTX ISA 9.7.13.12 atom, 9.7.13.13 red)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.emulator.errors import Unsupported
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.memory import (
    count_of,
    generic_is_shared,
    global_addresses,
    shared_addresses,
)
from tilewright.emulator.isa.types import BF16, TYPES
from tilewright.emulator.parse import Instruction, Operand, Sink
from tilewright.emulator.registers import Lanes

_ORDER = "{.relaxed|.acquire|.release|.acq_rel}{.cta|.cluster|.gpu|.sys}"
_GLOBAL = "{.global}"
_SHARED = "<.shared|.shared::cta|.shared::cluster>"
_OPS = "<.add|.min|.max|.and|.or|.xor|.exch|.cas|.inc|.dec>"
_TYPES = "<.b32|.b64|.u32|.u64|.s32|.s64|.f32|.f64>"
_HINT = "{.L2::cache_hint}"

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, b: b,
    "cas": lambda old, b, c: np.where(old == b, c, old),
    "inc": lambda old, b: np.where(old >= b, 0, old + np.uint32(1)).astype(old.dtype),
    "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - np.uint32(1)).astype(old.dtype),
}


def _element(ins: Instruction) -> np.dtype:
    name = ins.parts[-1] if ins.parts[-1] != "cache_hint" else ins.parts[-2]
    if name in ("f16x2", "bf16x2"):
        return np.dtype(np.float16) if name == "f16x2" else BF16
    return TYPES[name]


def _bytes(ins: Instruction) -> int:
    packed = 2 if "x2" in ins.opcode else 1
    return _element(ins).itemsize * packed * count_of(ins)


def _name(ins: Instruction) -> str:
    return next(p for p in ins.parts[1:] if p in _OPERATIONS)


def _apply(
    ins: Instruction,
    lanes: Lanes,
    address: Operand,
    sources: list[Operand],
    d: np.ndarray | None,
    is_shared: bool,
) -> Effect:
    """Lane by lane, in lane order: one of the orders that the hardware may choose."""
    kind, operation = _element(ins), _OPERATIONS[_name(ins)]
    machine, shared = lanes.cta.machine, lanes.cta.cluster.shared
    get = shared_addresses(lanes, address) if is_shared else global_addresses(lanes, address)
    values = [np.broadcast_to(lanes.read(o, kind), lanes.count) for o in sources]

    def effect() -> None:
        at = get()
        if is_shared:
            shared.check(at, kind.itemsize)
            parts: Any = [
                (
                    np.arange(lanes.count),
                    shared.views[kind.itemsize].view(kind),
                    at // np.uint32(kind.itemsize),
                )
            ]
        else:
            parts = [
                (
                    np.arange(lanes.count)[chosen],
                    machine.memory.view(t, kind.itemsize).view(kind),
                    offsets // kind.itemsize,
                )
                for chosen, t, offsets in machine.memory.parts(at, kind.itemsize)
            ]
        for chosen, view, index in parts:
            for lane, i in zip(chosen, index, strict=True):
                old = view[i]
                view[i] = operation(old, *(v[lane] for v in values))
                if d is not None:
                    d[lane] = old

    return effect


@instruction(
    "atom.global" + _ORDER + _OPS + _TYPES,  # LLVM names the space first
    polls=True,
    effects=True,
    unit="atomic",
    weight=_bytes,
)
@instruction(
    "atom" + _ORDER + _GLOBAL + _OPS + _TYPES,
    polls=True,
    effects=True,
    unit="atomic",
    weight=_bytes,
)
def atom_global(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.12 atom.global: returns the old value."""
    d, address, *sources = ins.operands
    out = None if isinstance(d, Sink) else lanes.write(d, _element(ins))
    in_global = _apply(ins, lanes, address, sources, out, is_shared=False)
    if "global" in ins.parts:
        return in_global
    in_shared = _apply(ins, lanes, address, sources, out, is_shared=True)
    at = global_addresses(lanes, address)
    return lambda: in_shared() if generic_is_shared(lanes, at()) else in_global()


@instruction(
    "atom" + _ORDER + _SHARED + _OPS + _TYPES,
    polls=True,
    effects=True,
    unit="atomic",
    weight=_bytes,
)
def atom_shared(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.12 atom.shared."""
    d, address, *sources = ins.operands
    out = None if isinstance(d, Sink) else lanes.write(d, _element(ins))
    return _apply(ins, lanes, address, sources, out, is_shared=True)


@instruction("red" + _ORDER + _SHARED + _OPS + _TYPES, effects=True, unit="atomic", weight=_bytes)
def red_shared(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.13 red.shared."""
    return _apply(ins, lanes, ins.operands[0], list(ins.operands[1:]), None, is_shared=True)


@instruction(
    "red"
    + _ORDER
    + _GLOBAL
    + _OPS
    + "{.noftz}{.v2|.v4|.v8}{.v2|.v4|.v8}"
    + _HINT
    + "<.b32|.b64|.u32|.u64|.s32|.s64|.f32|.f64|.f16x2|.bf16x2>",
    effects=True,
    unit="atomic",
    weight=_bytes,
)
def red_global(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.13 red.global: no result; vectors are one reduction an element."""
    sources = lanes.vector(ins.operands[1])
    kind, machine = _element(ins), lanes.cta.machine
    packed = 2 if "x2" in ins.opcode else 1
    if _name(ins) != "add":
        if len(sources) > 1 or packed > 1:
            raise Unsupported(ins.opcode)
        return _apply(ins, lanes, ins.operands[0], sources, None, is_shared=False)
    word = np.dtype(f"u{packed * kind.itemsize}")
    columns = [np.broadcast_to(lanes.read(o, word), lanes.count) for o in sources]
    get, size = global_addresses(lanes, ins.operands[0]), _bytes(ins)

    def effect() -> None:
        at = get()
        elements = np.stack(columns, 1).view(kind)  # (lane, element)
        for chosen, tensor, offsets in machine.memory.parts(at, size):
            view = machine.memory.view(tensor, kind.itemsize).view(kind)
            index = (offsets // kind.itemsize)[:, None] + np.arange(elements.shape[1])
            np.add.at(view, index, elements[chosen])

    return effect
