"""The probes with inputs and exact results. Operands are small integers, so sums are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import ml_dtypes
import numpy as np

from tests.emulator.probes import (
    cluster_exchange,
    mma_sync,
    ring,
    tcgen05,
    tcgen05_cp,
    tma_copy,
    wgmma,
    wgmma_tf32,
)

NUMPY = {
    cutlass.Uint8: np.uint8,
    cutlass.Float16: np.float16,
    cutlass.Float32: np.float32,
    cutlass.Int64: np.int64,
    cutlass.BFloat16: ml_dtypes.bfloat16,
    cutlass.Float8E4M3FN: ml_dtypes.float8_e4m3fn,
    cutlass.Float8E5M2: ml_dtypes.float8_e5m2,
}
F16, BF16, E4M3, E5M2 = (
    cutlass.Float16,
    cutlass.BFloat16,
    cutlass.Float8E4M3FN,
    cutlass.Float8E5M2,
)


@dataclass(frozen=True)
class Case:
    """`build` gives the function and what to trace it with; `tensors` its arguments, of which the
    last `outputs` are written; `expected` what they must hold."""

    name: str
    archs: tuple[str, ...]
    build: Callable[[], tuple[Any, list[Any]]]
    tensors: Callable[[], list[np.ndarray]]
    expected: Callable[..., list[np.ndarray]]
    outputs: int = 1


def _integers(
    shape: tuple[int, ...], dtype: Any, row_major: bool = True, seed: int = 0
) -> np.ndarray:
    values = np.random.default_rng(seed).integers(-3, 4, shape if row_major else shape[::-1])
    return (values if row_major else values.T).astype(dtype)


def _product(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    return [a.astype(np.float32) @ b.astype(np.float32).T]


def _gemm(
    name: str,
    archs: tuple[str, ...],
    probe: Any,
    a_type: Any,
    b_type: Any,
    tile: tuple[int, int, int],
    majors: str,
    d_type: Any = cutlass.Float32,
) -> Case:
    m, n, k = tile
    a_major, b_major = (c == "k" for c in majors)
    return Case(
        name,
        archs,
        lambda: (probe(), wgmma.arguments(a_type, b_type, tile, a_major, b_major, d_type)),
        lambda: [
            _integers((m, k), NUMPY[a_type], a_major),
            _integers((n, k), NUMPY[b_type], b_major),
            np.full((m, n), np.nan, NUMPY[d_type]),
        ],
        lambda a, b: [_product(a, b)[0].astype(NUMPY[d_type])],
    )


def _tma(dtype: Any, span: int, columns: int) -> Case:
    shape, kind = (40, columns + 16), NUMPY[dtype]  # boxes of 16 x columns reach over both edges

    def tensors() -> list[np.ndarray]:
        values = np.random.default_rng(0).integers(0, 100, shape).astype(kind)
        return [values, np.zeros(shape, kind), np.zeros(shape, kind)]

    return Case(
        f"tma {dtype.__name__} swizzle {span}",
        ("sm_90a", "sm_100a"),
        lambda: (tma_copy.TmaCopy((16, columns), span), tma_copy.arguments(dtype, shape)),
        tensors,
        lambda source: [source, source],
        outputs=2,
    )


def _mma_sync(
    arch: str, dtype: Any, b_k_major: bool, store_matrix: bool, d_type: Any = cutlass.Float32
) -> Case:
    name = f"mma.sync {dtype.__name__} {'k' if b_k_major else 'n'} {'stmatrix' * store_matrix}"
    if d_type is not cutlass.Float32:
        name += f"sums {d_type.__name__}"
    return Case(
        name,
        (arch,),
        lambda: (
            mma_sync.MmaSync(b_k_major, store_matrix),
            mma_sync.arguments(dtype, b_k_major, d_type),
        ),
        lambda: [
            _integers((64, 64), NUMPY[dtype]),
            _integers((64, 64), NUMPY[dtype], b_k_major),
            np.full((64, 64), np.nan, NUMPY[d_type]),
        ],
        lambda a, b: [_product(a, b)[0].astype(NUMPY[d_type])],
    )


def _tf32(name: str, arch: str, probe: Any, shape: tuple[int, int, int]) -> Case:
    """A product of float32 tensors that the instruction reads as tf32, both k contiguous."""
    m, n, k = shape
    return Case(
        name,
        (arch,),
        probe,
        lambda: [
            _integers((m, k), np.float32),
            _integers((n, k), np.float32, seed=1),
            np.full((m, n), np.nan, np.float32),
        ],
        _product,
    )


def _mma_sync_tf32(depth: int) -> Case:
    return _tf32(
        f"mma.sync tf32 k{depth}",
        "sm_80",
        lambda: (mma_sync.MmaSyncTf32(depth), mma_sync.arguments(cutlass.Float32, True)),
        (64, 64, 64),
    )


def _wgmma(
    a: Any,
    b: Any,
    tile: tuple[int, int, int],
    majors: str,
    registers: bool,
    d_type: Any = cutlass.Float32,
) -> Case:
    source = "RS" if registers else "SS"
    sums = "" if d_type is cutlass.Float32 else f" sums {d_type.__name__}"
    return _gemm(
        f"wgmma {source} {a.__name__} {b.__name__} {tile} {majors}{sums}",
        ("sm_90a",),
        lambda: wgmma.Wgmma(tile, registers),
        a,
        b,
        tile,
        majors,
        d_type,
    )


def _tcgen05(
    a: Any, b: Any, tile: tuple[int, int, int], majors: str, ctas: int, *shape: Any
) -> Case:
    """`shape` of the tensor-memory accesses, its repetition, and whether D is stored back first."""
    name = (
        f"tcgen05 {ctas} CTA {a.__name__} {b.__name__} {tile} {majors} {' '.join(map(str, shape))}"
    )
    return _gemm(
        name, ("sm_100a",), lambda: tcgen05.Tcgen05(tile, ctas, *shape), a, b, tile, majors
    )


# The row that each of the 128 lanes gets.
_CP_ROWS = {
    "128x256b": np.arange(128),
    "128x128b": np.arange(128),
    "64x128b.warpx2::02_13": np.tile(np.arange(64), 2),
    "64x128b.warpx2::01_23": np.r_[0:32, 0:32, 32:64, 32:64],
    "32x128b.warpx4": np.tile(np.arange(32), 4),
}


def _tcgen05_cp(shape: str, ctas: int) -> Case:
    probe = tcgen05_cp.Tcgen05Cp(shape, ctas)
    rows, columns, lanes = ctas * probe.rows, probe.columns, ctas * 128
    return Case(
        f"tcgen05.cp {shape} {ctas} CTA",
        ("sm_100a",),
        lambda: (tcgen05_cp.Tcgen05Cp(shape, ctas), tcgen05_cp.arguments(shape, ctas)),
        lambda: [
            np.arange(rows * columns, dtype=np.float32).reshape(rows, columns),
            np.full((lanes, columns), np.nan, np.float32),
        ],
        lambda source: [source.reshape(ctas, -1, columns)[:, _CP_ROWS[shape]].reshape(lanes, -1)],
    )


def _ring_sums(rows: np.ndarray) -> list[np.ndarray]:
    return [np.stack([rows[1::2].sum(0), rows[::2].sum(0)])]


CASES = [
    *(
        _tma(*case)
        for case in (
            (cutlass.Uint8, 128, 128),
            (F16, 128, 64),
            (cutlass.Float32, 128, 32),
            (cutlass.Int64, 128, 16),
            (F16, 64, 32),
            (cutlass.Float32, 64, 16),
            (cutlass.Uint8, 32, 32),
            (F16, 32, 16),
            (F16, 0, 32),
        )
    ),
    _mma_sync("sm_80", F16, True, False),
    _mma_sync("sm_80", BF16, False, False),
    _mma_sync("sm_90a", F16, True, True),
    _mma_sync("sm_80", F16, True, False, F16),
    _mma_sync_tf32(4),
    _mma_sync_tf32(8),
    _wgmma(F16, F16, (64, 64, 64), "kk", False),
    _wgmma(BF16, BF16, (128, 128, 64), "kn", False),
    _wgmma(BF16, BF16, (128, 96, 32), "mk", False),
    _wgmma(F16, F16, (64, 64, 64), "mn", False),
    _wgmma(F16, F16, (64, 64, 64), "kk", True),
    _wgmma(BF16, BF16, (64, 256, 64), "kn", True),
    _wgmma(E4M3, E5M2, (64, 64, 128), "kk", False),
    _wgmma(E5M2, E4M3, (64, 32, 64), "kk", True),
    _wgmma(F16, F16, (64, 64, 64), "kk", False, F16),
    _wgmma(F16, F16, (128, 32, 64), "kn", True, F16),
    _wgmma(E4M3, E5M2, (64, 64, 128), "kk", False, F16),
    _tf32(
        "wgmma SS tf32 kk",
        "sm_90a",
        lambda: (wgmma_tf32.WgmmaTf32(), wgmma_tf32.arguments()),
        (wgmma_tf32.M, wgmma_tf32.N, wgmma_tf32.K),
    ),
    Case(
        "ring",
        ("sm_90a", "sm_100a"),
        lambda: (ring.Ring(), ring.arguments(10)),
        lambda: [_integers((10, ring.ROW), np.float32), np.full((2, ring.ROW), np.nan, np.float32)],
        _ring_sums,
    ),
    Case(
        "cluster exchange",
        ("sm_90a", "sm_100a"),
        lambda: (cluster_exchange.ClusterExchange(), cluster_exchange.arguments()),
        lambda: [_integers((4, 64), np.int32), np.zeros((4, 64), np.int32)],
        lambda source: [np.roll(source, 1, 0) + source[0]],
    ),
    _tcgen05(F16, F16, (128, 64, 64), "kk", 1),
    _tcgen05(BF16, BF16, (128, 128, 64), "mn", 1),
    _tcgen05(BF16, BF16, (256, 128, 64), "kk", 2),
    _tcgen05(BF16, BF16, (128, 64, 64), "kn", 2),
    _tcgen05(E4M3, E5M2, (128, 64, 128), "kk", 1),
    _tcgen05(cutlass.Float32, cutlass.Float32, (128, 64, 32), "kk", 1),  # as tf32
    _tcgen05(BF16, BF16, (64, 64, 64), "kk", 1, "16x256b", 8),
    _tcgen05(BF16, BF16, (64, 64, 64), "kk", 1, "16x32bx2", 8),
    _tcgen05(BF16, BF16, (64, 64, 64), "kk", 1, "16x32bx2", 4, True),
    _tcgen05(F16, F16, (128, 64, 64), "kk", 1, "16x64b", 8, True),
    _tcgen05(F16, F16, (128, 64, 64), "kk", 1, "16x128b", 4, True),
    _tcgen05(F16, F16, (128, 64, 64), "kk", 1, "16x256b", 2, True),
    _tcgen05(F16, F16, (128, 64, 64), "kk", 1, "32x32b", 8, True),
    *(_tcgen05_cp(shape, ctas) for shape in tcgen05_cp.SHAPES for ctas in (1, 2)),
]
