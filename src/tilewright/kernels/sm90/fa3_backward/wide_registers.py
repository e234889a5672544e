"""A warpgroup's fragments where one holds dV of 64 keys, and another their dK; a cluster of two."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from tilewright.kernels.blocks.arithmetic import fma
from tilewright.kernels.blocks.carried import Unchanged
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3_backward.load import transposed
from tilewright.kernels.sm90.fa3_backward.operands import Shared
from tilewright.kernels.sm90.fa3_backward.registers import (
    OCTET_BYTES,
    Piece,
    Registers,
    add_fragments,
    zeros,
)
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec

# P goes from one warpgroup to the other in float16, whatever the dtype is. So scaled it has 11 bits
# down to 2^-26, and some to 2^-36; and where scores are so large that lse is far off, it may be 15.
P_SCALE = 2.0**12
WARP_ROWS = 16  # of P and dS, a warp's; the two lie in the same bytes
VECTOR = 8  # float16 numbers that a thread stores at once


def dq_columns(spec: BackwardSpec, w: int, rank: Int32) -> tuple[int, Int32]:
    """A warpgroup's columns of dQ, and the first of them.

    The CTA of rank 0 has the first half. A multiply of few columns costs much, since each reads dS,
    and shared memory swizzles 64 columns together: so 96 are 64 and 32.
    """
    if spec.head_dim == 256:
        return 64, 128 * rank + 64 * w
    return (32, 64 + 32 * rank) if w else (64, 128 * rank)


class WideRegisters(Registers):
    """Of warpgroup 0, which makes S, P and dV, or 1, which makes dP, dS and dK.

    Both have the same multiplies: of keys by queries, of what was made of that by queries, which is
    summed up in `acc`, and some of the columns of dQ. `w` is known when the kernel is traced.
    """

    def __init__(
        self, spec: BackwardSpec, sm: Shared, mmas: Any, thread: Int32, w: int, rank: Int32
    ):
        self.spec, self.thread, self.w = spec, thread, w
        self.first_key, self.first_octet = 0, 0
        self.mma_S, mma_dV, mma_dK = mmas[:3]
        self.mma_sum = mma_dK if w else mma_dV
        part_S, part_sum = (mma.get_slice(thread) for mma in (self.mma_S, self.mma_sum))
        sA, sB, sSum = (sm.sV, sm.sdO, sm.sQ) if w else (sm.sK, sm.sQ, sm.sdO)
        self.tSrA = self.mma_S.make_fragment_A(part_S.partition_A(sA[None, None, 0]))
        self.tSrB = self.mma_S.make_fragment_B(part_S.partition_B(sB))
        self.tSumrB = self.mma_sum.make_fragment_B(part_sum.partition_B(transposed(sSum)))
        self.shape_S = self.mma_S.partition_shape_C((matmul.ROWS, spec.tile_q))
        dim = spec.head_dim if w else spec.head_dim_v
        self.acc = cute.make_rmem_tensor(
            self.mma_sum.partition_shape_C((matmul.ROWS, dim)), Float32
        )
        self.acc_dV = self.acc_dK = self.acc  # whichever it is
        self.dQ = ColumnsOfdQ(spec, sm, thread, w, rank)
        self.peer = 1 - rank
        dtype = sm.sQ.element_type
        self.rP, self.rdS = (cute.make_rmem_tensor(self.shape_S, dtype) for _ in range(2))
        self.tSumrA = matmul.as_operand_A(self.rdS if w else self.rP)
        self.store_dS = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        self.part_store = cute.make_tiled_copy_C(self.store_dS, self.mma_S).get_slice(thread)
        self.sdS = sm.sdS
        self.sPeerdS = sm.sPeerdS
        # (8, vector, slot): a warp's 16-byte accesses lie side by side, so without conflicts, and
        # where its rows of dS are. What a warp has read it may overwrite.
        shape = VECTOR, (32, matmul.ROWS // WARP_ROWS), spec.tile_q // 16, spec.ds_slots
        warp_size, size = WARP_ROWS * spec.tile_q, matmul.ROWS * spec.tile_q
        p = cute.make_layout(shape, stride=(1, (VECTOR, warp_size), 32 * VECTOR, size))
        p = cute.make_tensor(cute.recast_ptr(sm.sdS.iterator, swizzle_=None, dtype=Float16), p)
        self.sP = p[None, thread, None, None]

    def multiply_pairs(self, slot: Int32) -> cute.Tensor:
        """The accumulator of S^T = K Q^T, or of dP^T = V dO^T."""
        acc, B = zeros(self.shape_S), self.tSrB[None, None, None, slot]
        matmul.gemm(self.mma_S, acc, self.tSrA, B, accumulate=False)
        return acc

    def multiply_sum(self, slot: Int32) -> None:
        # dV += P^T dO, or dK += dS^T Q
        B = self.tSumrB[None, None, None, slot]
        matmul.gemm(self.mma_sum, self.acc, self.tSumrA, B, accumulate=True)

    def add_dQ(self, sums: Int64, piece: Piece) -> None:
        add_fragments(self.dQ.acc, sums + Int64(self.dQ.first) * (OCTET_BYTES // 8), piece)

    def pack_P(self, acc: cute.Tensor) -> cute.Tensor:
        """P, an accumulator, as it goes to the other warpgroup."""
        packed = cute.make_rmem_tensor(acc.layout, Float16)
        packed.store((acc.load() * P_SCALE).to(Float16))
        return packed

    def write_P(self, packed: cute.Tensor, slot: Int32) -> None:
        """registers -> smem."""
        for i in range(cute.size(packed) // VECTOR):
            cute.autovec_copy(_vectors(packed)[None, i], self.sP[None, i, slot])

    def make_dS(self, acc: cute.Tensor, slot: Int32, sDelta: cute.Tensor, slot_dO: Int32) -> None:
        """dP -> dS, in place, with P from smem; two octets at a time, to save registers."""
        lane = self.thread % matmul.ROW_LANES
        pairs = cute.local_tile(sDelta[None, slot_dO], (2,), (None,))  # (2, pair)
        for i in range(cute.size(acc) // VECTOR):
            packed = cute.make_rmem_tensor(VECTOR, Float16)
            cute.autovec_copy(self.sP[None, i, slot], packed)
            P = cute.make_rmem_tensor(VECTOR, Float32)
            P.store(packed.load().to(Float32))
            delta = cute.make_rmem_tensor((2, 2), Float32)
            for half in range(2):
                octet = 2 * i + half
                cute.autovec_copy(pairs[None, matmul.ROW_LANES * octet + lane], delta[None, half])
            dP = _vectors(acc)[None, i]
            for e in range(VECTOR):
                unscaled = delta[e % 2, e // 4] * (-1 / P_SCALE)
                dP[e] = P[e] * fma(dP[e], 1 / P_SCALE, unscaled)

    @property
    def sent_bytes(self) -> int:
        """Of dS, by one warp."""
        return 2 * WARP_ROWS * self.spec.tile_q

    def send_dS(self, slot: Int32, barrier: cute.Pointer) -> None:
        """This warp's rows of dS, once they are written, to the other CTA, whose `barrier` counts
        them. By one thread."""
        # The DSL has a copy for this, which does not find the other CTA's barrier.
        row = slot * matmul.ROWS + self.thread // 32 * WARP_ROWS
        source, target = (
            cute.recast_ptr(x.iterator, swizzle_=None) + row * self.spec.tile_q
            for x in (self.sdS, self.sPeerdS)
        )
        target, barrier = (cute.arch.map_dsmem_ptr(x, self.peer) for x in (target, barrier))
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            f"[{{$r0}}], [{{$r1}}], {self.sent_bytes}, [{{$r2}}];",
            read_only_args=[x.toint() for x in (target, source, barrier)],
        )


class ColumnsOfdQ(Unchanged):
    """Some columns of dQ, of the keys of both CTAs."""

    def __init__(self, spec: BackwardSpec, sm: Shared, thread: Int32, w: int, rank: Int32):
        MN = matmul.MN_MAJOR
        columns, self.first = dq_columns(spec, w, rank)
        self.mma = matmul.make_mma(
            sm.sK.element_type, columns, MN, a_in_registers=False, a_layout=MN
        )
        part = self.mma.get_slice(thread)
        self.pairs = []
        for sdS, sK, first in (
            (sm.sdS, sm.sK, self.first),
            (sm.sPeerdS, sm.sPeerK, self.first - spec.first_peer_column(rank)),
        ):
            sKt = transposed(sK)[None, None, 0]  # (d, kv)
            sKt = cute.local_tile(sKt, (columns, spec.tile_kv), (first // columns, 0))
            A = self.mma.make_fragment_A(part.partition_A(transposed(sdS)))
            B = self.mma.make_fragment_B(part.partition_B(sKt))
            self.pairs.append((A, B))
        self.shape = self.mma.partition_shape_C((matmul.ROWS, columns))
        self.acc = cute.make_rmem_tensor(self.shape, Float32)  # of the last step

    def multiply(self, slot: Int32) -> None:
        # dQ = dS K
        self.acc.fill(0.0)  # as `zeros` says
        pairs = [(A[None, None, None, slot], B) for A, B in self.pairs]
        matmul.gemm_sum(self.mma, self.acc, pairs, accumulate=False)


def _vectors(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as (8, vector): two octets of columns, four numbers of each."""
    return cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, cute.size(acc) // VECTOR)))
