"""D = A B^T on sm_80: cp.async into swizzled shared memory, ldmatrix, mma.sync; optionally the
result passes through shared memory once more, by stmatrix on sm_90a."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp

M, N, K = 64, 64, 64
THREADS = 128


class MmaSync:
    """One tile; A (64, 64) and B (64, 64) of a 16-bit type, k or m/n contiguous.

    D is summed in its own type. `store_matrix`: it is rounded to the input type, stored by
    stmatrix and read back.
    """

    def __init__(self, b_k_major: bool, store_matrix: bool = False):
        self.b_k_major, self.store_matrix = b_k_major, store_matrix

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(a.element_type, d.element_type, (16, 8, 16)),
            (4, 1, 1),
            permutation_mnk=(64, 16, 16),
        )
        swizzle = cute.make_swizzle(3, 3, 3)
        rows = cute.make_composed_layout(swizzle, 0, cute.make_layout((64, 64), stride=(64, 1)))
        columns = cute.make_composed_layout(swizzle, 0, cute.make_layout((64, 64), stride=(1, 64)))
        sB_layout = rows if cutlass.const_expr(self.b_k_major) else columns
        self.kernel(mma, a, b, d, rows, sB_layout).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    def copy_in(self, g: cute.Tensor, s: cute.Tensor, thread: cutlass.Int32, row_major: bool):
        """global (64, 64) -> shared, 16 bytes a thread and step."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), g.element_type, num_bits_per_copy=128)
        threads = cute.make_layout((16, 8), stride=(8, 1) if row_major else (1, 16))
        values = cute.make_layout((1, 8))
        if not row_major:
            threads, values = cute.make_layout((8, 16)), cute.make_layout((8, 1))
        part = cute.make_tiled_copy_tv(atom, threads, values).get_slice(thread)
        cute.copy(atom, part.partition_S(g), part.partition_D(s))

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.utils.SmemAllocator()
        sA = smem.allocate_tensor(mA.element_type, sA_layout, 1024)
        sB = smem.allocate_tensor(mB.element_type, sB_layout, 1024)
        self.copy_in(mA, sA, thread, True)
        self.copy_in(mB, sB, thread, self.b_k_major)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        part = mma.get_slice(thread)
        tDrA = mma.make_fragment_A(part.partition_A(sA))
        tDrB = mma.make_fragment_B(part.partition_B(sB))
        tDrD = cute.make_rmem_tensor(part.partition_shape_C((M, N)), mD.element_type)
        tDrD.fill(0.0)
        for tile, fragment, make, transposed in (
            (sA, tDrA, cute.make_tiled_copy_A, False),
            (sB, tDrB, cute.make_tiled_copy_B, not self.b_k_major),
        ):
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), mA.element_type)
            load = make(atom, mma).get_slice(thread)
            cute.copy(atom, load.partition_S(tile), load.retile(fragment))
        cute.gemm(mma, tDrD, tDrA, tDrB, tDrD)
        if cutlass.const_expr(not self.store_matrix):
            cute.autovec_copy(tDrD, part.partition_C(mD))
        else:
            rounded = cute.make_rmem_tensor_like(tDrD, mA.element_type)
            rounded.store(tDrD.load().to(mA.element_type))
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), mA.element_type)
            store = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
            cute.arch.sync_threads()
            cute.copy(atom, store.retile(rounded), store.partition_D(sA))
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(M * N // THREADS):
                element = i * THREADS + thread
                row, column = element // N, element % N
                mD[row, column] = sA[row, column].to(cutlass.Float32)


class MmaSyncTf32:
    """One tile in float32, read as tf32; every thread loads its fragments from global memory."""

    def __init__(self, depth: int):
        self.depth = depth  # k of one instruction: 4 or 8

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        mma = cute.make_tiled_mma(warp.MmaTF32Op((16, 8, self.depth)), (4, 1, 1))
        self.kernel(mma, a, b, d).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        part = mma.get_slice(thread)
        tDgA, tDgB, tDgD = part.partition_A(mA), part.partition_B(mB), part.partition_C(mD)
        tDrA = cute.make_rmem_tensor(tDgA.shape, cutlass.Float32)
        tDrB = cute.make_rmem_tensor(tDgB.shape, cutlass.Float32)
        tDrD = cute.make_rmem_tensor(tDgD.shape, cutlass.Float32)
        cute.autovec_copy(tDgA, tDrA)
        cute.autovec_copy(tDgB, tDrB)
        tDrD.fill(0.0)
        tDrA = cute.recast_tensor(tDrA, cutlass.TFloat32)
        tDrB = cute.recast_tensor(tDrB, cutlass.TFloat32)
        cute.gemm(mma, tDrD, tDrA, tDrB, tDrD)
        cute.autovec_copy(tDrD, tDgD)


def arguments(dtype: Any, b_k_major: bool, d_type: Any = cutlass.Float32) -> list[Any]:
    """Tensors to trace with: A (m, k), B (n, k), D (m, n)."""
    kinds = ((dtype, (1, 0)), (dtype, (1, 0) if b_k_major else (0, 1)), (d_type, (1, 0)))
    return [
        cute.runtime.make_fake_compact_tensor(t, (64, 64), stride_order=o, assumed_align=16)
        for t, o in kinds
    ]
