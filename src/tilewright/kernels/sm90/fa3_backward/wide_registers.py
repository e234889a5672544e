"""A warpgroup's fragments where one holds dV of 64 keys, and another their dK."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3_backward.load import transposed
from tilewright.kernels.sm90.fa3_backward.operands import Shared
from tilewright.kernels.sm90.fa3_backward.registers import FRAGMENT, Registers
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec


def p_layout(spec: BackwardSpec) -> cute.Layout:
    """Shared memory of P: (4, thread, octet), as the thread that reads it holds it.

    A warp's 16-byte accesses lie side by side, so without conflicts.
    """
    return cute.make_layout((FRAGMENT, 128, spec.tile_q // 8))


class WideRegisters(Registers):
    """Of warpgroup 0, which makes S, P and dV, or 1, which makes dP, dS and dK.

    The first multiply's A are keys and its B queries; the second's A is what was made of that.
    """

    def __init__(self, spec: BackwardSpec, sm: Shared, mmas: Any, thread: Int32, w: int):
        self.spec, self.thread, self.w = spec, thread, w
        self.first_key = 0
        self.mma_S, mma_dV, mma_dK, self.mma_dQ = mmas
        self.mma_sum = mma_dK if w else mma_dV
        part_S, part_sum, part_dQ = (
            mma.get_slice(thread) for mma in (self.mma_S, self.mma_sum, self.mma_dQ)
        )
        sA, sB, sSum = (sm.sV, sm.sdO, sm.sQ) if w else (sm.sK, sm.sQ, sm.sdO)
        self.tSrA = self.mma_S.make_fragment_A(part_S.partition_A(sA[None, None, 0]))
        self.tSrB = self.mma_S.make_fragment_B(part_S.partition_B(sB))
        self.tSumrB = self.mma_sum.make_fragment_B(part_sum.partition_B(transposed(sSum)))
        sKt = transposed(sm.sK)[None, None, 0]  # (d, kv)
        sKt = cute.local_tile(sKt, (spec.dq_columns, spec.tile_kv), (w, 0))
        self.tQrdS = self.mma_dQ.make_fragment_A(part_dQ.partition_A(transposed(sm.sdS)))
        self.tQrK = self.mma_dQ.make_fragment_B(part_dQ.partition_B(sKt))
        self.shape_S = self.mma_S.partition_shape_C((matmul.ROWS, spec.tile_q))
        self.acc, self.acc_dQ = (
            cute.make_rmem_tensor(mma.partition_shape_C((matmul.ROWS, columns)), Float32)
            for mma, columns in (
                (self.mma_sum, spec.head_dim if w else spec.head_dim_v),
                (self.mma_dQ, spec.dq_columns),
            )
        )
        dtype = sm.sQ.element_type
        self.rdS = cute.make_rmem_tensor(self.shape_S, dtype)  # P in warpgroup 0
        self.tSumrA = matmul.as_operand_A(self.rdS)
        self.store_dS = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        self.part_store = cute.make_tiled_copy_C(self.store_dS, self.mma_S).get_slice(thread)
        self.sdS = sm.sdS
        self.sP = sm.sP[None, thread, None]  # (4, octet)

    def multiply_pairs(self, slot: Int32) -> cute.Tensor:
        """The accumulator of S^T = K Q^T, or of dP^T = V dO^T."""
        return self._multiply_queries(self.tSrA, self.tSrB, slot)

    def multiply_sum(self, slot: Int32) -> None:
        # dV += P^T dO, or dK += dS^T Q
        B = self.tSumrB[None, None, None, slot]
        matmul.gemm(self.mma_sum, self.acc, self.tSumrA, B, accumulate=True)

    def write_P(self, acc: cute.Tensor) -> None:
        for i in range(self.spec.tile_q // 8):
            cute.autovec_copy(_octets(acc)[None, i], self.sP[None, i])

    def read_P(self) -> cute.Tensor:
        acc = cute.make_rmem_tensor(self.shape_S, Float32)
        for i in range(self.spec.tile_q // 8):
            cute.autovec_copy(self.sP[None, i], _octets(acc)[None, i])
        return acc


def _octets(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as (4, octet): what a thread holds of each octet of columns."""
    return cute.make_tensor(acc.iterator, cute.make_layout((FRAGMENT, cute.size(acc) // FRAGMENT)))
