"""Emulated: 2^x by a polynomial, beside numpy's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the function is the DSL's")

import cutlass
import cutlass.cute as cute
import numpy as np

from tests.emulator import dsl
from tilewright.kernels.blocks.exp2 import exp2_by_polynomial

VALUES = 64


class Exp2:
    """y = 2^x, a thread an element."""

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor):
        self.kernel(mX, mY).launch(grid=(1, 1, 1), block=(VALUES, 1, 1))

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        mY[thread] = exp2_by_polynomial(mX[thread])


@pytest.fixture(scope="module")
def exp2() -> Any:
    dsl.use_arch("sm_90a")
    row = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (VALUES,), assumed_align=16)
    emulator = dsl.emulated("sm_90a", Exp2(), row, row)

    def call(x: np.ndarray) -> np.ndarray:
        y = np.full(VALUES, np.nan, np.float32)
        emulator(np.resize(x, VALUES).astype(np.float32), y)
        return y[: x.size]

    return call


def test_its_relative_error_is_that_of_its_coefficients(exp2: Any) -> None:
    x = np.linspace(-125.9, 126.9, VALUES).astype(np.float32)
    np.testing.assert_allclose(exp2(x), np.exp2(x.astype(np.float64)), rtol=8.9e-5)


def test_whole_numbers_are_exact_and_what_is_too_small_is_0(exp2: Any) -> None:
    x = np.array([0.0, 1.0, -1.0, 127.0, -126.0, -127.0, -1e9, -np.inf], np.float32)
    assert exp2(x).tolist() == [1.0, 2.0, 0.5, 2.0**127, 2.0**-126, 0.0, 0.0, 0.0]


def test_nan_stays_nan(exp2: Any) -> None:
    """Whatever its sign and payload."""
    bits = np.array([0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    assert np.isnan(exp2(bits.view(np.float32))).all()
