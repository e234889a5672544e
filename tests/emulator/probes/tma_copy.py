"""TMA load and store of boxes: every swizzle and element size, edges outside the tensor.

Each CTA loads one box, reads it with ordinary loads through the swizzled layout, and stores it by
TMA: the first output shows the physical placement, the second the round trip.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

THREADS = 128


class TmaCopy:
    """Copies (rows, columns) in boxes of `box`; `span` is the swizzle in bytes, 0 for none."""

    def __init__(self, box: tuple[int, int], span: int):
        self.box, self.span = box, span

    @cute.jit
    def __call__(self, source: cute.Tensor, read: cute.Tensor, copied: cute.Tensor):
        plain = cute.make_layout(self.box, stride=(self.box[1], 1))
        # Bits 7-9 of the byte address onto bits 4-6: 16-byte units, 8 rows of 128 bytes.
        bits = cutlass.const_expr({0: 0, 32: 1, 64: 2, 128: 3}[self.span])
        swizzle = cute.make_swizzle(bits, 4, 3)
        layout = cute.make_composed_layout(swizzle, 0, plain)
        load, mSource = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), source, layout, self.box
        )
        store, mCopied = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), copied, layout, self.box
        )
        rows, columns = source.shape
        self.kernel(load, mSource, store, mCopied, read, swizzle, plain).launch(
            grid=(cute.ceil_div(rows, self.box[0]), cute.ceil_div(columns, self.box[1]), 1),
            block=(THREADS, 1, 1),
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        mSource: cute.Tensor,
        store: cute.CopyAtom,
        mCopied: cute.Tensor,
        mRead: cute.Tensor,
        swizzle: cute.Swizzle,
        plain: cute.Layout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        bx, by, _ = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, 1)
        sBox = smem.allocate_tensor(mRead.element_type, plain, 1024, swizzle=swizzle)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        gSource = cute.local_tile(mSource, self.box, (bx, by))
        gCopied = cute.local_tile(mCopied, self.box, (bx, by))
        ts, tg = cpasync.tma_partition(
            load,
            0,
            cute.make_layout(1),
            cute.group_modes(sBox, 0, 2),
            cute.group_modes(gSource, 0, 2),
        )
        tcs, tcg = cpasync.tma_partition(
            store,
            0,
            cute.make_layout(1),
            cute.group_modes(sBox, 0, 2),
            cute.group_modes(gCopied, 0, 2),
        )
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    full, cute.size(plain) * mRead.element_type.width // 8
                )
            cute.copy(load, tg, ts, tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, 0)
        for i in cutlass.range_constexpr(cute.size(plain) // THREADS):
            element = i * THREADS + thread
            row, column = element // self.box[1], element % self.box[1]
            r, c = bx * self.box[0] + row, by * self.box[1] + column
            if cute.elem_less((r, c), mRead.shape):
                mRead[r, c] = sBox[row, column]
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            cute.copy(store, tcs, tcg)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=False)


def arguments(dtype: Any, shape: tuple[int, int]) -> list[Any]:
    """Tensors to trace with: (rows, columns) three times."""
    return [
        cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)
        for _ in range(3)
    ]
