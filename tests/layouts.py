"""Putting sequences into storage: dense, packed, cached, paged, and NaN where nobody's rows lie.

A placement is described once, by where each sequence's rows are, and serves inputs, outputs and
gradients alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tests.problems import Batch, cumulative

# How to reach a sequence's rows in a storage (..., heads, dim).
Index = tuple[Any, ...]

PAGE_SIZE = 4
LAYOUTS = ("dense", "varlen", "used", "cache", "paged")


@dataclass(frozen=True)
class Side:
    """Where the rows of queries, or of keys, lie."""

    shape: tuple[int, ...]  # of the storage, before heads and dim
    rows: list[Index]

    def store(self, parts: Sequence[Tensor]) -> Tensor:
        storage = parts[0].new_full((*self.shape, *parts[0].shape[1:]), torch.nan)
        for index, part in zip(self.rows, parts, strict=True):
            storage[index] = part
        return storage

    def parts_of(self, storage: Tensor) -> list[Tensor]:
        return [storage[index] for index in self.rows]

    def outside(self, storage: Tensor) -> Tensor:
        """(rows, heads, dim): the rows that belong to no sequence."""
        is_free = torch.ones(self.shape, dtype=torch.bool)
        for index in self.rows:
            is_free[index] = False
        return storage[is_free]


@dataclass(frozen=True)
class Placement:
    """One call's storage. `arguments` are those of the public function besides q, k and v."""

    queries: Side
    keys: Side
    arguments: dict[str, Tensor] = field(default_factory=dict)


def place(layout: str, batch: Batch) -> Placement:
    rows, keys = zip(*batch.lengths, strict=True)
    return _PLACES[layout](rows, keys)


def must_be_alone(layout: str, batch: Batch) -> bool:
    """Whether a call of this layout cannot take the sequences together."""
    rows, keys = (set(x) for x in zip(*batch.lengths, strict=True))
    return (
        layout != "varlen"
        and layout != "used"
        and (len(rows) > 1 or (layout == "dense" and len(keys) > 1))
    )


def _dense(rows: Sequence[int], keys: Sequence[int]) -> Placement:
    each = [(b,) for b in range(len(rows))]
    return Placement(Side((len(rows), rows[0]), each), Side((len(keys), keys[0]), each))


def _varlen(rows: Sequence[int], keys: Sequence[int]) -> Placement:
    """Packed without gaps; after the last sequence there are rows that belong to none."""
    arguments = {"cu_seqlens_q": cumulative(rows), "cu_seqlens_k": cumulative(keys)}
    return Placement(_packed(rows, 0, after=3), _packed(keys, 0, after=5), arguments)


def _used(rows: Sequence[int], keys: Sequence[int]) -> Placement:
    """Packed, and each sequence has room for more rows than it uses."""
    gaps = 2, 3
    arguments = {
        "cu_seqlens_q": cumulative([length + gaps[0] for length in rows]),
        "cu_seqlens_k": cumulative([length + gaps[1] for length in keys]),
        "seqused_q": torch.tensor(rows, dtype=torch.int32),
        "seqused_k": torch.tensor(keys, dtype=torch.int32),
    }
    return Placement(_packed(rows, gaps[0]), _packed(keys, gaps[1]), arguments)


def _packed(lengths: Sequence[int], gap: int, after: int = 0) -> Side:
    ends = list(accumulate(length + gap for length in lengths))
    starts = [0, *ends[:-1]]
    index = [(slice(a, a + length),) for a, length in zip(starts, lengths, strict=True)]
    return Side((ends[-1] + after,), index)


def _cache(rows: Sequence[int], keys: Sequence[int]) -> Placement:
    slots = [(b, slice(0, length)) for b, length in enumerate(keys)]
    lengths = torch.tensor(keys, dtype=torch.int32)
    queries = _dense(rows, keys).queries
    return Placement(queries, Side((len(keys), max(keys) + 5), slots), {"cache_seqlens": lengths})


def _paged(rows: Sequence[int], keys: Sequence[int]) -> Placement:
    """Pages handed out in a shuffled order; the last ones are free, and stand in unused entries."""
    pages_a_sequence = max(max(keys) // PAGE_SIZE + 2, 1)
    needed = [-(-length // PAGE_SIZE) for length in keys]
    total = sum(needed) + 2
    order = torch.randperm(total, generator=torch.Generator().manual_seed(total))
    table = order[-1].repeat(len(keys), pages_a_sequence)
    slots: list[Index] = []
    for b, length in enumerate(keys):
        first = sum(needed[:b])
        table[b, : needed[b]] = order[first : first + needed[b]]
        row = torch.arange(length)
        slots.append((table[b, row // PAGE_SIZE], row % PAGE_SIZE))
    arguments = {
        "cache_seqlens": torch.tensor(keys, dtype=torch.int32),
        "block_table": table.to(torch.int32),
    }
    return Placement(_dense(rows, keys).queries, Side((total, PAGE_SIZE), slots), arguments)


_PLACES = {"dense": _dense, "varlen": _varlen, "used": _used, "cache": _cache, "paged": _paged}
