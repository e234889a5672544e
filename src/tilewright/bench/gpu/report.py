"""The records of a GPU as a page for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.bench.gpu.contenders import CONTENDERS, DETERMINISTIC, OURS
from tilewright.bench.gpu.records import CEILINGS, COPY, CUBLAS, HOST, Record

TITLES = {
    OURS: "tilewright",
    DETERMINISTIC: "tilewright, deterministic",
    "cudnn": "cuDNN",
    "fa2": "FA-2",
    "flex": "FlexAttention",
    "fa4": "flash-attn-4",
    CUBLAS: "cuBLAS",
}
PEERS = [name for name in CONTENDERS if name != OURS]
HEADER = ("problem", *(TITLES[name] for name in CONTENDERS), "to best peer", "to cuBLAS")
HEADER_DETERMINISTIC = ("problem", "as it comes", "deterministic", "ratio")

_LEGEND = """\
TFLOP/s of each contender, from the median of CUDA events, in one process and in turns, on random
normal bfloat16 operands laid out (batch, seqlen, heads, dim). Operations are counted as
FlashAttention's papers do: 4 x seqlen^2 x dim x heads x batch, half of it for causal, 2.5 times
that for a backward pass. *To best peer* and *to cuBLAS* are ratios within one alternation: above 1,
tilewright is faster. cuBLAS multiplies 8192 x 8192 matrices in bfloat16. Every result was compared
with float32 before it was timed. A dash is a case that a contender refused; why stands below.
"""

_DETERMINISTIC = """\
With `deterministic=True`, in the same alternation; that two runs give the same bits was checked.
"""


@dataclass(frozen=True)
class Cell:
    """One case and pass, by contender."""

    name: str
    direction: str
    records: dict[str, Record]

    def tflops(self, contender: str) -> float | None:
        record = self.records.get(contender)
        return record.tflops if record else None

    @property
    def best_peer(self) -> float | None:
        return max((x for name in PEERS if (x := self.tflops(name)) is not None), default=None)

    @property
    def slowdown(self) -> float | None:
        """Deterministic speed as a share of ours as it comes."""
        ours, bound = self.tflops(OURS), self.tflops(DETERMINISTIC)
        return None if ours is None or bound is None else bound / ours

    def ratio(self, other: float | None) -> float | None:
        ours = self.tflops(OURS)
        return None if ours is None or other is None else ours / other


def cells(records: Sequence[Record]) -> list[Cell]:
    """In the order of the records; of a contender that stands twice in a case, the last."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        if record.name not in (CEILINGS, HOST):
            found.setdefault((record.direction, record.name), {})[record.contender] = record
    return [Cell(name, direction, by) for (direction, name), by in found.items()]


def table(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    return [
        (
            cell.name,
            *(_number(cell.tflops(contender), ".0f") for contender in CONTENDERS),
            _number(cell.ratio(cell.best_peer), ".2f"),
            _number(cell.ratio(cell.tflops(CUBLAS)), ".2f"),
        )
        for cell in cells
    ]


def table_deterministic(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """TFLOP/s of ours as it comes and bound to equal bits, where that was timed."""
    return [
        (
            cell.name,
            _number(cell.tflops(OURS), ".0f"),
            _number(cell.tflops(DETERMINISTIC), ".0f"),
            _number(cell.slowdown, ".2f"),
        )
        for cell in cells
        if DETERMINISTIC in cell.records
    ]


def summary(records: Sequence[Record]) -> list[str]:
    """The ratios, the ceilings, the clock and the power, the host's time, in a line each."""
    every = cells(records)
    lines = []
    for direction in dict.fromkeys(cell.direction for cell in every):
        chosen = [cell for cell in every if cell.direction == direction]
        lines += _range(f"{direction}, to the best peer", [c.ratio(c.best_peer) for c in chosen])
        slowdowns = [cell.slowdown for cell in chosen]
        lines += _range(f"{direction}, deterministic to as it comes", slowdowns)
    lines += _ceilings(records)
    of_host = {r.contender: r.ms for r in records if r.name == HOST and r.ms}
    if of_host:
        spent = ", ".join(f"{name} {ms * 1e3:.1f} us" for name, ms in of_host.items())
        lines.append(f"host time of an eager call: {spent}")
    paths = dict.fromkeys(r.backend for r in records if r.backend)
    if paths:
        lines.append(f"tilewright's path: {', '.join(paths)}")
    return lines


def refusals(records: Sequence[Record]) -> list[str]:
    """Each contender's reasons, with the cases that they meant."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.why_none:
            key = (TITLES.get(record.contender, record.contender), record.why_none)
            by_reason.setdefault(key, []).append(f"{record.name} {record.direction}")
    return [f"{who}: {why} ({', '.join(names)})" for (who, why), names in by_reason.items()]


def markdown(records: Sequence[Record], plots: Sequence[str] = ()) -> str:
    parts = [f"# tilewright beside its peers, on one {records[0].machine.get('gpu', 'GPU')}"]
    parts.append(_bullets(facts(records)))
    parts.append(_LEGEND.rstrip())
    parts.append(_bullets(summary(records)))
    parts += [f"![{plot.removesuffix('.png').replace('-', ' ')}]({plot})" for plot in plots]
    every = cells(records)
    for direction in dict.fromkeys(cell.direction for cell in every):
        chosen = [cell for cell in every if cell.direction == direction]
        parts += [f"## {direction.capitalize()}", _grid(HEADER, table(chosen))]
        if bound := table_deterministic(chosen):
            parts += [_DETERMINISTIC.rstrip(), _grid(HEADER_DETERMINISTIC, bound)]
    if reasons := refusals(records):
        parts += ["## Without a time", _bullets(reasons)]
    return "\n\n".join(part for part in parts if part) + "\n"


def facts(records: Sequence[Record]) -> list[str]:
    """Of the machines; each value of one that differs between runs, as their commands do."""
    pairs = dict.fromkeys(pair for record in records for pair in record.machine.items())
    names = dict.fromkeys(name for name, _ in pairs)
    return [f"{name}: {value}" for name in names for key, value in pairs if key == name]


def _range(what: str, values: Sequence[float | None]) -> list[str]:
    """One line, or none where there is no value."""
    found = [x for x in values if x is not None]
    if not found:
        return []
    low, middle, high = min(found), statistics.median(found), max(found)
    return [f"{what}: {low:.2f} to {high:.2f}, median {middle:.2f}"]


def _ceilings(records: Sequence[Record]) -> list[str]:
    lines = []
    for contender, unit in ((CUBLAS, "TFLOP/s"), (COPY, "TB/s")):
        values = [r.tflops for r in records if r.contender == contender and r.tflops]
        if values:
            low, high = f"{min(values):.3g}", f"{max(values):.3g}"
            lines.append(f"{TITLES.get(contender, contender)}: {low} to {high} {unit}")
    loads = [(r.mhz, r.watts) for r in records if r.contender == OURS and r.mhz and r.watts]
    if loads:
        mhz, watts = (statistics.median(values) for values in zip(*loads, strict=True))
        lines.append(f"under tilewright's load, in the median: {mhz:.0f} MHz, {watts:.0f} W")
    return lines


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
