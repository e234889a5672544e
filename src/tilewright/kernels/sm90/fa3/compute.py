"""The consumers: S = Q K^T, its softmax, O += P V. One warpgroup owns 64 rows of a tile.

Steady state of a warpgroup, blocks from the last to the first, `|` marks what runs at one time:

    S_j = Q K_j^T  |  O += P_{j+1} V_{j+1}        both on the tensor cores, issued in this order
    softmax of S_j |  O += P_{j+1} V_{j+1}        and the other warpgroup's multiplies

Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2, algorithms 1 and 2.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from tilewright.kernels.blocks.arithmetic import tanh
from tilewright.kernels.blocks.carried import Unchanged
from tilewright.kernels.blocks.masking import mask_scores
from tilewright.kernels.blocks.softmax import Softmax
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.operands import (
    Channels,
    Operands,
    Shared,
    Sync,
    Tile,
    band,
    key_blocks,
)
from tilewright.kernels.sm90.fa3.store import store, wait_for_stores

LOG2_E = 1.4426950408889634


class Registers(Unchanged):
    """A warpgroup's fragments, and its views of shared memory."""

    def __init__(self, spec: Any, sm: Shared, mmas: tuple[Any, Any], thread: Int32, w: Int32):
        self.mma_S, self.mma_O = mmas
        part_S, part_O = self.mma_S.get_slice(thread), self.mma_O.get_slice(thread)
        self.sQ, self.thread = sm.sQ[None, None, w], thread
        self.tSrQ = self.mma_S.make_fragment_A(part_S.partition_A(self.sQ))
        self.tSrK = self.mma_S.make_fragment_B(part_S.partition_B(sm.sK))
        self.tOrV = self.mma_O.make_fragment_B(part_O.partition_B(sm.sV))
        self.shape_S = self.mma_S.partition_shape_C((matmul.ROWS, spec.tile_kv))
        shape_O = self.mma_O.partition_shape_C((matmul.ROWS, spec.head_dim_v))
        self.acc_O = cute.make_rmem_tensor(shape_O, Float32)
        self.rP = cute.make_rmem_tensor(self.shape_S, sm.sQ.element_type)
        self.tOrP = matmul.as_operand_A(self.rP)
        self.O = matmul.as_rows(self.acc_O)
        self.factor = cute.make_rmem_tensor(matmul.THREAD_ROWS, Float32)

    def read_Q(self) -> None:
        """smem Q -> registers, where the multiply takes it from there."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.sQ.element_type)
        part = cute.make_tiled_copy_A(atom, self.mma_S).get_slice(self.thread)
        cute.copy(atom, part.partition_S(self.sQ), part.retile(self.tSrQ))

    def multiply_S(self, stage: Int32) -> cute.Tensor:
        """The accumulator of S = Q K^T. A new one each time: what is kept over a loop costs."""
        acc_S = cute.make_rmem_tensor(self.shape_S, Float32)
        B = self.tSrK[None, None, None, stage]
        matmul.gemm(self.mma_S, acc_S, self.tSrQ, B, accumulate=False)
        return acc_S

    def multiply_O(self, stage: Int32) -> None:
        # O += P V
        B = self.tOrV[None, None, None, stage]
        matmul.gemm(self.mma_O, self.acc_O, self.tOrP, B, accumulate=True)

    def convert_P(self, acc_S: cute.Tensor) -> None:
        self.rP.store(acc_S.load().to(self.rP.element_type))

    def rescale_O(self) -> None:
        """O shrinks to its rows' new maxima."""
        for r in range(matmul.THREAD_ROWS):
            for c in range(cute.size(self.O, mode=[1])):
                self.O[r, c] = self.O[r, c] * self.factor[r]


@cute.jit
def compute(spec: Constexpr, op: Operands, sm: Shared, ch: Channels, mmas: Constexpr):
    """smem Q, K, V -> gmem O, LSE. All warpgroups but the first."""
    thread, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(thread // 128) - 1
    thread = thread % 128
    regs = Registers(spec, sm, mmas, thread, w)
    scale_log2 = op.scale * LOG2_E
    if const_expr(spec.has_softcap):
        scale_log2 = op.softcap * LOG2_E  # the capped logit is in (-1, 1)
    softmax = Softmax(
        matmul.THREAD_ROWS,
        matmul.ROW_LANES,
        scale_log2,
        spec.rescale_threshold,
        spec.exp2_emulated,
    )
    if const_expr(spec.ping_pong and spec.warpgroups > 1):
        if w == spec.warpgroups - 1:  # the first turn is the first warpgroup's
            pass_turn(spec, w)
    tiles, q_tiles, blocks = Int32(0), Int32(0), Int32(0)
    ch.tile.wait_full(tiles)
    tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    while tile.q_block >= 0:
        ch.tile.release(tiles)
        tiles += 1
        begin, end = key_blocks(spec, op, tile)
        softmax.reset()
        regs.acc_O.fill(0.0)
        if (end > begin) | spec.out_shares_q:
            ch.q.wait_full(q_tiles)
            q_tiles += 1
        if end > begin:
            attend(spec, op, ch, regs, softmax, tile, w, q_tiles - 1, blocks, begin, end)
            blocks += end - begin
        store(spec, op, sm, ch, regs, softmax, tile, w, q_tiles)
        ch.tile.wait_full(tiles)
        tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    if const_expr(not spec.packed):
        wait_for_stores(thread)


@cute.jit
def attend(
    spec: Constexpr,
    op: Operands,
    ch: Channels,
    regs: Constexpr,
    softmax: Constexpr,
    tile: Tile,
    w: Int32,
    q_tiles: Int32,
    blocks: Int32,
    begin: Int32,
    end: Int32,
):
    """O and the softmax's state of one tile, over its key blocks from the last to the first."""
    if const_expr(spec.q_in_registers):
        regs.read_Q()
        if const_expr(not spec.out_shares_q):
            ch.q.release(q_tiles)
    if const_expr(spec.overlap):
        attend_overlapped(spec, op, ch, regs, softmax, tile, w, blocks, begin, end)
    else:
        attend_in_order(spec, op, ch, regs, softmax, tile, w, blocks, begin, end)
    if const_expr(not spec.out_shares_q and not spec.q_in_registers):
        ch.q.release(q_tiles)


@cute.jit
def attend_overlapped(
    spec: Constexpr,
    op: Operands,
    ch: Channels,
    regs: Constexpr,
    softmax: Constexpr,
    tile: Tile,
    w: Int32,
    blocks: Int32,
    begin: Int32,
    end: Int32,
):
    """The next block's S is issued before this block's P V, and runs under its softmax."""
    ch.k.wait_full(blocks)
    acc_S = regs.multiply_S(ch.k.index(blocks))
    matmul.wait(0)
    ch.k.release(blocks)
    make_P(spec, op, matmul.as_rows(acc_S), regs.factor, softmax, tile, w, end - 1)
    regs.convert_P(acc_S)
    for back in cutlass.range(1, end - begin, unroll=1):
        n = blocks + back
        ch.k.wait_full(n)
        take_turn(spec, w)
        acc_S = regs.multiply_S(ch.k.index(n))
        ch.v.wait_full(n - 1)
        regs.multiply_O(ch.v.index(n - 1))
        pass_turn(spec, w)
        matmul.wait(1)
        ch.k.release(n)
        make_P(spec, op, matmul.as_rows(acc_S), regs.factor, softmax, tile, w, end - 1 - back)
        matmul.wait(0)
        ch.v.release(n - 1)
        regs.convert_P(acc_S)
        rescale(spec, regs)
    last = blocks + end - begin - 1
    ch.v.wait_full(last)
    regs.multiply_O(ch.v.index(last))
    matmul.wait(0)
    ch.v.release(last)


@cute.jit
def attend_in_order(
    spec: Constexpr,
    op: Operands,
    ch: Channels,
    regs: Constexpr,
    softmax: Constexpr,
    tile: Tile,
    w: Int32,
    blocks: Int32,
    begin: Int32,
    end: Int32,
):
    """S, softmax, P V, one after the other: only the other warpgroups fill the tensor cores."""
    for back in cutlass.range(0, end - begin, unroll=1):
        n = blocks + back
        ch.k.wait_full(n)
        take_turn(spec, w)
        acc_S = regs.multiply_S(ch.k.index(n))
        matmul.wait(0)
        ch.k.release(n)
        pass_turn(spec, w)
        make_P(spec, op, matmul.as_rows(acc_S), regs.factor, softmax, tile, w, end - 1 - back)
        rescale(spec, regs)
        regs.convert_P(acc_S)
        ch.v.wait_full(n)
        regs.multiply_O(ch.v.index(n))
        matmul.wait(0)
        ch.v.release(n)


@cute.jit
def rescale(spec: Constexpr, regs: Constexpr):
    """O shrinks to its rows' new maxima; where they may lag, only if one of a warp's moved."""
    if const_expr(spec.rescale_threshold > 0):
        has_moved = (regs.factor[0] != 1.0) | (regs.factor[1] != 1.0)
        if cute.arch.vote_any_sync(has_moved):
            regs.rescale_O()
    else:
        regs.rescale_O()


@cute.jit
def make_P(
    spec: Constexpr,
    op: Operands,
    S: cute.Tensor,
    factor: cute.Tensor,
    softmax: Constexpr,
    tile: Tile,
    w: Int32,
    block: Int32,
):
    """S of key block `block` -> P, in registers."""
    if const_expr(spec.has_softcap):
        for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = tanh(S[r, c] * (op.scale / op.softcap))
    hide(spec, op, S, tile, w, block)
    softmax.step(S, factor)


@cute.jit
def hide(spec: Constexpr, op: Operands, S: cute.Tensor, tile: Tile, w: Int32, block: Int32):
    """Mask the scores, if any of this tile's may be hidden."""
    lane = cute.arch.lane_idx()
    limits = band(spec, op)
    first_key = block * spec.tile_kv
    row = tile.q_block * spec.tile_q + w * matmul.ROWS
    first, _ = limits.limits(row + matmul.ROWS - 1, tile.seqlen_q, tile.seqlen_k)
    _, past = limits.limits(row, tile.seqlen_q, tile.seqlen_k)
    is_cut = first_key + spec.tile_kv > past
    if const_expr(spec.bounded_left):
        is_cut = is_cut | (first_key < first)
    if is_cut:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        mine = row + 16 * warp + lane // matmul.ROW_LANES
        column = first_key + 2 * (lane % matmul.ROW_LANES)
        firsts, pasts = [], []
        for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
            first, past = limits.limits(mine + 8 * r, tile.seqlen_q, tile.seqlen_k)
            firsts.append(first - column if const_expr(spec.bounded_left) else None)
            pasts.append(past - column)
        mask_scores(S, matmul.columns_of_thread(spec.tile_kv), firsts, pasts)


def take_turn(spec: Any, w: Int32) -> None:
    """Wait until it is this warpgroup's turn to issue multiplies."""
    if spec.ping_pong and spec.warpgroups > 1:
        cute.arch.barrier(barrier_id=Sync.TURN + w, number_of_threads=256)


def pass_turn(spec: Any, w: Int32) -> None:
    """The next warpgroup may issue, while this one does its softmax."""
    if spec.ping_pong and spec.warpgroups > 1:
        following = Int32(cutlass.select_(w == spec.warpgroups - 1, Int32(0), w + 1))
        cute.arch.barrier_arrive(barrier_id=Sync.TURN + following, number_of_threads=256)
