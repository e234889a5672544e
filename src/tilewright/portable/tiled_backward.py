"""Tiled exact attention, backward: recompute P from lse, never store it.

With P = exp(S - lse) and D = rowsum(dO * O) - dlse:
dV += P^T dO,  dP = dO V^T,  dS = P * (dP - D),  dQ += dS K,  dK += dS^T Q.
Source: FlashAttention-2, arXiv 2307.08691, algorithm 2; dlse enters because d lse / d S = P.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.operands import Gradients, Operands, Saved
from tilewright.portable.tiled_forward import hide, tile_logits
from tilewright.portable.tiles import (
    Lanes,
    any_spoilt,
    keys_from_lanes,
    product,
    product_transposed,
    queries_from_lanes,
    queries_to_lanes,
    to_lanes,
)
from tilewright.problem import Scoring


@dataclass(frozen=True)
class RowTerms:
    """What the backward pass knows of each query row, as lanes (lane, group, row, 1 or dim_v)."""

    dout: Tensor
    lse: Tensor
    delta: Tensor  # rowsum(dO * O) - dlse


def backward(
    operands: Operands, scoring: Scoring, saved: Saved, needs: Sequence[bool]
) -> Gradients:
    """Gradients of (batch, seqlen, heads, dim) operands, none of them empty.

    `needs` says which of q, k and v have a gradient computed. Shapes of `saved` are those
    that `forward` makes.
    """
    q, k, v = operands.q, operands.k, operands.v
    lanes = to_lanes(q, k, v, scoring, may_be_spoilt=any_spoilt(q, k, v, saved.dout))
    terms = _row_terms(saved, k.shape[2], lanes.q.dtype)
    dq, dk, dv = (
        torch.zeros_like(x) if wanted else None
        for x, wanted in zip((lanes.q, lanes.k, lanes.v), needs[:3], strict=True)
    )
    for lane in lanes.slices():
        for rows in lanes.row_tiles():
            _backward_rows(lanes, terms, lane, rows, (dq, dk, dv))
    batch = q.shape[0]
    return Gradients(
        q=None if dq is None else queries_from_lanes(dq.mul_(scoring.scale), batch).to(q.dtype),
        k=None if dk is None else keys_from_lanes(dk, batch).to(k.dtype),
        v=None if dv is None else keys_from_lanes(dv, batch).to(v.dtype),
    )


def delta(saved: Saved, dtype: torch.dtype) -> Tensor:
    """rowsum(dO * O) - dlse, (batch, heads, seqlen)."""
    rows = (saved.dout.to(dtype) * saved.out.to(dtype)).sum(dim=-1).transpose(1, 2)
    return rows if saved.dlse is None else rows - saved.dlse.to(dtype)


def _row_terms(saved: Saved, heads_k: int, dtype: torch.dtype) -> RowTerms:
    # An empty row has lse = -inf. With +inf in its place each exp(S - lse) is the 0 it should be.
    lse = saved.lse.to(dtype).masked_fill(saved.lse == -math.inf, math.inf)
    return RowTerms(
        dout=queries_to_lanes(saved.dout.to(dtype), heads_k),
        lse=queries_to_lanes(lse.transpose(1, 2)[..., None], heads_k),
        delta=queries_to_lanes(delta(saved, dtype).transpose(1, 2)[..., None], heads_k),
    )


def _backward_rows(
    lanes: Lanes,
    terms: RowTerms,
    lane: slice,
    rows: range,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Add what one tile of queries contributes to `grads` of q, k and v, in place."""
    dq, dk, dv = grads
    q, dout, lse, row_delta = (
        x[lane, :, rows.start : rows.stop].flatten(1, 2)
        for x in (lanes.q, terms.dout, terms.lse, terms.delta)
    )
    for tile, seen in lanes.key_tiles(rows, range(lanes.k.shape[1])):
        at_keys = (lane, slice(tile.start, tile.stop))
        k, v = lanes.k[at_keys], lanes.v[at_keys]
        guard = seen if lanes.may_be_spoilt else None
        logits = tile_logits(q, k, seen, lanes.scoring.softcap)
        p = torch.exp(logits - lse)
        if guard is not None:
            hide(p, guard, 0.0)  # in a row whose lse is NaN it is not
        if dv is not None:
            dv[at_keys] += product_transposed(p, dout, guard)
        if dq is None and dk is None:
            continue
        ds = torch.bmm(dout, v.transpose(1, 2)).sub_(row_delta).mul_(p)
        if lanes.scoring.softcap is not None:
            ds.mul_(1 - (logits / lanes.scoring.softcap).square_())
        if seen is not None:
            hide(ds, seen, 0.0)  # dP may be NaN there, softcap's slope is
        if dq is not None:
            at_rows = dq[lane, :, rows.start : rows.stop]
            at_rows += product(ds, k, guard).view_as(at_rows)
        if dk is not None:
            dk[at_keys] += product_transposed(ds, q, guard)
