"""Scalar operations that must become one instruction each."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

TWO_LOG2_E = 2.8853900817779268


def fma(a: Any, b: Any, c: Any) -> Float32:
    return Float32(cute.math.fma(Float32(a), Float32(b), Float32(c)))


def fmax(a: Any, b: Any) -> Float32:
    """The larger one; a number where the other is NaN."""
    return Float32(cute.arch.fmax(a, b))


def exp2(x: Any) -> Float32:
    return Float32(cute.arch.exp2(x))


def reciprocal(x: Any) -> Float32:
    return Float32(cute.arch.rcp_approx(x))


def select(condition: Any, yes: Any, no: Any) -> Float32:
    return Float32(cutlass.select_(condition, Float32(yes), Float32(no)))


def tanh(x: Any) -> Float32:
    """Exact to a few 1e-7 of 1. The hardware's own tanh is wrong by 5e-4, which a softcap of 50
    would turn into 2 % of a probability."""
    return 1.0 - 2.0 * reciprocal(1.0 + exp2(Float32(x) * TWO_LOG2_E))


def add_rounded_down(x: Any, y: Any) -> Float32:
    return cute.arch.inline_ptx(
        "add.rm.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[Float32(x), Float32(y)],
    )
