"""Rules on caches: pages, appending, and splitting the keys."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.paths import Path, by_formula
from tests.problems import Batch, OneSequence, random_batch, random_qkv
from tests.tolerance import assert_forward_accurate
from tilewright import attention_decode

CAPACITY = 24


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def shuffled_table(batch: int, page_size: int) -> Tensor:
    """Pages of `CAPACITY` keys a sequence, handed out at random, with spare ones between."""
    pages = -(-CAPACITY // page_size)
    order = torch.randperm(batch * pages + 3, generator=torch.Generator().manual_seed(page_size))
    return order[: batch * pages].view(batch, pages).to(torch.int32)


def paged(cache: Tensor, table: Tensor, page_size: int) -> Tensor:
    """The contiguous `cache` (batch, CAPACITY, heads, dim) in pages, NaN elsewhere."""
    pages = cache.new_full((int(table.max()) + 4, page_size, *cache.shape[2:]), math.nan)
    for b in range(cache.shape[0]):
        for j in range(CAPACITY):
            pages[table[b, j // page_size], j % page_size] = cache[b, j]
    return pages


def contiguous(pages: Tensor, table: Tensor) -> Tensor:
    return torch.stack([pages[row.long()].flatten(0, 1)[:CAPACITY] for row in table])


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 8, 16, 24, 64])
@pytest.mark.parametrize("backend", [None, "cpu_fused", "portable"])
def test_pages_of_any_size_in_any_order_hold_what_a_contiguous_cache_holds(
    backend: str | None, page_size: int
) -> None:
    q, k, v = random_qkv(3, 2, CAPACITY, (4, 2))
    lengths = ints(24, 7, 16)
    options = {"cache_seqlens": lengths, "causal": True, "return_lse": True, "backend": backend}
    want = attention_decode(q, k, v, **options)
    table = shuffled_table(3, page_size)
    pages = [paged(x, table, page_size) for x in (k, v)]
    got = attention_decode(q, *pages, block_table=table, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_page_that_two_sequences_share_has_both_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 2, 8))
    table, lengths = ints([0], [0]), ints(8, 8)
    out = attention_decode(q, k[:1], v[:1], cache_seqlens=lengths, block_table=table)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    apart = attention_decode(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))
    for a, b in zip(got, torch.autograd.grad(apart.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("new", [1, 3])
def test_appended_rows_are_written_in_place_and_attended_to(
    tiled_path: Path, layout: str, new: int
) -> None:
    """Forward of cache and new rows, against the oracle over all rows of each sequence."""
    if tiled_path.name == "oracle":
        pytest.skip("the oracle writes nothing")
    tiled_path.skip_what_it_refuses(tiled_path.usual_dtype, layout, 16)
    to = tiled_path.device
    lengths = [0, CAPACITY - new, 10, 7]
    batch = random_batch([(new, n + new) for n in lengths], (4, 2), with_sink=True)
    cache = torch.full((4, CAPACITY, 2, 16), math.nan)
    caches = [cache.clone(), cache.clone()]
    for b, (x, n) in enumerate(zip(batch.sequences, lengths, strict=True)):
        caches[0][b, :n], caches[1][b, :n] = x.k[:n], x.v[:n]
    table = shuffled_table(4, 5)
    arguments = {}
    if layout == "paged":
        caches = [paged(x, table, 5) for x in caches]
        arguments["block_table"] = table.to(to)
    caches = [x.to(to) for x in caches]
    q, k_new, v_new = (
        torch.stack([getattr(x, name)[-new:] for x in batch.sequences]).to(to) for name in "qkv"
    )
    out, lse = attention_decode(
        q, *caches, k_new=k_new, v_new=v_new, cache_seqlens=ints(*lengths).to(to), causal=True,
        sink=batch.sink.to(to), return_lse=True, backend=tiled_path.backend, **arguments,
    )  # fmt: skip
    caches = [x.cpu() for x in caches]
    if layout == "paged":
        caches = [contiguous(x, table) for x in caches]
    for b, (x, n) in enumerate(zip(batch.sequences, lengths, strict=True)):
        for got, want in zip(caches, (x.k, x.v), strict=True):
            assert torch.equal(got[b, : n + new], want)
            assert torch.isnan(got[b, n + new :]).all(), "written past the new rows"
    assert_forward_accurate(out.cpu(), lse.cpu(), batch, causal=True)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_an_append_past_the_end_writes_nothing(device: str, layout: str, where: str) -> None:
    q, k, v = (x.to(device) for x in random_qkv(2, 2, CAPACITY))
    k_new, v_new = (x.to(device) for x in random_qkv(2, 2, 2)[1:])
    lengths = ints(23, 0) if where == "first" else ints(0, 23)
    arguments = {}
    if layout == "paged":
        arguments["block_table"] = torch.arange(2, dtype=torch.int32, device=device)[:, None]
    before = k.clone(), v.clone()
    with pytest.raises(ValueError, match=r"cache_seqlens\[\d\] is 23.*2 new rows make 25.*24"):
        attention_decode(
            q, k, v, cache_seqlens=lengths.to(device), k_new=k_new, v_new=v_new, **arguments
        )
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


def test_appending_one_by_one_equals_appending_at_once(device: str) -> None:
    q, k_new, v_new = (x.to(device) for x in random_qkv(2, 4, 4))
    at_once = [torch.zeros(2, 16, 2, 16, device=device) for _ in range(2)]
    one_by_one = [x.clone() for x in at_once]
    lengths = ints(5, 2).to(device)
    for cache in (*at_once, *one_by_one):
        cache[:, :5] = 0.5
    want = attention_decode(
        q, *at_once, cache_seqlens=lengths, k_new=k_new, v_new=v_new, causal=True
    )
    outs = []
    for i, j in pairwise(range(5)):
        step = {"k_new": k_new[:, i:j], "v_new": v_new[:, i:j], "cache_seqlens": lengths + i}
        outs.append(attention_decode(q[:, i:j], *one_by_one, causal=True, **step))
    torch.testing.assert_close(torch.cat(outs, dim=1), want)
    assert all(torch.equal(a, b) for a, b in zip(at_once, one_by_one, strict=True))


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 70, 1000])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 1)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_split_keys_give_the_unsplit_result_within_rounding(
    tiled_path: Path, splits: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    if tiled_path.name == "oracle":
        pytest.skip("the oracle is untiled")
    tiled_path.skip_what_it_refuses(dtype, "dense" if splits == 1 else "split", 16)
    batch = random_batch([(3, 70)] * 2, (4, 2), dtype=dtype, with_sink=True)
    q, k, v = (
        torch.stack([getattr(x, n) for x in batch.sequences]).to(tiled_path.device) for n in "qkv"
    )
    sink = batch.sink.to(tiled_path.device)
    out, lse = attention_decode(
        q,
        k,
        v,
        sink=sink,
        num_splits=splits,
        return_lse=True,
        backend=tiled_path.backend,
        **options,
    )
    assert_forward_accurate(out.cpu(), lse.cpu(), batch, **options)


@pytest.mark.parametrize("splits", [2, 5])
def test_gradients_flow_through_split_keys(splits: int) -> None:
    leaves = [x.requires_grad_() for x in random_qkv(2, 3, 70, dtype=torch.float64)]
    grads = [
        torch.autograd.grad(
            attention_decode(*leaves, causal=True, num_splits=n).square().sum(), leaves
        )
        for n in (splits, 1)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("splits", [1, 4])
def test_bits_do_not_depend_on_the_batch_when_the_splits_are_fixed(splits: int) -> None:
    q, k, v = random_qkv(4, 1, 70)
    lengths = ints(70, 33, 70, 12)
    together = attention_decode(q, k, v, cache_seqlens=lengths, num_splits=splits)
    for b in range(4):
        one = slice(b, b + 1)
        alone = attention_decode(
            q[one], k[one], v[one], cache_seqlens=lengths[one], num_splits=splits
        )
        assert torch.equal(alone, together[one])


def test_a_decode_step_is_a_row_of_the_whole() -> None:
    """The last query stands at the last key, so steps with a cache rebuild causal attention."""
    (x,) = random_batch([(9, 9)], dtype=torch.float64).sequences
    whole = by_formula(Batch((x,)), torch.float64, causal=True).out[0]
    for i in range(9):
        step = OneSequence(x.q[i : i + 1], x.k, x.v, x.dout[i : i + 1])
        got = attention_decode(
            step.q[None], step.k[None], step.v[None], cache_seqlens=ints(i + 1), causal=True
        )
        torch.testing.assert_close(got[0], whole[i : i + 1])
