"""Which key blocks of a tile a warpgroup works on, and what the mask hides of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from tilewright.kernels.blocks.masking import hide_before, hide_from
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.operands import Tile, key_blocks


@dataclass(frozen=True)
class Span:
    """A warpgroup's blocks of a tile, from `begin` up to `end`, and those that it leaves out.

    All rows see all keys of blocks `uncut_begin` up to `uncut_end`: two comparisons a block are all
    that is left of the mask there.
    """

    before: Int32  # how many of the tile's blocks are left out before `begin`
    begin: Int32
    end: Int32
    after: Int32  # and from `end` on
    uncut_begin: Int32
    uncut_end: Int32

    @property
    def blocks(self) -> Int32:
        return self.end - self.begin

    @property
    def all_blocks(self) -> Int32:
        return self.before + self.end - self.begin + self.after


def first_row(wg: Any, tile: Tile) -> Int32:
    return tile.q_block * wg.spec.tile_q + wg.regs.w * matmul.ROWS


def span(wg: Any, tile: Tile) -> Span:
    """Of the warpgroup's 64 rows. It has a block at the least, all of it hidden if it sees none."""
    # The shuffles keep the compiler from making limits anew in each block, and what depends on the
    # warpgroup out of every thread's registers.
    spec, limits, row = wg.spec, wg.band, first_row(wg, tile)
    lengths = tile.seqlen_q, tile.seqlen_k
    tile_begin, tile_end = key_blocks(spec, wg.op, tile)
    begin, end = tile_begin, tile_end
    if spec.skips_hidden:
        q_last = cutlass.min(row + matmul.ROWS, tile.seqlen_q) - 1
        begin, end = limits.blocks(row, q_last, *lengths, spec.tile_kv)
        begin = cutlass.min(cutlass.max(begin, tile_begin), tile_end - 1)
        end = cutlass.min(cutlass.max(end, begin + 1), tile_end)
        begin, end = (cute.arch.make_warp_uniform(x) for x in (begin, end))
    _, past = limits.limits(row, *lengths)
    uncut_begin, uncut_end = Int32(0), cutlass.max(past, 0) // spec.tile_kv
    if spec.bounded_left:
        first, _ = limits.limits(row + matmul.ROWS - 1, *lengths)
        uncut_begin = (cutlass.max(first, 0) + spec.tile_kv - 1) // spec.tile_kv
    uncut_begin, uncut_end = (cute.arch.make_warp_uniform(x) for x in (uncut_begin, uncut_end))
    return Span(begin - tile_begin, begin, end, tile_end - end, uncut_begin, uncut_end)


def is_cut_right(block: Int32, mine: Span) -> Boolean:
    """Whether a row of this warpgroup sees no key from one of the block's on."""
    return block >= mine.uncut_end


@cute.jit
def hide(wg: Any, S: cute.Tensor, tile: Tile, block: Int32, mine: Span):
    """The scores of hidden keys become -inf."""
    if is_cut_right(block, mine):
        _, pasts = row_limits(wg, tile, block)
        hide_from(S, pasts)
    if cutlass.const_expr(wg.spec.bounded_left):
        hide_left(wg, S, tile, block, mine)


@cute.jit
def hide_left(wg: Any, S: cute.Tensor, tile: Tile, block: Int32, mine: Span):
    """Those of keys before the first that a row sees, where there is a left bound."""
    if block < mine.uncut_begin:
        firsts, _ = row_limits(wg, tile, block)
        hide_before(S, firsts)


def row_limits(wg: Any, tile: Tile, block: Int32) -> tuple[list[Any], list[Int32]]:
    """How many elements of the thread's rows lie before the first key seen and the one past the
    last. Made anew for each block that is cut: registers are dearer."""
    thread = wg.regs.thread
    row = first_row(wg, tile) + thread // 32 * 16 + thread % 32 // matmul.ROW_LANES
    column = block * wg.spec.tile_kv + 2 * (thread % matmul.ROW_LANES)
    firsts, pasts = [], []
    for r in range(matmul.THREAD_ROWS):
        first, past = wg.band.limits(row + 8 * r, tile.seqlen_q, tile.seqlen_k)
        firsts.append(None if first is None else matmul.elements_before(first - column))
        pasts.append(matmul.elements_before(past - column))
    return firsts, pasts
