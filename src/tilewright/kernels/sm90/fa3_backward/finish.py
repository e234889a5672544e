"""dQ = scale dQ_sum, in q's dtype; 0 for rows that are not part of the problem.

Bound by memory: a CTA of 128 threads writes 64 rows, 16 bytes a lane. The sums lie in memory as a
warpgroup's accumulator does in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from tilewright.kernels.blocks.arithmetic import select
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.kernel import permuted
from tilewright.kernels.sm90.fa3.load import rows_of
from tilewright.kernels.sm90.fa3_backward.blocks import (
    FRAGMENT,
    LANES,
    THREADS,
    Block,
    Fakes,
    Lengths,
    find_block,
    fragments_of,
)
from tilewright.kernels.sm90.fa3_backward.spec import RowsSpec
from tilewright.kernels.sm90.rows import VECTOR, store_row


@dataclass(frozen=True)
class Operands:
    mSum: cute.Tensor  # (4, thread, octet, block, h[, b])
    mdQ: cute.Tensor  # (q, d, h[, b])
    lengths: Any  # Lengths of a packed call
    scale: Float32


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
        cu_seqlens_q: Any,
        seqused_q: Any,
        used: Int32,
        scale: Float32,
        stream: Any,
    ):
        packed = self.spec.packed
        op = Operands(
            permuted(dq_sum, (4, 3, 2, 1, 0) if packed else (5, 4, 3, 2, 1, 0)),
            permuted(dq, (0, 2, 1) if packed else (1, 3, 2, 0)),
            Lengths(cu_seqlens_q, seqused_q, used) if packed else None,
            scale,
        )
        blocks = cute.size(op.mSum, mode=[3]) * cute.size(op.mSum, mode=[4])
        ctas = blocks if packed else blocks * cute.size(op.mSum, mode=[5])
        self.kernel(op).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, op: Operands):
        spec = self.spec
        blocks, heads = (Int32(cute.size(op.mSum, mode=[i])) for i in (3, 4))
        rows = Int32(cute.size(op.mdQ, mode=[0]))
        block = Block(*find_block(spec, op.lengths, heads, blocks, rows))
        thread, _, _ = cute.arch.thread_idx()
        if block.first < block.q_rows:
            finish_rows(spec, op, block, thread)


@cute.jit
def finish_rows(spec: Constexpr, op: Operands, block: Block, thread: Int32):
    """gmem sums -> gmem dQ, two rows a thread."""
    fragments = fragments_of(spec, op.mSum, block, thread)
    rSum = cute.make_rmem_tensor(fragments.shape, Float32)  # (4, octet)
    cute.autovec_copy(fragments, rSum)
    lane, warp = thread % LANES, thread // LANES
    upper = block.first + warp * 16 + lane // matmul.ROW_LANES
    for e in cutlass.range_constexpr(FRAGMENT):
        # Not a factor of 0: in the rows of no sequence the sums may be NaN.
        is_used = upper + 8 * (e // 2) < block.seqlen_q
        for octet in cutlass.range_constexpr(cute.size(rSum, mode=[1])):
            rSum[e, octet] = select(is_used, rSum[e, octet] * op.scale, 0.0)
    rdQ = cute.make_rmem_tensor(rSum.shape, op.mdQ.element_type)
    rdQ.store(rSum.load().to(op.mdQ.element_type))
    mdQ = rows_of(spec, op.mdQ, block.head, block.batch, block.q_start, 0)
    for r in cutlass.range_constexpr(matmul.THREAD_ROWS):
        store_row(cute.recast_tensor(rdQ, Int32), r, mdQ, upper + 8 * r, block.q_rows)


def fake_operands(spec: RowsSpec) -> tuple[Any, ...]:
    """What to trace `Finish.__call__` with."""
    fakes = Fakes(spec)
    sums = fakes.sums(spec.head_dim // VECTOR)
    scalars = Int32(0), Float32(1.0)
    return (sums, fakes.rows(), *fakes.lengths(), *scalars, fakes.stream())
