"""The epilogue: O and the log-sum-exp from registers to memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from tilewright.kernels.blocks.arithmetic import select
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.operands import Channels, Operands, Shared, Sync, Tile

LOG2_E = 1.4426950408889634
VECTOR = 8  # elements of a 16-byte store


@cute.jit
def store(
    spec: Constexpr,
    op: Operands,
    sm: Shared,
    ch: Channels,
    regs: Constexpr,
    tile: Tile,
    tiles: Int32,
):
    """registers O, LSE -> gmem. One warpgroup, its 64 rows."""
    lane = regs.thread % 32
    first = tile.q_block * spec.tile_q + regs.w * matmul.ROWS
    mine = first + 16 * (regs.thread // 32) + lane // matmul.ROW_LANES
    lse = cute.make_rmem_tensor(matmul.THREAD_ROWS, Float32)
    regs.softmax.finish(op.mSink[tile.head].to(Float32) * LOG2_E, regs.factor, lse)
    mLSE = (
        op.mLSE[None, tile.head]
        if const_expr(spec.packed)
        else (op.mLSE[None, tile.head, tile.batch])
    )
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        row = mine + 8 * r
        is_used = row < tile.seqlen_q
        if (lane % matmul.ROW_LANES == 0) & (row < tile.q_rows):
            mLSE[tile.q_start + row] = select(is_used, lse[r], -Float32.inf)
        factor = select(is_used, regs.factor[r], 0.0)
        for c in cutlass.range_constexpr(cute.size(regs.O, mode=[1])):
            # A row without keys is 0, whatever lies in V.
            scaled = regs.O[r, c] * factor
            regs.O[r, c] = select(factor == 0.0, 0.0, scaled)
    copy_out(spec, op, sm, regs, tile, first)
    if const_expr(spec.out_shares_q):
        ch.q.release(tiles)


@cute.jit
def copy_out(
    spec: Constexpr,
    op: Operands,
    sm: Shared,
    regs: Constexpr,
    tile: Tile,
    first: Int32,
):
    """O in registers -> smem -> gmem."""
    thread, w = regs.thread, regs.w
    sO = sm.sO[None, None, w]  # (64, d)
    leader = thread < 32
    if const_expr(not spec.packed and not spec.out_shares_q):
        # The copy engine may still be reading the last tile's O.
        wait_for_stores(thread)
        cute.arch.barrier(barrier_id=Sync.OUT + w, number_of_threads=128)
    elif const_expr(spec.packed or spec.out_shares_q):
        # All warps are through with what lies there: Q's rows, or the last tile's O.
        cute.arch.barrier(barrier_id=Sync.OUT + w, number_of_threads=128)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), sO.element_type)
    part = cute.make_tiled_copy_C(atom, regs.mma_O).get_slice(thread)
    rO = cute.make_rmem_tensor(regs.acc_O.shape, sO.element_type)
    rO.store(regs.acc_O.load().to(sO.element_type))
    cute.copy(atom, part.retile(rO), part.partition_D(sO))
    if const_expr(spec.packed):
        cute.arch.barrier(barrier_id=Sync.OUT + w, number_of_threads=128)
        mO = cute.domain_offset((tile.q_start, 0), op.mO[None, None, tile.head])
        copy_rows(sO, mO, first, tile.q_rows)
    else:
        # Orders O's writes before the copy engine that reads them.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=Sync.OUT + w, number_of_threads=128)
        if leader:
            mO = op.out.tensor[None, None, tile.head, tile.batch]
            gO = cute.local_tile(mO, (matmul.ROWS, spec.head_dim_v), (None, 0))
            tOsO, tOgO = cpasync.tma_partition(
                op.out.copy,
                0,
                cute.make_layout(1),
                cute.group_modes(sO, 0, 2),
                cute.group_modes(gO, 0, 2),
            )
            cute.copy(op.out.copy, tOsO, tOgO[None, tile.q_block * spec.warpgroups + w])
            cute.arch.cp_async_bulk_commit_group()
        if const_expr(spec.out_shares_q):
            wait_for_stores(thread)
            cute.arch.barrier(barrier_id=Sync.OUT + w, number_of_threads=128)


@cute.jit
def wait_for_stores(thread: Int32):
    """Until the copy engine has read what this warpgroup gave it."""
    if thread < 32:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def copy_rows(sO: cute.Tensor, mO: cute.Tensor, first: Int32, rows: Int32):
    """smem O (64, d) -> gmem (q, d) from row `first` on, but for rows past `rows`."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % 128
    chunks = cute.size(sO, mode=[1]) // VECTOR
    held = cute.make_rmem_tensor((1, VECTOR), sO.element_type)
    for i in cutlass.range_constexpr(matmul.ROWS * chunks // 128):
        at = i * 128 + thread
        row, chunk = at // chunks, at % chunks
        if (first + row < rows) & (chunk * VECTOR < cute.size(mO, mode=[1])):
            cute.autovec_copy(cute.local_tile(sO, (1, VECTOR), (row, chunk)), held)
            cute.autovec_copy(held, cute.local_tile(mO, (1, VECTOR), (first + row, chunk)))
