"""Inputs for tests: sequences of random rows, and what an attention call is asked about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.masks import Mask
from tilewright.problem import Scoring


@dataclass(frozen=True)
class OneSequence:
    """The rows of one sequence and the gradients that flow into its results."""

    q: Tensor  # (seqlen_q, heads_q, dim)
    k: Tensor  # (seqlen_k, heads_k, dim)
    v: Tensor  # (seqlen_k, heads_k, dim_v)
    dout: Tensor  # (seqlen_q, heads_q, dim_v)
    dlse: Tensor | None = None  # (seqlen_q, heads_q)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q.shape[0], self.k.shape[0]

    def map(self, change: Callable[[Tensor], Tensor]) -> OneSequence:
        fields = (self.q, self.k, self.v, self.dout, self.dlse)
        return OneSequence(*(None if x is None else change(x) for x in fields))


@dataclass(frozen=True)
class Batch:
    """Sequences that one call takes together."""

    sequences: tuple[OneSequence, ...]
    sink: Tensor | None = None  # (heads_q,)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return [x.lengths for x in self.sequences]

    @property
    def dtype(self) -> torch.dtype:
        return self.sequences[0].q.dtype

    def to(self, target: torch.dtype | str) -> Batch:
        sink = None if self.sink is None else self.sink.to(target)
        return Batch(tuple(x.map(lambda t: t.to(target)) for x in self.sequences), sink)

    def alone(self) -> list[Batch]:
        return [replace(self, sequences=(x,)) for x in self.sequences]


# What rows are made of where a test does not say; a path that takes half precisions only sets it.
usual_dtype = ContextVar("usual_dtype", default=torch.float32)


def random_batch(
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype | None = None,
    with_sink: bool = False,
    with_dlse: bool = False,
    seed: int = 0,
) -> Batch:
    """Normal rows; `lengths` are (seqlen_q, seqlen_k), `heads` of q and k, `dims` D and Dv."""
    rng = torch.Generator().manual_seed(seed)
    dtype = dtype or usual_dtype.get()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    lse_dtype = torch.promote_types(dtype, torch.float32)
    sequences = tuple(
        OneSequence(
            q=normal(rows, heads[0], dims[0]),
            k=normal(keys, heads[1], dims[0]),
            v=normal(keys, heads[1], dims[1]),
            dout=normal(rows, heads[0], dims[1]),
            dlse=normal(rows, heads[0]).to(lse_dtype) if with_dlse else None,
        )
        for rows, keys in lengths
    )
    return Batch(sequences, normal(heads[0]) if with_sink else None)


def random_qkv(
    batch: int,
    rows: int,
    keys: int,
    heads: tuple[int, int] = (2, 2),
    dim: int = 16,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (batch, rows, heads, dim), k and v (batch, keys, heads, dim), for the public functions."""
    rng = torch.Generator().manual_seed(rows + 1000 * keys)
    q, k, v = (
        torch.randn(batch, length, count, dim, generator=rng, dtype=torch.float64).to(
            dtype or usual_dtype.get()
        )
        for length, count in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))
    )
    return q, k, v


def scoring(dim: int, options: dict[str, Any]) -> Scoring:
    """The options of the public functions as the oracle takes them."""
    left, right = options.get("window") or (None, None)
    mask = Mask.window(left, right) & (Mask.causal() if options.get("causal") else Mask.full())
    scale = options.get("scale")
    return Scoring(mask, dim**-0.5 if scale is None else scale, options.get("softcap"))


def cumulative(lengths: Sequence[int]) -> Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
