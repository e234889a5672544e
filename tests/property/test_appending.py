"""Appending to a cache, contiguous or paged, equals attending to the longer sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts import place
from tests.problems import Batch
from tests.property.strategies import batches, options
from tests.tolerance import assert_forward_accurate
from tilewright import attention_decode


@pytest.mark.parametrize("backend", [None, "portable"])
@pytest.mark.parametrize("layout", ["cache", "paged"])
@given(data=st.data(), batch=batches(equal_rows=True, longest=40), asked=options())
def test_append_then_attend(
    backend: str | None, layout: str, data: st.DataObject, batch: Batch, asked: dict[str, Any]
) -> None:
    """The cache holds NaN where the new rows go, so they must be written before they are read."""
    shortest = min(keys for _, keys in batch.lengths)
    new = data.draw(st.integers(0, shortest), label="new rows")
    splits = data.draw(st.one_of(st.none(), st.integers(1, 5)), label="num_splits")
    placement = place(layout, batch)
    q = torch.stack([x.q for x in batch.sequences])
    parts = {n: [getattr(x, n) for x in batch.sequences] for n in "kv"}
    whole = [placement.keys.store(parts[n]) for n in "kv"]
    cut = [[part.clone() for part in parts[n]] for n in "kv"]
    for part in (*cut[0], *cut[1]):
        part[len(part) - new :] = torch.nan
    caches = [placement.keys.store(x) for x in cut]
    k_new, v_new = (torch.stack([x[len(x) - new :] for x in parts[n]]) for n in "kv")
    arguments = {**placement.arguments, "sink": batch.sink, "num_splits": splits, **asked}
    arguments["cache_seqlens"] = arguments["cache_seqlens"] - new
    out, lse = attention_decode(
        q, *caches, k_new=k_new, v_new=v_new, return_lse=True, backend=backend, **arguments
    )
    for cache, want in zip(caches, whole, strict=True):
        assert torch.equal(torch.isnan(cache), torch.isnan(want))
        assert torch.equal(torch.nan_to_num(cache), torch.nan_to_num(want))
    assert_forward_accurate(out, lse, batch, **asked)
