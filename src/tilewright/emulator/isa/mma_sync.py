"""Warp matrix products of sm_80 (PTX ISA 9.7.14.5)."""

from __future__ import annotations

import numpy as np

from tilewright.emulator.errors import BarrierMisuse, Unsupported
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.operands import SIZES, halves_to_words, to_float32
from tilewright.emulator.parse import Instruction, Operand
from tilewright.emulator.registers import Lanes

_SHAPES = "<.m16n8k4|.m16n8k8|.m16n8k16|.m16n8k32>"
_TYPES = "<.f16|.bf16|.tf32|.e4m3|.e5m2>"


def _codes(words: np.ndarray, warps: int, rows: int, size: int) -> np.ndarray:
    """Registers [i, lane] to codes [warp, row, k]: 9.7.14.5.8, figures of the A and B fragments.

    Lane 4 g + q holds the 4 bytes at 16 kh + 4 q of k in rows g (and g + 8): register 2 kh + h.
    """
    halves = rows // 8
    tiles = words.reshape(-1, halves, warps, 8, 4)  # kh h warp g q
    whole = np.ascontiguousarray(tiles.transpose(2, 1, 3, 0, 4))
    return whole.reshape(warps, rows, -1).view(f"u{size}")


def _sums_of(ins: Instruction, lanes: Lanes, operand: Operand) -> tuple[np.ndarray, np.ndarray]:
    """The registers of C or D: a float32 each, or with .f16 a pair of neighbouring columns."""
    is_half = ins.parts[-1] == "f16"
    registers, rows = lanes.rows(operand, np.uint32 if is_half else np.float32)
    if len(rows) != (2 if is_half else 4):
        raise Unsupported(f"{ins.opcode} with {len(rows)} accumulators")
    return registers, rows


@instruction(
    "mma.sync.aligned" + _SHAPES + ".row.col<.f32>" + _TYPES + _TYPES + ".f32", together=32
)
@instruction("mma.sync.aligned<.m16n8k8|.m16n8k16>.row.col.f16.f16.f16.f16", together=32)
def mma(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.14.5.14 mma.sync: D [16, 8] = A [16, k] B [k, 8] + C."""
    if lanes.count % 32:
        raise BarrierMisuse("mma.sync by an incomplete warp")
    a_type, b_type = ins.parts[-3], ins.parts[-2]
    k, is_half = int(ins.parts[3].split("k")[1]), ins.parts[-1] == "f16"
    (d, d_rows), (c, c_rows) = (_sums_of(ins, lanes, ins.operands[i]) for i in (0, 3))
    (a, a_rows), (b, b_rows) = lanes.rows(ins.operands[1]), lanes.rows(ins.operands[2])
    size, warps = SIZES[a_type], lanes.count // 32
    if 8 * len(a_rows) * 4 * 4 != 16 * k * size or len(a_rows) != 2 * len(b_rows):
        raise Unsupported(f"{ins.opcode} with {len(a_rows)} and {len(b_rows)} registers")
    cta, flops = lanes.cta, 2 * 16 * 8 * k
    unit = f"MMA {ins.parts[3]} {a_type} FLOP"

    def effect() -> None:
        left = to_float32(_codes(a[a_rows], warps, 16, size), a_type)
        right = to_float32(_codes(b[b_rows], warps, 8, size), b_type)
        product = left @ right.swapaxes(1, 2)
        # Element (8 h + g, 2 q + i) is in lane 4 g + q: in register 2 h + i, or in half i of h.
        tiles = product.reshape(warps, 2, 8, 4, 2)
        if is_half:
            sums = halves_to_words(tiles.transpose(1, 0, 2, 3, 4).reshape(2, -1, 2), c[c_rows])
        else:
            sums = c[c_rows] + tiles.transpose(1, 4, 0, 2, 3).reshape(4, -1)
        d[d_rows] = sums
        for warp in lanes.warps:
            cta.count(warp, unit, flops)

    return effect
