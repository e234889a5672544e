"""The consumers for head dims over 128: a cluster of two CTAs, each with 64 keys of a pair of tiles.

dK and dV of 64 keys are too many registers for one warpgroup: one has dV, the other dK. And dQ of 64
keys alone would be more additions than L2 can take. So the CTAs exchange dS, and each makes half the
columns of dQ, over the keys of both.

Steady state, query blocks i from first to last. Multiplies of a warpgroup run in the order of
their issue; beside them stands what it does meanwhile:

    warpgroup 0                               warpgroup 1
    S_i = K Q_i^T                             dP_i = V dO_i^T
    dQ_{i-1} = dS_{i-1} K   P_i               dQ_{i-1} = dS_{i-1} K
    dV += P_i dO_i          P_i to smem       (dV)                    dS_i, over P_i
                            dQ_{i-1} added    dK += dS_i Q_i          dS_i sent, dQ_{i-1} added

dQ is made a step late: by then dS of the other CTA has come. P goes from one warpgroup to the other
in the bytes that dS takes its place in; those and what the other CTA sends are free as soon as both
CTAs have made dQ of the step before. Only dV and dK are under way where the loop closes.
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
from tilewright.kernels.sm90.fa3_backward.scores import (
    Warpgroup,
    cap,
    hide,
    is_cut,
    make_capped_P,
    make_P,
)
from tilewright.kernels.sm90.fa3_backward.step import add_dQ
from tilewright.kernels.sm90.fa3_backward.store import store_dK, store_dV
from tilewright.kernels.sm90.fa3_backward.wide_registers import WideRegisters


@dataclass(frozen=True)
class WideWarpgroup(Warpgroup):
    regs: WideRegisters

    @property
    def pairs(self) -> Ring:
        """Of the queries that its S or dP is made of."""
        return self.ch.do if self.regs.w else self.ch.q

    @property
    def summed(self) -> Ring:
        """Of those that its dV or dK is."""
        return self.ch.q if self.regs.w else self.ch.do


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
    ch, regs, (tiles, loaded, steps) = wg.ch, wg.regs, numbers
    regs.begin_tile(tile, 0)
    last = steps + sweep.steps - 1
    head, block = sweep.first()
    ch.k.wait_full(loaded)
    ch.peer_k.wait_full(loaded)
    if const_expr(regs.w == 1):
        ch.v.wait_full(loaded)
    wg.pairs.wait_full(steps)
    if const_expr(wg.spec.deterministic):
        release_tile(wg, tiles, steps + 1 >= last)
    attend_block(wg, tile, (steps, head, block), None, steps < last)
    for n in cutlass.range(steps + 1, last + 1, unroll=1):
        before = n - 1, head, block
        head, block = sweep.after(wg.spec, head, block)
        if const_expr(wg.spec.deterministic):
            release_tile(wg, tiles, n + 1 == last)
        attend_block(wg, tile, (n, head, block), before, n < last)
    ch.v.release(loaded)
    ch.pair.wait_full(last)
    regs.dQ.multiply()
    matmul.wait(0)
    ch.k.release(loaded)
    ch.peer_k.release(loaded)
    ch.ds.release(last)
    wg.summed.release(last)
    add_dQ(wg, tile, (last, head, block))


@cute.jit
def attend_block(wg: Constexpr, tile: Tile, step: Any, before: Constexpr, has_next: Boolean):
    """Step (n, head, query block), and dQ of the one `before`."""
    ch, regs, (n, _, block) = wg.ch, wg.regs, step
    acc = regs.multiply_pairs(wg.pairs.index(n))
    if const_expr(before is not None):
        ch.pair.wait_full(n - 1)
        regs.dQ.multiply()
    matmul.wait(0 if before is None else 1)
    if const_expr(before is not None):
        wg.summed.release(n - 1)
    is_there = wg.summed.is_full(n)
    if const_expr(regs.w == 0):
        make_dV(wg, acc, tile, (n, block, is_there), before)
    else:
        make_dK(wg, acc, tile, (n, block, is_there), before)
    if has_next:
        wg.pairs.wait_full(n + 1)
    if const_expr(before is not None):
        add_dQ(wg, tile, before)


@cute.jit
def make_dV(wg: Constexpr, acc: cute.Tensor, tile: Tile, step: Any, before: Constexpr):
    """S -> P, as A of the multiply that makes dV, and in smem, for dS."""
    ch, regs, (n, block, is_there) = wg.ch, wg.regs, step
    lse = regs.numbers(wg.sm.sLSE, ch.q.index(n))
    if const_expr(wg.spec.has_softcap):
        cap(wg, matmul.as_rows(acc), tile, block)
        make_capped_P(wg, acc, lse)
    else:
        make_P(wg, acc, lse, tile, block)
    packed = regs.pack_P(acc)
    ch.q.release(n)
    if not is_there:
        ch.do.wait_full(n)
    regs.multiply_dV(ch.do.index(n))
    let_dS_go(wg, n, before)
    ch.ds.wait_empty(n)
    regs.write_P(packed)
    ch.p.publish(n)


@cute.jit
def make_dK(wg: Constexpr, acc: cute.Tensor, tile: Tile, step: Any, before: Constexpr):
    """dP -> dS, as A of the multiply that makes dK, in smem, and there in the other CTA too."""
    ch, regs, (n, block, is_there) = wg.ch, wg.regs, step
    let_dS_go(wg, n, before)
    ch.p.wait_full(n)
    regs.make_dS(acc, wg.sm.sDelta, ch.do.index(n))
    ch.do.release(n)
    if is_cut(wg, tile, block):
        # What a hidden pair is multiplied by may be NaN.
        hide(wg, matmul.as_rows(acc), tile, block, 0.0)
    regs.rdS.store(acc.load().to(regs.rdS.element_type))
    # All lanes have read what they write over.
    cute.arch.sync_warp()
    regs.write_dS(0)
    # Orders dS's writes before the multiplies and the copy that read them.
    cute.arch.fence_proxy("async.shared", space="cta")
    ch.ds.publish(n)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ch.pair.full(n), regs.sent_bytes)
        regs.send_dS(ch.pair.full(n))
    if not is_there:
        ch.q.wait_full(n)
    ch.ds.wait_full(n)
    regs.multiply_dK_from(0, ch.q.index(n))


@cute.jit
def let_dS_go(wg: Constexpr, n: Int32, before: Constexpr):
    """That of the step before, in both CTAs, when dQ is made of it. dV may be under way."""
    if const_expr(before is not None):
        matmul.wait(1 - wg.regs.w)
        wg.ch.ds.release(n - 1)
