"""Conversions between types (PTX ISA 9.7.9.21 cvt) and between address spaces (cvta, mapa)."""

from __future__ import annotations

from functools import partial

import numpy as np

from tilewright.emulator.errors import Unsupported
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.types import TYPES, packed, packed_destination, type_of
from tilewright.emulator.memory import OFFSET_MASK, SHARED_WINDOW
from tilewright.emulator.parse import Instruction
from tilewright.emulator.registers import Lanes

_INTS = ".s8|.u8|.s16|.u16|.s32|.u32|.s64|.u64"


@instruction(f"cvt{{.sat}}<{_INTS}><{_INTS}>", unit="convert")
def cvt_int(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt between integers: truncates or extends; the register may be wider than the type."""
    if "sat" in ins.parts:
        raise Unsupported("cvt.sat between integers")
    to, source = type_of(ins.parts[-2]), type_of(ins.parts[-1])
    a = lanes.wide(ins.operands[1], source)
    if to.itemsize == 1:  # the narrowest register has 16 bits and gets the extended value
        narrow = lanes.write(ins.operands[0], f"{to.kind}2")
        return lambda: np.copyto(narrow, a.astype(to))
    d = lanes.write(ins.operands[0], to)
    return partial(np.copyto, d, a, casting="unsafe")


_INT_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction(
    f"cvt<.rni|.rzi|.rmi|.rpi>{{.ftz}}{{.sat}}<{_INTS}><.f16|.bf16|.f32|.f64>", unit="convert"
)
def cvt_to_int(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt float to integer: rounded, clamped to the range, NaN to 0."""
    to, source = type_of(ins.parts[-2]), type_of(ins.parts[-1])
    a, d = lanes.read(ins.operands[1], source), lanes.write(ins.operands[0], to)
    rounded, limits = _INT_ROUNDING[ins.parts[1]], np.iinfo(to)

    def effect() -> None:
        values = np.nan_to_num(rounded(a.astype(np.float64)), nan=0.0)
        inside = np.clip(values, limits.min, limits.max)
        top = values >= float(limits.max)
        d[:] = np.where(top, limits.max, np.where(top, 0, inside).astype(to))

    return effect


@instruction(f"cvt<.rn|.rz>{{.sat}}<.f16|.bf16|.f32|.f64><{_INTS}>", unit="convert")
def cvt_from_int(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt integer to float, to nearest even."""
    if ins.parts[1] != "rn" or "sat" in ins.parts:
        raise Unsupported(f"{ins.opcode}: only .rn")
    a = lanes.wide(ins.operands[1], type_of(ins.parts[-1]))
    return partial(
        np.copyto, lanes.write(ins.operands[0], type_of(ins.parts[-2])), a, casting="unsafe"
    )


@instruction("cvt<.rn|.rni|.rzi|.rmi|.rpi>{.ftz}.f32.f32", unit="convert")
def cvt_round(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt.f32.f32: round to an integral value."""
    if ins.parts[1] == "rn":
        raise Unsupported(ins.opcode)
    return partial(
        _INT_ROUNDING[ins.parts[1]],
        lanes.read(ins.operands[1], np.float32),
        lanes.write(ins.operands[0], np.float32),
    )


@instruction("cvt{.ftz}<.f32.f16|.f32.bf16|.f64.f32>", unit="convert")
def cvt_widen(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt to a wider float: exact."""
    a = lanes.read(ins.operands[1], type_of(ins.parts[-1]))
    return partial(np.copyto, lanes.write(ins.operands[0], type_of(ins.parts[-2])), a)


@instruction("cvt<.rn|.rz>{.relu}<.f16.f32|.bf16.f32|.f32.f64>", unit="convert")
def cvt_narrow(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt to a narrower float."""
    source, to = type_of(ins.parts[-1]), type_of(ins.parts[-2])
    a, d = lanes.read(ins.operands[1], source), lanes.write(ins.operands[0], to)
    return _rounded_store(ins, a, d)


@instruction("cvt<.rn|.rz>{.relu}<.f16x2|.bf16x2>.f32", unit="convert", weight=2)
def cvt_pack(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt.f16x2.f32, cvt.bf16x2.f32: a becomes the upper half, b the lower."""
    half = TYPES[ins.parts[-2][:-2]]
    whole = packed_destination(lanes, ins.operands[0], np.uint32, half)
    result = whole
    if ins.operands[0] in ins.operands[1:]:  # the first half stored would destroy a source
        result = np.empty(len(whole), half)
    upper = _rounded_store(ins, lanes.read(ins.operands[1], np.float32), result[1::2])
    lower = _rounded_store(ins, lanes.read(ins.operands[2], np.float32), result[0::2])

    def effect() -> None:
        upper()
        lower()
        if result is not whole:
            whole[:] = result

    return effect


def _rounded_store(ins: Instruction, a: np.ndarray, d: np.ndarray) -> Effect:
    if "rz" in ins.parts:
        if d.dtype.name != "bfloat16":
            raise Unsupported(f"{ins.opcode}: .rz to bf16 only")
        return lambda: np.copyto(
            d, (a.view(np.uint32) & 0xFFFF0000).view(np.float32), casting="unsafe"
        )
    if "relu" in ins.parts:
        return lambda: np.copyto(d, np.fmax(a, 0), casting="unsafe")
    return partial(np.copyto, d, a, casting="unsafe")


_FP8_MAX = {"e4m3x2": 448.0, "e5m2x2": 57344.0}


@instruction("cvt.rn.satfinite{.relu}<.e4m3x2|.e5m2x2>.f32", unit="convert", weight=2)
def cvt_pack_fp8(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt to two fp8 values in 16 bits, clamped to the largest finite one; a is the upper."""
    kind, limit = TYPES[ins.parts[-2][:-2]], np.float32(_FP8_MAX[ins.parts[-2]])
    whole = packed_destination(lanes, ins.operands[0], np.uint16, kind)
    upper, lower = (lanes.read(o, np.float32) for o in ins.operands[1:])
    floor = np.float32(0) if "relu" in ins.parts else -limit

    def effect() -> None:
        whole[1::2] = np.clip(upper, floor, limit).astype(kind)
        whole[0::2] = np.clip(lower, floor, limit).astype(kind)

    return effect


@instruction("cvt.rn{.relu}.f16x2<.e4m3x2|.e5m2x2>", unit="convert", weight=2)
def cvt_unpack_fp8(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt two fp8 values to f16: exact."""
    source = packed(lanes, ins.operands[1], np.uint16, TYPES[ins.parts[-1][:-2]])
    d = packed_destination(lanes, ins.operands[0], np.uint32, np.dtype(np.float16))
    return lambda: np.copyto(d, source.astype(np.float32), casting="unsafe")


@instruction("cvt<.rna|.rn>{.satfinite}.tf32.f32", unit="convert")
def cvt_tf32(ins: Instruction, lanes: Lanes) -> Effect:
    """cvt to tf32: 10 mantissa bits, nearest, ties away from zero (.rna) or to even (.rn)."""
    a, d = lanes.read(ins.operands[1], np.uint32), lanes.write(ins.operands[0], np.uint32)
    to_even = ins.parts[1] == "rn"

    def effect() -> None:
        bias = 0xFFF + (a >> 13 & 1) if to_even else np.uint32(0x1000)
        finite = (a & 0x7F800000) != 0x7F800000
        d[:] = np.where(finite, (a + bias) & np.uint32(0xFFFFE000), a)

    return effect


@instruction("cvta{.to}<.global|.param|.const|.local>.u64")
def cvta(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.20 cvta: generic addresses of these spaces are the addresses themselves here."""
    return partial(
        np.copyto, lanes.write(ins.operands[0], np.uint64), lanes.read(ins.operands[1], np.uint64)
    )


@instruction("cvta<.shared|.shared::cta|.shared::cluster>.u64")
def cvta_shared(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.20 cvta: shared to generic."""
    return partial(
        np.add,
        lanes.read(ins.operands[1], np.uint64),
        np.uint64(SHARED_WINDOW),
        lanes.write(ins.operands[0], np.uint64),
    )


@instruction("cvta.to<.shared|.shared::cta|.shared::cluster>.u64")
def cvta_to_shared(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.20 cvta.to: generic to shared."""
    return partial(
        np.subtract,
        lanes.read(ins.operands[1], np.uint64),
        np.uint64(SHARED_WINDOW),
        lanes.write(ins.operands[0], np.uint64),
    )


@instruction("mapa{.shared::cluster}<.u32|.u64>", unit="alu")
def mapa(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.23 mapa: the address of the same variable in the CTA of the given rank."""
    kind = type_of(ins.parts[-1])
    a, rank = lanes.read(ins.operands[1], kind), lanes.read(ins.operands[2], np.uint32)
    d, keep = lanes.write(ins.operands[0], kind), kind.type(~(0xFF << 24) & (2**32 - 1))
    if kind.itemsize == 8:
        keep = np.uint64(SHARED_WINDOW | OFFSET_MASK)
    return lambda: np.bitwise_or(a & keep, rank.astype(kind) << kind.type(24), d)
