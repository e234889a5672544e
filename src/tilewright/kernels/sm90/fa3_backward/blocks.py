"""What prepare and finish share: a CTA works on 64 rows of the workspace, of one head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.kernel import DTYPES
from tilewright.kernels.sm90.fa3_backward.spec import RowsSpec, padded_start

THREADS = 128
LANES = 32
FRAGMENT = 4  # floats of an octet of columns that a thread holds


@dataclass(frozen=True)
class Block:
    """64 rows of one head, all of one sequence or of none."""

    head: Int32
    batch: Int32
    index: Int32  # among the blocks of the workspace
    first: Int32  # row of the sequence; may lie past its end, where the workspace is padded
    q_start: Int32  # where the sequence's rows begin in its tensors
    q_rows: Int32  # that the sequence has there
    seqlen_q: Int32  # of them, those that are part of the problem


@cute.jit
def find_block(spec: Constexpr, lengths: Any, heads: Int32, blocks: Int32, rows: Int32):
    """The fields of this CTA's `Block`. Neighbours share rows, whose heads lie side by side.

    `rows` are those of a dense sequence, or of all packed ones.
    """
    cta, _, _ = cute.arch.block_idx()
    head, rest = cta % heads, cta // heads
    batch, index = rest // blocks, rest % blocks
    first = index * matmul.ROWS
    q_start, q_rows, seqlen_q = Int32(0), rows, rows
    if const_expr(spec.packed):
        cu_seqlens = lengths.cu_seqlens_q
        sequences = cute.size(cu_seqlens) - 1
        batch = find_sequence(cu_seqlens, sequences, first, True)
        q_start = cu_seqlens[batch]
        first -= padded_start(q_start, batch)
        # The rows past the last sequence count as one more, of which none is part of the problem.
        q_rows, seqlen_q = rows - q_start, Int32(0)
        if batch < sequences:
            q_rows = cu_seqlens[batch + 1] - q_start
            seqlen_q = q_rows
            if lengths.used & 1 != 0:
                seqlen_q = lengths.seqused_q[batch]
    return head, batch, index, first, q_start, q_rows, seqlen_q


@cute.jit
def find_sequence(
    cu_seqlens: cute.Tensor, sequences: Int32, row: Int32, is_padded: Constexpr
) -> Int32:
    """The sequence that row `row` belongs to, of the workspace if `is_padded`: the last to begin at
    or before it.

    Each step looks at 32 places, one a lane.
    """
    found, past = Int32(0), sequences + 1
    while past - found > 1:
        step = (past - found + LANES - 1) // LANES
        sequence = found + cute.arch.lane_idx() * step
        begins = Int32(0)
        if sequence < past:
            start = cu_seqlens[sequence]
            if const_expr(is_padded):
                start = padded_start(start, sequence)
            begins = Int32(start <= row)
        # Sequences begin one after the other, so that those before the row are the first lanes.
        before = cute.arch.popc(cute.arch.vote_ballot_sync(begins != 0))
        found += (before - 1) * step
        past = cutlass.min(past, found + step)
    return found


def values_of(spec: Any, mX: cute.Tensor, block: Block) -> cute.Tensor:
    """The sequence's values of X (q, h[, b]), one a row, of the block's head, (q)."""
    if spec.packed:
        return cute.domain_offset((block.q_start,), mX[None, block.head])
    return mX[None, block.head, block.batch]


def padded_values_of(spec: Any, mX: cute.Tensor, block: Block) -> cute.Tensor:
    """The block's values of X (r, h[, b]), a tensor of the workspace, (64)."""
    mine = mX[None, block.head] if spec.packed else mX[None, block.head, block.batch]
    return cute.domain_offset((block.index * matmul.ROWS,), mine)


def fragments_of(spec: Any, mSum: cute.Tensor, block: Block, thread: Int32) -> cute.Tensor:
    """The thread's part of the block's sums of dQ, mSum (4, thread, octet, block, h[, b]).

    (4, octet): four floats are columns 2 i and 2 i + 1 of the octet, i = thread % 4, of row
    16 (thread // 32) + thread % 32 // 4 of the block, and the same columns of the row 8 below.
    """
    if spec.packed:
        return mSum[None, thread, None, block.index, block.head]
    return mSum[None, thread, None, block.index, block.head, block.batch]


class Fakes:
    """What to trace a kernel of `spec` with: shapes and strides known when it runs."""

    def __init__(self, spec: RowsSpec):
        self.spec = spec
        names = ("b", "b1", "hq", "hk", "q", "k", "r", "blocks")
        self.sizes = {name: cute.sym_int32() for name in names}
        self.sizes |= {name: cute.sym_int32(divisibility=8) for name in ("d", "dv")}

    def rows(self, names: str) -> Any:
        """(b, q, hq, d) and the like, as TMA takes it too; `names` are without the batch."""
        return self._strided(names, DTYPES[self.spec.dtype], 8, 16)

    def values(self) -> Any:
        """(b, hq, q), with any strides."""
        shape = self._shape("hq q")
        strides = [cute.sym_int64() for _ in shape]
        return cute.runtime.make_fake_tensor(Float32, shape, strides, assumed_align=4)

    def padded_values(self) -> Any:
        """(b, hq, r) of the workspace."""
        return self._strided("hq r", Float32, 1, 4)

    def sums(self, octets: Any) -> Any:
        """(b, hq, blocks, octets, 128, 4) of the workspace."""
        shape = [*self._shape("hq blocks"), octets, THREADS, FRAGMENT]
        strides = [cute.sym_int64(divisibility=8) for _ in shape[:-3]]
        strides += [THREADS * FRAGMENT, FRAGMENT, 1]
        return cute.runtime.make_fake_tensor(Float32, shape, strides, assumed_align=16)

    def lengths(self, sides: int) -> list[Any]:
        """cu_seqlens of q, or of both sides, and seqused or its stand-in; None if dense."""
        if not self.spec.packed:
            return [None] * (2 * sides)
        sizes = [self.sizes["b1"]] * sides + [cute.sym_int32() for _ in range(sides)]
        return [cute.runtime.make_fake_compact_tensor(Int32, (n,), assumed_align=4) for n in sizes]

    def flag(self) -> Any:
        """(1,) of the workspace."""
        return cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4)

    def stream(self) -> Any:
        return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)

    def _shape(self, names: str) -> list[Any]:
        names = names if self.spec.packed else f"b {names}"
        return [self.sizes[name] for name in names.split()]

    def _strided(self, names: str, element: Any, multiple: int, align: int) -> Any:
        shape = self._shape(names)
        strides = [cute.sym_int64(divisibility=multiple) for _ in shape[1:]] + [1]
        return cute.runtime.make_fake_tensor(element, shape, strides, assumed_align=align)
