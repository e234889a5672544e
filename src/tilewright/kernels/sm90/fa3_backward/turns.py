"""Sums of dQ in a fixed order: each query block's is added to by one tile of keys after the other.

Tiles take turns from the last keys to the first, which is the order that they are handed out in: a
tile waits only for such as are at work. A counter in memory says how many additions were made. One
warp raises it, so that the computing ones go on while their additions are on their way to memory.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from tilewright.kernels.sm90.fa3_backward.operands import (
    Channels,
    Operands,
    Role,
    Shared,
    Tile,
    query_blocks,
    turn,
)
from tilewright.kernels.sm90.fa3_backward.spec import padded_start


@cute.jit
def keep_turns(spec: Constexpr, op: Operands, sm: Shared, ch: Channels):
    """compute's additions -> counters in gmem. One warp."""
    role = Role(spec, op, sm, ch)
    tiles, steps = Int32(0), Int32(0)
    ch.tile.wait_full(tiles)
    tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    while tile.kv_block >= 0:
        ch.tile.release(tiles)
        begin, count = query_blocks(spec, op, tile)
        group = op.heads_q // op.heads_k
        for g in cutlass.range(group, unroll=1):
            for i in cutlass.range(count, unroll=1):
                ch.added.wait_full(steps)
                ch.added.release(steps)
                # Orders the additions of all warps, who arrived after them, before the count.
                cute.arch.fence_acq_rel_gpu()
                done = additions(role, tile, tile.head * group + g, begin + i)
                if cute.arch.lane_idx() == 0:
                    cute.arch.atomic_add(done, Int32(1), sem="release", scope="gpu")
                steps += 1
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(sm.sTile, ch.tile.index(tiles))


def additions(role: Role, tile: Tile, head: Int32, block: Int32) -> cute.Pointer:
    """Where those to a query block's dQ are counted."""
    spec, op = role.spec, role.op
    if spec.packed:
        row = padded_start(tile.q_start, tile.batch) // spec.tile_q + block
        return op.mTurns.iterator + cute.crd2idx((row, head), op.mTurns.layout)
    return op.mTurns.iterator + cute.crd2idx((block, head, tile.batch), op.mTurns.layout)


def look_at_turn(role: Role, tile: Tile, head: Int32, block: Int32) -> Int32:
    """The additions that were made so far. Taken early, it hides that memory is far."""
    return cute.arch.load(additions(role, tile, head, block), Int32, sem="acquire", scope="gpu")


@cute.jit
def wait_for_turn(role: Constexpr, tile: Tile, head: Int32, block: Int32, seen: Int32):
    """Until all additions before this tile's were made, of which `seen` were long ago."""
    before = turn(role.spec, role.op, tile, block)
    while seen < before:
        seen = look_at_turn(role, tile, head, block)


def end_turn(role: Role, n: Int32) -> None:
    """This warp has made its additions of step `n`."""
    role.ch.added.wait_empty(n)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(role.ch.added.full(n))
