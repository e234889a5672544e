"""dQ = scale dQ_sum, in q's dtype; 0 for rows that are not part of the problem.

Bound by memory: a CTA of 128 threads writes 64 rows, 16 bytes a lane. The sums lie in memory as a
warpgroup's accumulator does in registers. Rows that are not finite are looked at: `repair.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from tilewright.kernels.blocks.arithmetic import fma, select
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.kernel import permuted
from tilewright.kernels.sm90.fa3.load import rows_of
from tilewright.kernels.sm90.fa3.operands import Lengths
from tilewright.kernels.sm90.fa3.repair import WARP_ROWS, is_not_finite
from tilewright.kernels.sm90.fa3.schedule import sequence
from tilewright.kernels.sm90.fa3_backward.blocks import (
    LANES,
    THREADS,
    Block,
    Fakes,
    find_block,
    fragments_of,
)
from tilewright.kernels.sm90.fa3_backward.repair import (
    Pairs,
    Sequence,
    is_voted,
    repair_keys,
    repair_query,
)
from tilewright.kernels.sm90.fa3_backward.spec import RowsSpec
from tilewright.kernels.sm90.rows import VECTOR, store_row


@dataclass(frozen=True)
class Operands:
    mSum: cute.Tensor  # (4, thread, octet, block, h[, b])
    mdQ: cute.Tensor  # (q, d, h[, b])
    mdK: cute.Tensor  # (kv, d, h[, b])
    mdV: cute.Tensor  # (kv, d, h[, b])
    mSpoilt: cute.Tensor  # (1): whether one of dK or dV is not finite
    pairs: Pairs
    lengths: Any  # Lengths of a packed call
    batch: Int32
    scale: Float32  # with the sign that the kernels' Q has instead


class Finish:
    """The last kernel of a backward pass. Instances are traced, not called."""

    def __init__(self, spec: RowsSpec):
        if reason := spec.why_illegal():
            raise ValueError(f"spec is {spec}; {reason}")
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        dq_sum: cute.Tensor,
        dq: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        spoilt: cute.Tensor,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_q: Any,
        seqused_k: Any,
        signed_scale: Float32,
        scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        used: Int32,
        stream: Any,
    ):
        packed = self.spec.packed
        rows_first, values_first = ((0, 2, 1), (1, 0)) if packed else ((1, 3, 2, 0), (2, 1, 0))
        pairs = Pairs(
            *(permuted(x, rows_first) for x in (q, k, v, dout)),
            *(permuted(x, values_first) for x in (lse_log2, delta)),
            *(scale, softcap, window_left, window_right),
        )
        lengths = None
        batch = cute.size(dq, mode=[0])
        if const_expr(packed):
            lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, used)
            batch = cute.size(cu_seqlens_q) - 1
        op = Operands(
            permuted(dq_sum, (4, 3, 2, 1, 0) if packed else (5, 4, 3, 2, 1, 0)),
            *(permuted(x, rows_first) for x in (dq, dk, dv)),
            spoilt,
            pairs,
            lengths,
            Int32(batch),
            signed_scale,
        )
        ctas = cute.size(pairs.mDelta) // matmul.ROWS
        # For one CTA an SM at the least: left to itself, ptxas spills for the sake of a sixth.
        self.kernel(op).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, op: Operands):
        cute.arch.griddepcontrol_wait()
        spec = self.spec
        blocks, heads = (Int32(cute.size(op.mSum, mode=[i])) for i in (3, 4))
        rows = Int32(cute.size(op.mdQ, mode=[0]))
        block = Block(*find_block(spec, op.lengths, heads, blocks, rows))
        thread, _, _ = cute.arch.thread_idx()
        if block.first < block.q_rows:
            finish_rows(spec, op, block, thread)
        if op.mSpoilt[0] != 0:
            repair_keys(spec, op, (op.mdK, op.mdV))


@cute.jit
def finish_rows(spec: Constexpr, op: Operands, block: Block, thread: Int32):
    """gmem sums -> gmem dQ, two rows a thread."""
    fragments = fragments_of(spec, op.mSum, block, thread)  # (4, octet)
    held = cute.make_rmem_tensor(fragments.shape, Float32)
    cute.autovec_copy(fragments, held)
    octets = cute.size(fragments, mode=[1])
    by_row = cute.make_layout((2, (2, octets)), stride=(2, (1, 4)))
    rSum = cute.make_tensor(held.iterator, by_row)  # (row, col)
    first = block.first + thread // LANES * WARP_ROWS
    mine = first + thread % LANES // matmul.ROW_LANES
    spoilt = [Boolean(False)] * matmul.THREAD_ROWS
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        is_used = mine + 8 * r < block.seqlen_q
        found = Float32(0.0)
        for c in cutlass.range_constexpr(cute.size(rSum, mode=[1])):
            found = fma(rSum[r, c], 0.0, found)
            # Not a factor of 0: in the rows of no sequence the sums may be NaN.
            rSum[r, c] = select(is_used, rSum[r, c] * op.scale, 0.0)
        spoilt[r] = is_used & is_not_finite(found)
    rdQ = cute.make_rmem_tensor(held.shape, op.mdQ.element_type)
    rdQ.store(held.load().to(op.mdQ.element_type))
    mdQ = rows_of(spec, op.mdQ, block.head, block.batch, block.q_start, 0)
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        store_row(cute.recast_tensor(rdQ, Int32), r, mdQ, mine + 8 * r, block.q_rows)
    if cute.arch.vote_any_sync(spoilt[0] | spoilt[1]):
        repair_rows(spec, op, block, first, spoilt, mdQ)


@cute.jit
def repair_rows(
    spec: Constexpr, op: Operands, block: Block, first: Int32, spoilt: Any, mdQ: cute.Tensor
):
    """The rows of mdQ (q, d), of the 16 that this warp has just stored, that are not finite."""
    k_start, seqlen_k = Int32(0), Int32(cute.size(op.pairs.mK, mode=[0]))
    if const_expr(spec.packed):
        _, _, k_start, seqlen_k = sequence(op, block.batch)
    r_start = block.index * matmul.ROWS - block.first
    at = Sequence(block.batch, block.q_start, r_start, block.seqlen_q, k_start, seqlen_k)
    lower, upper = (cute.arch.vote_ballot_sync(x) for x in spoilt)
    # The rows were stored by other lanes than those that store them now.
    cute.arch.sync_warp()
    for r in cutlass.range(WARP_ROWS, unroll=1):
        if is_voted(r, lower, upper):
            repair_query(spec, op.pairs, at, block.head, first + r, (mdQ, op.scale))


def fake_operands(spec: RowsSpec) -> tuple[Any, ...]:
    """What to trace `Finish.__call__` with."""
    fakes = Fakes(spec)
    names = ("q hq d", "q hq d", "k hk d", "k hk dv", "q hq dv")  # of dq, q, k, v, dout
    rows = [fakes.rows(x) for x in names]
    of_keys = [fakes.rows(x) for x in ("k hk d", "k hk dv")]
    terms = [fakes.padded_values() for _ in range(2)]
    scalars = (*[Float32(1.0)] * 3, *[Int32(0)] * 3)
    sums = fakes.sums(spec.head_dim // VECTOR)
    rest = (*fakes.lengths(2), *scalars, fakes.stream())
    return (sums, *rows, *terms, *of_keys, fakes.flag(), *rest)
