"""The compat layers add no graph break: one graph, dynamic shapes, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tilewright.compat import flash_attn
from tilewright.compat.sdpa import scaled_dot_product_attention


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flash_attn.flash_attn_func(q, k, v, causal=True, softcap=5.0)


def packed(qkv: Tensor, cu_seqlens: Tensor) -> Any:
    return flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, qkv.shape[0], causal=True)


def cached(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, rows: Tensor) -> Any:
    return flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, cache_batch_idx=rows, causal=True
    )


def top_left(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


CASES: dict[Callable[..., Any], Callable[[int], tuple[Tensor, ...]]] = {
    dense: lambda n: (normal(2, n, 4, 8), normal(2, n + 3, 2, 8), normal(2, n + 3, 2, 8)),
    packed: lambda n: (normal(n, 3, 2, 8), int32(0, 3, n)),
    cached: lambda n: (
        *(normal(2, 1, 4, 8), normal(3, n, 2, 8), normal(3, n, 2, 8)),
        *(int32(3, n), int32(2, 0)),
    ),
    top_left: lambda n: (normal(2, 4, n, 8), normal(2, 2, n + 3, 8), normal(2, 2, n + 3, 8)),
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_one_graph_serves_all_lengths(function: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (16, 21):
        operands = CASES[function](length)
        leaves = [x for x in operands if x.requires_grad]
        results = []
        for attend in (compiled, function):
            out = attend(*operands)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        assert_close(*results)
