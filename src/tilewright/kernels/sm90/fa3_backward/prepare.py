"""What the backward pass needs of each query row, once for all key blocks that visit it.

lse_log2 = lse log2(e), and D = rowsum(dO * O) - dLSE; Source: FlashAttention-2, arXiv 2307.08691,
algorithm 2. Rows that see no key and rows of no sequence get +inf and 0, so that for them
P = exp2(S c - lse_log2) and dS = P * (dP - D) are 0. The sums of dQ start as 0.

Bound by memory: a CTA of 128 threads reads 64 rows of O and dO, 16 bytes a lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from tilewright.kernels.blocks.arithmetic import fma, select
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.kernel import permuted
from tilewright.kernels.sm90.fa3.load import rows_of
from tilewright.kernels.sm90.fa3.operands import Lengths
from tilewright.kernels.sm90.fa3.registers import LOG2_E
from tilewright.kernels.sm90.fa3_backward.blocks import (
    FRAGMENT,
    THREADS,
    Block,
    Fakes,
    find_block,
    fragments_of,
    padded_values_of,
    values_of,
)
from tilewright.kernels.sm90.fa3_backward.spec import RowsSpec
from tilewright.kernels.sm90.rows import VECTOR, chunk

ROW_LANES = 8  # that share a row: 128 bytes at a time


@dataclass(frozen=True)
class Operands:
    mO: cute.Tensor  # (q, d, h[, b])
    mdO: cute.Tensor  # (q, d, h[, b])
    mLSE: cute.Tensor  # (q, h[, b])
    mdLSE: cute.Tensor  # (q, h[, b])
    mLSELog2: cute.Tensor  # (r, h[, b]), as the next is of the workspace
    mDelta: cute.Tensor  # (r, h[, b])
    mSum: cute.Tensor  # (4, thread, octet, block, h[, b])
    mSpoilt: cute.Tensor  # (1): whether one of dK or dV is not finite
    lengths: Any  # Lengths of a packed call
    has_dlse: Int32


class Prepare:
    """The first kernel of a backward pass. Instances are traced, not called."""

    def __init__(self, spec: RowsSpec):
        if reason := spec.why_illegal():
            raise ValueError(f"spec is {spec}; {reason}")
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_sum: cute.Tensor,
        spoilt: cute.Tensor,
        cu_seqlens_q: Any,
        seqused_q: Any,
        used: Int32,
        has_dlse: Int32,
        stream: Any,
    ):
        packed = self.spec.packed
        rows_first = (0, 2, 1) if packed else (1, 3, 2, 0)
        values_first = (1, 0) if packed else (2, 1, 0)
        sums = (4, 3, 2, 1, 0) if packed else (5, 4, 3, 2, 1, 0)
        op = Operands(
            *(permuted(x, rows_first) for x in (out, dout)),
            *(permuted(x, values_first) for x in (lse, dlse, lse_log2, delta)),
            permuted(dq_sum, sums),
            spoilt,
            Lengths(cu_seqlens_q, None, seqused_q, None, used) if packed else None,
            has_dlse,
        )
        ctas = cute.size(op.mDelta) // matmul.ROWS
        self.kernel(op).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, op: Operands):
        cute.arch.griddepcontrol_launch_dependents()
        spec = self.spec
        rows, _, heads = (Int32(cute.size(op.mO, mode=[i])) for i in range(3))
        blocks = Int32(cute.size(op.mSum, mode=[3]))
        block = Block(*find_block(spec, op.lengths, heads, blocks, rows))
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if (cta == 0) & (thread == 0):
            op.mSpoilt[0] = Int32(0)
        zero_sums(fragments_of(spec, op.mSum, block, thread))
        reduce_rows(spec, op, block, thread)


@cute.jit
def zero_sums(fragments: cute.Tensor):
    zeros = cute.make_rmem_tensor(FRAGMENT, Float32)
    zeros.fill(0.0)
    for octet in cutlass.range(cute.size(fragments, mode=[1]), unroll=4):
        cute.autovec_copy(zeros, fragments[None, octet])


@cute.jit
def reduce_rows(spec: Constexpr, op: Operands, block: Block, thread: Int32):
    """gmem O, dO, LSE, dLSE -> gmem LSE log2(e), D. Eight lanes a row."""
    at = block.head, block.batch, block.q_start
    mO, mdO = (rows_of(spec, x, *at, 0) for x in (op.mO, op.mdO))
    mLSE, mdLSE = (values_of(spec, x, block) for x in (op.mLSE, op.mdLSE))
    mLSELog2, mDelta = (padded_values_of(spec, x, block) for x in (op.mLSELog2, op.mDelta))
    lane = thread % ROW_LANES
    for i in cutlass.range_constexpr(matmul.ROWS * ROW_LANES // THREADS):
        offset = i * (THREADS // ROW_LANES) + thread // ROW_LANES
        row = block.first + offset
        total, lse, dlse = Float32(0.0), -Float32.inf, Float32(0.0)
        if row < block.seqlen_q:
            total = partial_product(spec, mO, mdO, row, lane)
            lse = mLSE[row]
            if op.has_dlse != 0:
                dlse = mdLSE[row]
        for step in cutlass.range_constexpr(ROW_LANES.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        if lane == 0:
            is_empty = lse == -Float32.inf
            mLSELog2[offset] = select(is_empty, Float32.inf, lse * LOG2_E)
            mDelta[offset] = select(is_empty, 0.0, total - dlse)


def partial_product(
    spec: Constexpr, mO: cute.Tensor, mdO: cute.Tensor, row: Int32, lane: Int32
) -> Float32:
    """A lane's octets of dO * O in a row, summed."""
    total = Float32(0.0)
    for i in range(-(-spec.head_dim // (ROW_LANES * VECTOR))):
        o, do = (chunk(x, row, i * ROW_LANES + lane) for x in (mO, mdO))
        for c in range(VECTOR):
            total = fma(o[c], do[c], total)
    return total


def fake_operands(spec: RowsSpec) -> tuple[Any, ...]:
    """What to trace `Prepare.__call__` with."""
    fakes = Fakes(spec)
    rows = [fakes.rows("q hq d") for _ in range(2)]
    values = [fakes.values() for _ in range(2)]
    terms = [fakes.padded_values() for _ in range(2)]
    workspace = *terms, fakes.sums(cute.sym_int32()), fakes.flag()
    flags = Int32(0), Int32(0)
    return (*rows, *values, *workspace, *fakes.lengths(1), *flags, fakes.stream())
