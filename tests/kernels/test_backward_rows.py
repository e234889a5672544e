"""Emulated: what goes before and after the backward's main kernel, row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.compiled import emulator
from tests.kernels.small import lengths_of
from tests.kernels.workspace import lengths_of_queries, rows_of, sums_of, workspace
from tests.layouts import place
from tests.problems import random_batch
from tilewright.emulator import Options
from tilewright.kernels import catalog
from tilewright.kernels.catalog import Kernel
from tilewright.kernels.sm90.fa3_backward.spec import ROWS_MULTIPLE, padded_rows, padded_start

PREPARE = [x for x in catalog.kernels("sm_90a") if x.family == catalog.FA3_PREPARE]
FINISH = [x for x in catalog.kernels("sm_90a") if x.family == catalog.FA3_FINISH]
DENSE = [(130, 1)] * 2
# Of which a search looks at 32 at a time; with rows that nobody uses, or rows past the end.
PACKED = {
    "used": [(65, 1), (0, 1), (130, 1), (1, 1)],
    "varlen": [(0, 1)] * 3 + [(1, 1)] * 33 + [(0, 1), (129, 1), (0, 1)],
}
CASES = [
    pytest.param(kernel, layout, id=f"{kernel}-{layout}")
    for kernels in (PREPARE, FINISH)
    for kernel in kernels
    for layout in (PACKED if kernel.spec.packed else ["dense"])
]
HEADS = 2


def emulated(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.usefixtures("entry_of")(test))


@pytest.mark.parametrize("lengths", [[5], [0, 0], [1, 0, 128, 129, 0, 300, 127], [0] * 40 + [7]])
@pytest.mark.parametrize("after", [0, 1, 200])
def test_no_tile_of_the_workspace_holds_rows_of_two_sequences(lengths: list[int], after: int):
    """The rows past the last sequence count as one more."""
    starts = torch.tensor([0, *lengths, after]).cumsum(0).tolist()
    owners: dict[int, int] = {}
    for sequence, length in enumerate([*lengths, after]):
        first = padded_start(starts[sequence], sequence)
        assert first % ROWS_MULTIPLE == 0
        for row in range(first, first + length, 1):
            assert owners.setdefault(row // ROWS_MULTIPLE, sequence) == sequence
            assert row < padded_rows(starts[-1], len(lengths))
    assert padded_rows(starts[-1], len(lengths)) % ROWS_MULTIPLE == 0


def test_sums_are_in_the_order_of_an_accumulators_fragments():
    """Thread 37, the second of warp 1's second row: columns 2 and 3 of rows 17 and 25."""
    rows = torch.arange(128.0)[:, None] * 1000 + torch.arange(64.0)
    sums = sums_of(rows)
    assert sums[1, 3, 37].tolist() == [81026.0, 81027.0, 89026.0, 89027.0]
    assert torch.equal(rows_of(sums), rows)


def spread(x: Tensor) -> Tensor:
    """The same values in rows that are farther apart, as TMA may read them; NaN between."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 16), torch.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@emulated
@pytest.mark.parametrize(("kernel", "layout"), [x for x in CASES if x.values[0] in PREPARE])
@pytest.mark.parametrize("has_dlse", [False, True], ids=["", "dlse"])
def test_prepare(kernel: Kernel, layout: str, has_dlse: bool) -> None:
    """One row of each head sees no key, and what is no row holds NaN."""
    spec = kernel.spec
    dim = spec.head_dim - (8 if has_dlse else 0)
    dtype, lengths = getattr(torch, spec.dtype), PACKED.get(layout, DENSE)
    batch = random_batch(lengths, (HEADS, 1), (dim, dim), dtype, with_dlse=True)
    placement = place(layout, batch)
    out, dout = (
        spread(placement.queries.store([getattr(x, n) for x in batch.sequences]))
        for n in ("q", "dout")
    )
    dlse = placement.queries.store([x.dlse for x in batch.sequences])  # (..., q, h)
    lse = dlse * 3.0
    for index in placement.queries.rows:
        lse[index][:1] = -math.inf
    work = workspace(placement, HEADS, 96)
    run = emulator(kernel)
    run.options = Options("random", races=True)
    terms = [x.transpose(-1, -2) for x in (lse, dlse)]
    lengths_q = lengths_of_queries(placement)
    written = work.lse_log2, work.delta, work.dq_sum, work.spoilt
    call = run(out, dout, *terms, *written, *lengths_q, int(has_dlse))
    assert not call.reports
    assert not work.dq_sum.any() and work.spoilt.tolist() == [0]
    assert (work.outside(work.lse_log2) == math.inf).all() and not work.outside(work.delta).any()
    for index, at in zip(placement.queries.rows, work.at, strict=True):
        terms = dout[index].double() * out[index].double()
        want = terms.sum(-1) - (dlse[index].double() if has_dlse else 0.0)
        is_empty = lse[index] == -math.inf
        want = want.masked_fill(is_empty, 0.0)
        allowed = torch.finfo(torch.float32).eps * (dim * terms.abs().sum(-1) + 1.0)
        assert ((work.delta[at].T - want).abs() <= allowed).all()
        assert torch.equal(torch.isposinf(work.lse_log2[at].T), is_empty)
        want = lse[index][~is_empty] * math.log2(math.e)
        torch.testing.assert_close(work.lse_log2[at].T[~is_empty], want, rtol=2**-22, atol=0.0)


@emulated
@pytest.mark.parametrize(("kernel", "layout"), [x for x in CASES if x.values[0] in FINISH])
@pytest.mark.parametrize("other", [0, 24], ids=["", "narrower"])
def test_finish(kernel: Kernel, layout: str, other: int) -> None:
    """Rows that nobody uses become 0, whatever their sums are."""
    spec, scale = kernel.spec, -0.3
    lengths = PACKED.get(layout, DENSE)
    dim = spec.head_dim - other
    batch = random_batch(lengths, (HEADS, 1), (dim, 8), getattr(torch, spec.dtype))
    placement = place(layout, batch)
    dq = placement.queries.store([x.q for x in batch.sequences]).fill_(torch.nan)
    work = workspace(placement, HEADS, spec.head_dim)
    rows, rng = rows_of(work.dq_sum), torch.Generator().manual_seed(1)
    for at in work.at:
        rows[at] = torch.randn(rows[at].shape, generator=rng)
    run = emulator(kernel)
    run.options = Options("random", races=True)
    # What is there to repair rows that are not finite is not looked at: it is NaN.
    work.spoilt.zero_()
    nan, keys = torch.full_like(dq, torch.nan), placement.keys.shape
    k = torch.full((*keys, 1, dim), torch.nan, dtype=dq.dtype)
    call = run(
        *(sums_of(rows), dq, nan, k, k, nan, work.lse_log2, work.delta, k, k, work.spoilt),
        *(*lengths_of(placement), scale, 0.3, 0.0, 0, 0, 3 * (layout == "used")),
    )
    assert not call.reports
    for index, at in zip(placement.queries.rows, work.at, strict=True):
        want = (rows[at][..., :dim] * torch.tensor(scale)).to(dq.dtype).transpose(0, 1)
        assert torch.equal(dq[index], want)
    assert not placement.queries.outside(dq).any()
