"""A kernel that does nothing but repair dK and dV: it takes every row of them for spoilt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from tilewright.kernels.sm90.fa3.kernel import permuted
from tilewright.kernels.sm90.fa3.load import rows_of
from tilewright.kernels.sm90.fa3.operands import Lengths
from tilewright.kernels.sm90.fa3.schedule import sequence
from tilewright.kernels.sm90.fa3_backward.blocks import Fakes
from tilewright.kernels.sm90.fa3_backward.repair import Pairs, Sequence, repair_keys
from tilewright.kernels.sm90.fa3_backward.spec import RowsSpec, padded_start

KEYS = 16


@dataclass(frozen=True)
class Operands:
    mdK: cute.Tensor
    mdV: cute.Tensor
    pairs: Pairs
    lengths: Any
    batch: Int32


class RepairKeys:
    """One warp for 16 keys of a head of a sequence."""

    def __init__(self, spec: RowsSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        dk: cute.Tensor,
        dv: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_q: Any,
        seqused_k: Any,
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        used: Int32,
        stream: Any,
    ):
        packed = self.spec.packed
        rows_first, values_first = ((0, 2, 1), (1, 0)) if packed else ((1, 3, 2, 0), (2, 1, 0))
        pairs = Pairs(
            *(permuted(x, rows_first) for x in (q, k, v, dout)),
            *(permuted(x, values_first) for x in (lse_log2, delta)),
            *(scale, softcap, left, right),
        )
        lengths, batch = None, cute.size(dk, mode=[0])
        if const_expr(packed):
            lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, used)
            batch = cute.size(cu_seqlens_q) - 1
        mdK, mdV = (permuted(x, rows_first) for x in (dk, dv))
        op = Operands(mdK, mdV, pairs, lengths, Int32(batch))
        blocks = (cute.size(mdK, mode=[0]) + KEYS - 1) // KEYS
        grid = blocks, cute.size(mdK, mode=[2]), batch
        self.kernel(op).launch(grid=grid, block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, op: Operands):
        block, head, batch = cute.arch.block_idx()
        repair(self.spec, op, block, head, batch)


@cute.jit
def repair(spec: Constexpr, op: Operands, block: Int32, head: Int32, batch: Int32):
    q_start, k_start, r_start = Int32(0), Int32(0), Int32(0)
    seqlen_q, seqlen_k = (Int32(cute.size(x, mode=[0])) for x in (op.pairs.mQ, op.pairs.mK))
    if const_expr(spec.packed):
        q_start, seqlen_q, k_start, seqlen_k = sequence(op, batch)
        r_start = padded_start(q_start, batch)
    seq = Sequence(batch, q_start, r_start, seqlen_q, k_start, seqlen_k)
    out = tuple(rows_of(spec, x, head, batch, k_start, 0) for x in (op.mdK, op.mdV))
    every = Boolean(True), Boolean(True)
    repair_keys(spec, op.pairs, seq, (head, block * KEYS), every, out)


def fake_operands(spec: RowsSpec) -> tuple[Any, ...]:
    fakes = Fakes(spec)
    names = ("k hk d", "k hk dv", "q hq d", "k hk d", "k hk dv", "q hq dv")
    rows = [fakes.rows(x) for x in names]
    terms = [fakes.padded_values() for _ in range(2)]
    scalars = (*[Float32(1.0)] * 2, *[Int32(0)] * 3)
    return (*rows, *terms, *fakes.lengths(2), *scalars, fakes.stream())


@dataclass(frozen=True)
class KeyRepair:
    """The kernel, as `jit` compiles it."""

    spec: RowsSpec
    arch: str = "sm_90a"
    family: str = "key_repair"

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        return RepairKeys(self.spec), fake_operands(self.spec)

    def __str__(self) -> str:
        return f"{self.family}_{self.spec}"
