"""tcgen05.cp: rows in shared memory to lanes of tensor memory, read back by tcgen05.ld."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05

LANES = 128
ALLOCATED = 32  # columns
SLICE = 8 * 4  # words of a core matrix: 8 rows of 16 bytes
# Operation and, for the lanes in order, extents and strides (in words) of the rows that they get.
SHAPES = {
    "128x256b": ("Cp128x256bOp", (8, 16), (4, SLICE)),
    "128x128b": ("Cp128x128bOp", (8, 16), (4, SLICE)),
    "64x128b.warpx2::02_13": ("Cp2x64x128b0213Op", (8, 8, 2), (4, SLICE, 0)),
    "64x128b.warpx2::01_23": ("Cp2x64x128b0123Op", (8, 4, 2, 2), (4, SLICE, 0, 4 * SLICE)),
    "32x128b.warpx4": ("Cp4x32x128bOp", (8, 4, 4), (4, SLICE, 0)),
}


class Tcgen05Cp:
    """One copy of 32-bit words, issued by the first CTA of one or two."""

    def __init__(self, shape: str, ctas: int):
        self.name, self.extents, self.strides = SHAPES[shape]
        rows, bits = shape.split("b")[0].split("x")
        self.rows, self.columns, self.ctas = int(rows), int(bits) // 32, ctas

    @cute.jit
    def __call__(self, source: cute.Tensor, out: cute.Tensor):
        self.kernel(source, out).launch(
            grid=(self.ctas, 1, 1), block=(LANES, 1, 1), cluster=(self.ctas, 1, 1)
        )

    @cute.jit
    def set_up(self, done: cute.Pointer, holder: cute.Pointer, warp: cutlass.Int32):
        """The barrier and tensor memory, made by warp 0."""
        is_pair = cutlass.const_expr(self.ctas == 2)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(done, 1)
            cute.arch.alloc_tmem(ALLOCATED, holder, is_two_cta=is_pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=is_pair)
        cute.arch.mbarrier_init_fence()

    @cute.kernel
    def kernel(self, source: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        is_pair = cutlass.const_expr(self.ctas == 2)
        smem = cutlass.utils.SmemAllocator()
        done, holder = smem.allocate_array(cutlass.Int64, 1), smem.allocate_array(cutlass.Int32, 1)
        # Columns in groups of 16 bytes, one group of all rows after the other.
        groups = (4, self.columns // 4)
        across = (1, self.rows * 4)
        tile_layout = cute.make_layout(((8, self.rows // 8), groups), stride=((4, SLICE), across))
        tile = smem.allocate_tensor(cutlass.Float32, tile_layout, 128)
        lanes = cute.make_tensor(
            tile.iterator, cute.make_layout((self.extents, groups), stride=(self.strides, across))
        )
        self.set_up(done, holder, warp)
        for i in cutlass.range_constexpr(self.rows * self.columns // LANES):
            row, column = (i * LANES + thread) // self.columns, thread % self.columns
            tile[row, column] = source[rank * self.rows + row, column]
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        address = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)
        cells = cute.make_tensor(
            address, cute.make_layout((LANES, self.columns), stride=(1 << 16, 1))
        )
        if warp == 0 and rank == 0:
            group = tcgen05.CtaGroup.TWO if is_pair else tcgen05.CtaGroup.ONE
            atom = cute.make_copy_atom(getattr(tcgen05, self.name)(group), cutlass.Float32)
            copy = tcgen05.make_s2t_copy(atom, cells)
            part = copy.get_slice(0)
            described = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(lanes))
            cute.copy(copy, described, part.partition_D(cells))
            with cute.arch.elect_one():
                if is_pair:
                    tcgen05.commit(done, cutlass.Int16(3), tcgen05.CtaGroup.TWO)
                else:
                    tcgen05.commit(done)
        cute.arch.mbarrier_wait(done, 0)
        self.store(cells, cute.local_tile(out, (LANES, self.columns), (rank, 0)), thread)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            cute.arch.dealloc_tmem(address, ALLOCATED, is_two_cta=is_pair)

    def store(self, cells: cute.Tensor, target: cute.Tensor, thread: cutlass.Int32):
        """tensor memory -> registers -> global, all four warps."""
        operation = tcgen05.Ld32x32bOp(tcgen05.Repetition(self.columns))
        atom = cute.make_copy_atom(operation, cutlass.Float32)
        copy = tcgen05.make_tmem_copy(atom, cells).get_slice(thread)
        into = copy.partition_D(target)
        values = cute.make_rmem_tensor(into.shape, cutlass.Float32)
        cute.copy(atom, copy.partition_S(cells), values)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(values, into)


def arguments(shape: str, ctas: int) -> list[Any]:
    """Tensors to trace with: the rows of all CTAs, the lanes of all CTAs."""
    probe = Tcgen05Cp(shape, ctas)
    return [
        cute.runtime.make_fake_compact_tensor(
            cutlass.Float32, (ctas * rows, probe.columns), stride_order=(1, 0), assumed_align=16
        )
        for rows in (probe.rows, LANES)
    ]
