"""Writing new keys and values into a cache, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright import problem as checks


def append_rows(
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    cache_seqlens: Tensor,
    block_table: Tensor | None,
) -> None:
    """Write `new` (batch, rows, heads, dim) after the rows that each sequence has.

    `caches` are (batch, capacity, heads, dim), with `block_table` (pages, page size, heads, dim).
    Raises ValueError, before anything is written, if a sequence has no room.
    """
    batch, count = new[0].shape[:2]
    check_append(caches[0], count, cache_seqlens, block_table)
    row = cache_seqlens.long()[:, None] + torch.arange(count, device=cache_seqlens.device)
    if block_table is None:
        where = torch.arange(batch, device=row.device)[:, None].expand_as(row), row
    else:
        size = caches[0].shape[1]
        where = block_table.long().gather(1, row // size), row % size
    for cache, values in zip(caches, new, strict=True):
        cache.index_put_(where, values)


def check_append(
    cache: Tensor, count: int, cache_seqlens: Tensor, block_table: Tensor | None
) -> None:
    """Whether each sequence has room for `count` more rows, in pages that exist.

    On an accelerator this synchronises.
    """
    size = cache.shape[1]
    capacity = size if block_table is None else block_table.shape[1] * size
    lengths = cache_seqlens.tolist()
    checks.check_room("cache_seqlens", lengths, count, capacity)
    if block_table is not None:
        used = [-(-(length + count) // size) for length in lengths]
        checks.check_pages(block_table.tolist(), used, cache.shape[0])
