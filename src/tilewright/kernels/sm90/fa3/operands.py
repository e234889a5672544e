"""What travels through the kernel together: tensors with their copies, shared memory, channels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tilewright.kernels.blocks.carried import Unchanged
from tilewright.kernels.blocks.masking import Band
from tilewright.kernels.blocks.ring import Ring
from tilewright.kernels.sm90.fa3.spec import ForwardSpec


@dataclass(frozen=True)
class TmaOperand:
    """A tensor as a copy engine's coordinates, and the copy."""

    copy: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True)
class Lengths:
    """Where sequences lie in the packed layout."""

    cu_seqlens_q: cute.Tensor
    cu_seqlens_k: cute.Tensor
    seqused_q: cute.Tensor
    seqused_k: cute.Tensor
    used: Int32  # bit 0: seqused_q counts, bit 1: seqused_k does


@dataclass(frozen=True)
class Operands:
    q: TmaOperand  # (q, d, h[, b])
    k: TmaOperand  # (kv, d, h[, b])
    v: TmaOperand  # (d, kv, h[, b])
    mQ: cute.Tensor  # (q, d, h[, b])
    mK: cute.Tensor  # (kv, d, h[, b])
    mV: cute.Tensor  # (kv, d, h[, b])
    out: Any  # TmaOperand (q, d, h, b), where O is stored by TMA
    mO: cute.Tensor  # (q, d, h[, b])
    mLSE: cute.Tensor  # (q, h[, b])
    mSink: cute.Tensor  # (h)
    mCounter: cute.Tensor  # (2): the next tile, the CTAs that are done
    lengths: Any  # Lengths of a packed call
    scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    batch: Int32
    heads_q: Int32
    heads_k: Int32
    seqlen_q: Int32
    seqlen_k: Int32


@dataclass(frozen=True)
class Shared:
    """Tiles in shared memory."""

    sQ: cute.Tensor  # (64, d, warpgroup)
    sK: cute.Tensor  # (kv, d, stage)
    sV: cute.Tensor  # (d, kv, stage)
    sO: Any  # (64, d, warpgroup), where O is stored by TMA
    sTile: cute.Tensor  # (word, slot)


@dataclass(frozen=True)
class Channels:
    """One field a hand-off, named for its cargo."""

    tile: Ring  # schedule -> load, compute
    q: Ring  # load -> compute
    k: Ring
    v: Ring
    tail: Ring  # load -> load: a tile of V that needs its last rows zeroed


@dataclass(frozen=True)
class Role(Unchanged):
    """What every warp works with."""

    spec: ForwardSpec
    op: Operands
    sm: Shared
    ch: Channels


class Sync(IntEnum):
    """Named barriers. 0 is the whole CTA's."""

    TURN = 1  # and the next three: a warpgroup may issue its matrix multiplies
    OUT = 8  # and the next three: a warpgroup's O is written, or read


@dataclass(frozen=True)
class Tile:
    """One tile of work, in registers. Row numbers are the tensor's own."""

    head: Int32
    batch: Int32
    q_block: Int32  # negative: no work is left
    q_start: Int32  # where the sequence's rows begin in q and out
    q_rows: Int32  # that the sequence has there
    seqlen_q: Int32  # of them, those that are part of the problem
    k_start: Int32
    seqlen_k: Int32

    @classmethod
    def none(cls) -> Tile:
        zeros = [Int32(0)] * TILE_WORDS
        return cls(*zeros[:2], Int32(-LARGEST_CLUSTER), *zeros[3:])

    @classmethod
    def read(cls, sTile: cute.Tensor, slot: Int32) -> Tile:
        words = [sTile[word, slot] for word in range(TILE_WORDS)]
        return cls(*(cute.arch.make_warp_uniform(word) for word in words))

    def write(self, sTile: cute.Tensor, slot: Int32) -> None:
        for word, value in enumerate(vars(self).values()):
            sTile[word, slot] = value

    def send(self, sTile: cute.Tensor, slot: Int32, full: cute.Pointer, rank: int) -> None:
        """Write it in the CTA of that rank in the cluster; its bytes count at `full` there."""
        words = tuple(vars(self).values())
        for first in range(0, TILE_WORDS, 4):
            to = (sTile.iterator + sTile.layout((first, slot))).align(16)
            cute.arch.store_async_dsmem(to, words[first : first + 4], full, rank)


TILE_WORDS = len(fields(Tile))
LARGEST_CLUSTER = 2  # the block of no tile is so far below 0 that no rank makes it one


def band(spec: Any, op: Operands) -> Band:
    return Band(spec.bounded_left, spec.bounded_right, op.window_left, op.window_right)


def key_blocks(spec: Any, op: Operands, tile: Tile) -> tuple[Int32, Int32]:
    """The first key block that a tile visits and the one past the last.

    A tile that sees no key visits one block, all of it masked: every tile then goes the same way.
    """
    q_first = tile.q_block * spec.tile_q
    q_last = cutlass.min(q_first + spec.tile_q, tile.seqlen_q) - 1
    begin, end = band(spec, op).blocks(q_first, q_last, tile.seqlen_q, tile.seqlen_k, spec.tile_kv)
    return begin, cutlass.max(end, begin + 1)
