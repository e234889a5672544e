"""What a warpgroup makes of its scores: P, dS, and what a mask hides. Rows are keys here."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32

from tilewright.kernels.blocks.arithmetic import exp2, fma, tanh
from tilewright.kernels.blocks.masking import mask_scores
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.registers import LOG2_E
from tilewright.kernels.sm90.fa3_backward.operands import ALWAYS, Role, Tile, query_limits
from tilewright.kernels.sm90.fa3_backward.registers import Registers


@dataclass(frozen=True)
class Warpgroup(Role):
    """What a computing warpgroup works with besides."""

    regs: Registers


@cute.jit
def make_P(wg: Constexpr, acc_S: cute.Tensor, lse: cute.Tensor, tile: Tile, block: Int32):
    """S of a query block -> P, for the multiply and in place."""
    S = matmul.as_rows(acc_S)  # (row, col)
    if is_cut(wg, tile, block):
        hide(wg, S, tile, block, -Float32.inf)
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = exp2(fma(S[r, c], wg.op.scale * LOG2_E, -lse[c]))
    wg.regs.rP.store(acc_S.load().to(wg.regs.rP.element_type))


def make_dS(P: cute.Tensor, dP: cute.Tensor, delta: cute.Tensor) -> None:
    """dP -> dS, in place, without the scale."""
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


def make_capped_P(wg: Warpgroup, acc_S: cute.Tensor, lse: cute.Tensor) -> None:
    """What `cap` has made of S -> P for the multiply; in place, P times the cap's slope.

    The slope of what is hidden is not finite, and so will its dS be.
    """
    S = matmul.as_rows(acc_S)  # (row, col)
    acc_P = cute.make_rmem_tensor(acc_S.layout, Float32)
    P = matmul.as_rows(acc_P)  # (row, col)
    for r in range(matmul.THREAD_ROWS):
        for c in range(cute.size(S, mode=[1])):
            P[r, c] = exp2(fma(S[r, c], wg.op.softcap * LOG2_E, -lse[c]))
            S[r, c] = P[r, c] * (1.0 - S[r, c] * S[r, c])
    wg.regs.rP.store(acc_P.load().to(wg.regs.rP.element_type))


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
