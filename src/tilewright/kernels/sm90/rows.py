"""Rows in memory, 16 bytes a lane: loaded in octets of columns, and stored from accumulators.

In an accumulator a quad of lanes holds an octet of columns of a row in pieces of two. Four octets
are exchanged in the quad, so that a lane stores one of them whole.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from tilewright.kernels.sm90 import matmul

VECTOR = 8  # elements of 16 bytes, an octet; 32 lanes hold a row of the largest head dim
QUAD = 4  # octets that a quad of lanes exchanges at a time


@cute.jit
def chunk(mX: cute.Tensor, row: Int32, i: Int32) -> cute.Tensor:
    """Eight elements of a row of gmem X (row, d), in float32; zeros past the head dim."""
    held = cute.make_rmem_tensor((1, VECTOR), mX.element_type)
    held.fill(0.0)
    if i < cute.size(mX, mode=[1]) // VECTOR:
        cute.autovec_copy(cute.local_tile(mX, (1, VECTOR), (row, i)), held)
    wide = cute.make_rmem_tensor(VECTOR, Float32)
    for c in cutlass.range_constexpr(VECTOR):
        wide[c] = held[0, c].to(Float32)
    return wide


@cute.jit
def store_chunk(acc: cute.Tensor, factor: Float32, mX: cute.Tensor, row: Int32, i: Int32):
    """The inverse of `chunk`, times a factor."""
    held = cute.make_rmem_tensor((1, VECTOR), mX.element_type)
    for c in cutlass.range_constexpr(VECTOR):
        held[0, c] = (acc[c] * factor).to(mX.element_type)
    if i < cute.size(mX, mode=[1]) // VECTOR:
        cute.autovec_copy(held, cute.local_tile(mX, (1, VECTOR), (row, i)))


@cute.jit
def store_row(words: cute.Tensor, r: Constexpr, mO: cute.Tensor, row: Int32, rows: Int32):
    """A thread's part of row `row`: words (column pair of (row, octet)) -> mO (q, d)."""
    quad_lane = cute.arch.lane_idx() % QUAD
    octets = cute.size(words) // matmul.THREAD_ROWS
    for group in cutlass.range_constexpr(octets // QUAD):
        held = cute.make_rmem_tensor((1, QUAD), Int32)
        for i in cutlass.range_constexpr(QUAD):
            held[0, i] = words[r + matmul.THREAD_ROWS * (QUAD * group + i)]
        transpose_quad(held, quad_lane)
        octet = QUAD * group + quad_lane
        if (row < rows) & (octet * VECTOR < cute.size(mO, mode=[1])):
            target = cute.local_tile(mO, (1, VECTOR), (row, octet))
            cute.autovec_copy(cute.recast_tensor(held, mO.element_type), target)


def transpose_quad(held: cute.Tensor, quad_lane: Int32) -> None:
    """Word i of lane j becomes word j of lane i, in each quad of lanes."""
    for step in (1, 2):
        is_upper = quad_lane & step != 0
        for i in (i for i in range(QUAD) if not i & step):
            low, high = held[0, i], held[0, i + step]
            sent = Int32(cutlass.select_(is_upper, low, high))
            got = cute.arch.shuffle_sync_bfly(sent, offset=step)
            held[0, i] = Int32(cutlass.select_(is_upper, got, low))
            held[0, i + step] = Int32(cutlass.select_(is_upper, high, got))
