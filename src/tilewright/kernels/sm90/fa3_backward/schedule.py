"""Which tile of keys is next: the forward's scheduler, with queries and keys in changed places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from tilewright.kernels.sm90.fa3 import schedule as forward
from tilewright.kernels.sm90.fa3.operands import Lengths
from tilewright.kernels.sm90.fa3_backward.operands import (
    Channels,
    Operands,
    Shared,
    begins_together,
)
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec


@dataclass(frozen=True)
class Order:
    """What the scheduler asks of a spec: `tile_q` are the rows that a tile has, so its keys."""

    packed: bool
    bounded_right: bool
    tile_q: int
    head_dim: int
    head_dim_v: int
    longest_first: Any  # bool or Boolean: the last keys first
    tiles_per_cta: int
    cluster: int
    dynamic: bool = True


@dataclass(frozen=True)
class Sides:
    """What the scheduler asks of operands, `q` being keys and `k` queries."""

    mCounter: cute.Tensor
    lengths: Any
    batch: Int32
    heads_q: Int32
    heads_k: Int32
    seqlen_q: Int32
    seqlen_k: Int32


def order(spec: BackwardSpec, op: Operands) -> Order:
    # Of a query, Q and dO are read and the sums of dQ, in float32, are added to. A section has
    # tiles for all CTAs, and no more: those of one head are at work together, for the sake of L2.
    #
    # The first keys are those that most queries see. But sums in a fixed order go from the last
    # keys to the first: so none waits for one that began with it and reaches the block later. Where
    # tiles begin with the same block, the first keys may be first.
    last_first: Any = spec.bounded_left and not spec.bounded_right
    if spec.deterministic:
        last_first = cutlass.select_(begins_together(spec, op), Boolean(False), Boolean(True))
    return Order(
        spec.packed,
        spec.bounded_right or spec.deterministic,
        spec.tile_kv,
        3 * spec.head_dim,
        spec.head_dim_v,
        longest_first=last_first,
        tiles_per_cta=1,
        cluster=spec.cluster,
    )


@cute.jit
def schedule(spec: Constexpr, op: Operands, sm: Shared, ch: Channels):
    """counter in gmem -> tiles in smem. One warp."""
    lengths = None
    if const_expr(spec.packed):
        given = op.lengths
        used = (given.used & 1) << 1 | (given.used & 2) >> 1
        lengths = Lengths(
            given.cu_seqlens_k, given.cu_seqlens_q, given.seqused_k, given.seqused_q, used
        )
    sides = Sides(op.mCounter, lengths, op.batch, op.heads_k, op.heads_k, op.seqlen_k, op.seqlen_q)
    forward.schedule(order(spec, op), sides, sm, ch)
