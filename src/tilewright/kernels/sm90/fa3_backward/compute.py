"""The consumers. One warpgroup owns 64 keys of a tile, and dK and dV of them in its registers.

Steady state of a warpgroup, query blocks i from first to last; what shares a line runs at one time:

    S_i = K Q_i^T
    dP_i = V dO_i^T     P_i = exp2(S_i - lse)
    dK += dS_{i-1} Q    dS_i = P_i (dP_i - delta)
    dV += P_i dO_i      dS_i to shared memory
    dQ_i = dS_i K       and then dQ_i is added to memory

so that dK runs a step late: under the making of dS. Everything that is made of
queries and keys is transposed here: rows are keys, columns are queries.
Source: FlashAttention-3, arXiv 2407.08608, section 3.1 and appendix B; FlashAttention-2,
arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from tilewright.kernels.blocks.arithmetic import exp2, fma, tanh
from tilewright.kernels.blocks.masking import mask_scores
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.registers import LOG2_E
from tilewright.kernels.sm90.fa3_backward.operands import (
    ALWAYS,
    Channels,
    Operands,
    Role,
    Shared,
    Sync,
    Tile,
    query_blocks,
    query_limits,
)
from tilewright.kernels.sm90.fa3_backward.registers import Registers
from tilewright.kernels.sm90.fa3_backward.spec import padded_start
from tilewright.kernels.sm90.fa3_backward.store import store
from tilewright.kernels.sm90.fa3_backward.turns import (
    end_turn,
    wait_for_turn,
)


@dataclass(frozen=True)
class Warpgroup(Role):
    """What a computing warpgroup works with besides."""

    regs: Registers


@cute.jit
def compute(spec: Constexpr, op: Operands, sm: Shared, ch: Channels, mmas: Constexpr):
    """smem Q, dO, K, V -> gmem dK, dV, and added to dQ. All warpgroups but the first."""
    thread, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(thread // 128) - 1
    wg = Warpgroup(spec, op, sm, ch, Registers(spec, sm, mmas, thread % 128, w))
    tiles, loaded, steps = Int32(0), Int32(0), Int32(0)
    ch.tile.wait_full(tiles)
    tile = Tile.read(sm.sTile, ch.tile.index(tiles))
    while tile.kv_block >= 0:
        begin, count = query_blocks(spec, op, tile)
        if const_expr(spec.deterministic):
            release_tile(wg, tiles, count == 0)
        else:
            ch.tile.release(tiles)
        wg.regs.acc_dV.fill(0.0)
        wg.regs.acc_dK.fill(0.0)
        if count > 0:
            attend_queries(wg, tile, begin, count, (tiles, loaded, steps))
            loaded += 1
            steps += count * (op.heads_q // op.heads_k)
        store(spec, op, wg.regs, tile)
        tiles += 1
        ch.tile.wait_full(tiles)
        tile = Tile.read(sm.sTile, ch.tile.index(tiles))


@cute.jit
def attend_queries(wg: Constexpr, tile: Tile, begin: Int32, count: Int32, numbers: Any):
    """All queries of all heads that see a tile of keys.

    `numbers` are the tile's, its own among those that have queries, and the first step's.
    """
    ch, regs, (tiles, loaded, steps) = wg.ch, wg.regs, numbers
    group = wg.op.heads_q // wg.op.heads_k
    head, block, last = tile.head * group, begin, steps + count * group - 1
    ch.k.wait_full(loaded)
    ch.q.wait_full(steps)
    ch.v.wait_full(loaded)
    if const_expr(wg.spec.keys_in_registers):
        regs.read_keys()
        ch.v.release(loaded)
    if const_expr(wg.spec.deterministic):
        release_tile(wg, tiles, steps + 1 >= last)
    attend_block(wg, tile, (steps, head, block), True, steps < last)
    for n in cutlass.range(steps + 1, last + 1, unroll=1):
        block += 1
        if block == begin + count:
            block = begin
            head += 1
        if const_expr(wg.spec.deterministic):
            release_tile(wg, tiles, n + 1 == last)
        attend_block(wg, tile, (n, head, block), False, n < last)
    if const_expr(not wg.spec.keys_in_registers):
        ch.v.release(loaded)
    ch.k.release(loaded)
    regs.multiply_dK(ch.q.index(last))
    matmul.wait(0)
    ch.q.release(last)


@cute.jit
def release_tile(wg: Constexpr, tiles: Int32, is_time: Boolean):
    """Let the tile after number `tiles` be taken now: two steps before this one ends.

    In turns others wait for what is taken. Without them it is taken as this one begins, so that its
    loads are in time.
    """
    if is_time:
        wg.ch.tile.release(tiles)


@cute.jit
def attend_block(wg: Constexpr, tile: Tile, step: Any, is_first: Constexpr, has_next: Boolean):
    """Step (n, head, query block), whose Q is there; the dK of the one before, if there is one."""
    ch, regs, (n, _, block) = wg.ch, wg.regs, step
    acc_S = regs.multiply_S(ch.q.index(n))
    ch.do.wait_full(n)
    acc_dP = regs.multiply_dP(ch.do.index(n))
    if const_expr(not is_first):
        regs.multiply_dK(ch.q.index(n - 1))
    matmul.wait(1 if is_first else 2)
    is_there = ch.q.is_full(n + 1)
    S, dP = matmul.as_rows(acc_S), matmul.as_rows(acc_dP)  # (row, col)
    if const_expr(wg.spec.has_softcap):
        cap(wg, S, tile, block)
    else:
        make_P(wg, acc_S, tile, n, block)
    # The next Q is waited for here because of the branch: without one, the assembler moves the end
    # of dP up to before the exponentials that should run under it.
    if has_next & (not is_there):
        ch.q.wait_full(n + 1)
    matmul.wait(0 if is_first else 1)
    if const_expr(wg.spec.has_softcap):
        make_capped_dS(wg, acc_S, dP, n)
    else:
        make_dS(wg, S, dP, n)
    if is_cut(wg, tile, block):
        # What a hidden pair is multiplied by may be NaN.
        hide(wg, dP, tile, block, 0.0)
    regs.multiply_dV(ch.do.index(n))
    if const_expr(not is_first):
        matmul.wait(1)
        ch.q.release(n - 1)
    regs.rdS.store(acc_dP.load().to(regs.rdS.element_type))
    # Of two slots: what reads this one was waited for by all before they wrote the other.
    slot = n & 1
    regs.write_dS(slot)
    # Orders dS's writes, all warpgroups', before the multiply that reads them.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=Sync.DS_WRITTEN, number_of_threads=128 * wg.spec.warpgroups)
    regs.multiply_dQ(slot)
    is_turn = Boolean(True)
    if const_expr(wg.spec.deterministic):
        is_turn = ch.turn.is_full(n)
    # No multiply may be under way where the loop closes, if its result is read behind: the
    # assembler would then let none run beside another.
    matmul.wait(0)
    ch.do.release(n)
    add_dQ(wg, tile, step, is_turn)


@cute.jit
def make_P(wg: Constexpr, acc_S: cute.Tensor, tile: Tile, n: Int32, block: Int32):
    """S of a query block -> P, for the multiply and in place."""
    S = matmul.as_rows(acc_S)  # (row, col)
    if is_cut(wg, tile, block):
        hide(wg, S, tile, block, -Float32.inf)
    lse = wg.regs.numbers(wg.sm.sLSE, wg.ch.q.index(n))
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = exp2(fma(S[r, c], wg.op.scale * LOG2_E, -lse[c]))
    wg.regs.rP.store(acc_S.load().to(wg.regs.rP.element_type))


def make_dS(wg: Warpgroup, P: cute.Tensor, dP: cute.Tensor, n: Int32) -> None:
    """dP -> dS, in place, without the scale."""
    delta = wg.regs.numbers(wg.sm.sDelta, wg.ch.do.index(n))
    for r in range(matmul.THREAD_ROWS):
        for c in range(cute.size(P, mode=[1])):
            dP[r, c] = P[r, c] * (dP[r, c] - delta[c])


@cute.jit
def cap(wg: Constexpr, S: cute.Tensor, tile: Tile, block: Int32):
    """S of a query block -> tanh(s / c), in place, of which the capped logit is c times.

    To keep its slope from here on, beside P, takes more registers than there are at head dim 128:
    the assembler would let no multiply run beside another.
    """
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = tanh(S[r, c] * (wg.op.scale / wg.op.softcap))
    if is_cut(wg, tile, block):
        hide(wg, S, tile, block, -Float32.inf)


def make_capped_P(wg: Warpgroup, acc_S: cute.Tensor, n: Int32) -> None:
    """What `cap` has made of S -> P for the multiply; in place, P times the cap's slope.

    The slope of what is hidden is not finite, and so will its dS be.
    """
    S = matmul.as_rows(acc_S)  # (row, col)
    acc_P = cute.make_rmem_tensor(acc_S.layout, Float32)
    P = matmul.as_rows(acc_P)  # (row, col)
    lse = wg.regs.numbers(wg.sm.sLSE, wg.ch.q.index(n))
    for r in range(matmul.THREAD_ROWS):
        for c in range(cute.size(S, mode=[1])):
            P[r, c] = exp2(fma(S[r, c], wg.op.softcap * LOG2_E, -lse[c]))
            S[r, c] = P[r, c] * (1.0 - S[r, c] * S[r, c])
    wg.regs.rP.store(acc_P.load().to(wg.regs.rP.element_type))


def make_capped_dS(wg: Warpgroup, acc_S: cute.Tensor, dP: cute.Tensor, n: Int32) -> None:
    """dP -> dS, and what `cap` has made of S -> P."""
    make_capped_P(wg, acc_S, n)
    make_dS(wg, matmul.as_rows(acc_S), dP, n)


def first_key(wg: Warpgroup, tile: Tile) -> Int32:
    return tile.kv_block * wg.spec.tile_kv + wg.regs.first_key


def is_cut(wg: Warpgroup, tile: Tile, block: Int32) -> Boolean:
    """Whether a key of this warpgroup is not seen by all queries of the block."""
    key, query = first_key(wg, tile), block * wg.spec.tile_q
    last = key + matmul.ROWS - 1
    answer = last >= tile.seqlen_k
    if wg.spec.bounded_right:
        first, _ = query_limits(wg.spec, wg.op, tile, last)
        answer = answer | (query < first)
    if wg.spec.bounded_left:
        _, past = query_limits(wg.spec, wg.op, tile, key)
        answer = answer | (query + wg.spec.tile_q > past)
    return answer


def hide(wg: Warpgroup, X: cute.Tensor, tile: Tile, block: Int32, value: float) -> None:
    """X (row, col) becomes `value` where a query does not see a key."""
    thread = wg.regs.thread
    key = first_key(wg, tile) + thread // 32 * 16 + thread % 32 // matmul.ROW_LANES
    column = block * wg.spec.tile_q + 2 * (thread % matmul.ROW_LANES)
    firsts, pasts = [], []
    for r in range(matmul.THREAD_ROWS):
        first, past = query_limits(wg.spec, wg.op, tile, key + 8 * r)
        past = Int32(ALWAYS) if past is None else past - column
        is_key = key + 8 * r < tile.seqlen_k
        firsts.append(None if first is None else first - column)
        pasts.append(Int32(cutlass.select_(is_key, past, Int32(-ALWAYS))))
    mask_scores(X, matmul.columns_of_thread(wg.spec.tile_q), firsts, pasts, value)


@cute.jit
def add_dQ(wg: Constexpr, tile: Tile, step: Any, is_turn: Boolean):
    """This warpgroup's part of a query block's dQ, registers -> gmem.

    Where there are turns: in its turn, which it may have seen to have come.
    """
    spec, op, (n, head, block) = wg.spec, wg.op, step
    if const_expr(spec.packed):
        first = padded_start(tile.q_start, tile.batch)
        mdQ = op.mdQ[None, None, None, None, head]
    else:
        first = Int32(0)
        mdQ = op.mdQ[None, None, None, None, head, tile.batch]
    unit = (first + block * spec.tile_q) // matmul.ROWS
    if const_expr(spec.tile_q != matmul.ROWS):
        unit += wg.regs.w
    target = cute.domain_offset((0, 0, wg.regs.first_octet), mdQ[None, None, None, unit])
    if const_expr(spec.deterministic):
        wait_for_turn(wg, n, is_turn)
    wg.regs.add_dQ(target)
    if const_expr(spec.deterministic):
        end_turn(wg, n)
