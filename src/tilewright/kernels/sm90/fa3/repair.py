"""Rows of O that were spoilt by keys which they do not see, once more.

A hidden key has a probability of 0 in its block, but 0 times a NaN or an Inf of V is NaN. The
epilogue looks whether any of O is not finite. Only then is this code reached: a warp works on one
row after the other, straight from memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from tilewright.kernels.blocks.arithmetic import exp2, fma, select, tanh
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.load import rows_of
from tilewright.kernels.sm90.fa3.operands import Operands, Tile, band, key_blocks
from tilewright.kernels.sm90.rows import VECTOR, chunk, store_chunk

WARP_ROWS = 16


@cute.jit
def repair(
    spec: Constexpr, op: Operands, target: cute.Tensor, origin: Int32, regs: Constexpr, tile: Tile
):
    """The rows of `target` (q, d), of the 16 that this warp has just stored, that keys spoilt.

    That is gmem, or smem; its first row is the sequence's row `origin`.
    Rows past the sequence's end become 0, whatever lies in their q.
    """
    # Without bounds only keys past the end are hidden, whose V is loaded as zeros.
    if const_expr(spec.bounded_left or spec.bounded_right or spec.packed):
        lower, upper = (is_spoilt(regs.O, r) for r in range(matmul.THREAD_ROWS))
        if cute.arch.vote_any_sync(lower | upper):
            repair_rows(spec, op, (target, origin), regs, tile, (lower, upper))


def is_spoilt(rO: cute.Tensor, r: int) -> Boolean:
    """Whether a thread's row of O (row, col) has an element that is not finite.

    Two elements a step, by their product. Where large ones overflow, the row is repaired in vain.
    """
    found = Float32(0.0)
    for c in range(0, cute.size(rO, mode=[1]), 2):
        found = fma(rO[r, c], rO[r, c + 1], found)
    return is_not_finite(found)


def is_not_finite(x: Float32) -> Boolean:
    return Boolean(x - x != 0.0)


@cute.jit
def repair_rows(spec: Constexpr, op: Operands, out: Any, regs: Constexpr, tile: Tile, spoilt: Any):
    """The same where one of the rows is not finite: `spoilt` tells it of this thread's."""
    first = tile.q_block * spec.tile_q + regs.w * matmul.ROWS + regs.thread // 32 * WARP_ROWS
    if hides_spoilt(spec, op, tile, first) | (first + WARP_ROWS > tile.seqlen_q):
        lower, upper = (cute.arch.vote_ballot_sync(x) for x in spoilt)
        # The rows were stored by other lanes than those that store them now.
        cute.arch.sync_warp()
        for r in cutlass.range(WARP_ROWS, unroll=1):
            votes = cutlass.select_(r < 8, lower, upper) >> first_owner(r)
            is_there = first + r < tile.q_rows
            if is_there & (votes & ((1 << matmul.ROW_LANES) - 1) != 0):
                repair_row(spec, op, out, regs, tile, first + r)


@cute.jit
def hides_spoilt(spec: Constexpr, op: Operands, tile: Tile, first: Int32) -> Boolean:
    """Whether V is not finite in a key that the tile visits and one of 16 rows does not see."""
    begin, end = key_blocks(spec, op, tile)
    begin, end = begin * spec.tile_kv, cutlass.min(end * spec.tile_kv, tile.seqlen_k)
    limits = band(spec, op)
    _, past = limits.limits(first, tile.seqlen_q, tile.seqlen_k)
    spoilt = has_spoilt(spec, op, tile, cutlass.max(begin, past), end)
    if const_expr(spec.bounded_left):
        seen, _ = limits.limits(first + WARP_ROWS - 1, tile.seqlen_q, tile.seqlen_k)
        spoilt = spoilt | has_spoilt(spec, op, tile, begin, cutlass.min(end, seen))
    return spoilt


@cute.jit
def has_spoilt(spec: Constexpr, op: Operands, tile: Tile, begin: Int32, end: Int32) -> Boolean:
    """Whether V is not finite in one of the keys `begin` to `end`."""
    mV = keys_of(spec, op, op.mV, tile)
    chunks = cute.size(mV, mode=[1]) // VECTOR
    # A bound of 2^30 puts the end so far before the beginning that a multiple would wrap around.
    keys = cutlass.max(end - begin, 0)
    found = Float32(0.0)
    for i in cutlass.range(cute.arch.lane_idx(), keys * chunks, 32, unroll=1):
        v = chunk(mV, begin + i // chunks, i % chunks)
        for c in cutlass.range_constexpr(VECTOR):
            found = fma(v[c], 0.0, found)
    return Boolean(cute.arch.vote_any_sync(is_not_finite(found)))


@cute.jit
def repair_row(spec: Constexpr, op: Operands, out: Any, regs: Constexpr, tile: Tile, row: Int32):
    """Row `row`, eight columns a lane, into `out`: a tensor, and which row is its first."""
    target, origin = out
    owner, is_lower = first_owner(row), row % WARP_ROWS < 8
    maximum = shuffled(regs.softmax.maximum, is_lower, owner)
    factor = shuffled(regs.factor, is_lower, owner)
    # A NaN among the logits has spoilt the row for good.
    if factor == factor:
        acc = attend_row(spec, op, regs, tile, row, maximum)
        store_chunk(acc, factor, target, row - origin, cute.arch.lane_idx())


@cute.jit
def attend_row(
    spec: Constexpr, op: Operands, regs: Constexpr, tile: Tile, row: Int32, maximum: Float32
) -> cute.Tensor:
    """P V of a query by the maximum that its softmax ended with; 0 past the sequence's end.

    A lane works on eight columns of Q, K and V. Its result is as close to the tiles' as two orders
    of a sum are, because P is rounded alike.
    """
    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    if row < tile.seqlen_q:
        lane, softmax = cute.arch.lane_idx(), regs.softmax
        q = chunk(rows_of(spec, op.mQ, tile.head, tile.batch, tile.q_start, 0), row, lane)
        mK, mV = keys_of(spec, op, op.mK, tile), keys_of(spec, op, op.mV, tile)
        reference = select(maximum == -Float32.inf, 0.0, -maximum)
        first, past = band(spec, op).limits(row, tile.seqlen_q, tile.seqlen_k)
        first = cutlass.max(first, 0) if const_expr(spec.bounded_left) else Int32(0)
        for key in cutlass.range(first, past, unroll=1):
            s = logit(spec, op, q, chunk(mK, key, lane))
            p = exp2(fma(s, softmax.scale_log2, reference))
            p = p.to(mV.element_type).to(Float32)
            v = chunk(mV, key, lane)
            for c in cutlass.range_constexpr(VECTOR):
                acc[c] = fma(p, v[c], acc[c])
    return acc


@cute.jit
def logit(spec: Constexpr, op: Operands, q: cute.Tensor, k: cute.Tensor) -> Float32:
    """q . k from the lanes' chunks, capped, in the scale of the softmax."""
    s = Float32(0.0)
    for c in cutlass.range_constexpr(VECTOR):
        s = fma(q[c], k[c], s)
    for i in cutlass.range_constexpr(5):
        s = s + cute.arch.shuffle_sync_bfly(s, offset=1 << i)
    return tanh(s * (op.scale / op.softcap)) if const_expr(spec.has_softcap) else s


def keys_of(spec: Any, op: Operands, mX: cute.Tensor, tile: Tile) -> cute.Tensor:
    """The tile's keys, or their values, (kv, d)."""
    head = tile.head // (op.heads_q // op.heads_k)
    return rows_of(spec, mX, head, tile.batch, tile.k_start, 0)


def first_owner(r: Int32) -> Int32:
    """The first of the four lanes that hold row `r` of a warp's 16."""
    return r % 8 * matmul.ROW_LANES


def shuffled(x: cute.Tensor, is_lower: Boolean, owner: Int32) -> Float32:
    """x (2) of lane `owner`, for its lower or its upper row."""
    return Float32(cute.arch.shuffle_sync(select(is_lower, x[0], x[1]), owner))
