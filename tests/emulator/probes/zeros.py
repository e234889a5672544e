"""Sets a tensor that is named as an attention kernel names its log-sum-exp to zero."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute


class Zeros:
    """One CTA for each batch and head, one thread for each row."""

    @cute.jit
    def __call__(self, mLSE: cute.Tensor):
        batch, heads, length = mLSE.shape
        self.kernel(mLSE).launch(grid=(batch, heads, 1), block=(length, 1, 1))

    @cute.kernel
    def kernel(self, mLSE: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        batch, head, _ = cute.arch.block_idx()
        mLSE[batch, head, thread] = cutlass.Float32(0.0)


def arguments() -> list[Any]:
    """A tensor to trace with: (1, 1, 128)."""
    return [
        cute.runtime.make_fake_compact_tensor(
            cutlass.Float32, (1, 1, 128), stride_order=(2, 1, 0), assumed_align=16
        )
    ]
