"""The consumers for head dims over 128: two warpgroups share 64 keys, one has dV, the other dK.

Steady state, query blocks i from first to last. Multiplies of a warpgroup run in the order of
their issue; beside them stands what it does meanwhile, so that none of the two ever has nothing to
multiply:

    warpgroup 0                               warpgroup 1
    S_i = K Q_i^T                             dP_i = V dO_i^T
    dQ_{i-1} = dS_{i-1} K   P_i, to smem      dQ_{i-1} = dS_{i-1} K   P_i from smem, dS_i, to smem
    dV += P_i dO_i          dQ_{i-1} added    dK += dS_i Q_i          dQ_{i-1} added

Each makes some columns of dQ, a step late: dS_i is there before S_{i+1} is. P goes from one to
the other in float32, since dS wants it so. Only dV and dK are under way where the loop closes.
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
    # Apart at the top: the assembler lets no multiply run beside another under a condition.
    if w == 0:
        regs = WideRegisters(spec, sm, mmas, thread % 128, 0)
        attend_tiles(WideWarpgroup(spec, op, sm, ch, regs))
    else:
        regs = WideRegisters(spec, sm, mmas, thread % 128, 1)
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
    """All queries of all heads that see a tile of keys; `numbers` as in `compute.py`."""
    ch, regs, (tiles, loaded, steps) = wg.ch, wg.regs, numbers
    regs.begin_tile(tile, 0)
    last = steps + sweep.steps - 1
    head, block = sweep.first()
    ch.k.wait_full(loaded)
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
    ch.ds.wait_full(last)
    multiply_dQ(wg, last, regs.parts_dQ)
    matmul.wait(0)
    ch.k.release(loaded)
    ch.ds.release(last)
    wg.summed.release(last)
    add_dQ(wg, tile, (last, head, block))


@cute.jit
def attend_block(wg: Constexpr, tile: Tile, step: Any, before: Constexpr, has_next: Boolean):
    """Step (n, head, query block), and dQ of the one `before`."""
    ch, regs, (n, _, block) = wg.ch, wg.regs, step
    acc = regs.multiply_pairs(wg.pairs.index(n))
    if const_expr(before is not None):
        ch.ds.wait_full(n - 1)
        multiply_dQ(wg, n - 1, regs.parts_dQ[: regs.early_parts])
    matmul.wait(0 if before is None else regs.early_parts)
    if const_expr(before is not None):
        wg.summed.release(n - 1)
    is_there = wg.summed.is_full(n)
    if const_expr(regs.w == 0):
        hand_on_P(wg, acc, tile, n, block)
    else:
        hand_on_dS(wg, acc, tile, n, block)
    wg.pairs.release(n)
    is_next_there = wg.pairs.is_full(n + 1)
    if not is_there:
        wg.summed.wait_full(n)
    if const_expr(before is not None):
        multiply_dQ(wg, n - 1, regs.parts_dQ[regs.early_parts :])
    if const_expr(regs.w == 0):
        regs.multiply_dV(ch.do.index(n))
    else:
        ch.ds.wait_full(n)
        regs.multiply_dK_from(ch.ds.index(n), ch.q.index(n))
    if has_next & (not is_next_there):
        wg.pairs.wait_full(n + 1)
    if const_expr(before is not None):
        matmul.wait(1)
        ch.ds.release(n - 1)
        add_dQ(wg, tile, before)


def multiply_dQ(wg: WideWarpgroup, n: Int32, parts: list[Any]) -> None:
    for part in parts:
        part.multiply(wg.ch.ds.index(n))


@cute.jit
def hand_on_P(wg: Constexpr, acc: cute.Tensor, tile: Tile, n: Int32, block: Int32):
    """S -> P, as A of the multiply that makes dV, and in smem, for dS."""
    regs, p = wg.regs, wg.ch.p
    is_free = p.is_empty(n)
    if const_expr(wg.spec.has_softcap):
        cap(wg, matmul.as_rows(acc), tile, block)
        make_capped_P(wg, acc, regs.numbers(wg.sm.sLSE, wg.ch.q.index(n)))
    else:
        make_P(wg, acc, regs.numbers(wg.sm.sLSE, wg.ch.q.index(n)), tile, block)
    if not is_free:
        p.wait_empty(n)
    regs.write_P(acc)
    p.publish(n)


@cute.jit
def hand_on_dS(wg: Constexpr, acc: cute.Tensor, tile: Tile, n: Int32, block: Int32):
    """dP -> dS, to smem."""
    regs, p, ds = wg.regs, wg.ch.p, wg.ch.ds
    is_free = ds.is_empty(n)
    p.wait_full(n)
    regs.make_dS(acc, wg.sm.sDelta, wg.ch.do.index(n))
    p.release(n)
    if is_cut(wg, tile, block):
        # What a hidden pair is multiplied by may be NaN.
        hide(wg, matmul.as_rows(acc), tile, block, 0.0)
    regs.rdS.store(acc.load().to(regs.rdS.element_type))
    if not is_free:
        ds.wait_empty(n)
    regs.write_dS(ds.index(n))
    # Orders dS's writes before the multiplies that read them.
    cute.arch.fence_proxy("async.shared", space="cta")
    ds.publish(n)
