"""A warpgroup's fragments where one holds dV of 64 keys, and another their dK."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from tilewright.kernels.blocks.carried import Unchanged
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3_backward.load import transposed
from tilewright.kernels.sm90.fa3_backward.operands import Shared
from tilewright.kernels.sm90.fa3_backward.registers import (
    FRAGMENT,
    Registers,
    add_fragments,
    zeros,
)
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec


def dq_parts(spec: BackwardSpec, w: int) -> list[tuple[int, int]]:
    """The multiplies that make a warpgroup's share of dQ: columns, and the first of them.

    As few as registers allow, since each reads dS. Shared memory swizzles 64 columns together, so
    192 are not halved.
    """
    if spec.head_dim == 256:
        return [(64, 128 * w), (64, 128 * w + 64)]
    return [(64, 128)] if w else [(128, 0)]


def p_layout(spec: BackwardSpec) -> cute.Layout:
    """Shared memory of P: (4, thread, octet), as the thread that reads it holds it.

    A warp's 16-byte accesses lie side by side, so without conflicts.
    """
    return cute.make_layout((FRAGMENT, 128, spec.tile_q // 8))


class WideRegisters(Registers):
    """Of warpgroup 0, which makes S, P and dV, or 1, which makes dP, dS and dK.

    Both have the same multiplies: of keys by queries, of what was made of that by queries, which is
    summed up in `acc`, and some of the columns of dQ. `w` is known when the kernel is traced.
    """

    def __init__(self, spec: BackwardSpec, sm: Shared, mmas: Any, thread: Int32, w: int):
        self.spec, self.thread, self.w = spec, thread, w
        self.first_key, self.first_octet = 0, 0
        self.mma_S, mma_dV, mma_dK = mmas[:3]
        self.mma_sum = mma_dK if w else mma_dV
        part_S, part_sum = (mma.get_slice(thread) for mma in (self.mma_S, self.mma_sum))
        sA, sB, sSum = (sm.sV, sm.sdO, sm.sQ) if w else (sm.sK, sm.sQ, sm.sdO)
        self.tSrA = self.mma_S.make_fragment_A(part_S.partition_A(sA[None, None, 0]))
        self.tSrB = self.mma_S.make_fragment_B(part_S.partition_B(sB))
        self.tSumrB = self.mma_sum.make_fragment_B(part_sum.partition_B(transposed(sSum)))
        self.shape_S = self.mma_S.partition_shape_C((matmul.ROWS, spec.tile_q))
        dim = spec.head_dim if w else spec.head_dim_v
        self.acc = cute.make_rmem_tensor(
            self.mma_sum.partition_shape_C((matmul.ROWS, dim)), Float32
        )
        self.acc_dV = self.acc_dK = self.acc  # whichever it is
        self.parts_dQ = [PartOfdQ(sm, thread, *part) for part in dq_parts(spec, w)]
        dtype = sm.sQ.element_type
        self.rP, self.rdS = (cute.make_rmem_tensor(self.shape_S, dtype) for _ in range(2))
        # dS is read back from shared memory for dK too: with it in registers there are too few of
        # them at 256, and the assembler lets no multiply run beside another.
        self.tSumrA = matmul.as_operand_A(self.rP)
        if w:
            self.tSumrA = self.mma_sum.make_fragment_A(part_sum.partition_A(sm.sdS))
        self.store_dS = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        self.part_store = cute.make_tiled_copy_C(self.store_dS, self.mma_S).get_slice(thread)
        self.sdS = sm.sdS
        self.sP = sm.sP[None, thread, None]  # (4, octet)

    def multiply_pairs(self, slot: Int32) -> cute.Tensor:
        """The accumulator of S^T = K Q^T, or of dP^T = V dO^T."""
        acc, B = zeros(self.shape_S), self.tSrB[None, None, None, slot]
        matmul.gemm(self.mma_S, acc, self.tSrA, B, accumulate=False)
        return acc

    def multiply_dV(self, slot: Int32) -> None:
        # dV += P^T dO
        B = self.tSumrB[None, None, None, slot]
        matmul.gemm(self.mma_sum, self.acc, self.tSumrA, B, accumulate=True)

    def multiply_dK_from(self, slot_dS: Int32, slot: Int32) -> None:
        # dK += dS^T Q
        A, B = self.tSumrA[None, None, None, slot_dS], self.tSumrB[None, None, None, slot]
        matmul.gemm(self.mma_sum, self.acc, A, B, accumulate=True)

    @property
    def early_parts(self) -> int:
        """Of dQ's, those that run under the making of P or dS. A softcap needs the registers."""
        return 0 if self.spec.has_softcap else 1

    def add_dQ(self, sums: Int64) -> None:
        for part in self.parts_dQ:
            add_fragments(part.acc, sums, part.first // 8)

    def write_P(self, acc: cute.Tensor) -> None:
        """P, an accumulator -> smem."""
        for i in range(self.spec.tile_q // 8):
            cute.autovec_copy(_octets(acc)[None, i], self.sP[None, i])

    def make_dS(self, acc: cute.Tensor, sDelta: cute.Tensor, slot: Int32) -> None:
        """dP -> dS, in place, with P from shared memory; an octet at a time, to save registers."""
        lane = self.thread % matmul.ROW_LANES
        pairs = cute.local_tile(sDelta[None, slot], (2,), (None,))  # (2, pair)
        for i in range(self.spec.tile_q // 8):
            P, delta = (cute.make_rmem_tensor(size, Float32) for size in (FRAGMENT, 2))
            cute.autovec_copy(self.sP[None, i], P)
            cute.autovec_copy(pairs[None, matmul.ROW_LANES * i + lane], delta)
            dP = _octets(acc)[None, i]
            for e in range(FRAGMENT):
                dP[e] = P[e] * (dP[e] - delta[e % 2])


class PartOfdQ(Unchanged):
    """Some columns of dQ, from `first` on, as one multiply makes them."""

    def __init__(self, sm: Shared, thread: Int32, columns: int, first: int):
        MN = matmul.MN_MAJOR
        self.first = first
        self.mma = matmul.make_mma(
            sm.sK.element_type, columns, MN, a_in_registers=False, a_layout=MN
        )
        part = self.mma.get_slice(thread)
        sKt = transposed(sm.sK)[None, None, 0]  # (d, kv)
        sKt = cute.local_tile(sKt, (columns, cute.size(sKt, mode=[1])), (first // columns, 0))
        self.tQrdS = self.mma.make_fragment_A(part.partition_A(transposed(sm.sdS)))
        self.tQrK = self.mma.make_fragment_B(part.partition_B(sKt))
        self.shape = self.mma.partition_shape_C((matmul.ROWS, columns))
        self.acc: Any = None  # of the last step

    def multiply(self, slot: Int32) -> None:
        # dQ = dS K
        self.acc, A = zeros(self.shape), self.tQrdS[None, None, None, slot]
        matmul.gemm(self.mma, self.acc, A, self.tQrK, accumulate=False)


def _octets(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as (4, octet): what a thread holds of each octet of columns."""
    return cute.make_tensor(acc.iterator, cute.make_layout((FRAGMENT, cute.size(acc) // FRAGMENT)))
