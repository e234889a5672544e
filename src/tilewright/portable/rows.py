"""Where the rows of each sequence of a batch lie, and how to fetch and store them.

Attention itself works on (sequences, length, heads, dim). These classes make that from padded,
packed and paged storage, and touch no row that is not part of the problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """The rows of a batch of sequences in some storage.

    `sequences` are positions in the batch. All of them have at least `length` rows.
    """

    def take(self, storage: Tensor, sequences: Sequence[int], length: int) -> Tensor:
        """(sequences, length, ...), a view where one exists."""
        ...

    def put(self, storage: Tensor, sequences: Sequence[int], values: Tensor) -> None:
        """Add `values` (sequences, length, ...) to their places in a zeroed `storage`."""
        ...


class PaddedRows:
    """storage is (batch, longest, ...)."""

    def take(self, storage: Tensor, sequences: Sequence[int], length: int) -> Tensor:
        return storage[_as_index(sequences, storage.device), :length]

    def put(self, storage: Tensor, sequences: Sequence[int], values: Tensor) -> None:
        storage[_as_index(sequences, storage.device), : values.shape[1]] = values


class PackedRows:
    """storage is (total, ...); sequence b begins at row `starts[b]`."""

    def __init__(self, starts: Sequence[int]) -> None:
        self.starts = starts

    def take(self, storage: Tensor, sequences: Sequence[int], length: int) -> Tensor:
        rows = self._rows(sequences, length, storage.device)
        return storage[rows].unflatten(0, (len(sequences), length))

    def put(self, storage: Tensor, sequences: Sequence[int], values: Tensor) -> None:
        rows = self._rows(sequences, values.shape[1], storage.device)
        storage[rows] = values.flatten(0, 1)

    def _rows(self, sequences: Sequence[int], length: int, device: torch.device) -> slice | Tensor:
        starts = [self.starts[b] for b in sequences]
        if all(b - a == length for a, b in pairwise(starts)):
            return slice(starts[0], starts[0] + len(starts) * length)
        first = torch.tensor(starts, device=device)
        return (first[:, None] + torch.arange(length, device=device)).flatten()


class PagedRows:
    """storage is (pages, page size, ...); row j is in page ``table[b, j // page size]``."""

    def __init__(self, block_table: Tensor, page_size: int) -> None:
        self.block_table = block_table
        self.page_size = page_size

    def take(self, storage: Tensor, sequences: Sequence[int], length: int) -> Tensor:
        return storage[self._pages_and_slots(sequences, length)]

    def put(self, storage: Tensor, sequences: Sequence[int], values: Tensor) -> None:
        # Sequences may share a page, so their values add up.
        where = self._pages_and_slots(sequences, values.shape[1])
        storage.index_put_(where, values, accumulate=True)

    def _pages_and_slots(self, sequences: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(length, device=self.block_table.device)
        tables = self.block_table[_as_index(sequences, row.device)].long()
        pages = tables[:, row // self.page_size]
        return pages, (row % self.page_size).expand_as(pages)


def _as_index(sequences: Sequence[int], device: torch.device) -> slice | Tensor:
    """A slice, which makes views, for consecutive sequences; else an index."""
    first, last = sequences[0], sequences[-1]
    if last - first + 1 == len(sequences):  # they are in ascending order
        return slice(first, last + 1)
    return torch.tensor(sequences, device=device)
