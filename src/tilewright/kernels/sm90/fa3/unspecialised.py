"""The kernel without warp specialisation: every warp computes, and the first one loads besides.

    all     compute    S = Q K^T | softmax | O += P V | O, LSE to memory
    first   load       between the multiplies and the softmax of a block: K and V of later ones
            and        before the store of O: the next tile's Q, its first K and V, and which
            schedule   tile comes after it

The warp that loads waits until the others have read a slot, and its warpgroup waits for it. No
kernel of the catalog is like this; it tells what the roles of the others are worth: docs/fa3.md.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from tilewright.kernels.sm90.fa3.compute import (
    Warpgroup,
    attend_block,
    last_multiply,
    pass_turn,
    start_tile,
)
from tilewright.kernels.sm90.fa3.load import fill, is_first_warp, tile_views
from tilewright.kernels.sm90.fa3.operands import Channels, Operands, Shared, Tile
from tilewright.kernels.sm90.fa3.registers import Registers
from tilewright.kernels.sm90.fa3.schedule import (
    dense_tile,
    leave_counter_at_zero,
    next_tile,
    publish,
    row_blocks,
    section_heads,
)
from tilewright.kernels.sm90.fa3.spans import span
from tilewright.kernels.sm90.fa3.store import store, wait_for_stores


@cute.jit
def load_and_compute(spec: Constexpr, op: Operands, sm: Shared, ch: Channels, mmas: Constexpr):
    """gmem Q, K, V -> gmem O, LSE. All warpgroups."""
    thread, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(thread // 128)
    wg = Warpgroup(spec, op, sm, ch, Registers(spec, op, sm, mmas, thread % 128, w))
    if w == spec.warpgroups - 1:  # the first turn is the first warpgroup's
        pass_turn(wg)
    tiles, blocks = Int32(0), Int32(0)
    index, _, _ = cute.arch.block_idx()
    if is_first_warp():
        hand_out(wg, tiles, index)
    tile, index = begin_tile(wg, tiles, blocks, index)
    while tile.q_block >= 0:
        here = replace(wg, views=tile_views(spec, op, sm, tile))
        start_tile(here, tile, tiles, blocks)
        wg.regs.acc_O.fill(0.0)
        mine = span(wg, tile)
        for back in cutlass.range(1, mine.blocks, unroll=1):
            attend_block(here, tile, mine, blocks + back, mine.end - 1 - back)
        blocks += mine.blocks
        last_multiply(wg, tiles, blocks - 1)
        tiles += 1
        following, index = begin_tile(wg, tiles, blocks, index)
        store(spec, op, wg.regs, tile)
        tile = following
    if const_expr(spec.stores_by_tma):
        wait_for_stores(thread % 128)


@cute.jit
def begin_tile(wg: Constexpr, tiles: Int32, n: Int32, index: Int32) -> tuple[Tile, Int32]:
    """Tile number `tiles` of this CTA, whose first block is number `n`, with its loads issued.

    `index` is its number among those of all CTAs, which becomes the next one's. Only the first warp
    has it.
    """
    ch = wg.ch
    ch.tile.wait_full(tiles)
    tile = Tile.read(wg.sm.sTile, ch.tile.index(tiles))
    ch.tile.release(tiles)
    if is_first_warp() & (tile.q_block >= 0):
        fill(wg, tile, tiles, n)
        index = next_tile(wg.spec, wg.op, ch, tiles + 1, index)
        hand_out(wg, tiles + 1, index)
    return tile, index


@cute.jit
def hand_out(wg: Constexpr, n: Int32, index: Int32):
    """Tile `index` of all as number `n` of this CTA, or that there is none. One warp."""
    spec, op = wg.spec, wg.op
    blocks = row_blocks(spec, op.seqlen_q)
    if index < op.heads_q * op.batch * blocks:
        section = section_heads(spec, op, op.seqlen_k, blocks)
        publish(wg.spec, wg.sm, wg.ch, n, dense_tile(spec, op, index, blocks, section))
    else:
        publish(wg.spec, wg.sm, wg.ch, n, Tile.none())
        if const_expr(spec.dynamic):
            ctas, _, _ = cute.arch.grid_dim()
            leave_counter_at_zero(op, ctas)
