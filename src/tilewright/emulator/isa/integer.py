"""Integer arithmetic and bit fields (PTX ISA 9.7.1)."""

from __future__ import annotations

from functools import partial

import numpy as np

from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.types import type_of
from tilewright.emulator.parse import Instruction
from tilewright.emulator.registers import Lanes

_INT = "<.s16|.u16|.s32|.u32|.s64|.u64>"


def binary(ins: Instruction, lanes: Lanes, operation: np.ufunc) -> Effect:
    kind = type_of(ins.parts[-1])
    d, a, b = ins.operands
    return partial(operation, lanes.read(a, kind), lanes.read(b, kind), out=lanes.write(d, kind))


@instruction("add" + _INT, unit="alu")
def add(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.1 add: d = a + b, wrapping."""
    return binary(ins, lanes, np.add)


@instruction("sub" + _INT, unit="alu")
def sub(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.2 sub: d = a - b, wrapping."""
    return binary(ins, lanes, np.subtract)


@instruction("mul.lo" + _INT, unit="alu")
def mul_lo(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.3 mul.lo: the low half of a * b."""
    return binary(ins, lanes, np.multiply)


def _double(kind: np.dtype) -> np.dtype:
    return np.dtype(f"{kind.kind}{2 * kind.itemsize}")


@instruction("mul.hi<.s16|.u16|.s32|.u32>", unit="alu")
def mul_hi(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.3 mul.hi: the high half of a * b."""
    kind = type_of(ins.parts[-1])
    wide = _double(kind)
    a, b = (lanes.read(o, kind) for o in ins.operands[1:])
    d, shift = lanes.write(ins.operands[0], kind), wide.type(8 * kind.itemsize)

    def effect() -> None:
        d[:] = a.astype(wide) * b >> shift

    return effect


@instruction("mul.hi<.u64|.s64>", unit="alu")
def mul_hi_64(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.3 mul.hi: the high 64 bits of a 128-bit product."""
    kind = type_of(ins.parts[-1])
    a, b = (lanes.read(o, kind) for o in ins.operands[1:])
    d = lanes.write(ins.operands[0], kind)

    def effect() -> None:
        d[:] = (a.astype(object) * b.astype(object) >> 64).astype(kind)

    return effect


@instruction("mul.wide<.s16|.u16|.s32|.u32>", unit="alu")
def mul_wide(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.3 mul.wide: the whole product in twice the width."""
    kind = type_of(ins.parts[-1])
    a, b = (lanes.read(o, kind) for o in ins.operands[1:])
    return partial(
        np.multiply, a, b, lanes.write(ins.operands[0], _double(kind)), dtype=_double(kind)
    )


@instruction("mad.lo" + _INT, unit="alu")
def mad_lo(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.4 mad.lo: d = low half of a * b, plus c."""
    kind = type_of(ins.parts[-1])
    a, b, c = (lanes.read(o, kind) for o in ins.operands[1:])
    d = lanes.write(ins.operands[0], kind)
    return lambda: np.add(a * b, c, d)


@instruction("mad.wide<.s16|.u16|.s32|.u32>", unit="alu")
def mad_wide(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.4 mad.wide: d = a * b + c in twice the width."""
    kind = type_of(ins.parts[-1])
    wide = _double(kind)
    a, b = (lanes.read(o, kind) for o in ins.operands[1:3])
    c, d = lanes.read(ins.operands[3], wide), lanes.write(ins.operands[0], wide)
    return lambda: np.add(np.multiply(a, b, dtype=wide), c, d)


def _truncating_divide(ins: Instruction, lanes: Lanes, remainder: bool) -> Effect:
    kind = type_of(ins.parts[-1])
    a, b = (lanes.read(o, kind) for o in ins.operands[1:])
    d = lanes.write(ins.operands[0], kind)

    def effect() -> None:
        # numpy floors, PTX truncates; a zero divisor is unspecified in PTX.
        rest = np.fmod(a, b)
        d[:] = rest if remainder else (a - rest) // b

    return effect


@instruction("div" + _INT, unit="alu")
def div(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.8 div: integer quotient, truncated."""
    return _truncating_divide(ins, lanes, remainder=False)


@instruction("rem" + _INT, unit="alu")
def rem(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.9 rem: remainder of the truncated quotient."""
    return _truncating_divide(ins, lanes, remainder=True)


def _extremum(ins: Instruction, lanes: Lanes, operation: np.ufunc) -> Effect:
    plain = binary(ins, lanes, operation)
    if "relu" not in ins.parts:
        return plain
    d = lanes.write(ins.operands[0], type_of(ins.parts[-1]))

    def effect() -> None:
        plain()
        np.maximum(d, 0, out=d)

    return effect


@instruction("min{.relu}" + _INT, unit="alu")
def min_int(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.12 min."""
    return _extremum(ins, lanes, np.minimum)


@instruction("max{.relu}" + _INT, unit="alu")
def max_int(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.13 max."""
    return _extremum(ins, lanes, np.maximum)


def unary(ins: Instruction, lanes: Lanes, operation: np.ufunc) -> Effect:
    kind = type_of(ins.parts[-1])
    return partial(operation, lanes.read(ins.operands[1], kind), lanes.write(ins.operands[0], kind))


@instruction("neg<.s16|.s32|.s64>", unit="alu")
def neg_int(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.11 neg."""
    return unary(ins, lanes, np.negative)


@instruction("abs<.s16|.s32|.s64>", unit="alu")
def abs_int(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.10 abs."""
    return unary(ins, lanes, np.absolute)


@instruction("popc<.b32|.b64>", unit="alu")
def popc(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.14 popc: number of one bits."""
    a = lanes.read(ins.operands[1], type_of(ins.parts[-1]))
    d = lanes.write(ins.operands[0], np.uint32)
    return lambda: np.copyto(d, np.bitwise_count(a))


@instruction("clz<.b32|.b64>", unit="alu")
def clz(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.15 clz: number of leading zeros."""
    kind = type_of(ins.parts[-1])
    a, d = lanes.read(ins.operands[1], kind), lanes.write(ins.operands[0], np.uint32)
    bits = 8 * kind.itemsize

    def effect() -> None:
        d[:] = [bits - int(x).bit_length() for x in np.broadcast_to(a, d.shape)]

    return effect


@instruction("bfe<.u32|.s32>", unit="alu")
def bfe(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.19 bfe: `len` bits from `pos` on, sign-extended for .s32."""
    signed = ins.parts[-1] == "s32"
    a, pos, length = (lanes.read(o, np.uint32) for o in ins.operands[1:])
    d = lanes.write(ins.operands[0], np.uint32)

    def effect() -> None:
        size = (length & 0xFF).astype(np.int64)
        value = a.astype(np.int64)
        value = value - ((value >> 31 & 1) << 32) if signed else value
        field = value >> np.minimum(pos & 0xFF, 63).astype(np.int64)
        mask = (np.int64(1) << np.minimum(size, 32)) - 1
        field &= mask
        if signed:
            top = np.where(size > 0, field >> np.maximum(size - 1, 0) & 1, 0)
            field -= top << np.minimum(size, 32)
        d[:] = field.astype(np.uint32)

    return effect


@instruction("bfi.b32", unit="alu")
def bfi(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.20 bfi: insert the low `len` bits of a into b at `pos`."""
    a, b, pos, length = (lanes.read(o, np.uint32) for o in ins.operands[1:])
    d = lanes.write(ins.operands[0], np.uint32)

    def effect() -> None:
        shift = (pos & 0xFF).astype(np.uint64)
        mask = ((np.uint64(1) << (length & 0xFF).astype(np.uint64)) - np.uint64(1)) << shift
        d[:] = (b & ~mask | (a.astype(np.uint64) << shift & mask)).astype(np.uint32)

    return effect


@instruction("prmt.b32", unit="alu")
def prmt(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.7 prmt: four bytes picked from the eight of {b, a}; bit 3 replicates the sign."""
    a, b, selector = (lanes.read(o, np.uint32) for o in ins.operands[1:])
    d = lanes.write(ins.operands[0], np.uint32)

    def effect() -> None:
        source = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros(d.shape, np.uint64)
        for i in range(4):
            choice = (selector >> np.uint32(4 * i) & 15).astype(np.uint64)
            byte = source >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            byte = np.where(choice & np.uint64(8), sign, byte)
            result |= byte << np.uint64(8 * i)
        d[:] = result.astype(np.uint32)

    return effect


@instruction("brev.b32", unit="alu")
def brev(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.1.17 brev: the bits of a in reverse order."""
    a, d = lanes.read(ins.operands[1], np.uint32), lanes.write(ins.operands[0], np.uint32)

    def effect() -> None:
        bits = np.unpackbits(a.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
        d[:] = np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32)[:, 0]

    return effect
