"""The consumers: S = Q K^T, its softmax, O += P V. One warpgroup owns 64 rows of a tile.

Steady state of a warpgroup, blocks from the last to the first; what shares a line runs at one time:

    S_j = Q K_j^T   O += P_{j+1} V_{j+1}     issued in this order
    softmax of S_j  O += P_{j+1} V_{j+1}     and the other warpgroups' multiplies

With Q in registers the same goes on across tiles: the S of the next tile's first block is issued
with the last P V of this one, and runs under it and under the store of O.
Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2, algorithms 1 and 2.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from tilewright.kernels.blocks.arithmetic import tanh
from tilewright.kernels.blocks.masking import mask_scores
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
from tilewright.kernels.sm90.fa3.registers import Registers
from tilewright.kernels.sm90.fa3.store import store, wait_for_stores


@cute.jit
def compute(spec: Constexpr, op: Operands, sm: Shared, ch: Channels, mmas: Constexpr):
    """smem Q, K, V -> gmem O, LSE. All warpgroups but the first."""
    thread, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(thread // 128) - 1
    regs = Registers(spec, op, sm, mmas, thread % 128, w)
    if const_expr(spec.takes_turns):
        if w == spec.warpgroups - 1:  # the first turn is the first warpgroup's
            pass_turn(spec, w)
    first = Int32(0)
    ch.tile.wait_full(first)
    tile = Tile.read(sm.sTile, ch.tile.index(first))
    if tile.q_block >= 0:
        ch.tile.release(first)
        if const_expr(spec.overlap):
            attend_tiles(spec, op, sm, ch, regs, tile)
        else:
            attend_tiles_in_order(spec, op, sm, ch, regs, tile)
    if const_expr(not spec.packed):
        wait_for_stores(thread % 128)


@cute.jit
def attend_tiles(
    spec: Constexpr, op: Operands, sm: Shared, ch: Channels, regs: Constexpr, tile: Tile
):
    """All tiles of this CTA, from its first one on. Tiles and key blocks count from 0."""
    tiles, blocks = Int32(0), Int32(0)
    start_tile(spec, op, ch, regs, tile, tiles, blocks)
    is_left = Boolean(True)
    while is_left:
        regs.acc_O.fill(0.0)
        begin, end = key_blocks(spec, op, tile)
        for back in cutlass.range(1, end - begin, unroll=1):
            has_next = back + 1 < end - begin
            attend_block(spec, op, ch, regs, tile, blocks + back, end - 1 - back, has_next)
        blocks += end - begin
        ch.tile.wait_full(tiles + 1)
        following = Tile.read(sm.sTile, ch.tile.index(tiles + 1))
        is_left = following.q_block >= 0
        if is_left:
            ch.tile.release(tiles + 1)
            turn_over(spec, op, sm, ch, regs, tile, following, tiles, blocks)
            tile = following
            tiles += 1
    last_multiply(spec, ch, regs, tiles, blocks - 1)
    store(spec, op, sm, ch, regs, tile, tiles)


@cute.jit
def start_tile(
    spec: Constexpr,
    op: Operands,
    ch: Channels,
    regs: Constexpr,
    tile: Tile,
    tiles: Int32,
    n: Int32,
):
    """P of the tile's last block, which is number `n`, with nothing to run under it."""
    take_Q(spec, ch, regs, tiles)
    ch.k.wait_full(n)
    acc_S = regs.multiply_S(ch.k.index(n))
    matmul.wait(0)
    ch.k.release(n)
    start_softmax(spec, op, ch, regs, acc_S, tile, n)


@cute.jit
def attend_block(
    spec: Constexpr,
    op: Operands,
    ch: Channels,
    regs: Constexpr,
    tile: Tile,
    n: Int32,
    block: Int32,
    has_next: Boolean,
):
    """S of key block `block`, which is number `n` and there, over P V of the one before; its P."""
    is_there = ch.v.is_full(n - 1)
    take_turn(spec, regs.w)
    acc_S = regs.multiply_S(ch.k.index(n))
    if not is_there:
        ch.v.wait_full(n - 1)
    regs.multiply_O(ch.v.index(n - 1))
    pass_turn(spec, regs.w)
    matmul.wait(1)
    is_there = ch.k.is_full(n + 1)
    has_moved = Boolean(True)
    if const_expr(spec.goes_ahead):
        has_moved = make_P_ahead(spec, op, ch, regs, acc_S, tile, n, block)
        ch.k.release(n)
    else:
        ch.k.release(n)
        make_P(spec, op, regs, matmul.as_rows(acc_S), tile, block)
    # The next K is waited for here because of the branch: without one, the assembler moves the end
    # of P V up to before the softmax that should run under it.
    if has_next & (not is_there):
        ch.k.wait_full(n + 1)
    matmul.wait(0)
    ch.v.release(n - 1)
    regs.convert_P(acc_S)
    if const_expr(spec.goes_ahead):
        if has_moved:
            regs.rescale_O()
    else:
        rescale(spec, regs)


@cute.jit
def turn_over(
    spec: Constexpr,
    op: Operands,
    sm: Shared,
    ch: Channels,
    regs: Constexpr,
    tile: Tile,
    following: Tile,
    tiles: Int32,
    n: Int32,
):
    """The end of tile number `tiles` over the beginning of the next, whose first block is `n`."""
    if const_expr(spec.carries_over):
        take_Q(spec, ch, regs, tiles + 1)
        ch.k.wait_full(n)
        take_turn(spec, regs.w)
        acc_S = regs.multiply_S(ch.k.index(n))
        ch.v.wait_full(n - 1)
        regs.multiply_O(ch.v.index(n - 1))
        pass_turn(spec, regs.w)
        matmul.wait(0)
        ch.k.release(n)
        ch.v.release(n - 1)
        store(spec, op, sm, ch, regs, tile, tiles)
        start_softmax(spec, op, ch, regs, acc_S, following, n)
    else:
        last_multiply(spec, ch, regs, tiles, n - 1)
        store(spec, op, sm, ch, regs, tile, tiles)
        start_tile(spec, op, ch, regs, following, tiles + 1, n)


@cute.jit
def last_multiply(spec: Constexpr, ch: Channels, regs: Constexpr, tiles: Int32, n: Int32):
    """O += P V of a tile's first block, which is number `n` and the last to be done."""
    if const_expr(spec.frees_q_early and not spec.q_in_registers):
        ch.q.release(tiles)
    ch.v.wait_full(n)
    regs.multiply_O(ch.v.index(n))
    matmul.wait(0)
    ch.v.release(n)


@cute.jit
def attend_tiles_in_order(
    spec: Constexpr, op: Operands, sm: Shared, ch: Channels, regs: Constexpr, tile: Tile
):
    """S, softmax, P V, one after the other: only other warpgroups fill the tensor cores."""
    tiles, blocks = Int32(0), Int32(0)
    is_left = Boolean(True)
    while is_left:
        take_Q(spec, ch, regs, tiles)
        regs.acc_O.fill(0.0)
        regs.softmax.reset()
        begin, end = key_blocks(spec, op, tile)
        for back in cutlass.range(0, end - begin, unroll=1):
            attend_block_in_order(spec, op, ch, regs, tile, blocks + back, end - 1 - back)
        blocks += end - begin
        if const_expr(spec.frees_q_early and not spec.q_in_registers):
            ch.q.release(tiles)
        store(spec, op, sm, ch, regs, tile, tiles)
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(sm.sTile, ch.tile.index(tiles))
        is_left = tile.q_block >= 0
        if is_left:
            ch.tile.release(tiles)


@cute.jit
def attend_block_in_order(
    spec: Constexpr, op: Operands, ch: Channels, regs: Constexpr, tile: Tile, n: Int32, block: Int32
):
    """S of key block `block`, which is number `n`, its P, and P V."""
    is_there = ch.v.is_full(n)
    ch.k.wait_full(n)
    take_turn(spec, regs.w)
    acc_S = regs.multiply_S(cute.arch.make_warp_uniform(ch.k.index(n)))
    matmul.wait(0)
    pass_turn(spec, regs.w)
    ch.k.release(n)
    make_P(spec, op, regs, matmul.as_rows(acc_S), tile, block)
    rescale(spec, regs)
    regs.convert_P(acc_S)
    if not is_there:
        ch.v.wait_full(n)
    regs.multiply_O(cute.arch.make_warp_uniform(ch.v.index(n)))
    matmul.wait(0)
    ch.v.release(n)


@cute.jit
def take_Q(spec: Constexpr, ch: Channels, regs: Constexpr, tiles: Int32):
    """Wait for the tile's Q, and move it to the registers if that is where it is to be."""
    ch.q.wait_full(tiles)
    if const_expr(spec.q_in_registers):
        regs.read_Q()
        if const_expr(spec.frees_q_early):
            ch.q.release(tiles)


@cute.jit
def start_softmax(
    spec: Constexpr,
    op: Operands,
    ch: Channels,
    regs: Constexpr,
    acc_S: cute.Tensor,
    tile: Tile,
    n: Int32,
):
    """P of a tile's last block, the first to be done, which is number `n`."""
    regs.softmax.reset()
    begin, end = key_blocks(spec, op, tile)
    make_P(spec, op, regs, matmul.as_rows(acc_S), tile, end - 1)
    regs.convert_P(acc_S)
    if end - begin > 1:
        ch.k.wait_full(n + 1)


@cute.jit
def make_P(
    spec: Constexpr, op: Operands, regs: Constexpr, S: cute.Tensor, tile: Tile, block: Int32
):
    """S (row, col) of key block `block` -> P, in place."""
    cap(spec, op, S)
    hide(spec, op, regs, S, tile, block)
    regs.softmax.step(S, regs.factor)


@cute.jit
def make_P_ahead(
    spec: Constexpr,
    op: Operands,
    ch: Channels,
    regs: Constexpr,
    acc_S: cute.Tensor,
    tile: Tile,
    n: Int32,
    block: Int32,
) -> Boolean:
    """The same by the maxima so far. If they do not do, S is multiplied once more and they move.

    So the maxima of the block are off the path from S to P, and run under its exponentials.
    """
    S = matmul.as_rows(acc_S)
    cap(spec, op, S)
    hide(spec, op, regs, S, tile, block)
    sums = [regs.softmax.sum[r] for r in range(matmul.THREAD_ROWS)]
    has_moved = Boolean(cute.arch.vote_any_sync(regs.softmax.step_ahead(S)))
    if has_moved:
        for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
            regs.softmax.sum[r] = sums[r]
        regs.multiply_S_again(acc_S, ch.k.index(n))
        make_P(spec, op, regs, S, tile, block)
    return has_moved


def cap(spec: Any, op: Operands, S: cute.Tensor) -> None:
    """The logits' tanh, where there is a softcap."""
    if spec.has_softcap:
        for r in range(matmul.THREAD_ROWS):
            for c in range(cute.size(S, mode=[1])):
                S[r, c] = tanh(S[r, c] * (op.scale / op.softcap))


@cute.jit
def hide(spec: Constexpr, op: Operands, regs: Constexpr, S: cute.Tensor, tile: Tile, block: Int32):
    """Mask the scores, if any of this warpgroup's may be hidden."""
    limits = band(spec, op)
    first_key = block * spec.tile_kv
    row = tile.q_block * spec.tile_q + regs.w * matmul.ROWS
    first, _ = limits.limits(row + matmul.ROWS - 1, tile.seqlen_q, tile.seqlen_k)
    _, past = limits.limits(row, tile.seqlen_q, tile.seqlen_k)
    is_cut = first_key + spec.tile_kv > past
    if const_expr(spec.bounded_left):
        is_cut = is_cut | (first_key < first)
    if is_cut:
        mine = row + regs.thread // 32 * 16 + regs.thread % 32 // matmul.ROW_LANES
        column = first_key + 2 * (regs.thread % matmul.ROW_LANES)
        firsts, pasts = [], []
        for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
            first, past = limits.limits(mine + 8 * r, tile.seqlen_q, tile.seqlen_k)
            firsts.append(first - column if const_expr(spec.bounded_left) else None)
            pasts.append(past - column)
        mask_scores(S, matmul.columns_of_thread(spec.tile_kv), firsts, pasts)


@cute.jit
def rescale(spec: Constexpr, regs: Constexpr):
    """O shrinks to its rows' new maxima; where they may lag, only if one of a warp's moved."""
    if const_expr(spec.rescale_threshold > 0):
        has_moved = (regs.factor[0] != 1.0) | (regs.factor[1] != 1.0)
        if cute.arch.vote_any_sync(has_moved):
            regs.rescale_O()
    else:
        regs.rescale_O()


def take_turn(spec: Any, w: Int32) -> None:
    """Wait until it is this warpgroup's turn to issue multiplies."""
    if spec.takes_turns:
        cute.arch.barrier(barrier_id=Sync.TURN + w, number_of_threads=256)


def pass_turn(spec: Any, w: Int32) -> None:
    """The next warpgroup may issue, while this one does its softmax."""
    if spec.takes_turns:
        following = Int32(cutlass.select_(w == spec.warpgroups - 1, Int32(0), w + 1))
        cute.arch.barrier_arrive(barrier_id=Sync.TURN + following, number_of_threads=256)
