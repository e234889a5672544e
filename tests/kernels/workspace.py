"""The workspace that the backward's three kernels share, as tests read and write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.layouts import Index, Placement
from tilewright.kernels.sm90.fa3_backward.spec import padded_rows, padded_start


@dataclass
class Workspace:
    """NaN, or -1, before it is written. `at` is where a sequence has its (heads, rows)."""

    lse_log2: Tensor  # (batch, heads, r) or (heads, r)
    delta: Tensor
    dq_sum: Tensor  # (batch, heads, r // 64, octets, 128, 4) or without the batch
    spoilt: Tensor  # (1,)
    at: list[Index]

    def outside(self, x: Tensor) -> Tensor:
        """What of a row term belongs to no sequence."""
        is_free = torch.ones(x.shape, dtype=torch.bool)
        for index in self.at:
            is_free[index] = False
        return x[is_free]


def workspace(placement: Placement, heads: int, dim: int) -> Workspace:
    """`dim` is the head dim of q's tiles."""
    shape, rows = placement.queries.shape, placement.queries.rows
    bounds = placement.arguments.get("cu_seqlens_q")
    if bounds is None:
        outer, padded = (shape[0], heads), padded_rows(shape[1], 0)
        at = [(b, slice(None), slice(0, shape[1])) for (b,) in rows]
    else:
        outer, padded = (heads,), padded_rows(shape[0], len(bounds) - 1)
        starts = [padded_start(x, i) for i, x in enumerate(bounds.tolist())]
        lengths = [x.stop - x.start for (x,) in rows]
        at = [
            (slice(None), slice(x, x + n))
            for x, n in zip(starts[: len(rows)], lengths, strict=True)
        ]
    terms = (torch.full((*outer, padded), torch.nan) for _ in range(2))
    sums = torch.full((*outer, padded // 64, dim // 8, 128, 4), torch.nan)
    return Workspace(*terms, sums, torch.full((1,), -1, dtype=torch.int32), at)


def lengths_of_queries(placement: Placement) -> list[Any]:
    """cu_seqlens_q, seqused_q or what stands in for it, and whether that counts."""
    bounds = placement.arguments.get("cu_seqlens_q")
    used = placement.arguments.get("seqused_q")
    return [bounds, bounds if used is None else used, int(used is not None)]


# Thread 32 w + 4 g + l of a warpgroup holds, of an octet, row 16 w + g + 8 i and column 2 l + j.
_THREADS = {"w": 4, "g": 8, "l": 4, "i": 2, "j": 2}


def rows_of(sums: Tensor) -> Tensor:
    """(..., r, dim) of (..., r // 64, octets, 128, 4)."""
    *outer, blocks, octets, _, _ = sums.shape
    x = sums.reshape(-1, blocks, octets, *_THREADS.values())
    x = torch.einsum("zbowglij->zbwigolj", x)
    return x.reshape(*outer, 64 * blocks, 8 * octets)


def sums_of(rows: Tensor) -> Tensor:
    """The inverse."""
    *outer, r, dim = rows.shape
    x = rows.reshape(-1, r // 64, 4, 2, 8, dim // 8, 4, 2)
    return torch.einsum("zbwigolj->zbowglij", x).reshape(*outer, r // 64, dim // 8, 128, 4)
