"""D = A B^T by tcgen05 with one CTA or a pair; D leaves tensor memory by a given load shape."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import LayoutEnum

THREADS = 128
COLUMNS = 512


class Tcgen05:
    """One tile (m, n, k); A (m, k) and B (n, k) by TMA, D (m, n) in float32.

    `ctas` is 1 or 2; with 2 each CTA loads half of A's and of B's rows. `through_memory`: D goes
    back to tensor memory by tcgen05.st and is loaded again.
    """

    def __init__(
        self,
        tile: tuple[int, int, int],
        ctas: int = 1,
        shape: str = "32x32b",
        repeat: int = 32,
        through_memory: bool = False,
    ):
        self.tile, self.ctas, self.through_memory = tile, ctas, through_memory
        times = tcgen05.Repetition(repeat)
        self.load = getattr(tcgen05, f"Ld{shape}Op")(times)
        self.store = getattr(tcgen05, f"St{shape}Op")(times)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        self.a_type, self.b_type = a.element_type, b.element_type
        group = tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE
        mma = sm100.make_trivial_tiled_mma(
            a.element_type,
            b.element_type,
            LayoutEnum.from_tensor(a).mma_major_mode(),
            LayoutEnum.from_tensor(b).mma_major_mode(),
            cutlass.Float32,
            group,
            self.tile[:2],
        )
        sA_layout = sm100.make_smem_layout_a(mma, self.tile, a.element_type, 1)
        sB_layout = sm100.make_smem_layout_b(mma, self.tile, b.element_type, 1)
        op = cpasync.CopyBulkTensorTileG2SOp(group)
        cluster = cute.tiled_divide(cute.make_layout((self.ctas, 1, 1)), (mma.thr_id.shape,))
        load_A, mA = cute.nvgpu.make_tiled_tma_atom_A(
            op, a, cute.slice_(sA_layout, (None, None, None, 0)), self.tile, mma, cluster.shape
        )
        load_B, mB = cute.nvgpu.make_tiled_tma_atom_B(
            op, b, cute.slice_(sB_layout, (None, None, None, 0)), self.tile, mma, cluster.shape
        )
        self.kernel(mma, load_A, mA, load_B, mB, d, sA_layout, sB_layout).launch(
            grid=(self.ctas, 1, 1), block=(THREADS, 1, 1), cluster=(self.ctas, 1, 1)
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
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = cutlass.utils.SmemAllocator()
        full, done = smem.allocate_array(cutlass.Int64, 1), smem.allocate_array(cutlass.Int64, 1)
        holder = smem.allocate_array(cutlass.Int32, 1)
        sA = smem.allocate_tensor(self.a_type, sA_layout.outer, 1024, swizzle=sA_layout.inner)
        sB = smem.allocate_tensor(self.b_type, sB_layout.outer, 1024, swizzle=sB_layout.inner)
        is_pair = cutlass.const_expr(self.ctas == 2)
        self.set_up(full, done, holder, warp)
        part = mma.get_slice(rank)
        gA = part.partition_A(cute.local_tile(mA, (self.tile[0], self.tile[2]), (0, 0)))
        gB = part.partition_B(cute.local_tile(mB, (self.tile[1], self.tile[2]), (0, 0)))
        tAsA, tAgA = self.tma_views(load_A, sA, gA)
        tBsB, tBgB = self.tma_views(load_B, sB, gB)
        tDtD = cute.make_tensor(
            cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder),
            mma.make_fragment_C(mma.partition_shape_C(self.tile[:2])).layout,
        )
        size_A = cute.size_in_bytes(self.a_type, sA_layout)
        size_B = cute.size_in_bytes(self.b_type, sB_layout)
        if warp == 0:
            if rank == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.ctas * (size_A + size_B))
            cute.copy(load_A, tAgA, tAsA[None, 0], tma_bar_ptr=full)
            cute.copy(load_B, tBgB, tBsB[None, 0], tma_bar_ptr=full)
            if rank == 0:
                cute.arch.mbarrier_wait(full, 0)
                fA, fB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                    cute.gemm(mma, tDtD, fA[None, None, k, 0], fB[None, None, k, 0], tDtD)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    if is_pair:
                        tcgen05.commit(done, cutlass.Int16(3), tcgen05.CtaGroup.TWO)
                    else:
                        tcgen05.commit(done)
        cute.arch.mbarrier_wait(done, 0)
        self.store_D(tDtD, part.partition_C(cute.local_tile(mD, self.tile[:2], (0, 0))), thread)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            address = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)
            cute.arch.dealloc_tmem(address, COLUMNS, is_two_cta=is_pair)

    def tma_views(self, load: cute.CopyAtom, s: cute.Tensor, g: cute.Tensor):
        """Shared and global side of one load."""
        return cpasync.tma_partition(
            load, 0, cute.make_layout(1), cute.group_modes(s, 0, 3), cute.group_modes(g, 0, 3)
        )

    @cute.jit
    def set_up(
        self, full: cute.Pointer, done: cute.Pointer, holder: cute.Pointer, warp: cutlass.Int32
    ):
        """Barriers and tensor memory, made by warp 0 and known to the cluster."""
        is_pair = cutlass.const_expr(self.ctas == 2)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
                cute.arch.mbarrier_init(done, 1)
            cute.arch.alloc_tmem(COLUMNS, holder, is_two_cta=is_pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=is_pair)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        cute.arch.sync_threads()

    def store_D(self, tDtD: cute.Tensor, tDgD: cute.Tensor, thread: cutlass.Int32):
        """tensor memory -> registers -> global, all four warps."""
        accumulator = tDtD[(None, None), 0, 0]  # (row, column) of this CTA
        target = tDgD[(None, None), 0, 0]
        if cutlass.const_expr(self.through_memory):
            atom = cute.make_copy_atom(self.store, cutlass.Float32)
            load = cute.make_copy_atom(self.load, cutlass.Float32)
            first = tcgen05.make_tmem_copy(load, accumulator).get_slice(thread)
            values = cute.make_rmem_tensor(first.partition_D(target).shape, cutlass.Float32)
            cute.copy(load, first.partition_S(accumulator), values)
            cute.arch.fence_view_async_tmem_load()
            second = tcgen05.make_tmem_copy(atom, accumulator).get_slice(thread)
            cute.copy(atom, values, second.partition_D(accumulator))
            cute.arch.fence_view_async_tmem_store()
        atom = cute.make_copy_atom(self.load, cutlass.Float32)
        copy = tcgen05.make_tmem_copy(atom, accumulator).get_slice(thread)
        into = copy.partition_D(target)
        values = cute.make_rmem_tensor(into.shape, cutlass.Float32)
        cute.copy(atom, copy.partition_S(accumulator), values)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(values, into)
