"""A warpgroup's fragments, and the five multiplies between them and shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from tilewright.kernels.blocks.carried import Unchanged
from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3_backward.load import transposed
from tilewright.kernels.sm90.fa3_backward.operands import Shared, Tile
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec, padded_start

FRAGMENT = 4  # floats of an octet of columns that a thread holds, and adds to dQ at once
FRAGMENT_BYTES = 4 * FRAGMENT
OCTET_BYTES = 128 * FRAGMENT_BYTES  # of 64 rows


def make_mmas(spec: BackwardSpec, dtype: Any) -> tuple[Any, ...]:
    """Those of S and dP, whose rows are keys, of dV and dK, and of dQ, whose rows are queries."""
    K, MN = matmul.K_MAJOR, matmul.MN_MAJOR
    return (
        matmul.make_mma(dtype, spec.tile_q, K, spec.keys_in_registers),
        matmul.make_mma(dtype, spec.head_dim_v, MN, a_in_registers=True),
        matmul.make_mma(dtype, spec.head_dim, MN, a_in_registers=True),
        matmul.make_mma(dtype, spec.dq_columns, MN, a_in_registers=False, a_layout=MN),
    )


class Piece(NamedTuple):
    """What is added of a dQ at one place of a step: parts `begin` to `end` of `parts`."""

    begin: int
    end: int
    parts: int

    @property
    def is_first(self) -> bool:
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.parts

    def of(self, octets: int) -> range:
        return range(octets * self.begin // self.parts, octets * self.end // self.parts)


WHOLE = Piece(0, 1, 1)


class Registers(Unchanged):
    """Of warpgroup `w`, which owns 64 keys of the tile; `thread` counts inside it."""

    def __init__(self, spec: BackwardSpec, sm: Shared, mmas: Any, thread: Int32, w: Int32):
        self.spec, self.thread, self.w = spec, thread, w
        self.first_key = w * matmul.ROWS
        self.first_octet = w * (spec.dq_columns // 8) if spec.tile_q == matmul.ROWS else 0
        self.mma_S, self.mma_dV, self.mma_dK, self.mma_dQ = mmas
        part_S, part_dV, part_dK, part_dQ = (mma.get_slice(thread) for mma in mmas)
        sK, sV = (
            cute.local_tile(x, (matmul.ROWS, dim, stages), (w, 0, 0))
            for x, dim, stages in (
                (sm.sK, spec.head_dim, spec.k_stages),
                (sm.sV, spec.head_dim_v, 1),
            )
        )
        self.sK, self.sV = sK, sV
        sK_first = sK[None, None, 0] if spec.keys_in_registers else sK
        self.tSrK = self.mma_S.make_fragment_A(part_S.partition_A(sK_first))
        self.tSrQ = self.mma_S.make_fragment_B(part_S.partition_B(sm.sQ))
        self.tPrV = self.mma_S.make_fragment_A(part_S.partition_A(sV[None, None, 0]))
        self.tPrdO = self.mma_S.make_fragment_B(part_S.partition_B(sm.sdO))
        self.tVrdO = self.mma_dV.make_fragment_B(part_dV.partition_B(transposed(sm.sdO)))
        self.tKrQ = self.mma_dK.make_fragment_B(part_dK.partition_B(transposed(sm.sQ)))
        sdS, sKt = transposed(sm.sdS), transposed(sm.sK)  # (q, kv, slot), (d, kv, slot)
        # A warpgroup's part of dQ: 64 rows, or some columns where there are no more rows.
        if spec.tile_q == matmul.ROWS:
            tile = spec.dq_columns, spec.tile_kv, spec.k_stages
            sKt = cute.local_tile(sKt, tile, (w, 0, 0))
        else:
            sdS = cute.local_tile(sdS, (matmul.ROWS, spec.tile_kv, spec.ds_slots), (w, 0, 0))
        self.tQrdS = self.mma_dQ.make_fragment_A(part_dQ.partition_A(sdS))
        self.tQrK = self.mma_dQ.make_fragment_B(part_dQ.partition_B(sKt))
        self.shape_S = self.mma_S.partition_shape_C((matmul.ROWS, spec.tile_q))
        dV, dK, dQ = (
            cute.make_rmem_tensor(mma.partition_shape_C((matmul.ROWS, columns)), Float32)
            for mma, columns in (
                (self.mma_dV, spec.head_dim_v),
                (self.mma_dK, spec.head_dim),
                (self.mma_dQ, spec.dq_columns),
            )
        )
        self.acc_dV, self.acc_dK, self.acc_dQ = dV, dK, dQ
        dtype = sm.sQ.element_type
        self.rP, self.rdS = (cute.make_rmem_tensor(self.shape_S, dtype) for _ in range(2))
        self.tVrP, self.tKrdS = matmul.as_operand_A(self.rP), matmul.as_operand_A(self.rdS)
        store_dS = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        self.store_dS = store_dS
        self.part_store = cute.make_tiled_copy_C(store_dS, self.mma_S).get_slice(thread)
        self.sdS = cute.local_tile(sm.sdS, (matmul.ROWS, spec.tile_q, spec.ds_slots), (w, 0, 0))

    def begin_tile(self, tile: Tile, k_slot: Any) -> None:
        """Keep what a tile's steps have in common: its K's slot, and where dQ's sums begin."""
        self.k_slot = k_slot
        if self.spec.packed:
            # One number for two: registers are few.
            self.first_unit = padded_start(tile.q_start, tile.batch) // matmul.ROWS

    def read_keys(self) -> None:
        """smem K and V -> registers, where the multiplies take them from there."""
        for sX, rX in (
            (self.sK[None, None, self.k_slot], self.tSrK),
            (self.sV[None, None, 0], self.tPrV),
        ):
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), sX.element_type)
            part = cute.make_tiled_copy_A(atom, self.mma_S).get_slice(self.thread)
            cute.copy(atom, part.partition_S(sX), part.retile(rX))

    def multiply_S(self, slot: Int32) -> cute.Tensor:
        """The accumulator of S^T = K Q^T."""
        A = self.tSrK
        if not self.spec.keys_in_registers:
            A = A[None, None, None, self.k_slot]
        return self._multiply_queries(A, self.tSrQ, slot)

    def multiply_dP(self, slot: Int32) -> cute.Tensor:
        """The accumulator of dP^T = V dO^T."""
        return self._multiply_queries(self.tPrV, self.tPrdO, slot)

    def _multiply_queries(self, A: cute.Tensor, B: cute.Tensor, slot: Int32) -> cute.Tensor:
        acc = zeros(self.shape_S)
        matmul.gemm(self.mma_S, acc, A, B[None, None, None, slot], accumulate=False)
        return acc

    def multiply_dV(self, slot: Int32) -> None:
        # dV += P^T dO
        B = self.tVrdO[None, None, None, slot]
        matmul.gemm(self.mma_dV, self.acc_dV, self.tVrP, B, accumulate=True)

    def multiply_dK(self, slot: Int32) -> None:
        # dK += dS^T Q
        B = self.tKrQ[None, None, None, slot]
        matmul.gemm(self.mma_dK, self.acc_dK, self.tKrdS, B, accumulate=True)

    def multiply_dQ(self, slot: Int32) -> None:
        # dQ = dS K
        A = self.tQrdS[None, None, None, slot]
        self.acc_dQ.fill(0.0)  # as `zeros` says
        matmul.gemm(
            self.mma_dQ, self.acc_dQ, A, self.tQrK[None, None, None, self.k_slot], accumulate=False
        )

    def write_dS(self, slot: Int32) -> None:
        """registers dS^T -> smem dS, where the multiply that makes dQ reads all keys' part."""
        sdS = self.part_store.partition_D(self.sdS[None, None, slot])
        cute.copy(self.store_dS, self.part_store.retile(self.rdS), sdS)

    def numbers(self, sX: cute.Tensor, slot: Int32) -> cute.Tensor:
        """A number for each of this thread's columns, which are queries."""
        lane = self.thread % matmul.ROW_LANES
        pairs = cute.local_tile(sX[None, slot], (2,), (None,))  # (2, pair)
        octets = self.spec.tile_q // 8
        held = cute.make_rmem_tensor((2, octets), Float32)
        for i in range(octets):
            cute.autovec_copy(pairs[None, matmul.ROW_LANES * i + lane], held[None, i])
        return cute.make_tensor(held.iterator, cute.make_layout(2 * octets))

    def add_dQ(self, sums: Int64, piece: Piece) -> None:
        """registers -> gmem, added to what is there, from the address `sums` on."""
        add_fragments(self.acc_dQ, sums, piece)


def zeros(shape: Any) -> cute.Tensor:
    """An accumulator that is not accumulated to. To the assembler, a multiply reads it even so:
    were it not set, its registers would be held from each step to the next. No zero is moved."""
    acc = cute.make_rmem_tensor(shape, Float32)
    acc.fill(0.0)
    return acc


def add_fragments(acc: cute.Tensor, sums: Int64, piece: Piece) -> None:
    """A piece of an accumulator's octets, added to those from the address `sums` on.

    By the warps themselves: through the copy engine the same bytes would pass shared memory
    twice more, which is what this kernel has least of.
    """
    for i in piece.of(cute.size(acc) // FRAGMENT):
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}} + {OCTET_BYTES * i}], "
            "{{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[sums, *(acc[FRAGMENT * i + e] for e in range(FRAGMENT))],
        )
