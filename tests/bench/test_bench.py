"""The benchmark compares equal computations, counts the work right and says what it saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewright.bench import contenders, report, run
from tilewright.bench.cases import Case, dense_cases, other_cases
from tilewright.bench.timing import Timing
from tilewright.cli import app
from tilewright.masks import Mask
from tilewright.reference.forward import visible

SMALL = [
    Case("dense", "float32", 40, 40, 4, 4, 16, Mask.causal(), batch=2),
    Case("gqa", "float32", 40, 40, 4, 2, 16),
    Case("window", "float32", 40, 40, 4, 4, 16, Mask(5, 0)),
    Case("bottom-right", "float32", 10, 40, 4, 4, 16, Mask.causal()),
    Case("varlen", "float32", 30, 30, 2, 2, 16, Mask.causal(), 3, (30, 7, 1)),
    Case("varlen", "float32", 30, 30, 2, 2, 16, Mask.full(), 3, (30, 7, 1)),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.group} {case.mask}")
def test_both_ways_compute_the_same(case: Case) -> None:
    """Else the ratio of their times would mean nothing."""
    ours, sdpa = contenders.ours(case), contenders.sdpa(case)
    if case.lengths:
        rows = [(b, i) for b, length in enumerate(case.lengths) for i in range(length)]
        where = tuple(torch.tensor(rows).T)
        inputs = [x.detach()[where] for x in sdpa.inputs]
        want = sdpa.attend(*sdpa.inputs)[where]
    else:
        inputs, want = list(sdpa.inputs), sdpa.attend(*sdpa.inputs)
    torch.testing.assert_close(ours.attend(*inputs), want)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.group} {case.mask}")
def test_flops_count_the_visible_pairs(case: Case) -> None:
    pairs = sum(
        int(visible(case.mask, *lengths, torch.device("cpu")).sum()) for lengths in case.sequences()
    )
    assert case.flops == 4 * pairs * case.heads_q * case.head_dim


def test_the_grid_is_the_one_promised() -> None:
    seen = {(c.dtype, c.head_dim, c.seqlen_q, str(c.mask)) for c in dense_cases()}
    assert len(seen) == len(dense_cases()) == 2 * 2 * 5 * 2
    assert {c.group for c in other_cases()} == {"gqa 8:1", "window", "bottom-right", "varlen"}


def test_a_ratio_above_one_means_that_tilewright_is_faster() -> None:
    times = {"tilewright": 2.0, "sdpa": 6.0, "sdpa again": 5.0}
    timings = {name: Timing(value, value, value, value, 5) for name, value in times.items()}
    row = run.Row(SMALL[0], "forward", timings)
    assert row.ratio == 3.0
    assert row.noise == 1.2
    assert row.gflops == SMALL[0].flops / 2.0 / 1e6


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    arguments = ["bench", "--cases", "dense", "--dtype", "float32", "--longest", "512"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--seconds", "0.01"])
    assert result.exit_code == 0, result.output
    machine, *rows = map(json.loads, (tmp_path / "cpu" / "results.jsonl").read_text().splitlines())
    assert machine["torch"] == torch.__version__
    assert len(rows) == 4 * 2
    page = (tmp_path / "cpu" / "README.md").read_text()
    for row in rows:
        assert f"{row['ratio']:.2f}" in page
        assert f"{row['ms']['tilewright']['median']:.2f}" in result.output


def test_a_choice_without_cases_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "--cases", "nothing"])
    assert result.exit_code == 2


def test_every_header_has_its_cell() -> None:
    timings = {name: Timing(1.0, 1.0, 1.0, 1.0, 5) for name in ("tilewright", "sdpa", "sdpa again")}
    for case in dense_cases() + other_cases():
        rows = [run.Row(case, direction, timings) for direction in run.PASSES]
        (line,) = report.table(rows)
        assert len(line) == len(report.HEADER)
