"""The epilogue: dK and dV from registers to memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from tilewright.kernels.blocks.arithmetic import fma, select
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.load import rows_of
from tilewright.kernels.sm90.fa3.repair import is_not_finite
from tilewright.kernels.sm90.fa3_backward.operands import Operands, Tile
from tilewright.kernels.sm90.rows import store_row


@cute.jit
def store_dV(spec: Constexpr, op: Operands, regs: Constexpr, tile: Tile):
    """registers -> gmem. One warpgroup, its 64 keys."""
    report_spoilt(spec, op, regs.acc_dV)
    mdV = rows_of(spec, op.mdV, tile.head, tile.batch, tile.k_start, 0)
    store_keys(regs, regs.acc_dV, mdV, tile)


@cute.jit
def store_dK(spec: Constexpr, op: Operands, regs: Constexpr, tile: Tile):
    """registers -> gmem, with the scale that it has not had yet."""
    acc = regs.acc_dK
    acc.store(acc.load() * op.scale)
    report_spoilt(spec, op, acc)
    mdK = rows_of(spec, op.mdK, tile.head, tile.batch, tile.k_start, 0)
    store_keys(regs, acc, mdK, tile)


@cute.jit
def report_spoilt(spec: Constexpr, op: Operands, acc: cute.Tensor):
    """Let finish look after rows that are not finite, which hidden ones may have spoilt.

    Without bounds, rows that are hidden are past a sequence's end, where a dense one's are zeros.
    """
    if const_expr(spec.bounded_left or spec.bounded_right or spec.packed):
        found = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(acc)):
            found = fma(acc[i], 0.0, found)
        if is_not_finite(found):
            op.mSpoilt[0] = Int32(1)


@cute.jit
def store_keys(regs: Constexpr, acc: cute.Tensor, mX: cute.Tensor, tile: Tile):
    """An accumulator's rows -> mX (kv, d). Those of no key of the problem are 0."""
    lane = regs.thread % 32
    first = tile.kv_block * regs.spec.tile_kv + regs.first_key
    mine = first + 16 * (regs.thread // 32) + lane // matmul.ROW_LANES
    rows = matmul.as_rows(acc)  # (row, col)
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        is_key = mine + 8 * r < tile.seqlen_k
        for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, c] = select(is_key, rows[r, c], 0.0)
    rX = cute.make_rmem_tensor(acc.shape, mX.element_type)
    rX.store(acc.load().to(mX.element_type))
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        store_row(cute.recast_tensor(rX, Int32), r, mX, mine + 8 * r, tile.k_rows)
