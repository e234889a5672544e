"""Tiled exact attention, forward: the readable twin of the kernels.

For each tile of queries, walk the tiles of keys that the mask lets it see: S = Q K^T, online
softmax, O += P V. Divide once at the end. Memory is linear in the sequence lengths.
Source: FlashAttention-2, arXiv 2307.08691, algorithm 1.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from tilewright.portable.merge import merge
from tilewright.portable.softmax import OnlineSoftmax
from tilewright.portable.tiles import (
    Lanes,
    any_spoilt,
    blocks,
    product,
    queries_from_lanes,
    to_lanes,
)
from tilewright.problem import Scoring


def forward(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, num_splits: int = 1
) -> tuple[Tensor, Tensor]:
    """Attention of (batch, seqlen, heads, dim) operands, none of them empty.

    With `num_splits` the keys are cut into that many parts, attended to one by one, and merged, as
    a split-KV decode kernel does. Returns out (batch, seqlen, heads, dim_v) and lse (batch, heads,
    seqlen), both in the dtype that the arithmetic ran in: float32 or wider.
    """
    lanes = to_lanes(q, k, v, scoring, may_be_spoilt=any_spoilt(k, v))
    all_keys = range(k.shape[1])
    parts = blocks(all_keys, -(-len(all_keys) // num_splits))
    return reduce(merge, (_attend(lanes, keys, q.shape[0]) for keys in parts))


def _attend(lanes: Lanes, keys: range, batch: int) -> tuple[Tensor, Tensor]:
    """Every query over one range of keys."""
    out = lanes.q.new_empty(*lanes.q.shape[:-1], lanes.v.shape[-1])
    lse = lanes.q.new_empty(*lanes.q.shape[:-1], 1)
    for lane in lanes.slices():
        for rows in lanes.row_tiles():
            tile_out, tile_lse = _attend_rows(lanes, lane, rows, keys)
            out[lane, :, rows.start : rows.stop] = tile_out
            lse[lane, :, rows.start : rows.stop] = tile_lse
    lse = queries_from_lanes(lse, batch)[..., 0].transpose(1, 2)
    return queries_from_lanes(out, batch), lse


def _attend_rows(lanes: Lanes, lane: slice, rows: range, keys: range) -> tuple[Tensor, Tensor]:
    """One tile of queries over its keys, tile by tile."""
    q = lanes.q[lane, :, rows.start : rows.stop]  # (lane, group, row, dim)
    heads_and_rows = q.shape[1:3]
    q = q.flatten(1, 2)
    softmax = OnlineSoftmax(torch.Size((*q.shape[:-1], 1)), like=q)
    acc = q.new_zeros(*q.shape[:-1], lanes.v.shape[-1])
    for tile, seen in lanes.key_tiles(rows, keys):
        k, v = (x[lane, tile.start : tile.stop] for x in (lanes.k, lanes.v))
        p, factor = softmax.add_block(tile_logits(q, k, seen, lanes.scoring.softcap))
        acc = acc * factor + product(p, v, seen if lanes.may_be_spoilt else None)
    out = softmax.normalise(acc)
    return out.unflatten(1, heads_and_rows), softmax.lse().unflatten(1, heads_and_rows)


def tile_logits(q: Tensor, k: Tensor, seen: Tensor | None, softcap: float | None) -> Tensor:
    """(lane, group * row, key) logits of one tile, -inf where a key is hidden."""
    logits = torch.bmm(q, k.transpose(1, 2))
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if seen is not None:
        hide(logits, seen, -math.inf)
    return logits


def hide(tile: Tensor, seen: Tensor, value: float) -> None:
    """Overwrite what is not `seen` (row, key) in a tile (lane, group * row, key)."""
    tile.unflatten(1, (-1, seen.shape[0])).masked_fill_(~seen, value)
