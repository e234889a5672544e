"""Rules on numbers: lengths around tile edges, and more batches or sequences than a grid has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.paths import Path
from tests.problems import cumulative, random_batch, random_qkv
from tests.tolerance import assert_accurate
from tilewright import attention, attention_varlen

EDGES = [1, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257]
HEAD_DIMS = [16, 32, 40, 64, 72, 80, 96, 120, 128, 192, 256]
# Every length meets every head dim or a neighbour of it; all pairs would be 121 of each.
PAIRS = [(EDGES[i], EDGES[(3 * i + 2) % 11], HEAD_DIMS[(5 * i + 1) % 11]) for i in range(11)]
PAIRS += [(EDGES[(4 * i + 1) % 11], EDGES[i], HEAD_DIMS[(2 * i + 3) % 11]) for i in range(11)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", PAIRS, ids=str)
def test_lengths_around_tile_edges_are_accurate(
    path: Path, sizes: tuple[int, int, int], causal: bool
) -> None:
    rows, keys, dim = sizes
    batch = random_batch([(rows, keys)], (2, 1), (dim, dim))
    assert_accurate(path.run(batch, causal=causal), batch, causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(1023, 1025), (1025, 1023), (1024, 1)], ids=str)
def test_about_a_thousand_rows_are_accurate(
    path: Path, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    batch = random_batch([lengths], (1, 1), (64, 64), dtype)
    assert_accurate(path.run(batch, causal=True), batch, causal=True)


@pytest.mark.parametrize(
    ("lengths", "heads", "dim"),
    [
        ([(1, 3), (0, 0), (1, 5)], (9, 3), 64),
        ([(0, 0), (0, 1), (1023, 2044)], (1, 1), 16),
        ([(137, 137), (349, 349)], (2, 2), 64),  # and rows after the last sequence
    ],
    ids=["9/3 heads", "one long", "698"],
)
def test_varlen_batches_that_were_wrong_elsewhere(
    path: Path, lengths: list[tuple[int, int]], heads: tuple[int, int], dim: int
) -> None:
    batch = random_batch(lengths, heads, (dim, dim))
    assert_accurate(path.run(batch, "varlen", causal=True), batch, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "cpu_fused", "portable"])
def test_keys_of_a_sequence_without_queries_have_zero_gradients(backend: str | None) -> None:
    bounds_q = torch.tensor([0, 0, 1208, 2048, 2048], dtype=torch.int32)
    bounds_k = torch.tensor([0, 2538, 4280, 5120, 8192], dtype=torch.int32)
    q, k, v = (x[0].requires_grad_() for x in random_qkv(1, 2048, 8192, (4, 1), 256))
    out = attention_varlen(q, k, v, bounds_q, bounds_k, causal=True, backend=backend)
    _, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    for grad in (dk, dv):
        assert not grad[:2538].any() and not grad[5120:].any()
        assert grad[2538:5120].abs().amax(dim=(1, 2)).gt(0).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_one_packed_sequence_equals_the_dense_call(path: Path, causal: bool) -> None:
    """To the bit, where sums of dq are not left to whoever comes first."""
    batch, options = random_batch([(300, 400)], (4, 2)), {"causal": causal}
    if path.name != "oracle":
        options["deterministic"] = True
    dense, packed = (path.run(batch, layout, **options) for layout in ("dense", "varlen"))
    for (name, a), (_, b) in zip(dense.named(), packed.named(), strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y), name


def backward_of_sum(function: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    leaves = [x.requires_grad_() for x in args[:3]]
    out = function(*leaves, *args[3:], **options)
    return out.detach(), *torch.autograd.grad(out.sum(), leaves)


def assert_some_equal_the_call_alone(
    results: tuple[torch.Tensor, ...], operands: tuple[torch.Tensor, ...], picks: list[int]
) -> None:
    """`operands` and `results` are (batch, ...); entries far apart are compared."""
    alone = backward_of_sum(attention, *(x.detach()[picks] for x in operands))
    for got, want in zip(results, alone, strict=True):
        torch.testing.assert_close(got[picks], want)


@pytest.mark.slow
def test_8300_batches_of_one_row(device: str) -> None:
    heads = (16, 16) if device == "cuda" else (4, 4)
    operands = tuple(x.to(device) for x in random_qkv(8300, 1, 1, heads, 128))
    results = backward_of_sum(attention, *operands)
    assert_some_equal_the_call_alone(results, operands, [0, 4150, 8299])


@pytest.mark.slow
def test_more_batches_than_a_grid_dimension(device: str) -> None:
    """65,536 is one past what CUDA counts in a grid's y and z."""
    heads, dim = ((8, 8), 64) if device == "cuda" else ((1, 1), 16)
    operands = tuple(x.to(device) for x in random_qkv(65_536, 4, 4, heads, dim))
    with torch.no_grad():
        out = attention(*operands)
        alone = attention(*(x[[0, 65_535]] for x in operands))
    torch.testing.assert_close(out[[0, 65_535]], alone)


def test_80000_sequences_of_16(device: str) -> None:
    q, k, v = (x.to(device) for x in random_qkv(80_000, 16, 16, (1, 1), 16))
    bounds = cumulative([16] * 80_000).to(device)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    results = backward_of_sum(attention_varlen, *packed, bounds, bounds)
    unpacked = tuple(x.unflatten(0, (80_000, 16)) for x in results)
    assert_some_equal_the_call_alone(unpacked, (q, k, v), [0, 40_000, 79_999])


def test_70000_heads(device: str) -> None:
    q, k, v = (x.to(device) for x in random_qkv(1, 2, 3, (70_000, 70_000), 4))
    out = attention(q, k, v)
    some = [0, 65_535, 65_536, 69_999]
    alone = attention(*(x[:, :, some] for x in (q, k, v)))
    torch.testing.assert_close(out[:, :, some], alone)
