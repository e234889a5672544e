"""Rules on what is empty: rows that see no key, sequences without rows or keys, empty batches."""

from __future__ import annotations

import math

import pytest
import torch

from tests.layouts import LAYOUTS
from tests.paths import Path, Results
from tests.problems import cumulative, random_batch
from tests.tolerance import assert_accurate
from tilewright import attention, attention_decode, attention_varlen
from tilewright.portable.merge import merge


def assert_same_bits(a: Results, b: Results) -> None:
    for (name, x), (_, y) in zip(a.named(), b.named(), strict=True):
        for first, second in zip(x, y, strict=True):
            assert torch.equal(first, second), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_sees_no_key_is_empty(path: Path, layout: str) -> None:
    batch = random_batch([(5, 2), (300, 40)], (4, 2), with_dlse=True)
    got = path.run(batch, layout, causal=True)
    for index, empty in enumerate((3, 260)):
        assert not got.out[index][:empty].any()
        assert torch.isneginf(got.lse[index][:empty]).all()
        assert not got.dq[index][:empty].any()
    assert_accurate(got, batch, causal=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_row_adds_nothing_to_gradients(path: Path, layout: str) -> None:
    """Not even if what flows into it is huge."""
    batch = random_batch([(5, 2)], with_dlse=True)
    quiet = path.run(batch, layout, causal=True)
    batch.sequences[0].dout[:3] = 1e30
    batch.sequences[0].dlse[:3] = 1e30
    assert_same_bits(path.run(batch, layout, causal=True), quiet)


@pytest.mark.parametrize("window", [(0, 0), (1, 0), (0, 1)], ids=str)
def test_a_window_may_leave_rows_empty_on_either_side(
    tiled_path: Path, window: tuple[int, int]
) -> None:
    batch = random_batch([(7, 3), (3, 7), (70, 30)], with_dlse=True)
    assert_accurate(tiled_path.run(batch, window=window), batch, window=window)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sink_fills_a_row_that_sees_no_key(path: Path, layout: str) -> None:
    """Its denominator is the sink, so lse is the sink and out still 0."""
    batch = random_batch([(5, 2)], with_sink=True, with_dlse=True)
    got = path.run(batch, layout, causal=True)
    assert not got.out[0][:3].any()
    torch.testing.assert_close(got.lse[0][:3], batch.sink.expand(3, -1), check_dtype=False)
    assert_accurate(got, batch, causal=True)


@pytest.mark.parametrize("layout", ["varlen", "used"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_zero_length_sequence_changes_no_other(path: Path, layout: str, causal: bool) -> None:
    full = random_batch([(3, 5), (6, 4), (2, 9)], (9, 3))
    with_empty = [full.sequences[0]]
    for lengths in ((0, 4), (3, 0), (0, 0)):
        with_empty += random_batch([lengths], (9, 3)).sequences
    batch = type(full)((*with_empty, *full.sequences[1:]))
    got = path.run(batch, layout, causal=causal)
    alone = path.run(full, layout, causal=causal)
    for (name, x), (_, y) in zip(got.named()[:5], alone.named()[:5], strict=True):
        for a, b in zip((x[0], *x[4:]), y, strict=True):
            assert torch.equal(a, b), name
    assert_accurate(got, batch, causal=causal)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(0, 4), (3, 0), (0, 0)], ids=str)
def test_a_batch_of_zero_length_sequences_is_empty(
    path: Path, layout: str, lengths: tuple[int, int]
) -> None:
    batch = random_batch([lengths, lengths], (4, 2), (16, 8), with_sink=True, with_dlse=True)
    assert_accurate(path.run(batch, layout, causal=True), batch, causal=True)


@pytest.mark.parametrize("layout", ["dense", "varlen", "cache", "paged"])
def test_a_batch_of_no_sequences_is_empty(tiled_path: Path, layout: str) -> None:
    if tiled_path.name == "oracle":
        pytest.skip("the oracle loops over sequences; tests/reference has its empty batch")
    dtype = tiled_path.usual_dtype
    tiled_path.skip_what_it_refuses(dtype, layout, 16)
    to = {"device": tiled_path.device, "requires_grad": True, "dtype": dtype}
    none = torch.zeros(0, dtype=torch.int32, device=tiled_path.device)
    q, k = torch.ones(0, 3, 2, 16, **to), torch.ones(0, 4, 2, 16, **to)
    options = {"causal": True, "return_lse": True, "backend": tiled_path.backend}
    if layout == "dense":
        out, lse = attention(q, k, k, **options)
    elif layout == "varlen":
        q, k, bounds = torch.ones(3, 2, 16, **to), torch.ones(4, 2, 16, **to), cumulative([])
        bounds = bounds.to(tiled_path.device)
        out, lse = attention_varlen(q, k, k, bounds, bounds, **options)
    elif layout == "cache":
        out, lse = attention_decode(q, k, k, cache_seqlens=none, **options)
    else:
        table, k = none.view(0, 1), torch.ones(2, 4, 2, 16, **to)
        out, lse = attention_decode(q, k, k, cache_seqlens=none, block_table=table, **options)
    assert out.shape == q.shape and not out.any()
    assert torch.isneginf(lse).all()
    for x, grad in zip((q, k), torch.autograd.grad(out.sum(), (q, k)), strict=True):
        assert grad.shape == x.shape and not grad.any()


def test_two_empty_partial_results_merge_to_an_empty_one() -> None:
    empty = torch.zeros(1, 2, 3, 4), torch.full((1, 3, 2), -math.inf)
    out, lse = merge(empty, empty)
    assert torch.equal(out, empty[0]) and torch.equal(lse, empty[1])


@pytest.mark.parametrize("pair", [(0.0, 200.0), (-1e5, 1e5), (-math.inf, 300.0), (1e38, 1e38)])
def test_merging_never_overflows(pair: tuple[float, float]) -> None:
    outs = torch.full((1, 1, 1, 4), 2.0), torch.full((1, 1, 1, 4), 6.0)
    results = [(out, torch.full((1, 1, 1), lse)) for out, lse in zip(outs, pair, strict=True)]
    for a, b in (results, results[::-1]):
        out, lse = merge(a, b)
        assert torch.equal(out, torch.full_like(out, 4.0 if pair[0] == pair[1] else 6.0))
        torch.testing.assert_close(lse, torch.full_like(lse, max(pair)))
