"""Gradients that were spoilt by rows which they have nothing to do with, once more.

A hidden pair has P = 0 and dS = 0, but 0 times a NaN or an Inf of a row of K, Q or dO is NaN, and
with such rows a tile multiplies all of its others. A sum that is not finite is looked at here: a
warp works on one row after the other, straight from memory, over the pairs that are seen. Where one
of those is spoilt itself, the gradient rightly is, and stays as it is. Not told apart: an Inf of V
that a row of dV's key sees spoils dK only; what hidden rows did to dV then stays too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from tilewright.kernels.blocks.arithmetic import exp2, fma, select, tanh
from tilewright.kernels.blocks.masking import Band
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.load import rows_of
from tilewright.kernels.sm90.fa3.registers import LOG2_E
from tilewright.kernels.sm90.fa3.repair import first_owner, is_not_finite
from tilewright.kernels.sm90.fa3.schedule import sequence
from tilewright.kernels.sm90.fa3_backward.blocks import LANES, find_sequence
from tilewright.kernels.sm90.fa3_backward.spec import padded_start
from tilewright.kernels.sm90.rows import VECTOR, chunk, store_chunk


@dataclass(frozen=True)
class Pairs:
    """What the terms of all pairs are made of. Bounds are 2^30 where there is none."""

    mQ: cute.Tensor  # (q, d, h[, b])
    mK: cute.Tensor  # (kv, d, h[, b])
    mV: cute.Tensor  # (kv, d, h[, b])
    mdO: cute.Tensor  # (q, d, h[, b])
    mLSELog2: cute.Tensor  # (r, h[, b])
    mDelta: cute.Tensor  # (r, h[, b])
    scale: Float32
    softcap: Float32  # 0 for none
    window_left: Int32
    window_right: Int32

    @property
    def group(self) -> Any:
        """Query heads that share a key head."""
        return cute.size(self.mQ, mode=[2]) // cute.size(self.mK, mode=[2])


@dataclass(frozen=True)
class Sequence:
    """Where a sequence lies, and the rows of it that are part of the problem."""

    batch: Int32
    q_start: Int32
    r_start: Int32  # in the workspace
    seqlen_q: Int32
    k_start: Int32
    seqlen_k: Int32


def queries_of(spec: Any, pairs: Pairs, seq: Sequence, head: Int32) -> tuple[Any, ...]:
    """Q and dO (q, d), LSE log2(e) and D (q) of a sequence's head."""
    at = head, seq.batch, seq.q_start
    terms = (pairs.mLSELog2, pairs.mDelta)
    if spec.packed:
        terms = (cute.domain_offset((seq.r_start,), x[None, head]) for x in terms)
    else:
        terms = (x[None, head, seq.batch] for x in terms)
    return *(rows_of(spec, x, *at, 0) for x in (pairs.mQ, pairs.mdO)), *terms


def keys_of(spec: Any, pairs: Pairs, seq: Sequence, head: Int32) -> tuple[Any, ...]:
    """K and V (kv, d) of a sequence's key head."""
    at = head, seq.batch, seq.k_start
    return tuple(rows_of(spec, x, *at, 0) for x in (pairs.mK, pairs.mV))


@cute.jit
def repair_query(spec: Constexpr, pairs: Pairs, seq: Sequence, head: Int32, row: Int32, out: Any):
    """dQ of row `row` into `out`: a tensor (q, d), and the factor of dS K. One warp."""
    target, factor = out
    mQ, mdO, mLSELog2, mDelta = queries_of(spec, pairs, seq, head)
    lse, delta = mLSELog2[row], mDelta[row]
    is_empty = lse == Float32.inf
    # If its Q or dO, or a key that it sees, is spoilt, one of them is not finite.
    if is_finite(select(is_empty, 0.0, lse), delta):
        mK, mV = keys_of(spec, pairs, seq, head // pairs.group)
        lane = cute.arch.lane_idx()
        q, do = chunk(mQ, row, lane), chunk(mdO, row, lane)
        acc = cute.make_rmem_tensor(VECTOR, Float32)
        acc.fill(0.0)
        band = Band(True, True, pairs.window_left, pairs.window_right)
        first, past = band.limits(row, seq.seqlen_q, seq.seqlen_k)
        past = cutlass.select_(is_empty, Int32(0), past)
        for key in cutlass.range(cutlass.max(first, 0), past, unroll=1):
            k = chunk(mK, key, lane)
            _, ds = terms_of(pairs, (q, k), (do, chunk(mV, key, lane)), (lse, delta))
            add(acc, ds.to(mK.element_type), k)
        store_chunk(acc, factor, target, row, lane)


@cute.jit
def repair_keys(spec: Constexpr, op: Any, out: Any):
    """The rows of `out`, dK and dV (kv, d, h[, b]), that are not finite. All CTAs, a warp a row."""
    pairs = op.pairs
    rows, _, heads = (Int32(cute.size(pairs.mK, mode=[i])) for i in range(3))
    total = rows * heads
    if const_expr(not spec.packed):
        total *= cute.size(pairs.mK, mode=[3])
    (cta, _, _), (ctas, _, _) = cute.arch.block_idx(), cute.arch.grid_dim()
    thread, _, _ = cute.arch.thread_idx()
    warps, _, _ = cute.arch.block_dim()
    warps //= LANES
    first = cta * warps + cute.arch.make_warp_uniform(thread // LANES)
    for i in cutlass.range(first, total, ctas * warps, unroll=1):
        head, row = i % heads, i // heads
        if const_expr(spec.packed):
            seq = packed_sequence(op, row)
        else:
            seq = dense_sequence(pairs, row // rows)
            row = row % rows
        key = row - seq.k_start
        mine = tuple(rows_of(spec, x, head, seq.batch, seq.k_start, 0) for x in out)
        if (key < seq.seqlen_k) & is_row_spoilt(mine, key):
            repair_key(spec, pairs, seq, head, key, mine)


def dense_sequence(pairs: Pairs, batch: Int32) -> Sequence:
    zero = Int32(0)
    lengths = (Int32(cute.size(x, mode=[0])) for x in (pairs.mQ, pairs.mK))
    return Sequence(batch, zero, zero, next(lengths), zero, next(lengths))


def packed_sequence(op: Any, row: Int32) -> Sequence:
    """The sequence of a row of the keys; past all of them, one of length 0."""
    batch = find_sequence(op.lengths.cu_seqlens_k, op.batch, row, False)
    q_start, seqlen_q, k_start, seqlen_k = sequence(op, batch)
    r_start = padded_start(q_start, batch)
    return Sequence(batch, q_start, r_start, seqlen_q, k_start, seqlen_k)


def is_row_spoilt(out: Any, key: Int32) -> Boolean:
    """Whether row `key` of dK or dV (kv, d) has an element that is not finite."""
    lane = cute.arch.lane_idx()
    found = Float32(0.0)
    for mX in out:
        x = chunk(mX, key, lane)
        for c in range(VECTOR):
            found = fma(x[c], 0.0, found)
    return Boolean(cute.arch.vote_any_sync(is_not_finite(found)))


@cute.jit
def repair_key(spec: Constexpr, pairs: Pairs, seq: Sequence, head: Int32, key: Int32, out: Any):
    """dK and dV of key `key` into `out`. One warp."""
    # Row i sees key j where j - right <= i + seqlen_k - seqlen_q <= j + left.
    position = key - seq.seqlen_k + seq.seqlen_q
    first = cutlass.max(position - pairs.window_right, 0)
    past = cutlass.min(position + pairs.window_left + 1, seq.seqlen_q)
    # A row that sees the key and is spoilt, or a spoilt key, shows in the row's terms.
    is_sound = Boolean(True)
    for g in cutlass.range(pairs.group, unroll=1):
        _, _, mLSELog2, mDelta = queries_of(spec, pairs, seq, head * pairs.group + g)
        is_sound = is_sound & are_finite(mLSELog2, mDelta, first, past)
    if is_sound:
        lane = cute.arch.lane_idx()
        kv = tuple(chunk(x, key, lane) for x in keys_of(spec, pairs, seq, head))
        grads = tuple(cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        for acc in grads:
            acc.fill(0.0)
        for g in cutlass.range(pairs.group, unroll=1):
            queries = queries_of(spec, pairs, seq, head * pairs.group + g)
            attend_to_key(pairs, queries, (first, past), kv, grads)
        store_chunk(grads[0], pairs.scale, out[0], key, lane)
        store_chunk(grads[1], Float32(1.0), out[1], key, lane)


@cute.jit
def attend_to_key(pairs: Pairs, queries: Any, rows: Any, kv: Any, grads: Any):
    """Add dS^T Q and P^T dO of a range of a head's rows to the chunks of `grads`."""
    mQ, mdO, mLSELog2, mDelta = queries
    lane = cute.arch.lane_idx()
    for row in cutlass.range(rows[0], rows[1], unroll=1):
        lse, delta = mLSELog2[row], mDelta[row]
        # Rows that see no key have an lse of +inf.
        if lse != Float32.inf:
            q, do = chunk(mQ, row, lane), chunk(mdO, row, lane)
            p, ds = terms_of(pairs, (q, kv[0]), (do, kv[1]), (lse, delta))
            add(grads[0], ds.to(mQ.element_type), q)
            add(grads[1], p.to(mQ.element_type), do)


@cute.jit
def are_finite(mLSELog2: cute.Tensor, mDelta: cute.Tensor, first: Int32, past: Int32) -> Boolean:
    """Whether rows `first` to `past` are, but for the +inf of rows without keys. A lane a row."""
    found = Float32(0.0)
    for row in cutlass.range(first + cute.arch.lane_idx(), past, LANES, unroll=1):
        lse = mLSELog2[row]
        found = fma(select(lse == Float32.inf, 0.0, lse), 0.0, found)
        found = fma(mDelta[row], 0.0, found)
    return Boolean(cute.arch.vote_any_sync(is_not_finite(found)) == 0)


def is_finite(x: Float32, y: Float32) -> Boolean:
    """Whether both are."""
    return Boolean(fma(x, 0.0, y * 0.0) == 0.0)


def is_voted(r: Int32, lower: Int32, upper: Int32) -> Boolean:
    """Whether one of the four lanes that hold row `r` of 16 has voted for it."""
    votes = cutlass.select_(r < 8, lower, upper) >> first_owner(r)
    return Boolean(votes & ((1 << matmul.ROW_LANES) - 1) != 0)


def terms_of(pairs: Pairs, qk: Any, dov: Any, row_terms: Any) -> tuple[Float32, Float32]:
    """P and dS, without the scale, of a query and a key, from the lanes' chunks."""
    lse, delta = row_terms
    s, dp = (dot(*x) for x in (qk, dov))
    s = s * pairs.scale
    is_capped = pairs.softcap > 0.0
    # Without a cap that is a division by 0, whose result nobody takes.
    capped = tanh(s / pairs.softcap)
    s = select(is_capped, pairs.softcap * capped, s)
    slope = select(is_capped, 1.0 - capped * capped, 1.0)
    p = exp2(fma(s, LOG2_E, -lse))
    return p, p * (dp - delta) * slope


def dot(a: cute.Tensor, b: cute.Tensor) -> Float32:
    """The sum over all lanes' chunks."""
    total = Float32(0.0)
    for c in range(VECTOR):
        total = fma(a[c], b[c], total)
    for i in range(LANES.bit_length() - 1):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
    return total


def add(acc: cute.Tensor, weight: Any, x: cute.Tensor) -> None:
    """acc += weight x, the weight rounded as the tiles' multiplies take it."""
    for c in range(VECTOR):
        acc[c] = fma(weight.to(Float32), x[c], acc[c])
