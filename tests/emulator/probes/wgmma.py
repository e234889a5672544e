"""D = A B^T by wgmma: A in shared memory or registers, either operand major, every element type."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum


class Wgmma:
    """One tile (m, n, k); A (m, k) and B (n, k) loaded by TMA, D (m, n) in float32 or float16."""

    def __init__(self, tile: tuple[int, int, int], a_in_registers: bool = False):
        self.tile, self.a_in_registers = tile, a_in_registers
        self.threads = 2 * tile[0]  # a warpgroup for every 64 rows

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        m, n, k = self.tile
        self.a_type, self.b_type = a.element_type, b.element_type
        a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        source = (
            warpgroup.OperandSource.RMEM if self.a_in_registers else warpgroup.OperandSource.SMEM
        )
        mma = sm90.make_trivial_tiled_mma(
            a.element_type,
            b.element_type,
            a_layout.sm90_mma_major_mode(),
            b_layout.sm90_mma_major_mode(),
            d.element_type,
            (m // 64, 1, 1),
            (64, n),
            source,
        )
        sA_layout = sm90.make_smem_layout_a(a_layout, self.tile, a.element_type, 1)
        sB_layout = sm90.make_smem_layout_b(b_layout, self.tile, b.element_type, 1)
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_A, mA = cpasync.make_tiled_tma_atom(
            load, a, cute.slice_(sA_layout, (None, None, 0)), (m, k)
        )
        load_B, mB = cpasync.make_tiled_tma_atom(
            load, b, cute.slice_(sB_layout, (None, None, 0)), (n, k)
        )
        self.kernel(mma, load_A, mA, load_B, mB, d, sA_layout, sB_layout).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1)
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        load_A: cute.CopyAtom,
        mA: cute.Tensor,
        load_B: cute.CopyAtom,
        mB: cute.Tensor,
        mD: cute.Tensor,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, 1)
        sA = smem.allocate_tensor(self.a_type, sA_layout.outer, 1024, swizzle=sA_layout.inner)
        sB = smem.allocate_tensor(self.b_type, sB_layout.outer, 1024, swizzle=sB_layout.inner)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tAsA, tAgA = cpasync.tma_partition(
            load_A, 0, cute.make_layout(1), cute.group_modes(sA, 0, 2), cute.group_modes(mA, 0, 2)
        )
        tBsB, tBgB = cpasync.tma_partition(
            load_B, 0, cute.make_layout(1), cute.group_modes(sB, 0, 2), cute.group_modes(mB, 0, 2)
        )
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    full,
                    cute.size_in_bytes(self.a_type, sA_layout)
                    + cute.size_in_bytes(self.b_type, sB_layout),
                )
            cute.copy(load_A, tAgA, tAsA[None, 0], tma_bar_ptr=full)
            cute.copy(load_B, tBgB, tBsB[None, 0], tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, 0)
        part = mma.get_slice(thread)
        tDrA = mma.make_fragment_A(part.partition_A(sA[None, None, 0]))
        tDrB = mma.make_fragment_B(part.partition_B(sB[None, None, 0]))
        tDgD = part.partition_C(mD)
        tDrD = cute.make_rmem_tensor(tDgD.shape, mD.element_type)
        if cutlass.const_expr(self.a_in_registers):
            cute.autovec_copy(part.partition_A(sA[None, None, 0]), tDrA)
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(cute.size(tDrB, mode=[2])):
            cute.gemm(mma, tDrD, tDrA[None, None, k], tDrB[None, None, k], tDrD)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.autovec_copy(tDrD, tDgD)


def arguments(
    a_type: Any,
    b_type: Any,
    tile: tuple[int, int, int],
    a_k_major: bool,
    b_k_major: bool,
    d_type: Any = cutlass.Float32,
) -> list[Any]:
    """Tensors to trace with: A (m, k), B (n, k), D (m, n)."""
    m, n, k = tile

    def fake(dtype: Any, shape: tuple[int, int], row_major: bool) -> Any:
        return cute.runtime.make_fake_compact_tensor(
            dtype, shape, stride_order=(1, 0) if row_major else (0, 1), assumed_align=16
        )

    return [
        fake(a_type, (m, k), a_k_major),
        fake(b_type, (n, k), b_k_major),
        fake(d_type, (m, n), True),
    ]
