"""Sums of dQ in a fixed order: each query block's is added to by one tile of keys after the other.

Tiles take turns in the order that they are handed out in, so that a tile waits only for such as are
at work: from the last keys to the first, or the other way where they begin together. A counter in
memory says how many additions were made. Two warps see to it, so that the computing ones neither
wait for memory nor order it: one looks when their turn comes, and one counts what they have added.
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
    Sweep,
    Tile,
    turn,
)
from tilewright.kernels.sm90.fa3_backward.spec import padded_start


@cute.jit
def take_turns(spec: Constexpr, op: Operands, sm: Shared, ch: Channels):
    """counters in gmem -> compute may add. One warp."""
    role = Role(spec, op, sm, ch)
    tiles, steps = Int32(0), Int32(0)
    ch.tile.wait_full(tiles)
    tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    while tile.kv_block >= 0:
        ch.tile.release(tiles)
        sweep = Sweep.of(spec, op, tile)
        head, block = sweep.first()
        for _ in cutlass.range(sweep.steps, unroll=1):
            done, before = additions(role, tile, head, block), turn(spec, op, tile, block)
            made = Int32(-1)
            while made < before:
                made = cute.arch.load(done, Int32, sem="acquire", scope="gpu")
            ch.turn.wait_empty(steps)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ch.turn.full(steps))
            steps += 1
            head, block = sweep.after(spec, head, block)
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(sm.sTile, ch.tile.index(tiles))


@cute.jit
def count_additions(spec: Constexpr, op: Operands, sm: Shared, ch: Channels):
    """compute's additions -> counters in gmem. One warp."""
    role = Role(spec, op, sm, ch)
    tiles, steps = Int32(0), Int32(0)
    ch.tile.wait_full(tiles)
    tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    while tile.kv_block >= 0:
        ch.tile.release(tiles)
        sweep = Sweep.of(spec, op, tile)
        head, block = sweep.first()
        for _ in cutlass.range(sweep.steps, unroll=1):
            ch.added.wait_full(steps)
            ch.added.release(steps)
            # Orders the additions of all warps, who arrived after them, before the count. If that
            # were a release, it would be a second fence.
            cute.arch.fence_acq_rel_gpu()
            if cute.arch.lane_idx() == 0:
                done = additions(role, tile, head, block)
                cute.arch.atomic_add(done, Int32(1), sem="relaxed", scope="gpu")
            steps += 1
            head, block = sweep.after(spec, head, block)
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


def end_turn(role: Role, n: Int32) -> None:
    """This warp has made its additions of step `n`."""
    role.ch.turn.release(n)
    role.ch.added.wait_empty(n)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(role.ch.added.full(n))
