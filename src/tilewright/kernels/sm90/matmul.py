"""Warpgroup matrix multiplies: the operands' layouts, and accumulators as (row, col) tiles."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.utils import LayoutEnum

K_MAJOR, MN_MAJOR = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
ROWS = 64  # of one warpgroup's multiply
THREAD_ROWS = 2  # of a tile that one thread holds pieces of
ROW_LANES = 4  # that share a row


def make_mma(
    dtype: Any,
    columns: int,
    b_layout: LayoutEnum,
    a_in_registers: bool,
    a_layout: LayoutEnum = K_MAJOR,
) -> Any:
    """D (64, columns) = A B by one warpgroup, in float32."""
    source = warpgroup.OperandSource
    return sm90.make_trivial_tiled_mma(
        dtype,
        dtype,
        a_layout.sm90_mma_major_mode(),
        b_layout.sm90_mma_major_mode(),
        Float32,
        (1, 1, 1),
        (ROWS, columns),
        source.RMEM if a_in_registers else source.SMEM,
    )


def rows_layout(dtype: Any, dim: int, stages: int) -> Any:
    """Shared memory of (64, dim, stage) rows, as A of a multiply or on their way out."""
    return sm90.make_smem_layout_a(K_MAJOR, (ROWS, 1, dim), dtype, stages)


def keys_layout(dtype: Any, tile_kv: int, dim: int, stages: int) -> Any:
    """Shared memory of (kv, dim, stage), as B of S = Q K^T."""
    return sm90.make_smem_layout_b(K_MAJOR, (ROWS, tile_kv, dim), dtype, stages)


def values_layout(dtype: Any, tile_kv: int, dim: int, stages: int) -> Any:
    """Shared memory of (dim, kv, stage), as B of O = P V."""
    return sm90.make_smem_layout_b(MN_MAJOR, (ROWS, dim, tile_kv), dtype, stages)


def gemm(mma: Any, acc: cute.Tensor, A: cute.Tensor, B: cute.Tensor, accumulate: bool) -> None:
    """Issue acc (+)= A B as one group of multiplies; `wait` tells when it is done."""
    gemm_sum(mma, acc, [(A, B)], accumulate)


def gemm_sum(
    mma: Any, acc: cute.Tensor, pairs: list[tuple[cute.Tensor, cute.Tensor]], accumulate: bool
) -> None:
    """The same for the sum of several A B."""
    # A fresh atom: the accumulate field is a value of the region that it was set in.
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for A, B in pairs:
        for k in range(cute.size(B, mode=[2])):
            cute.gemm(atom, acc, A[None, None, k], B[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def wait(groups_in_flight: int) -> None:
    warpgroup.wait_group(groups_in_flight)


def as_rows(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((col%2, row, col//8), 1, 1) as (row, col)."""
    pair, row, octet = acc.layout.shape[0]
    pair_stride, row_stride, octet_stride = acc.layout.stride[0]
    layout = cute.make_layout(
        (row, (pair, octet)), stride=(row_stride, (pair_stride, octet_stride))
    )
    return cute.make_tensor(acc.iterator, layout)


def columns_of_thread(columns: int) -> list[int]:
    """Columns of a thread's elements of a row, relative to its first, 2 * (lane % 4)."""
    return [8 * (i // 2) + i % 2 for i in range(columns // ROW_LANES)]


def elements_before(column: Int32) -> Int32:
    """How many of a thread's elements of a row lie before a column, relative to its first."""
    return (column >> 3) * 2 + cutlass.min(column & 7, 2)


def as_operand_A(acc: cute.Tensor) -> cute.Tensor:
    """A tile that was an accumulator, 16-bit by now, as A of the next multiply.

    The eight values of a thread in two neighbouring octets of columns are just those that the
    multiply wants of it in one step of 16, so no data moves.
    """
    pair, row, octet = acc.layout.shape[0]
    s_pair, s_row, s_octet = acc.layout.stride[0]
    layout = cute.make_layout(
        ((pair, row, 2), 1, octet // 2), stride=((s_pair, s_row, s_octet), 0, 2 * s_octet)
    )
    return cute.make_tensor(acc.iterator, layout)


def multiply_again(acc: cute.Tensor, rA: Any, sA: cute.Tensor, sB: cute.Tensor) -> None:
    """acc = A B^T once more, by one warp's own multiplies, out of step with its warpgroup.

    `acc`, and `rA` where A is in registers, are those of the warpgroup's multiply: per warp,
    mma.sync lays its fragments out in the same way. sA is this warp's 16 rows, (row, k); sB is
    (column, k).
    """
    dtype = sB.element_type
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))
    lane = cute.arch.lane_idx()
    part = mma.get_slice(lane)
    load_A = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype)
    load_B = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 2), dtype)
    copy_A = cute.make_tiled_copy_A(load_A, mma).get_slice(lane)
    copy_B = cute.make_tiled_copy_B(load_B, mma).get_slice(lane)
    (pair, row, octets), strides = acc.layout.shape[0], acc.layout.stride[0]
    tC_layout = cute.make_layout(((pair, row), 1, 1), stride=(strides[:2], 0, 0))
    acc.fill(0.0)
    for k in range(cute.size(sB, mode=[1]) // 16):
        if rA is None:
            sA_step = cute.local_tile(sA, (16, 16), (0, k))
            tA = mma.make_fragment_A(part.partition_A(sA_step))  # (v, 1, 1)
            cute.copy(load_A, copy_A.partition_S(sA_step), copy_A.retile(tA))
            tA = tA[None, None, 0]
        else:
            tA = rA[None, None, k]
        for n in range(octets):
            sB_step = cute.local_tile(sB, (8, 16), (n, k))
            tB = mma.make_fragment_B(part.partition_B(sB_step))  # (v, 1, 1)
            cute.copy(load_B, copy_B.partition_S(sB_step), copy_B.retile(tB))
            tC = cute.make_tensor(acc.iterator + n * strides[2], tC_layout)
            cute.gemm(mma, tC, tA, tB[None, None, 0], tC)
