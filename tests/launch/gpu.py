"""What tests on a GPU of compute capability 9.0 share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.problems import random_qkv

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no GPU of compute capability 9.0",
    ),
]
BF16 = torch.bfloat16


def qkv(
    batch: int, rows: int, keys: int, heads: tuple[int, int] = (4, 2), dim: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.cuda() for x in random_qkv(batch, rows, keys, heads, dim, BF16))
    return q, k, v


def graphed(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results
