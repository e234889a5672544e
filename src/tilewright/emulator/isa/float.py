"""Floating-point instructions on f32, f64, f16, bf16 and their packed forms (PTX ISA 9.7.3-9.7.5).

Subnormals are kept unless .ftz says otherwise. Approximate functions are computed exactly and
rounded: the hardware's last bits are not documented.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tilewright.emulator.errors import Unsupported
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.types import BF16, packed, packed_destination, type_of
from tilewright.emulator.parse import Instruction
from tilewright.emulator.registers import Lanes

_SMALLEST_NORMAL = np.float32(2.0**-126)
_PACKED = {
    "f32x2": (np.uint64, np.dtype(np.float32)),
    "f16x2": (np.uint32, np.dtype(np.float16)),
    "bf16x2": (np.uint32, BF16),
}
_ALL = "<.f32|.f64|.f16|.bf16|.f32x2|.f16x2|.bf16x2>"


def _lanes_packed(ins: Instruction) -> int:
    return 2 if ins.opcode.endswith("x2") else 1


def _views(ins: Instruction, lanes: Lanes) -> tuple[np.ndarray, list[np.ndarray]]:
    """Destination and sources, elementwise, of a packed or plain type."""
    name = ins.parts[-1]
    if name in _PACKED:
        word, element = _PACKED[name]
        sources = [packed(lanes, o, word, element) for o in ins.operands[1:]]
        return packed_destination(lanes, ins.operands[0], word, element), sources
    kind = type_of(name)
    sources = [lanes.read(o, kind) for o in ins.operands[1:]]
    return lanes.write(ins.operands[0], kind), sources


def _flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def _finish(ins: Instruction, compute: Callable[[], np.ndarray], d: np.ndarray) -> Effect:
    """Stores a result after .ftz, .relu and .sat."""
    flush, relu, saturate = ("ftz" in ins.parts, "relu" in ins.parts, "sat" in ins.parts)

    def effect() -> None:
        result = compute()
        if flush:
            result = _flushed(result)
        if relu:
            result = np.fmax(result, 0)
        if saturate:
            result = np.clip(np.nan_to_num(result, nan=0.0), 0, 1)
        d[:] = result

    return effect


def _arithmetic(ins: Instruction, lanes: Lanes, operation: np.ufunc) -> Effect:
    d, (a, b) = _views(ins, lanes)
    if not {"ftz", "sat", "relu"} & set(ins.parts):
        return partial(operation, a, b, out=d)
    return _finish(ins, lambda: operation(a, b), d)


def _round_down_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b rounded towards -inf: the nearest sum, one step down where TwoSum's error is < 0."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return np.where(error < 0, np.nextafter(total, np.float32(-np.inf)), total)


@instruction("add{.rn|.rm}{.ftz}{.sat}" + _ALL, unit="fma", weight=_lanes_packed)
def add(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.4, 9.7.4.1 add: .rn, and .rm for f32 (range reduction of exp2 relies on it)."""
    if "rm" not in ins.parts:
        return _arithmetic(ins, lanes, np.add)
    if "f32" not in ins.parts[-1]:
        raise Unsupported(f"{ins.opcode}: .rm for f32 only")
    d, (a, b) = _views(ins, lanes)
    return _finish(ins, lambda: _round_down_sum(a, b), d)


@instruction("sub{.rn}{.ftz}{.sat}" + _ALL, unit="fma", weight=_lanes_packed)
def sub(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.5, 9.7.4.2 sub."""
    return _arithmetic(ins, lanes, np.subtract)


@instruction("mul{.rn}{.ftz}{.sat}" + _ALL, unit="fma", weight=_lanes_packed)
def mul(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.6, 9.7.4.3 mul."""
    return _arithmetic(ins, lanes, np.multiply)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float64: the product of two floats is exact there, the sum nearly."""
    return np.multiply(a, b, dtype=np.float64) + c


@instruction(
    "fma.rn{.ftz}{.sat}{.relu}<.f32|.f16|.bf16|.f32x2|.f16x2|.bf16x2>",
    unit="fma",
    weight=_lanes_packed,
)
def fma(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.7, 9.7.4.4 fma: one rounding (of a float64 sum; double rounding below 2^-29)."""
    d, (a, b, c) = _views(ins, lanes)
    if d.dtype != np.float32:
        a, b, c = (np.asarray(x) for x in (a, b, c))
        return _finish(
            ins,
            lambda: _fused(a.astype(np.float64), b.astype(np.float64), c.astype(np.float64)).astype(
                d.dtype
            ),
            d,
        )
    if not {"ftz", "sat", "relu"} & set(ins.parts):
        return lambda: np.copyto(d, _fused(a, b, c), casting="unsafe")
    return _finish(ins, lambda: _fused(a, b, c).astype(np.float32), d)


@instruction("fma.rn{.sat}.f32<.f16|.bf16>", unit="fma")
def fma_mixed(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.5.3 fma, mixed precision: a and b in half precision, c and d in f32."""
    half = type_of(ins.parts[-1])
    a, b = (lanes.read(o, half) for o in ins.operands[1:3])
    c, d = lanes.read(ins.operands[3], np.float32), lanes.write(ins.operands[0], np.float32)
    return _finish(ins, lambda: _fused(a.astype(np.float64), b.astype(np.float64), c), d)


@instruction("add.f32<.f16|.bf16>", unit="fma")
def add_mixed(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.5.1 add, mixed precision: a in half precision, c and d in f32."""
    a = lanes.read(ins.operands[1], type_of(ins.parts[-1]))
    c, d = lanes.read(ins.operands[2], np.float32), lanes.write(ins.operands[0], np.float32)
    return _finish(ins, lambda: a.astype(np.float32) + c, d)


@instruction("div<.rn|.full|.approx>{.ftz}.f32", unit="special")
def div(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.8 div."""
    return _arithmetic(ins, lanes, np.divide)


def _extremum(ins: Instruction, lanes: Lanes, plain: np.ufunc, keeping_nan: np.ufunc) -> Effect:
    operation = keeping_nan if "NaN" in ins.parts else plain
    d, sources = _views(ins, lanes)
    if len(sources) == 3:
        a, b, c = sources
        return _finish(ins, lambda: operation(operation(a, b), c), d)
    return _arithmetic(ins, lanes, operation)


@instruction(
    "max{.ftz}{.NaN}<.f32|.f64|.f16|.bf16|.f16x2|.bf16x2>", unit="alu", weight=_lanes_packed
)
def max_float(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.12 max, of two or three: a NaN operand is ignored unless .NaN."""
    return _extremum(ins, lanes, np.fmax, np.maximum)


@instruction(
    "min{.ftz}{.NaN}<.f32|.f64|.f16|.bf16|.f16x2|.bf16x2>", unit="alu", weight=_lanes_packed
)
def min_float(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.11 min, of two or three."""
    return _extremum(ins, lanes, np.fmin, np.minimum)


@instruction("neg{.ftz}" + _ALL, unit="alu", weight=_lanes_packed)
def neg(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.10 neg."""
    d, (a,) = _views(ins, lanes)
    return _finish(ins, lambda: np.negative(a), d)


@instruction("abs{.ftz}" + _ALL, unit="alu", weight=_lanes_packed)
def absolute(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.9 abs."""
    d, (a,) = _views(ins, lanes)
    return _finish(ins, lambda: np.absolute(a), d)


def _special(ins: Instruction, lanes: Lanes, function: Callable[..., np.ndarray]) -> Effect:
    d, (a,) = _views(ins, lanes)
    if ins.parts[-1] in ("f32", "f64"):
        return _finish(ins, lambda: function(a), d)
    return _finish(ins, lambda: function(a.astype(np.float32)).astype(d.dtype), d)


@instruction(
    "ex2.approx{.ftz}<.f32|.f16|.f16x2|.bf16|.bf16x2>", unit="special", weight=_lanes_packed
)
def ex2(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.22 ex2: 2 ** a."""
    if ins.opcode != "ex2.approx.ftz.f32":
        return _special(ins, lanes, np.exp2)
    d, (a,) = _views(ins, lanes)

    def effect() -> None:
        np.exp2(a, d)
        # Results are never negative: a product with 0 or 1 flushes subnormals.
        np.multiply(d, d >= _SMALLEST_NORMAL, d)

    return effect


@instruction("lg2.approx{.ftz}.f32", unit="special")
def lg2(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.21 lg2."""
    return _special(ins, lanes, np.log2)


@instruction("rcp<.approx|.rn>{.ftz}<.f32|.f64>", unit="special")
def rcp(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.13 rcp: 1 / a."""
    return _special(ins, lanes, np.reciprocal)


@instruction("rsqrt.approx{.ftz}.f32", unit="special")
def rsqrt(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.16 rsqrt."""
    return _special(ins, lanes, lambda a: np.reciprocal(np.sqrt(a)))


@instruction("sqrt<.approx|.rn>{.ftz}.f32", unit="special")
def sqrt(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.15 sqrt."""
    return _special(ins, lanes, np.sqrt)


@instruction("tanh.approx<.f32|.f16|.f16x2|.bf16|.bf16x2>", unit="special", weight=_lanes_packed)
def tanh(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.23 tanh."""
    return _special(ins, lanes, np.tanh)


@instruction("sin.approx{.ftz}.f32", unit="special")
def sin(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.19 sin."""
    return _special(ins, lanes, np.sin)


@instruction("cos.approx{.ftz}.f32", unit="special")
def cos(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.20 cos."""
    return _special(ins, lanes, np.cos)


@instruction("copysign<.f32|.f64>", unit="alu")
def copysign(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.3.2 copysign: the sign of a on the magnitude of b."""
    d, (a, b) = _views(ins, lanes)
    return _finish(ins, lambda: np.copysign(b, a), d)
