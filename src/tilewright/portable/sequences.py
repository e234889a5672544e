"""Batches of unequal sequences: each group of equal ones becomes one dense call.

A batch of 80,000 short sequences is then a handful of calls, and no sequence is padded to the
longest. A row's result does not depend on its group, because every engine treats the entries of a
batch independently.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tilewright import problem as checks
from tilewright.operands import Gradients, Operands, Saved
from tilewright.portable import dense
from tilewright.portable.rows import PackedRows, PaddedRows, PagedRows, Rows
from tilewright.problem import AttentionProblem


@dataclass(frozen=True)
class Batch:
    """Where the sequences of a call lie and how long each is."""

    rows_q: Rows
    rows_k: Rows
    lengths: tuple[tuple[int, int], ...]  # (seqlen_q, seqlen_k) of each sequence

    def groups(self) -> Iterator[tuple[list[int], int, int]]:
        """Sequences that share both lengths, with those lengths."""
        by_lengths = defaultdict(list)
        for sequence, pair in enumerate(self.lengths):
            by_lengths[pair].append(sequence)
        return ((sequences, *pair) for pair, sequences in by_lengths.items())

    def take(self, operands: Operands, sequences: list[int]) -> Operands:
        """Dense operands of sequences that share their lengths."""
        length_q, length_k = self.lengths[sequences[0]]
        return Operands(
            self.rows_q.take(operands.q, sequences, length_q),
            self.rows_k.take(operands.k, sequences, length_k),
            self.rows_k.take(operands.v, sequences, length_k),
            operands.sink,
        )


def read_batch(problem: AttentionProblem, operands: Operands) -> Batch:
    """Read the lengths out of their tensors and check them. On an accelerator this synchronises."""
    rows_q, room_q = _padded_or_packed(
        "q", operands.q, operands.cu_seqlens_q, problem.batch, problem.seqlen_q
    )
    if operands.block_table is None:
        rows_k, room_k = _padded_or_packed(
            "k", operands.k, operands.cu_seqlens_k, problem.batch, problem.seqlen_k
        )
    else:
        page_size = operands.k.shape[1]
        rows_k = PagedRows(operands.block_table, page_size)
        room_k = [operands.block_table.shape[1] * page_size] * problem.batch
    lengths_q = _used("seqused_q", operands.seqused_q, room_q)
    # A cache has no packed rows, and its user calls the lengths by another name.
    name_k = "cache_seqlens" if operands.cu_seqlens_k is None else "seqused_k"
    lengths_k = _used(name_k, operands.seqused_k, room_k)
    if operands.block_table is not None:
        pages = [-(-length // operands.k.shape[1]) for length in lengths_k]
        checks.check_pages(operands.block_table.tolist(), pages, operands.k.shape[0])
    return Batch(rows_q, rows_k, tuple(zip(lengths_q, lengths_k, strict=True)))


def forward(problem: AttentionProblem, operands: Operands, fuse: bool) -> tuple[Tensor, Tensor]:
    """out like q and lse (batch, heads_q, seqlen_q), for packed q (heads_q, total_q).

    Rows that belong to no sequence have out 0 and lse -inf.
    """
    if not problem.ragged:
        return dense.forward(problem, operands, fuse)
    batch = read_batch(problem, operands)
    q = operands.q
    out = q.new_zeros(*q.shape[:-1], operands.v.shape[-1])
    lse = _rows_of_lse(q)
    for sequences, length_q, length_k in batch.groups():
        part, part_lse = dense.forward(
            problem.with_lengths(len(sequences), length_q, length_k),
            batch.take(operands, sequences),
            fuse,
        )
        batch.rows_q.put(out, sequences, part)
        batch.rows_q.put(lse, sequences, part_lse.transpose(1, 2))
    return out, lse.transpose(-1, -2).contiguous()


def backward(
    problem: AttentionProblem, operands: Operands, saved: Saved, needs: Sequence[bool], fuse: bool
) -> Gradients:
    """Gradients like the operands; exactly 0 for rows that belong to no sequence.

    `needs` says which of q, k, v and sink are wanted.
    """
    if not problem.ragged:
        return dense.backward(problem, operands, saved, needs, fuse)
    batch = read_batch(problem, operands)
    inputs = operands.q, operands.k, operands.v, operands.sink
    totals = [
        None
        if x is None or not need
        else torch.zeros_like(x, memory_format=torch.contiguous_format)
        for x, need in zip(inputs, needs, strict=True)
    ]
    for sequences, length_q, length_k in batch.groups():
        part = dense.backward(
            problem.with_lengths(len(sequences), length_q, length_k),
            batch.take(operands, sequences),
            _saved_of(saved, batch.rows_q, sequences, length_q),
            needs,
            fuse,
        )
        for total, values, rows in zip(
            totals[:3],
            (part.q, part.k, part.v),
            (batch.rows_q, batch.rows_k, batch.rows_k),
            strict=True,
        ):
            if total is not None and values is not None:
                rows.put(total, sequences, values)
        if totals[3] is not None and part.sink is not None:
            totals[3] += part.sink
    return Gradients(*totals)


def _saved_of(saved: Saved, rows: Rows, sequences: list[int], length: int) -> Saved:
    def of_lse(x: Tensor) -> Tensor:
        return rows.take(x.transpose(-1, -2), sequences, length).transpose(1, 2)

    return Saved(
        out=rows.take(saved.out, sequences, length),
        lse=of_lse(saved.lse),
        dout=rows.take(saved.dout, sequences, length),
        dlse=None if saved.dlse is None else of_lse(saved.dlse),
    )


def _rows_of_lse(q: Tensor) -> Tensor:
    """(..., rows, heads) of -inf, so that it is addressed as q is."""
    return q.new_full(q.shape[:-1], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))


def _padded_or_packed(
    name: str, x: Tensor, cu_seqlens: Tensor | None, batch: int, longest: int
) -> tuple[Rows, list[int]]:
    """The rows of q or k and the room that each sequence has there."""
    if cu_seqlens is None:
        return PaddedRows(), [x.shape[1]] * batch
    bounds = cu_seqlens.tolist()
    checks.check_cumulative(f"cu_seqlens_{name}", bounds, x.shape[0])
    lengths = [b - a for a, b in pairwise(bounds)]
    checks.check_longest(f"max_seqlen_{name}", lengths, longest)
    return PackedRows(bounds), lengths


def _used(name: str, used: Tensor | None, room: list[int]) -> list[int]:
    if used is None:
        return room
    lengths = used.tolist()
    checks.check_used(name, lengths, room)
    return lengths
