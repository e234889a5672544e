"""Logic, shifts, comparison, selection and moves (PTX ISA 9.7.6 to 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tilewright.emulator.errors import Unsupported
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.integer import binary, unary
from tilewright.emulator.isa.types import TYPES, type_of
from tilewright.emulator.parse import Instruction, Operand, Register, Special, Vector
from tilewright.emulator.registers import Lanes

_BITS = "<.b16|.b32|.b64>"


_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _logic(ins: Instruction, lanes: Lanes) -> Effect:
    return binary(ins, lanes, _LOGIC[ins.parts[0]])


@instruction("and<.pred|.b16|.b32|.b64>", unit="alu")
def bit_and(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.8.1 and."""
    return _logic(ins, lanes)


@instruction("or<.pred|.b16|.b32|.b64>", unit="alu")
def bit_or(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.8.2 or."""
    return _logic(ins, lanes)


@instruction("xor<.pred|.b16|.b32|.b64>", unit="alu")
def bit_xor(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.8.3 xor."""
    return _logic(ins, lanes)


@instruction("not<.pred|.b16|.b32|.b64>", unit="alu")
def bit_not(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.8.4 not."""
    return unary(ins, lanes, np.logical_not if ins.parts[-1] == "pred" else np.invert)


@instruction("lop3.b32", unit="alu")
def lop3(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.8.6 lop3: the logic function of three inputs with the given truth table."""
    a, b, c, table = (lanes.read(o, np.uint32) for o in ins.operands[1:])
    d, truth = lanes.write(ins.operands[0], np.uint32), int(table[0])

    def effect() -> None:
        result = np.zeros(d.shape, np.uint32)
        for row in range(8):
            if truth >> row & 1:
                terms = (x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
                result |= np.bitwise_and.reduce(np.broadcast_arrays(*terms), axis=0)
        d[:] = result

    return effect


def _shift(ins: Instruction, lanes: Lanes, operation: np.ufunc) -> Effect:
    kind = type_of(ins.parts[-1])
    a, count = lanes.read(ins.operands[1], kind), lanes.read(ins.operands[2], np.uint32)
    d = lanes.write(ins.operands[0], kind)
    # Counts of the width and more give 0 or the sign in numpy as in PTX, given enough width.
    if kind.itemsize == 8 and kind.kind == "i":
        return lambda: operation(a, np.minimum(count, 63).astype(np.int64), d)
    return partial(operation, a, count, d, casting="unsafe")


@instruction("shl" + _BITS, unit="alu")
def shl(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.8.8 shl."""
    return _shift(ins, lanes, np.left_shift)


@instruction("shr<.b16|.b32|.b64|.u16|.u32|.u64|.s16|.s32|.s64>", unit="alu")
def shr(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.8.9 shr: arithmetic for signed types."""
    return _shift(ins, lanes, np.right_shift)


@instruction("shf<.l|.r>.wrap.b32", unit="alu")
def shf(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.8.7 shf.wrap: funnel shift of {b, a} by c mod 32."""
    a, b, c = (lanes.read(o, np.uint32) for o in ins.operands[1:])
    d, left = lanes.write(ins.operands[0], np.uint32), ins.parts[1] == "l"

    def effect() -> None:
        both, count = b.astype(np.uint64) << np.uint64(32) | a, (c & 31).astype(np.uint64)
        result = both << count >> np.uint64(32) if left else both >> count
        d[:] = result.astype(np.uint32)

    return effect


def _ordered_not_equal(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    return np.logical_and(a != b, ~(np.isnan(a) | np.isnan(b)), out)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_UNORDERED = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_COMPARISONS = ".eq|.ne|.lt|.le|.gt|.ge|.lo|.ls|.hi|.hs|.equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan"


@instruction(
    f"setp<{_COMPARISONS}>{{.and|.or|.xor}}{{.ftz}}<.b16|.b32|.b64|.s16|.s32|.s64|.u16|.u32"
    "|.u64|.f16|.bf16|.f32|.f64>",
    unit="alu",
)
def setp(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.6.2 setp: p = a cmp b, combined with c; q gets the opposite comparison."""
    kind = TYPES[ins.parts[-1]]
    first, second = lanes.pair(ins.operands[0])
    a, b = (lanes.read(o, kind) for o in ins.operands[1:3])
    p, q = lanes.write(first, np.bool_), lanes.write(second, np.bool_)
    combine = next((_LOGIC[m] for m in ins.parts[2:-1] if m in _LOGIC), None)
    compare = _comparison(ins.parts[1], kind)
    if combine is None and not isinstance(second, Register):
        return partial(compare, a, b, p)
    if combine is None:
        return lambda: np.logical_not(compare(a, b, p), q)
    c, negated = lanes.predicate(ins.operands[3])

    def effect() -> None:
        result = compare(a, b, np.empty(lanes.count, np.bool_))
        other = ~c if negated else c
        q[:] = combine(~result, other)
        p[:] = combine(result, other)

    return effect


def _comparison(name: str, kind: np.dtype) -> Callable[..., Any]:
    if name in _UNORDERED:
        opposite = _COMPARE[_UNORDERED[name]]
        if _UNORDERED[name] == "ne":
            opposite = _ordered_not_equal
        return lambda a, b, out: np.logical_not(opposite(a, b, out), out)
    if name in ("num", "nan"):
        return lambda a, b, out: np.equal(np.isnan(a) | np.isnan(b), name == "nan", out)
    return _ordered_not_equal if name == "ne" and kind.kind == "f" else _COMPARE[name]


@instruction("selp<.b16|.b32|.b64|.u16|.u32|.u64|.s16|.s32|.s64|.f32|.f64>", unit="alu")
def selp(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.6.3 selp: d = p ? a : b."""
    kind = type_of(ins.parts[-1])
    a, b = (lanes.read(o, kind) for o in ins.operands[1:3])
    p, negated = lanes.predicate(ins.operands[3])
    d = lanes.write(ins.operands[0], kind)
    a, b = (b, a) if negated else (a, b)
    if isinstance(ins.operands[1], Register) or isinstance(ins.operands[2], Register):
        return lambda: np.copyto(d, np.where(p, a, b))  # d may be a or b
    table = np.concatenate([b, a])
    return lambda: np.take(table, p.view(np.uint8), out=d, mode="clip")


@instruction("mov<.b16|.b32|.b64|.b128|.u16|.u32|.u64|.s16|.s32|.s64|.f32|.f64|.pred>", unit="alu")
def mov(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.1, 9.7.9.2 mov: registers, constants, addresses of variables; packs and unpacks."""
    kind = type_of(ins.parts[-1])
    d, a = ins.operands
    if isinstance(d, Vector):
        return _unpack(d, a, kind, lanes)
    if isinstance(a, Vector):
        return _pack(d, a, kind, lanes)
    if isinstance(a, Special):
        row = lanes.special(a.name)
        return partial(np.copyto, lanes.write(d, kind), row, casting="unsafe")
    return partial(np.copyto, lanes.write(d, kind), lanes.read(a, kind))


def _part_type(kind: np.dtype, count: int) -> np.dtype:
    if kind.itemsize % count or kind.itemsize // count < 2:
        raise Unsupported(f"mov between {8 * kind.itemsize} bits and {count} parts")
    return np.dtype(f"u{kind.itemsize // count}")


def _unpack(d: Vector, a: Operand, kind: np.dtype, lanes: Lanes) -> Effect:
    part = _part_type(kind, len(d.items))
    words = lanes.read(a, kind)
    source = np.repeat(words, lanes.count) if len(words) != lanes.count else words
    source = source.view(part)
    pieces = [(lanes.write(o, part), source[i :: len(d.items)]) for i, o in enumerate(d.items)]

    def effect() -> None:
        for to, piece in pieces:
            to[:] = piece

    return effect


def _pack(d: Operand, a: Vector, kind: np.dtype, lanes: Lanes) -> Effect:
    part = _part_type(kind, len(a.items))
    whole = lanes.write(d, kind).view(part)
    pieces = [(whole[i :: len(a.items)], lanes.read(o, part)) for i, o in enumerate(a.items)]

    def effect() -> None:
        for to, piece in pieces:
            to[:] = piece

    return effect
