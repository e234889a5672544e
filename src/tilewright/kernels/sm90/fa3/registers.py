"""A warpgroup's fragments, and the multiplies between them and shared memory."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from tilewright.kernels.blocks.carried import Unchanged
from tilewright.kernels.blocks.softmax import Softmax
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3.operands import Operands, Shared

LOG2_E = 1.4426950408889634


class Registers(Unchanged):
    """Of warpgroup `w`, which owns 64 rows of the tile; `thread` counts inside it."""

    def __init__(
        self, spec: Any, op: Operands, sm: Shared, mmas: tuple[Any, Any], thread: Int32, w: Int32
    ):
        self.mma_S, self.mma_O = mmas
        self.sQ, self.sK, self.thread, self.w = sm.sQ[None, None, w], sm.sK, thread, w
        self.sO = sm.sO[None, None, w] if spec.stores_by_tma else None
        part_S, part_O = self.mma_S.get_slice(thread), self.mma_O.get_slice(thread)
        self.tSrQ = self.mma_S.make_fragment_A(part_S.partition_A(self.sQ))
        self.tSrK = self.mma_S.make_fragment_B(part_S.partition_B(sm.sK))
        self.tOrV = self.mma_O.make_fragment_B(part_O.partition_B(sm.sV))
        self.shape_S = self.mma_S.partition_shape_C((matmul.ROWS, spec.tile_kv))
        shape_O = self.mma_O.partition_shape_C((matmul.ROWS, spec.head_dim_v))
        self.acc_O = cute.make_rmem_tensor(shape_O, Float32)
        self.rP = cute.make_rmem_tensor(self.shape_S, sm.sQ.element_type)
        self.tOrP = matmul.as_operand_A(self.rP)
        self.O = matmul.as_rows(self.acc_O)  # (row, col)
        self.factor = cute.make_rmem_tensor(matmul.THREAD_ROWS, Float32)
        # A capped logit is c * tanh(s / c); only the tanh is left of it in the registers.
        scale = op.softcap if spec.has_softcap else op.scale
        self.softmax = Softmax(
            matmul.THREAD_ROWS,
            matmul.ROW_LANES,
            scale * LOG2_E,
            spec.rescale_threshold,
            spec.exp2_emulated,
        )

    def read_Q(self) -> None:
        """smem Q -> registers, where the multiply takes it from there."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.sQ.element_type)
        part = cute.make_tiled_copy_A(atom, self.mma_S).get_slice(self.thread)
        cute.copy(atom, part.partition_S(self.sQ), part.retile(self.tSrQ))

    def multiply_S(self, stage: Int32) -> cute.Tensor:
        """The accumulator of S = Q K^T. A new one each time: what is kept over a loop costs."""
        acc_S = cute.make_rmem_tensor(self.shape_S, Float32)
        B = self.tSrK[None, None, None, stage]
        matmul.gemm(self.mma_S, acc_S, self.tSrQ, B, accumulate=False)
        return acc_S

    def multiply_S_again(self, acc_S: cute.Tensor, stage: Int32) -> None:
        """S of this warp's 16 rows, once more."""
        rQ = self.tSrQ if self.mma_S.op.a_src == warpgroup.OperandSource.RMEM else None
        sQ = cute.local_tile(self.sQ, (16, cute.size(self.sQ, mode=[1])), (self.thread // 32, 0))
        matmul.multiply_again(acc_S, rQ, sQ, self.sK[None, None, stage])

    def multiply_O(self, stage: Int32, accumulate: bool = True) -> None:
        # O += P V
        B = self.tOrV[None, None, None, stage]
        matmul.gemm(self.mma_O, self.acc_O, self.tOrP, B, accumulate=accumulate)

    def convert_P(self, acc_S: cute.Tensor) -> None:
        self.rP.store(acc_S.load().to(self.rP.element_type))

    def rescale_O(self) -> None:
        """O shrinks to its rows' new maxima."""
        for r in range(matmul.THREAD_ROWS):
            for c in range(cute.size(self.O, mode=[1])):
                self.O[r, c] = self.O[r, c] * self.factor[r]
