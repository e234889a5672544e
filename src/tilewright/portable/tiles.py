"""What the tiled forward and backward pass share: lanes, the walk over tiles, masked products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.masks import Mask
from tilewright.problem import Scoring

TILE_Q = 256  # query rows a tile, over all the heads of a group together
TILE_KV = 512
# Logits alive at once. 2^19 float32 are 2 MiB, what one core's L2 holds on current servers: the
# tile is written by one product, walked a few times by the softmax, and read by the next product.
TILE_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Lanes:
    """Operands as independent lanes, one a batch entry and key-value head.

    q is (lane, group, row, dim), where a group holds the query heads that share a lane's keys, and
    is already multiplied by the scale. k and v are (lane, key, dim). All are in the dtype that the
    arithmetic runs in.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scoring: Scoring
    # Whether NaN or Inf may hide in the operands, so that masked weights must not meet them.
    may_be_spoilt: bool

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q.shape[2], self.k.shape[1]

    def slices(self) -> Iterator[slice]:
        """Slices of lanes that are worked on together so that their logits stay in cache."""
        group, rows, keys = self.q.shape[1], *self.lengths
        tile = group * min(rows, self.rows_a_tile) * min(keys, TILE_KV)
        step = max(1, TILE_ELEMENTS // tile)
        return (slice(first, first + step) for first in range(0, self.q.shape[0], step))

    @property
    def rows_a_tile(self) -> int:
        """Query rows a tile.

        Tiles of r rows visit r - 1 + w keys under a window of w, so that short windows want short
        tiles; products of fewer than 64 rows are slow.
        """
        mask, rows = self.scoring.mask, TILE_Q
        if mask.left is not None and mask.right is not None:
            rows = min(max(64, (mask.left + mask.right) // 2), TILE_Q)
        return max(16, rows // self.q.shape[1])

    def row_tiles(self) -> Iterator[range]:
        return blocks(range(self.lengths[0]), self.rows_a_tile)

    def key_tiles(self, rows: range, keys: range) -> Iterator[tuple[range, Tensor | None]]:
        """Tiles of `keys` that `rows` see, each with its (rows, keys) bool mask if it needs one."""
        mask = self.scoring.mask
        seen_by_rows = mask.keys_seen_by(rows, *self.lengths)
        span = range(max(keys.start, seen_by_rows.start), min(keys.stop, seen_by_rows.stop))
        for tile in blocks(span, TILE_KV):
            if mask.hides_nothing(rows, tile, *self.lengths):
                yield tile, None
            else:
                yield tile, _visible(mask, rows, tile, self.lengths, self.q.device)


def to_lanes(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, may_be_spoilt: bool) -> Lanes:
    """Bring (batch, seqlen, heads, dim) operands into lanes; half precisions become float32.

    With float32 products the result is as exact as the inputs allow; a bfloat16 product would round
    each logit to 8 bits.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_lanes = queries_to_lanes(q.to(dtype), k.shape[2]) * scoring.scale
    k_lanes, v_lanes = (keys_to_lanes(x.to(dtype)) for x in (k, v))
    return Lanes(q_lanes, k_lanes, v_lanes, scoring, may_be_spoilt)


def queries_to_lanes(x: Tensor, heads_k: int) -> Tensor:
    """(batch, row, heads_q, dim) -> (batch * heads_k, group, row, dim)."""
    return x.unflatten(2, (heads_k, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)


def queries_from_lanes(x: Tensor, batch: int) -> Tensor:
    """(batch * heads_k, group, row, dim) -> (batch, row, heads_q, dim)."""
    return x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def keys_to_lanes(x: Tensor) -> Tensor:
    """(batch, key, heads_k, dim) -> (batch * heads_k, key, dim)."""
    return x.transpose(1, 2).flatten(0, 1)


def keys_from_lanes(x: Tensor, batch: int) -> Tensor:
    """(batch * heads_k, key, dim) -> (batch, key, heads_k, dim)."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def any_spoilt(*operands: Tensor) -> bool:
    """Whether an operand may hold NaN or Inf.

    One pass over the operands, small beside attention itself. On an accelerator the answer would
    cost a synchronisation, so there it is always yes. A finite sum that overflows also says yes,
    which costs time and not correctness.
    """
    if any(x.device.type != "cpu" for x in operands):
        return True
    sums = (x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in operands)
    return not all(math.isfinite(total.item()) for total in sums)


def blocks(span: range, size: int) -> Iterator[range]:
    """Cut a range into consecutive ranges of at most `size`."""
    for first in range(span.start, span.stop, size):
        yield range(first, min(first + size, span.stop))


def product(weights: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """weights @ values, where a pair that is not `seen` adds nothing, not even 0 * NaN.

    weights is (lane, group * row, key), values (lane, key, dim) and seen (row, key) bool, None
    where nothing is hidden or the values are known to be finite. A row that sees a spoilt value
    gets NaN in that value's columns.
    """
    if seen is None:
        return torch.bmm(weights, values)
    finite = torch.isfinite(values)
    clean = torch.bmm(weights, values.masked_fill(~finite, 0.0))
    touched = torch.matmul(seen.to(values.dtype), (~finite).to(values.dtype)) > 0
    by_group = clean.unflatten(1, (-1, seen.shape[0]))
    return by_group.masked_fill(touched[:, None], math.nan).flatten(1, 2)


def product_transposed(weights: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """weights^T @ values over the rows of all heads of a group, masked as in `product`.

    weights is (lane, group * row, key), values (lane, group * row, dim); returns (lane, key, dim).
    """
    if seen is None:
        return torch.bmm(weights.transpose(1, 2), values)
    every_head = seen.repeat(weights.shape[1] // seen.shape[0], 1)  # (group * row, key)
    return product(weights.transpose(1, 2), values, every_head.T)


def _visible(
    mask: Mask, rows: range, keys: range, lengths: tuple[int, int], device: torch.device
) -> Tensor:
    """(rows, keys) bool for a tile that the mask's edge crosses."""
    position = torch.arange(rows.start, rows.stop, device=device) + (lengths[1] - lengths[0])
    distance = torch.arange(keys.start, keys.stop, device=device) - position[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.left is not None:
        seen &= distance >= -mask.left
    if mask.right is not None:
        seen &= distance <= mask.right
    return seen
