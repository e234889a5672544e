"""D = A B^T by wgmma on tf32, of which the DSL has no operation: written in PTX."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

M, N, K = 64, 16, 32
THREADS = 128
SUMS = N // 2  # accumulators of a thread
ROW_GROUP = 1024  # bytes of 8 rows
SWIZZLE_128B = 1 << 62

_STEPS = "".join(
    f"""
    wgmma.mma_async.sync.aligned.m64n{N}k8.f32.tf32.tf32
        {{{", ".join(f"${i}" for i in range(SUMS))}}}, a, b, {"p" if step else "q"}, 1, 1;
    add.s64 a, a, 2; add.s64 b, b, 2;"""
    for step in range(K // 8)
)
_PTX = f"""{{
    .reg .pred p, q;
    .reg .b64 a, b;
    setp.eq.u32 p, 0, 0;
    setp.ne.u32 q, 0, 0;
    mov.b64 a, ${SUMS};
    mov.b64 b, ${SUMS + 1};
    wgmma.fence.sync.aligned;{_STEPS}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
}}"""


@dsl_user_op
def products(
    a: cutlass.Int64,
    b: cutlass.Int64,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> list[cutlass.Float32]:
    """The thread's accumulators, of tiles of 32 elements a row that two descriptors name."""
    found = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * SUMS),
        [x.ir_value(loc=loc, ip=ip) for x in (a, b)],
        _PTX,
        ",".join(["=f"] * SUMS + ["l", "l", "~{memory}"]),
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    sums = (llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip) for i in range(SUMS))
    return [cutlass.Float32(x) for x in sums]


class WgmmaTf32:
    """A (64, 32) and B (16, 32), k contiguous, in shared memory with a swizzle of 128 bytes."""

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        self.kernel(a, b, d).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    def place(
        self, g: cute.Tensor, rows: int, thread: cutlass.Int32, smem: cutlass.utils.SmemAllocator
    ) -> cute.Tensor:
        """Global (rows, 32) to shared memory."""
        layout = cute.make_layout((rows, K), stride=(K, 1))
        s = smem.allocate_tensor(cutlass.Float32, layout, 1024, swizzle=cute.make_swizzle(3, 4, 3))
        for i in range(rows * K // THREADS):
            element = i * THREADS + thread
            s[element // K, element % K] = g[element // K, element % K]
        return s

    def descriptor(self, s: cute.Tensor) -> cutlass.Int64:
        start = cutlass.Int64(s.iterator.toint()) >> 4
        return start | (ROW_GROUP >> 4) << 32 | SWIZZLE_128B

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.utils.SmemAllocator()
        sA, sB = self.place(mA, M, thread, smem), self.place(mB, N, thread, smem)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        sums = products(self.descriptor(sA), self.descriptor(sB))
        row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
        for i in cutlass.range_constexpr(SUMS):
            mD[row + 8 * (i // 2 % 2), column + 8 * (i // 4) + i % 2] = sums[i]


def arguments() -> list[Any]:
    """Tensors to trace with: A (m, k), B (n, k), D (m, n)."""
    return [
        cute.runtime.make_fake_compact_tensor(
            cutlass.Float32, shape, stride_order=(1, 0), assumed_align=16
        )
        for shape in ((M, K), (N, K), (M, N))
    ]
