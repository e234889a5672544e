"""What travels through the kernel together, and which queries a tile of keys visits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from tilewright.kernels.blocks.carried import Unchanged
from tilewright.kernels.blocks.ring import Ring
from tilewright.kernels.sm90.fa3.operands import TILE_WORDS, TmaOperand
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec

ALWAYS = 1 << 30  # past every query


@dataclass(frozen=True)
class Operands:
    q: TmaOperand  # (q, d, h[, b])
    k: TmaOperand  # (kv, d, h[, b])
    v: TmaOperand  # (kv, d, h[, b])
    dout: TmaOperand  # (q, d, h[, b])
    peer_k: Any  # K once more, some of whose columns the other CTA of a cluster needs
    mLSE: cute.Tensor  # (q, h[, b]), in log2; rows of the workspace
    mDelta: cute.Tensor  # (q, h[, b])
    mdQ: cute.Tensor  # (4, thread, octet, 64 rows, h[, b]), fragments
    mdK: cute.Tensor  # (kv, d, h[, b])
    mdV: cute.Tensor  # (kv, d, h[, b])
    mSpoilt: cute.Tensor  # (1): whether one of dK or dV is not finite
    mCounter: cute.Tensor  # (2): the next tile, the CTAs that are done
    mTurns: Any  # (q_block, h[, b]): the additions to dQ that were made, of a deterministic call
    lengths: Any  # fa3's Lengths of a packed call
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
    """Tiles in shared memory. Each of Q, K and dO is also read as its transpose."""

    sQ: cute.Tensor  # (q, d, stage)
    sdO: cute.Tensor  # (q, d, stage)
    sK: cute.Tensor  # (kv, d, slot)
    sV: cute.Tensor  # (kv, d, 1)
    sdS: cute.Tensor  # (kv, q, slot)
    sLSE: cute.Tensor  # (q, stage)
    sDelta: cute.Tensor  # (q, stage)
    sTile: cute.Tensor  # (word, slot)
    sPeerK: Any = None  # (kv, d, 1), some columns of the other CTA's K, of a cluster
    sPeerdS: Any = None  # (kv, q, 1), its dS


@dataclass(frozen=True)
class Channels:
    """One field a hand-off, named for its cargo."""

    tile: Ring  # schedule -> load, compute
    k: Ring  # load -> compute
    v: Ring
    q: Ring  # with lse
    do: Ring  # with delta
    turn: Ring  # take_turns -> compute: it may add, of a deterministic call
    added: Ring  # compute -> count_additions: it has added
    tail: Ring  # load -> load: a tile that needs its last rows zeroed
    ds: Ring  # those who make dS, of all CTAs of a cluster -> all
    p: Any = None  # the warpgroup that makes P -> the one that makes dS, of a wide kernel
    peer_k: Any = None  # load -> compute, of a cluster


@dataclass(frozen=True)
class Role(Unchanged):
    """What every warp works with."""

    spec: BackwardSpec
    op: Operands
    sm: Shared
    ch: Channels


@dataclass(frozen=True)
class Tile:
    """One tile of work, in registers: a block of keys, and all queries that see one of them.

    Its words are those of the forward's tile, whose scheduler hands it out: the two sides change
    places.
    """

    head: Int32  # of the keys
    batch: Int32
    kv_block: Int32  # negative: no work is left
    k_start: Int32  # where the sequence's rows begin in k and v
    k_rows: Int32  # that the sequence has there
    seqlen_k: Int32  # of them, those that are part of the problem
    q_start: Int32
    seqlen_q: Int32

    @classmethod
    def read(cls, sTile: cute.Tensor, slot: Int32) -> Tile:
        words = [sTile[word, slot] for word in range(TILE_WORDS)]
        return cls(*(cute.arch.make_warp_uniform(word) for word in words))


def query_limits(spec: Any, op: Operands, tile: Tile, key: Int32) -> tuple[Any, Any]:
    """The first query that sees a key, and the one past the last; None where there is no bound."""
    position = key + tile.seqlen_q - tile.seqlen_k
    first = position - op.window_right if spec.bounded_right else None
    past = position + op.window_left + 1 if spec.bounded_left else None
    return first, past


def query_blocks(spec: Any, op: Operands, tile: Tile) -> tuple[Int32, Int32]:
    """The first query block that a tile visits, and how many it does; or a cluster's tiles."""
    together = spec.cluster_keys
    key = tile.kv_block // spec.cluster * together
    first, _ = query_limits(spec, op, tile, key)
    _, past = query_limits(spec, op, tile, cutlass.min(key + together, tile.seqlen_k) - 1)
    first = Int32(0) if first is None else cutlass.max(first, 0)
    past = tile.seqlen_q if past is None else cutlass.min(past, tile.seqlen_q)
    begin = first // spec.tile_q
    count = (past + spec.tile_q - 1) // spec.tile_q - begin
    is_empty = (first >= past) | (key >= tile.seqlen_k)
    return begin, Int32(cutlass.select_(is_empty, Int32(0), count))


@dataclass(frozen=True)
class Sweep:
    """Which queries a tile of keys visits, and in which order.

    Where heads share keys, all heads of a block, then the next, from the last block to the first:
    tiles of the same keys' head begin with the same queries, whatever a mask hides of their first,
    and stay together, so that of Q, dO and the sums of dQ little is in use at a time. A left bound
    hides last queries too. There one head comes after the other, from the first block on: tiles
    have as many blocks as their neighbours, and so stay a few behind them in each head. One head is
    little by itself; there too each tile begins where the mask lets it, so that few add to one
    block at once.
    """

    head: Int32  # the group's first
    group: Int32  # how many heads it has
    begin: Int32  # the first block
    count: Int32  # of blocks
    descends: Boolean  # from the last block to the first

    @classmethod
    def of(cls, spec: Any, op: Operands, tile: Tile) -> Sweep:
        group = op.heads_q // op.heads_k
        blocks = query_blocks(spec, op, tile)
        return cls(tile.head * group, group, *blocks, begins_together(spec, op))

    @property
    def steps(self) -> Int32:
        return self.count * self.group

    def first(self) -> tuple[Int32, Int32]:
        """A head and a block."""
        last = self.begin + self.count - 1
        return self.head, Int32(cutlass.select_(self.descends, last, self.begin))

    def after(self, spec: Any, head: Int32, block: Int32) -> tuple[Int32, Int32]:
        """The head and the block that follow."""
        if spec.bounded_left:
            is_last = block + 1 == self.begin + self.count
            head = Int32(cutlass.select_(is_last, head + 1, head))
            return head, Int32(cutlass.select_(is_last, self.begin, block + 1))
        is_last = head + 1 == self.head + self.group
        following = Int32(cutlass.select_(self.descends, block - 1, block + 1))
        block = Int32(cutlass.select_(is_last, following, block))
        return Int32(cutlass.select_(is_last, self.head, head + 1)), block


def turn(spec: Any, op: Operands, tile: Tile, q_block: Int32) -> Int32:
    """How many tiles add to a query block's dQ before this one: those of later keys.

    Where tiles begin together, those of earlier ones: see `schedule.order`.
    """
    first_key, last_key = Int32(0), tile.seqlen_k - 1
    if spec.bounded_left:
        first = q_block * spec.tile_q + tile.seqlen_k - tile.seqlen_q
        first_key = cutlass.max(first - op.window_left, 0)
    if spec.bounded_right:
        last_query = cutlass.min((q_block + 1) * spec.tile_q, tile.seqlen_q) - 1
        position = last_query + tile.seqlen_k - tile.seqlen_q
        last_key = cutlass.min(position + op.window_right, last_key)
    mine, together = tile.kv_block // spec.cluster, spec.cluster_keys
    earlier, later = mine - first_key // together, last_key // together - mine
    # All tiles of a cluster count, each with its columns, and wait for all.
    return spec.cluster * Int32(cutlass.select_(begins_together(spec, op), earlier, later))


def begins_together(spec: Any, op: Operands) -> Boolean:
    """Whether all tiles of a head visit its last block of queries first."""
    return Boolean(False) if spec.bounded_left else op.heads_q != op.heads_k
