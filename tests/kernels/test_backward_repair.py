"""Emulated: gradients that hidden rows spoilt are computed once more, the rest stays as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.compiled import emulator
from tests.kernels.small import lengths_of
from tests.kernels.small_backward import fill
from tests.kernels.workspace import Workspace, workspace
from tests.layouts import Placement, place
from tests.paths import by_formula
from tests.problems import Batch, random_batch, scoring
from tests.tolerance import assert_error_within, sizes_of_terms
from tilewright.emulator import Options
from tilewright.kernels import catalog
from tilewright.kernels.catalog import Kernel
from tilewright.kernels.sm90.fa3_backward.spec import RowsSpec
from tilewright.launch.fa3 import NO_BOUND

pytest.importorskip("cutlass", reason="the compiler is the DSL's")
pytestmark = pytest.mark.slow

DIM, DIM_V = 64, 40
CASES = [
    ("dense", [(70, 90)] * 2, {"window": (20, 7)}),
    ("dense", [(70, 40)], {"causal": True, "softcap": 3.0}),
    ("used", [(70, 90), (0, 5), (3, 0), (20, 20)], {"causal": True}),
    ("varlen", [(33, 17), (1, 40)], {"window": (None, 3), "softcap": 2.0}),
]
cases = pytest.mark.parametrize(("layout", "lengths", "options"), CASES, ids=str)
faults = pytest.mark.parametrize("fault", ["q", "k", "v", "dout"])


@dataclass
class Spoilt:
    """A batch with a NaN or an Inf in one operand, and what a backward pass has of it."""

    clean: Batch
    batch: Batch
    options: dict[str, Any]
    placement: Placement
    work: Workspace

    def wanted(self, name: str) -> list[Tensor]:
        return getattr(by_formula(self.batch, torch.float64, **self.options), name)

    def stored(self) -> list[Tensor]:
        """q, k, v, dout."""
        sequences, (queries, keys) = self.batch.sequences, self.sides()
        sides = (queries, keys, keys, queries)
        return [
            side.store([getattr(x, name) for x in sequences])
            for side, name in zip(sides, ("q", "k", "v", "dout"), strict=True)
        ]

    def sides(self) -> tuple[Any, Any]:
        return self.placement.queries, self.placement.keys

    def scalars(self) -> list[Any]:
        rule = scoring(DIM, self.options)
        bounds = (NO_BOUND if x is None else x for x in (rule.mask.left, rule.mask.right))
        return [rule.scale, rule.softcap or 0.0, *bounds, 3 * ("seqused_q" in self.arguments())]

    def arguments(self) -> dict[str, Tensor]:
        return self.placement.arguments


def spoilt(
    layout: str, lengths: list[tuple[int, int]], options: dict[str, Any], fault: str
) -> Spoilt:
    """A row of one head of `fault` is spoilt in each sequence that is not too short."""
    clean, batch = (
        random_batch(lengths, (4, 2), (DIM, DIM_V), torch.bfloat16, with_dlse=True)
        for _ in range(2)
    )
    for x in batch.sequences:
        if min(x.lengths) > 12:
            alien = -math.inf if fault == "v" else math.nan
            getattr(x, fault)[-3 if fault in "kv" else -11, 1, 5] = alien
    placement = place(layout, batch)
    work = workspace(placement, 4, DIM)
    fill(work, batch, options)
    return Spoilt(clean, batch, options, placement, work)


def assert_repaired(problem: Spoilt, name: str, got: list[Tensor]) -> None:
    """A row that is spoilt for good has been left as NaN; each other one is accurate."""
    clean, options = problem.clean, problem.options
    want = problem.wanted(name)
    kinds = torch.zeros(2, dtype=torch.int64)
    for a, b in zip(got, want, strict=True):
        is_spoilt = ~b.isfinite().all(-1)
        assert a[is_spoilt].isnan().all()
        b[is_spoilt] = math.nan  # where the oracle has an Inf, or spoils some columns only
        kinds += torch.tensor([(~is_spoilt).sum(), is_spoilt.sum()])
    assert kinds.all(), "there are rows of both kinds"
    plain, (sizes, logit) = (
        by_formula(clean, clean.dtype, **options),
        sizes_of_terms(clean, options),
    )
    assert_error_within(name, got, want, getattr(plain, name), getattr(sizes, name), logit)


@faults
@cases
def test_rows_of_dq(
    layout: str, lengths: list[tuple[int, int]], options: dict[str, Any], fault: str
) -> None:
    """All sums are NaN, as if a hidden key had spoilt each row. dK and dV are not looked at."""
    problem = spoilt(layout, lengths, options, fault)
    problem.work.dq_sum.fill_(math.nan)
    dk, dv = (torch.full_like(x, math.nan) for x in problem.stored()[1:3])
    dq = finish(problem, dk, dv)
    queries, _ = problem.sides()
    assert_repaired(problem, "dq", queries.parts_of(dq))
    assert not queries.outside(dq).any()
    assert dk.isnan().all() and dv.isnan().all()


@faults
@cases
def test_rows_of_dk_and_dv(
    layout: str, lengths: list[tuple[int, int]], options: dict[str, Any], fault: str
) -> None:
    """All of them are NaN, as if hidden rows had spoilt them; but V does not reach dV."""
    problem = spoilt(layout, lengths, options, fault)
    problem.work.spoilt.fill_(1)
    dk, dv = (torch.full_like(x, math.nan) for x in problem.stored()[1:3])
    _, keys = problem.sides()
    if fault == "v":
        dv = keys.store([x.to(dv.dtype) for x in problem.wanted("dv")])
    assert not finish(problem, dk, dv).any()
    assert_repaired(problem, "dk", keys.parts_of(dk))
    if fault != "v":
        assert_repaired(problem, "dv", keys.parts_of(dv))
    for x in (dk, dv):
        assert keys.outside(x).isnan().all()


def finish(problem: Spoilt, dk: Tensor, dv: Tensor) -> Tensor:
    """dq; rows of dk and dv are repaired in place."""
    spec = RowsSpec("bfloat16", DIM, "cu_seqlens_q" in problem.arguments())
    q, k, v, dout = problem.stored()
    dq, work = torch.full_like(q, 7.0), problem.work
    run = emulator(Kernel(catalog.FA3_FINISH, spec, "sm_90a"))
    run.options = Options("random", races=True)
    scale, *others = problem.scalars()
    call = run(
        *(work.dq_sum, dq, q, k, v, dout, work.lse_log2, work.delta, dk, dv, work.spoilt),
        *(*lengths_of(problem.placement), scale, scale, *others),
    )
    assert not call.reports
    return dq
