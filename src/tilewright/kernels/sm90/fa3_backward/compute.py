"""The consumers. One warpgroup owns 64 keys of a tile, and dK and dV of them in its registers.

What they do with a block of queries, and in which order, `step.py` says. Everything that is made of
queries and keys is transposed here: rows are keys, columns are queries.
Source: FlashAttention-3, arXiv 2407.08608, section 3.1 and appendix B; FlashAttention-2,
arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3_backward.operands import (
    Channels,
    Operands,
    Shared,
    Sweep,
    Tile,
)
from tilewright.kernels.sm90.fa3_backward.registers import Registers
from tilewright.kernels.sm90.fa3_backward.scores import Warpgroup
from tilewright.kernels.sm90.fa3_backward.step import (
    Place,
    Step,
    add_dQ,
    add_older,
    multiply_dQ,
)
from tilewright.kernels.sm90.fa3_backward.store import store_dK, store_dV


@cute.jit
def compute(spec: Constexpr, op: Operands, sm: Shared, ch: Channels, mmas: Constexpr):
    """smem Q, dO, K, V -> gmem dK, dV, and added to dQ. All warpgroups but the first."""
    thread, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(thread // 128) - 1
    if const_expr(spec.keeps_thread):
        # The assembler cannot tell what it gets here, so it will not read the index once more.
        thread = cute.arch.shuffle_sync(thread, cute.arch.lane_idx())
    wg = Warpgroup(spec, op, sm, ch, Registers(spec, sm, mmas, thread % 128, w))
    tiles, loaded, steps = Int32(0), Int32(0), Int32(0)
    ch.tile.wait_full(tiles)
    tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    while tile.kv_block >= 0:
        sweep = Sweep.of(spec, op, tile)
        if const_expr(spec.deterministic):
            release_tile(wg, tiles, sweep.count == 0)
        else:
            ch.tile.release(tiles)
        wg.regs.acc_dV.fill(0.0)
        wg.regs.acc_dK.fill(0.0)
        if sweep.count > 0:
            attend_queries(wg, tile, sweep, (tiles, loaded, steps))
            loaded += 1
            steps += sweep.steps
        else:
            store_dV(spec, op, wg.regs, tile)
            store_dK(spec, op, wg.regs, tile)
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(sm.sTile, ch.tile.index(tiles))


@cute.jit
def attend_queries(wg: Constexpr, tile: Tile, sweep: Sweep, numbers: Any):
    """All queries of all heads that see a tile of keys, and its dV and dK to memory.

    `numbers` are the tile's, its own among those that have queries, and the first step's.
    """
    ch, regs, (tiles, loaded, first) = wg.ch, wg.regs, numbers
    last = first + sweep.steps - 1
    head, block = sweep.first()
    regs.begin_tile(tile, ch.k.index(loaded))
    ch.k.wait_full(loaded)
    ch.q.wait_full(first)
    if const_expr(wg.spec.keys_in_registers):
        ch.v.wait_full(loaded)
        regs.read_keys()
        ch.v.release(loaded)
    if const_expr(wg.spec.deterministic):
        release_tile(wg, tiles, first + 1 >= last)
    Step(wg, tile, Place(first, first, block, first < last), None, loaded).run()
    older = (head, block)
    for n in cutlass.range(first + 1, last + 1, unroll=1):
        before = (head, block)
        head, block = sweep.after(wg.spec, head, block)
        if const_expr(wg.spec.deterministic):
            release_tile(wg, tiles, n + 1 == last)
        Step(wg, tile, Place(n, first, block, n < last), (before, older), loaded).run()
        if const_expr(wg.spec.adds_late):
            older = before
    if const_expr(wg.spec.adds_late):
        add_older(wg, tile, (last - 1, *older), first)
    regs.multiply_dK(ch.q.index(last))
    store_dV(wg.spec, wg.op, regs, tile)
    multiply_dQ(wg, last)
    matmul.wait(1)
    ch.q.release(last)
    store_dK(wg.spec, wg.op, regs, tile)
    matmul.wait(0)
    if const_expr(wg.spec.hands_back_ds):
        ch.ds.release(last)
    ch.k.release(loaded)
    add_dQ(wg, tile, (last, head, block))


@cute.jit
def release_tile(wg: Constexpr, tiles: Int32, is_time: Boolean):
    """Let the tile after number `tiles` be taken now: two steps before this one ends.

    In turns others wait for what is taken. Without them the warp that loads says when.
    """
    if is_time:
        wg.ch.tile.release(tiles)
