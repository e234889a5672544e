"""The benchmark's rows as a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from tilewright.bench.cases import Case
from tilewright.bench.run import Row

HEADER = ("problem", "forward", "fwd+bwd", "ms", "ms f+b", "GF/s", "noise")

_PREFACE = """# tilewright beside PyTorch's scaled_dot_product_attention, on a CPU
"""

_LEGEND = """\
A ratio is SDPA's median time over tilewright's: above 1, tilewright is faster. All run in one
process, in turns, on random normal data laid out (batch, seqlen, heads, dim). `ms` and `GF/s` are
tilewright's; GF/s counts 4 x visible pairs x heads x dim, 3.5 times that with backward. `noise` is
the ratio of SDPA to a second, equal SDPA. Where two numbers stand in a cell, the first is of
forward, the second of forward with backward.
"""


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line a case: the ratios to SDPA, above 1 where tilewright is faster."""
    return [_line(case, list(pair)) for case, pair in groupby(rows, key=lambda row: row.case)]


def summary(rows: Sequence[Row]) -> list[str]:
    """The lowest, median and highest ratio of each group of cases, and the noise."""
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(f"{row.case.group}, {row.case.dtype}", []).append(row)
    lines = []
    for name, group in by_group.items():
        ratios = [row.ratio for row in group]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        lines.append(f"{name}: {low:.2f} to {high:.2f}, median {middle:.2f}")
    noises = [row.noise for row in rows]
    lines.append(f"SDPA against itself in the same runs: {min(noises):.2f} to {max(noises):.2f}")
    return lines


def markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    groups = "\n".join(f"- {line}" for line in summary(rows))
    cells = [HEADER, ("---",) * len(HEADER), *table(rows)]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    return f"{_PREFACE}\n{facts}\n\n{_LEGEND}\n{groups}\n\n{grid}\n"


def _line(case: Case, rows: list[Row]) -> tuple[str, ...]:
    return (
        _name(case),
        *(f"{row.ratio:.2f}" for row in rows),
        *(f"{row.timings['tilewright'].median:.2f}" for row in rows),
        " ".join(f"{row.gflops:.0f}" for row in rows),
        " ".join(f"{row.noise:.2f}" for row in rows),
    )


def _name(case: Case) -> str:
    """Such as "gqa 8:1 bf16 causal B1 S2048 D64"."""
    dtype = {"float32": "f32", "bfloat16": "bf16"}[case.dtype]
    if case.lengths:
        sizes = f"{len(case.lengths)} of {min(case.lengths)} to {max(case.lengths)}"
    elif case.seqlen_q == case.seqlen_k:
        sizes = f"B{case.batch} S{case.seqlen_q}"
    else:
        sizes = f"B{case.batch} S{case.seqlen_q}x{case.seqlen_k}"
    return f"{case.group} {dtype} {case.mask} {sizes} D{case.head_dim}"
