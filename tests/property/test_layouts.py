"""Any call in any layout is as accurate as plain attention: forward and backward, each path."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import Path
from tests.problems import Batch
from tests.property.strategies import batches, options
from tests.tolerance import assert_accurate
from tilewright import explain
from tilewright.dispatch import BACKENDS

PATHS = ["default", "portable", "cpu_fused"]


def hold(name: str, batch: Batch, layout: str, asked: dict[str, Any]) -> None:
    if name == "cpu_fused":
        # What it cannot take, it refuses: the rule of explain. The rest it computes.
        try:
            got = Path(name).run(batch, layout, **asked)
        except NotImplementedError:
            left = (asked.get("window") or (None, None))[0]
            hard = asked.get("softcap") is not None or left not in (None, -1)
            scale = asked.get("scale")
            assert hard or (scale is not None and scale <= 0)
            return
    else:
        got = Path(name).run(batch, layout, **asked)
    assert_accurate(got, batch, **asked)


@pytest.mark.parametrize("name", PATHS)
@given(batch=batches(equal=True), asked=options())
def test_dense(name: str, batch: Batch, asked: dict[str, Any]) -> None:
    hold(name, batch, "dense", asked)


@pytest.mark.parametrize("name", PATHS)
@given(batch=batches(), layout=st.sampled_from(["varlen", "used"]), asked=options())
def test_varlen(name: str, batch: Batch, layout: str, asked: dict[str, Any]) -> None:
    hold(name, batch, layout, asked)


@pytest.mark.parametrize("name", PATHS)
@given(batch=batches(equal_rows=True), layout=st.sampled_from(["cache", "paged"]), asked=options())
def test_decode(name: str, batch: Batch, layout: str, asked: dict[str, Any]) -> None:
    hold(name, batch, layout, asked)


@pytest.mark.parametrize("name", PATHS)
@settings(max_examples=8)
@given(batch=batches(equal=True, longest=700), asked=options())
def test_dense_over_several_tiles(name: str, batch: Batch, asked: dict[str, Any]) -> None:
    hold(name, batch, "dense", asked)


@given(batch=batches(equal=True), asked=options())
def test_explain_names_the_path_that_is_taken(batch: Batch, asked: dict[str, Any]) -> None:
    (x, *_) = batch.sequences
    answer = explain(x.q[None], x.k[None], x.v[None], **asked)
    assert answer.backend not in answer.rejected
    assert set(answer.rejected) | {answer.backend} == set(BACKENDS)
    named = explain(x.q[None], x.k[None], x.v[None], backend=answer.backend, **asked)
    assert named.backend == answer.backend
