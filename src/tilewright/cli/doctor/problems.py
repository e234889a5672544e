"""Typical problems, and what `tilewright.explain` says of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewright
from tilewright.dispatch import Explanation

DTYPES = (torch.bfloat16, torch.float32)
HEADS, SEQLEN, HEAD_DIM = 8, 512, 64
PAGE_SIZE = 16


@dataclass(frozen=True)
class Case:
    """`arguments` makes the keyword arguments of a call out of an empty tensor to take after."""

    name: str
    arguments: Callable[[Tensor], dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    case: str
    dtype: str
    explanation: Explanation


def explain_all(device: str) -> list[Verdict]:
    """Every case in every dtype, on uninitialised tensors of at most 1 MiB."""
    return [
        Verdict(
            case.name,
            str(dtype).removeprefix("torch."),
            tilewright.explain(**case.arguments(torch.empty(0, dtype=dtype, device=device))),
        )
        for case in CASES
        for dtype in DTYPES
    ]


def _dense(like: Tensor, heads_k: int = HEADS, **options: Any) -> dict[str, Any]:
    q = like.new_empty(1, SEQLEN, HEADS, HEAD_DIM)
    k = like.new_empty(1, SEQLEN, heads_k, HEAD_DIM)
    return {"q": q, "k": k, "v": k, **options}


def _with_sink(like: Tensor) -> dict[str, Any]:
    return _dense(like, causal=True, sink=like.new_zeros(HEADS))


def _varlen(like: Tensor) -> dict[str, Any]:
    """Four sequences of very different lengths."""
    rows = like.new_empty(SEQLEN, HEADS, HEAD_DIM)
    bounds = torch.tensor([0, 7, 40, 200, SEQLEN], dtype=torch.int32, device=like.device)
    return {"q": rows, "k": rows, "v": rows, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}


def _paged_decode(like: Tensor) -> dict[str, Any]:
    """One new token for each of two sequences, grouped heads, keys in pages."""
    pages = SEQLEN // PAGE_SIZE
    cache = like.new_empty(2 * pages, PAGE_SIZE, HEADS // 4, HEAD_DIM)
    table = torch.arange(2 * pages, dtype=torch.int32, device=like.device)
    return {
        "q": like.new_empty(2, 1, HEADS, HEAD_DIM),
        "k": cache,
        "v": cache,
        "causal": True,
        "cache_seqlens": torch.tensor([SEQLEN, 100], dtype=torch.int32, device=like.device),
        "block_table": table.view(2, pages),
    }


CASES = (
    Case("Training, causal", lambda like: _dense(like, causal=True)),
    Case("Grouped heads, 4 to 1", lambda like: _dense(like, heads_k=HEADS // 4, causal=True)),
    Case("Sliding window of 128", lambda like: _dense(like, window=(127, 0))),
    Case("Softcap", lambda like: _dense(like, causal=True, softcap=30.0)),
    Case("Sink", _with_sink),
    Case("Packed, unequal lengths", _varlen),
    Case("Decode, paged cache", _paged_decode),
)
