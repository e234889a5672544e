"""The oracle for batches of unequal sequences: one dense call a sequence, in a plain loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.operands import Operands
from tilewright.problem import Scoring
from tilewright.reference.backward import backward
from tilewright.reference.forward import forward

# The first row and the one past the last of each sequence, for the queries and for the keys.
Spans = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]
Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]


def forward_varlen(operands: Operands, spans: Spans, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """q (total_q, heads, dim), k and v (total_k, heads, dim).

    Returns out like q and lse (heads, total_q). Rows in no span have out 0 and lse -inf.
    """
    q, k, v = operands.q, operands.k, operands.v
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
    for rows, keys in _slices(spans):
        piece = Operands(q[None, rows], k[None, keys], v[None, keys], operands.sink)
        piece_out, piece_lse = forward(piece, scoring)
        out[rows], lse[:, rows] = piece_out[0], piece_lse[0]
    return out, lse


def backward_varlen(
    operands: Operands, spans: Spans, scoring: Scoring, dout: Tensor, dlse: Tensor | None = None
) -> Grads:
    """dq, dk, dv and dsink for `forward_varlen`; exactly 0 for rows in no span."""
    q, k, v, sink = operands.q, operands.k, operands.v, operands.sink
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros_like(sink)
    for rows, keys in _slices(spans):
        piece = Operands(q[None, rows], k[None, keys], v[None, keys], sink)
        piece_dlse = None if dlse is None else dlse[None, :, rows]
        grads = backward(piece, scoring, dout[None, rows], piece_dlse)
        dq[rows], dk[keys], dv[keys] = (x[0] for x in grads[:3])
        dsink = _sum(dsink, grads[3])
    return dq, dk, dv, dsink


def forward_paged(
    operands: Operands, tables: Sequence[Sequence[int]], lengths: Sequence[int], scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """q (batch, seqlen_q, heads, dim); k and v in pages (pages, page size, heads, dim).

    Sequence b's key j lies in page ``tables[b][j // page size]``, slot ``j % page size``.
    """
    results = [
        forward(_one_sequence(operands, b, table, length), scoring)
        for b, (table, length) in enumerate(zip(tables, lengths, strict=True))
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses)


def backward_paged(
    operands: Operands,
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    scoring: Scoring,
    dout: Tensor,
    dlse: Tensor | None = None,
) -> Grads:
    """Gradients for `forward_paged`; a page that two sequences share adds up what both send."""
    dq, dk, dv = (torch.zeros_like(x) for x in (operands.q, operands.k, operands.v))
    dsink = None if operands.sink is None else torch.zeros_like(operands.sink)
    size = operands.k.shape[1]
    for b, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        sequence = _one_sequence(operands, b, table, length)
        grads = backward(sequence, scoring, dout[b, None], None if dlse is None else dlse[b, None])
        dq[b] = grads[0][0]
        for j in range(length):
            dk[table[j // size], j % size] += grads[1][0, j]
            dv[table[j // size], j % size] += grads[2][0, j]
        dsink = _sum(dsink, grads[3])
    return dq, dk, dv, dsink


def _slices(spans: Spans) -> list[tuple[slice, slice]]:
    return [(slice(*rows), slice(*keys)) for rows, keys in zip(*spans, strict=True)]


def _one_sequence(operands: Operands, b: int, table: Sequence[int], length: int) -> Operands:
    """Sequence b with its keys copied out of their pages, row by row."""

    def gather(pages: Tensor) -> Tensor:
        size = pages.shape[1]
        rows = [pages[table[j // size], j % size] for j in range(length)]
        return torch.stack(rows)[None] if rows else pages.new_empty(1, 0, *pages.shape[2:])

    return Operands(operands.q[b, None], gather(operands.k), gather(operands.v), operands.sink)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if a is None or b is None else a + b
