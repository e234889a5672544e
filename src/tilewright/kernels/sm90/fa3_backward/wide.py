"""The consumers for head dims over 128: two CTAs, each with 64 keys of a pair of tiles.

dK and dV of 64 keys are too many registers for one warpgroup: one has dV, the other dK. And to
add dQ of 64 keys at a time would be more than L2 can take. So the CTAs, a cluster, exchange dS, and
each makes half the columns of dQ, over the keys of both.

Steady state, query blocks i from first to last. Multiplies of a warpgroup run in the order of
their issue; beside them stands what it does meanwhile:

    warpgroup 0                               warpgroup 1
    S_i = K Q_i^T                             dP_i = V dO_i^T
                            P_i, to smem      dQ_{i-1} = dS_{i-1} K
    dV += P_i dO_i                                                    dS_i
    dQ_{i-1} = dS_{i-1} K                     dK += dS_i Q_i          dS_i over P_i, and sent

dQ is made a step late, when the other CTA's dS has come, and added in parts, at places that the
spec names. P goes from one warpgroup to the other in the bytes that dS takes its place in. Those,
and what the other CTA sends, are free as soon as both CTAs have made dQ of them. At head dim 256
there is room for one of each: there dQ_{i-1} is made before P_i is written, and before dV.
Nothing is under way where the loop closes: what is read behind it would be held back there.
Everything that is made of queries and keys is transposed here, as in `compute.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from tilewright.kernels.blocks.ring import Ring
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.kernel import rank_in
from tilewright.kernels.sm90.fa3_backward.compute import release_tile
from tilewright.kernels.sm90.fa3_backward.operands import (
    Channels,
    Operands,
    Shared,
    Sweep,
    Tile,
)
from tilewright.kernels.sm90.fa3_backward.registers import Piece
from tilewright.kernels.sm90.fa3_backward.scores import (
    Warpgroup,
    cap,
    make_capped_P,
    make_P,
)
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec
from tilewright.kernels.sm90.fa3_backward.step import (
    Place,
    add_dQ,
    add_older,
    hide_dS,
    wait_unless,
)
from tilewright.kernels.sm90.fa3_backward.store import store_dK, store_dV
from tilewright.kernels.sm90.fa3_backward.wide_registers import WideRegisters


@dataclass(frozen=True)
class WideWarpgroup(Warpgroup):
    regs: WideRegisters

    @property
    def pairs(self) -> Ring:
        """Of the queries that its S or dP is made of."""
        return self.ch.do if self.regs.w else self.ch.q


@cute.jit
def compute_wide(spec: Constexpr, op: Operands, sm: Shared, ch: Channels, mmas: Constexpr):
    """smem Q, dO, K, V -> gmem dK, dV, and added to dQ. Two warpgroups."""
    thread, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(thread // 128) - 1
    rank = rank_in(spec.cluster)
    # Apart at the top: the assembler lets no multiply run beside another under a condition.
    if w == 0:
        regs = WideRegisters(spec, sm, mmas, thread % 128, 0, rank)
        attend_tiles(WideWarpgroup(spec, op, sm, ch, regs))
    else:
        regs = WideRegisters(spec, sm, mmas, thread % 128, 1, rank)
        attend_tiles(WideWarpgroup(spec, op, sm, ch, regs))


@cute.jit
def attend_tiles(wg: Constexpr):
    spec, op, sm, ch = wg.spec, wg.op, wg.sm, wg.ch
    tiles, loaded, steps = Int32(0), Int32(0), Int32(0)
    ch.tile.wait_full(tiles)
    tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    while tile.kv_block >= 0:
        sweep = Sweep.of(spec, op, tile)
        if const_expr(spec.deterministic):
            release_tile(wg, tiles, sweep.count == 0)
        else:
            ch.tile.release(tiles)
        wg.regs.acc.fill(0.0)
        if sweep.count > 0:
            attend_queries(wg, tile, sweep, (tiles, loaded, steps))
            loaded += 1
            steps += sweep.steps
        if const_expr(wg.regs.w == 0):
            store_dV(spec, op, wg.regs, tile)
        else:
            store_dK(spec, op, wg.regs, tile)
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(sm.sTile, ch.tile.index(tiles))


@cute.jit
def attend_queries(wg: Constexpr, tile: Tile, sweep: Sweep, numbers: Any):
    """All queries of all heads that see a pair of tiles; `numbers` as in `compute.py`."""
    ch, regs, (tiles, loaded, first) = wg.ch, wg.regs, numbers
    step = step_of_dK if regs.w else step_of_dV
    regs.begin_tile(tile, 0)
    last = first + sweep.steps - 1
    head, block = sweep.first()
    ch.k.wait_full(loaded)
    ch.peer_k.wait_full(loaded)
    if const_expr(regs.w == 1):
        ch.v.wait_full(loaded)
    wg.pairs.wait_full(first)
    if const_expr(wg.spec.deterministic):
        release_tile(wg, tiles, first + 1 >= last)
    step(wg, tile, Place(first, first, block, first < last), None)
    older = (head, block)
    for n in cutlass.range(first + 1, last + 1, unroll=1):
        before = (head, block)
        head, block = sweep.after(wg.spec, head, block)
        if const_expr(wg.spec.deterministic):
            release_tile(wg, tiles, n + 1 == last)
        step(wg, tile, Place(n, first, block, n < last), (before, older))
        older = before
    ch.v.release(loaded)
    left = piece_left(wg.spec)
    if const_expr(regs.w == 0 and left.begin < left.end):
        add_older(wg, tile, (last - 1, *older), first, left)
    multiply_dQ(wg, last)
    matmul.wait(0)
    ch.k.release(loaded)
    ch.peer_k.release(loaded)
    ch.ds.release(last)
    add_dQ(wg, tile, (last, head, block))


@cute.jit
def step_of_dV(wg: Constexpr, tile: Tile, place: Place, before: Constexpr):
    """Warpgroup 0's: S -> P, for dV and for warpgroup 1; dQ of the step before.

    `before` are the head and the block of queries of that step, and of the one before that.
    """
    spec, ch, regs, n = wg.spec, wg.ch, wg.regs, place.n
    lse = None if spec.has_softcap else regs.numbers(wg.sm.sLSE, ch.q.index(n))
    acc = regs.multiply_pairs(ch.q.index(n))
    add_at("S", wg, tile, place, before)
    matmul.wait(0)
    is_there = ch.do.is_full(n)
    if const_expr(spec.has_softcap):
        cap(wg, matmul.as_rows(acc), tile, place.block)
        make_capped_P(wg, acc, regs.numbers(wg.sm.sLSE, ch.q.index(n)))
    else:
        make_P(wg, acc, lse, tile, place.block)
    packed = regs.pack_P(acc)
    ch.q.release(n)
    add_at("P", wg, tile, place, before)
    if const_expr(not spec.has_room):
        if const_expr(before is not None):
            multiply_dQ(wg, n - 1)
        multiply_dV(wg, n, is_there)
        if const_expr(before is not None):
            matmul.wait(1)
            ch.ds.release(n - 1)
    ch.ds.wait_empty(n)
    regs.write_P(packed, ch.ds.index(n))
    ch.p.publish(n)
    add_at("write", wg, tile, place, before)
    if const_expr(spec.has_room):
        multiply_dV(wg, n, is_there)
        add_at("dV", wg, tile, place, before)
        if const_expr(before is not None):
            multiply_dQ(wg, n - 1)
            matmul.wait(1)
            ch.do.release(n)
    if place.has_next:
        ch.q.wait_full(n + 1)
    matmul.wait(0)
    if const_expr(before is None or not spec.has_room):
        ch.do.release(n)
    else:
        ch.ds.release(n - 1)


@cute.jit
def step_of_dK(wg: Constexpr, tile: Tile, place: Place, before: Constexpr):
    """Warpgroup 1's: dP -> dS, for dK, and for dQ in both CTAs; dQ of the step before."""
    ch, regs, n = wg.ch, wg.regs, place.n
    acc = regs.multiply_pairs(ch.do.index(n))
    if const_expr(before is not None):
        multiply_dQ(wg, n - 1)
    is_there = ch.q.is_full(n)
    matmul.wait(0)
    if const_expr(before is not None):
        ch.ds.release(n - 1)
    add_at("dQ", wg, tile, place, before)
    slot = ch.ds.index(n)
    ch.p.wait_full(n)
    regs.make_dS(acc, slot, wg.sm.sDelta, ch.do.index(n))
    ch.do.release(n)
    hide_dS(wg, matmul.as_rows(acc), tile, place.block)
    regs.rdS.store(acc.load().to(regs.rdS.element_type))
    add_at("dS", wg, tile, place, before)
    wait_unless(is_there, ch.q, n)
    regs.multiply_sum(ch.q.index(n))
    add_at("dK", wg, tile, place, before)
    # All lanes have read what they write over.
    cute.arch.sync_warp()
    regs.write_dS(slot)
    # Orders dS's writes before the multiplies and the copy that read them.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ch.ds.full(n), regs.sent_bytes)
        regs.send_dS(slot, ch.ds.full(n))
    add_at("send", wg, tile, place, before)
    if place.has_next:
        ch.do.wait_full(n + 1)
    matmul.wait(0)
    ch.q.release(n)


def add_at(name: str, wg: WideWarpgroup, tile: Tile, place: Place, before: Any) -> None:
    """What is to be added at a place of a step: of dQ that was made last."""
    spec, w, n = wg.spec, wg.regs.w, place.n
    names = spec.additions[w]
    if before is None or name not in names:
        return
    begin = names.index(name)
    piece = Piece(begin, begin + names.count(name), len(names))
    # Of the step before it is not made yet, where warpgroup 0 makes it behind this place.
    if w == 0 and (spec.has_room or name != "write"):
        add_older(wg, tile, (n - 2, *before[1]), place.first, piece)
    else:
        add_dQ(wg, tile, (n - 1, *before[0]), piece)


def piece_left(spec: BackwardSpec) -> Piece:
    """Of warpgroup 0's dQ, what the step after the one that makes it would add."""
    names = spec.additions[0]
    return Piece(0 if spec.has_room else names.count("write"), len(names), len(names))


def multiply_dV(wg: WideWarpgroup, n: Int32, is_there: Boolean) -> None:
    wait_unless(is_there, wg.ch.do, n)
    wg.regs.multiply_sum(wg.ch.do.index(n))


def multiply_dQ(wg: WideWarpgroup, n: Int32) -> None:
    """Of step `n`, when both CTAs have made their dS."""
    wg.ch.ds.wait_full(n)
    wg.regs.dQ.multiply(wg.ch.ds.index(n))
