"""A ring of stages between a producer warp and two consumers, with mbarriers and named barriers.

The producer fills a stage with bulk copies of one row; each consumer warp adds the rows it gets to
its sums; the consumers exchange their sums through shared memory under a named barrier.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

ROW = 32  # floats a row, one a lane
STAGES = 3


class Ring:
    """out (2, 32): sums of the rows of each parity, then the sums of the other warp."""

    @cute.jit
    def __call__(self, rows: cute.Tensor, out: cute.Tensor):
        self.kernel(rows, out).launch(grid=(1, 1, 1), block=(96, 1, 1))

    @cute.kernel
    def kernel(self, mRows: cute.Tensor, mOut: cute.Tensor):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, STAGES)
        empty = smem.allocate_array(cutlass.Int64, STAGES)
        sRows = smem.allocate_tensor(
            cutlass.Float32, cute.make_layout((STAGES, ROW), stride=(ROW, 1)), 128
        )
        sSums = smem.allocate_tensor(
            cutlass.Float32, cute.make_layout((2, ROW), stride=(ROW, 1)), 128
        )
        if warp == 0 and lane == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 32)
                cute.arch.mbarrier_init(empty + stage, 2)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        count = mRows.shape[0]
        if warp == 0:
            for row in cutlass.range(count, unroll=1):
                stage, phase = row % STAGES, row // STAGES % 2
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                sRows[stage, lane] = mRows[row, lane]
                cute.arch.mbarrier_arrive(full + stage)
        else:
            total = cutlass.Float32(0.0)
            for row in cutlass.range(count, unroll=1):
                stage, phase = row % STAGES, row // STAGES % 2
                cute.arch.mbarrier_wait(full + stage, phase)
                if row % 2 == warp - 1:
                    total += sRows[stage, lane]
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(empty + stage)
            sSums[warp - 1, lane] = total
            cute.arch.barrier(barrier_id=1, number_of_threads=64)
            mOut[warp - 1, lane] = sSums[2 - warp, lane]


def arguments(count: int) -> list[Any]:
    """Tensors to trace with: rows (count, 32), out (2, 32)."""
    return [
        cute.runtime.make_fake_compact_tensor(
            cutlass.Float32, shape, stride_order=(1, 0), assumed_align=16
        )
        for shape in ((count, ROW), (2, ROW))
    ]
