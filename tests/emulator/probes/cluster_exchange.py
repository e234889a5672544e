"""Distributed shared memory: each CTA of a cluster sends a row to its right neighbour.

Asynchronous stores carry the row and count as bytes at the neighbour's mbarrier; a remote arrive
says that the row was taken; a TMA multicast gives one row to all.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

RANKS = 4
ROW = 64


class ClusterExchange:
    """source (4, 64), out (4, 64): out[r] = source[r - 1] + source[0]."""

    @cute.jit
    def __call__(self, source: cute.Tensor, out: cute.Tensor):
        layout = cute.make_layout((1, ROW), stride=(ROW, 1))
        load, mSource = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(), source, layout, (1, ROW), num_multicast=1
        )
        self.kernel(load, mSource, source, out, layout).launch(
            grid=(RANKS, 1, 1), block=(ROW, 1, 1), cluster=(RANKS, 1, 1)
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        mTma: cute.Tensor,
        mSource: cute.Tensor,
        mOut: cute.Tensor,
        layout: cute.Layout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = cutlass.utils.SmemAllocator()
        arrived = smem.allocate_array(cutlass.Int64, 1)
        landed = smem.allocate_array(cutlass.Int64, 1)
        full = smem.allocate_array(cutlass.Int64, 1)
        sShared = smem.allocate_tensor(cutlass.Int32, layout, 128)
        sRow = smem.allocate_tensor(cutlass.Int32, layout, 128)
        if thread == 0:
            cute.arch.mbarrier_init(arrived, ROW)
            cute.arch.mbarrier_init(landed, 1)
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, ROW * 4)
            cute.arch.mbarrier_arrive_and_expect_tx(landed, ROW * 4)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if rank == 0 and cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            ts, tg = cpasync.tma_partition(
                load,
                0,
                cute.make_layout(1),
                cute.group_modes(sShared, 0, 2),
                cute.group_modes(cute.local_tile(mTma, (1, ROW), (0, 0)), 0, 2),
            )
            cute.copy(load, tg, ts, tma_bar_ptr=full, mcast_mask=cutlass.Int16((1 << RANKS) - 1))
        right = (rank + 1) % RANKS
        cute.arch.store_async_dsmem(sRow.iterator + thread, mSource[rank, thread], landed, right)
        cute.arch.mbarrier_wait(landed, 0)
        cute.arch.mbarrier_arrive(arrived, peer_cta_rank_in_cluster=right)
        cute.arch.mbarrier_wait(arrived, 0)
        cute.arch.mbarrier_wait(full, 0)
        mOut[rank, thread] = sRow[0, thread] + sShared[0, thread]
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def arguments() -> list[Any]:
    """Tensors to trace with: source and out, (4, 64)."""
    return [
        cute.runtime.make_fake_compact_tensor(
            cutlass.Int32, (RANKS, ROW), stride_order=(1, 0), assumed_align=16
        )
        for _ in range(2)
    ]
