"""The epilogue: O and the log-sum-exp from registers to memory.

By the copy engine through shared memory, where there is room for it and a tile's rows are all of
one sequence. Else straight from the registers, see `store_row`. Measured on an H200: docs/fa3.md.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from tilewright.kernels.blocks.arithmetic import select
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.operands import Operands, Sync, Tile
from tilewright.kernels.sm90.fa3.registers import LOG2_E
from tilewright.kernels.sm90.fa3.repair import repair
from tilewright.kernels.sm90.rows import store_row


@cute.jit
def store(spec: Constexpr, op: Operands, regs: Constexpr, tile: Tile):
    """registers O, LSE -> gmem. One warpgroup, its 64 rows."""
    lane = regs.thread % 32
    first = tile.q_block * spec.tile_q + regs.w * matmul.ROWS
    mine = first + 16 * (regs.thread // 32) + lane // matmul.ROW_LANES
    lse = cute.make_rmem_tensor(matmul.THREAD_ROWS, Float32)
    regs.softmax.finish(op.mSink[tile.head].to(Float32) * LOG2_E, regs.factor, lse)
    if const_expr(spec.packed):
        mLSE = cute.domain_offset((tile.q_start,), op.mLSE[None, tile.head])
        mO = cute.domain_offset((tile.q_start, 0), op.mO[None, None, tile.head])
    else:
        mLSE = op.mLSE[None, tile.head, tile.batch]
        mO = op.mO[None, None, tile.head, tile.batch]
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        row = mine + 8 * r
        is_used = row < tile.seqlen_q
        if (lane % matmul.ROW_LANES == 0) & (row < tile.q_rows):
            mLSE[row] = select(is_used, lse[r], -Float32.inf)
        regs.factor[r] = select(is_used, regs.factor[r], 0.0)
        for c in cutlass.range_constexpr(cute.size(regs.O, mode=[1])):
            regs.O[r, c] = regs.O[r, c] * regs.factor[r]
    rO = cute.make_rmem_tensor(regs.acc_O.shape, op.mO.element_type)
    rO.store(regs.acc_O.load().to(op.mO.element_type))
    if const_expr(spec.stores_by_tma):
        store_tile(spec, op, regs, rO, tile)
    else:
        for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
            store_row(cute.recast_tensor(rO, Int32), r, mO, mine + 8 * r, tile.q_rows)
        repair(spec, op, mO, Int32(0), regs, tile)


@cute.jit
def store_tile(spec: Constexpr, op: Operands, regs: Constexpr, rO: cute.Tensor, tile: Tile):
    """registers O -> smem -> gmem, by the copy engine, which clips the rows past the end."""
    wait_for_stores(regs.thread)
    cute.arch.barrier(barrier_id=Sync.OUT + regs.w, number_of_threads=128)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), rO.element_type)
    part = cute.make_tiled_copy_C(atom, regs.mma_O).get_slice(regs.thread)
    cute.copy(atom, part.retile(rO), part.partition_D(regs.sO))
    first = tile.q_block * spec.tile_q + regs.w * matmul.ROWS
    repair(spec, op, regs.sO, first, regs, tile)
    # Orders O's writes before the copy engine that reads them.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=Sync.OUT + regs.w, number_of_threads=128)
    if regs.thread < 32:
        mO = op.out.tensor[None, None, tile.head, tile.batch]
        gO = cute.local_tile(mO, (matmul.ROWS, spec.head_dim_v), (None, 0))
        tOsO, tOgO = cpasync.tma_partition(
            op.out.copy,
            0,
            cute.make_layout(1),
            cute.group_modes(regs.sO, 0, 2),
            cute.group_modes(gO, 0, 2),
        )
        cute.copy(op.out.copy, tOsO, tOgO[None, tile.q_block * spec.warpgroups + regs.w])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def wait_for_stores(thread: Int32):
    """Until the copy engine has read what this warpgroup gave it."""
    if thread < 32:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
