"""The consumers: S = Q K^T, its softmax, O += P V. One warpgroup owns 64 rows of a tile.

Steady state of a warpgroup, blocks from the last to the first; what shares a line runs at one time:

    S_j = Q K_j^T   O += P_{j+1} V_{j+1}     issued in this order
    softmax of S_j  O += P_{j+1} V_{j+1}     and the other warpgroups' multiplies

With Q in registers the same goes on across tiles: the S of the next tile's first block is issued
with the last P V of this one, and runs under it and under the store of O.
Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2, algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from tilewright.kernels.blocks.arithmetic import tanh
from tilewright.kernels.blocks.masking import Band
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.load import refill
from tilewright.kernels.sm90.fa3.operands import (
    Channels,
    Operands,
    Role,
    Shared,
    Sync,
    Tile,
    band,
)
from tilewright.kernels.sm90.fa3.registers import Registers
from tilewright.kernels.sm90.fa3.spans import Span, hide, hide_left, is_cut_right, span
from tilewright.kernels.sm90.fa3.store import store, wait_for_stores


@dataclass(frozen=True)
class Warpgroup(Role):
    """What a computing warpgroup works with besides."""

    regs: Registers
    views: Any = None  # of this tile's Q, K and V, where a computing warp loads them

    @property
    def band(self) -> Band:
        return band(self.spec, self.op)


@cute.jit
def compute(spec: Constexpr, op: Operands, sm: Shared, ch: Channels, mmas: Constexpr):
    """smem Q, K, V -> gmem O, LSE. All warpgroups but the first."""
    thread, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(thread // 128) - 1
    wg = Warpgroup(spec, op, sm, ch, Registers(spec, op, sm, mmas, thread % 128, w))
    if w == spec.warpgroups - 1:  # the first turn is the first warpgroup's
        pass_turn(wg)
    first = Int32(0)
    ch.tile.wait_full(first)
    tile = Tile.read(sm.sTile, ch.tile.index(first))
    if tile.q_block >= 0:
        ch.tile.release(first)
        if const_expr(spec.starts_two):
            attend_tiles_from_two(wg, tile)
        elif const_expr(spec.overlap):
            attend_tiles(wg, tile)
        else:
            attend_tiles_in_order(wg, tile)
    if const_expr(spec.stores_by_tma):
        wait_for_stores(thread % 128)


@cute.jit
def attend_tiles(wg: Constexpr, tile: Tile):
    """All tiles of this CTA, from its first one on. Tiles and key blocks count from 0."""
    ch = wg.ch
    tiles, blocks = Int32(0), Int32(0)
    start_tile(wg, tile, tiles, blocks)
    is_left = Boolean(True)
    while is_left:
        wg.regs.acc_O.fill(0.0)
        mine = span(wg, tile)
        first = blocks + mine.after
        for back in cutlass.range(1, mine.blocks, unroll=1):
            attend_block(wg, tile, mine, first + back, mine.end - 1 - back)
        blocks += mine.all_blocks
        ch.tile.wait_full(tiles + 1)
        following = Tile.read(wg.sm.sTile, ch.tile.index(tiles + 1))
        is_left = following.q_block >= 0
        if is_left:
            ch.tile.release(tiles + 1)
            turn_over(wg, (tile, following), mine.before, tiles, blocks)
            tile = following
            tiles += 1
    end_tile(wg, tile, span(wg, tile).before, tiles, blocks)


@cute.jit
def attend_tiles_from_two(wg: Constexpr, tile: Tile):
    """The same; S of a tile's second block runs under the softmax of its first."""
    ch, regs = wg.ch, wg.regs
    tiles, blocks = Int32(0), Int32(0)
    is_left = Boolean(True)
    while is_left:
        mine = span(wg, tile)
        first = enter_tile(wg, tile, tiles, blocks)
        if mine.blocks > 1:
            start_two(wg, tile, mine, first)
        else:
            regs.acc_O.fill(0.0)
            start_one(wg, tile, first)
        for back in cutlass.range(2, mine.blocks, unroll=1):
            attend_block(wg, tile, mine, first + back, mine.end - 1 - back)
        blocks += mine.all_blocks
        end_tile(wg, tile, mine.before, tiles, blocks)
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(wg.sm.sTile, ch.tile.index(tiles))
        is_left = tile.q_block >= 0
        if is_left:
            ch.tile.release(tiles)


@cute.jit
def start_two(wg: Constexpr, tile: Tile, mine: Span, n: Int32):
    """P of a tile's two last blocks, numbers `n` and `n` + 1, and O of the first of them.

    O is not live before its first multiply, which takes no account of it: so there is room for two
    tiles of S. One path from the first multiply on: where paths met, the assembler would wait for
    each multiply.
    """
    ch, regs = wg.ch, wg.regs
    ch.k.wait_full(n)
    ch.k.wait_full(n + 1)
    acc_S = regs.multiply_S(ch.k.index(n))
    following_S = regs.multiply_S(ch.k.index(n + 1))
    matmul.wait(1)
    ch.k.release(n)
    start_softmax(wg, acc_S, tile, mine)
    attend_block(wg, tile, mine, n + 1, mine.end - 2, following_S)


@cute.jit
def start_tile(wg: Constexpr, tile: Tile, tiles: Int32, n: Int32):
    """P of a tile's last block. The first of its blocks is number `n`."""
    start_one(wg, tile, enter_tile(wg, tile, tiles, n))


@cute.jit
def start_one(wg: Constexpr, tile: Tile, n: Int32):
    """P of the tile's last block, which is number `n`, with nothing to run under it."""
    mine = span(wg, tile)
    wg.ch.k.wait_full(n)
    acc_S = wg.regs.multiply_S(wg.ch.k.index(n))
    matmul.wait(0)
    wg.ch.k.release(n)
    start_softmax(wg, acc_S, tile, mine)
    if mine.blocks > 1:
        wg.ch.k.wait_full(n + 1)


@cute.jit
def enter_tile(wg: Constexpr, tile: Tile, tiles: Int32, n: Int32) -> Int32:
    """Take the tile's Q, leave out what is hidden. The number of the first block that is not."""
    take_Q(wg, tiles)
    if const_expr(wg.spec.skips_hidden):
        skipped = span(wg, tile).after
        pass_over(wg.ch, n, skipped)
        n += skipped
    return n


@cute.jit
def pass_over(ch: Constexpr, n: Int32, count: Int32):
    """Hand back the keys and values of `count` blocks from number `n` on, unread.

    An arrival belongs to a round of a slot, and only when it is full has that round begun for all.
    """
    for i in cutlass.range(count, unroll=1):
        for ring in (ch.k, ch.v):
            ring.wait_full(n + i)
            ring.release(n + i)


@cute.jit
def attend_block(wg: Constexpr, tile: Tile, mine: Span, n: Int32, block: Int32, issued: Any = None):
    """S of key block `block`, which is number `n` and there, over P V of the one before; its P.

    `issued` is the accumulator of S where that is issued already, for a tile's second block.
    """
    ch, regs = wg.ch, wg.regs
    is_there = ch.v.is_full(n - 1)
    take_turn(wg)
    acc_S = regs.multiply_S(ch.k.index(n)) if const_expr(issued is None) else issued
    if not is_there:
        ch.v.wait_full(n - 1)
    regs.multiply_O(ch.v.index(n - 1), accumulate=issued is None)
    pass_turn(wg)
    if const_expr(not wg.spec.specialised):
        refill(wg, mine.begin, n, block)
    matmul.wait(1)
    is_there = ch.k.is_full(n + 1)
    has_moved = Boolean(True)
    if const_expr(wg.spec.goes_ahead):
        has_moved = make_P_ahead(wg, acc_S, tile, mine, n, block)
        ch.k.release(n)
    else:
        ch.k.release(n)
        has_moved = make_P(wg, acc_S, tile, mine, block)
    # The next K is waited for here because of the branch: without one, the assembler moves the end
    # of P V up to before the softmax that should run under it.
    if (block > mine.begin) & (not is_there):
        ch.k.wait_full(n + 1)
    matmul.wait(0)
    ch.v.release(n - 1)
    regs.convert_P(acc_S)
    if has_moved:
        regs.rescale_O()


@cute.jit
def turn_over(wg: Constexpr, both: tuple[Tile, Tile], skipped: Int32, tiles: Int32, n: Int32):
    """The end of tile number `tiles` over the beginning of the next, whose first block is `n`.

    `skipped` blocks lie between the last one that was done of this tile and `n`.
    """
    ch, regs = wg.ch, wg.regs
    tile, following = both
    if const_expr(wg.spec.carries_over):
        take_Q(wg, tiles + 1)
        ch.k.wait_full(n)
        take_turn(wg)
        acc_S = regs.multiply_S(ch.k.index(n))
        ch.v.wait_full(n - 1)
        regs.multiply_O(ch.v.index(n - 1))
        pass_turn(wg)
        matmul.wait(0)
        ch.k.release(n)
        ch.v.release(n - 1)
        store(wg.spec, wg.op, regs, tile)
        mine = span(wg, following)
        start_softmax(wg, acc_S, following, mine)
        if mine.blocks > 1:
            ch.k.wait_full(n + 1)
    else:
        end_tile(wg, tile, skipped, tiles, n)
        start_tile(wg, following, tiles + 1, n)


@cute.jit
def end_tile(wg: Constexpr, tile: Tile, skipped: Int32, tiles: Int32, n: Int32):
    """The last P V of tile number `tiles` and its store. `n` is the next tile's first block."""
    last_multiply(wg, tiles, n - 1 - skipped)
    store(wg.spec, wg.op, wg.regs, tile)
    if const_expr(wg.spec.skips_hidden):
        pass_over(wg.ch, n - skipped, skipped)


@cute.jit
def last_multiply(wg: Constexpr, tiles: Int32, n: Int32):
    """O += P V of a tile's first block, which is number `n` and the last to be done."""
    if const_expr(not wg.spec.q_in_registers):
        wg.ch.q.release(tiles)
    wg.ch.v.wait_full(n)
    wg.regs.multiply_O(wg.ch.v.index(n))
    matmul.wait(0)
    wg.ch.v.release(n)


@cute.jit
def attend_tiles_in_order(wg: Constexpr, tile: Tile):
    """S, softmax, P V, one after the other: only other warpgroups fill the tensor cores."""
    ch = wg.ch
    tiles, blocks = Int32(0), Int32(0)
    is_left = Boolean(True)
    while is_left:
        take_Q(wg, tiles)
        wg.regs.acc_O.fill(0.0)
        wg.regs.softmax.reset()
        mine = span(wg, tile)
        for back in cutlass.range(0, mine.blocks, unroll=1):
            attend_block_in_order(wg, tile, mine, blocks + back, mine.end - 1 - back)
        blocks += mine.all_blocks
        if const_expr(not wg.spec.q_in_registers):
            ch.q.release(tiles)
        store(wg.spec, wg.op, wg.regs, tile)
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(wg.sm.sTile, ch.tile.index(tiles))
        is_left = tile.q_block >= 0
        if is_left:
            ch.tile.release(tiles)


@cute.jit
def attend_block_in_order(wg: Constexpr, tile: Tile, mine: Span, n: Int32, block: Int32):
    """S of key block `block`, which is number `n`, its P, and P V."""
    ch, regs = wg.ch, wg.regs
    is_there = ch.v.is_full(n)
    ch.k.wait_full(n)
    take_turn(wg)
    acc_S = regs.multiply_S(cute.arch.make_warp_uniform(ch.k.index(n)))
    matmul.wait(0)
    pass_turn(wg)
    ch.k.release(n)
    if make_P(wg, acc_S, tile, mine, block):
        regs.rescale_O()
    regs.convert_P(acc_S)
    if not is_there:
        ch.v.wait_full(n)
    regs.multiply_O(cute.arch.make_warp_uniform(ch.v.index(n)))
    matmul.wait(0)
    ch.v.release(n)


@cute.jit
def take_Q(wg: Constexpr, tiles: Int32):
    """Wait for the tile's Q, and move it to the registers if that is where it is to be."""
    wg.ch.q.wait_full(tiles)
    if const_expr(wg.spec.q_in_registers):
        wg.regs.read_Q()
        wg.ch.q.release(tiles)


@cute.jit
def start_softmax(wg: Constexpr, acc_S: cute.Tensor, tile: Tile, mine: Span):
    """P of a tile's last block, the first to be done."""
    wg.regs.softmax.reset()
    make_P(wg, acc_S, tile, mine, mine.end - 1)
    wg.regs.convert_P(acc_S)


@cute.jit
def make_P(wg: Constexpr, acc_S: cute.Tensor, tile: Tile, mine: Span, block: Int32) -> Boolean:
    """S of key block `block` -> P, in place. Whether O has to be rescaled."""
    spec, regs = wg.spec, wg.regs
    S = matmul.as_rows(acc_S)  # (row, col)
    cap(wg, S)
    hide(wg, S, tile, block, mine)
    regs.softmax.step(S, regs.factor)
    has_moved = Boolean(True)
    if const_expr(spec.rescale_threshold > 0):
        # Maxima may lag, so most blocks move none of a warp's.
        is_less = (regs.factor[0] != 1.0) | (regs.factor[1] != 1.0)
        has_moved = Boolean(cute.arch.vote_any_sync(is_less))
    return has_moved


@cute.jit
def make_P_ahead(
    wg: Constexpr, acc_S: cute.Tensor, tile: Tile, mine: Span, n: Int32, block: Int32
) -> Boolean:
    """The same by the maxima so far. If they do not do, S is multiplied once more and they move.

    So the maxima of the block are off the path from S to P, and run under its exponentials. Where
    the right bound cuts, rows may have seen no key so far: such a block goes the plain way.
    """
    regs = wg.regs
    has_moved = Boolean(True)
    if not is_cut_right(block, mine):
        S = matmul.as_rows(acc_S)
        cap(wg, S)
        if const_expr(wg.spec.bounded_left):
            hide_left(wg, S, tile, block, mine)
        sums = [regs.softmax.sum[r] for r in range(matmul.THREAD_ROWS)]
        has_moved = Boolean(cute.arch.vote_any_sync(regs.softmax.step_ahead(S)))
        if has_moved:
            for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
                regs.softmax.sum[r] = sums[r]
            regs.multiply_S_again(acc_S, wg.ch.k.index(n))
    if has_moved:
        has_moved = make_P(wg, acc_S, tile, mine, block)
    return has_moved


def cap(wg: Warpgroup, S: cute.Tensor) -> None:
    """The logits' tanh, where there is a softcap."""
    if wg.spec.has_softcap:
        for r in range(matmul.THREAD_ROWS):
            for c in range(cute.size(S, mode=[1])):
                S[r, c] = tanh(S[r, c] * (wg.op.scale / wg.op.softcap))


def take_turn(wg: Warpgroup) -> None:
    """Wait until it is this warpgroup's turn to issue multiplies."""
    if wg.spec.takes_turns:
        cute.arch.barrier(barrier_id=Sync.TURN + wg.regs.w, number_of_threads=256)


def pass_turn(wg: Warpgroup) -> None:
    """The next warpgroup may issue, while this one does its softmax."""
    if wg.spec.takes_turns:
        is_last = wg.regs.w == wg.spec.warpgroups - 1
        following = Int32(cutlass.select_(is_last, Int32(0), wg.regs.w + 1))
        cute.arch.barrier_arrive(barrier_id=Sync.TURN + following, number_of_threads=256)
