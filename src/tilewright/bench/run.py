"""Timing cases and keeping what was seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.bench import contenders
from tilewright.bench.cases import Case
from tilewright.bench.timing import Plan, Timing, alternate

PASSES = {"forward": "forward", "forward+backward": "forward_backward"}


@dataclass(frozen=True)
class Row:
    """One case and pass: milliseconds of each contender.

    "sdpa again" is a second, equal contender: its ratio to "sdpa" shows how much of a difference is
    noise.
    """

    case: Case
    direction: str
    timings: dict[str, Timing]

    @property
    def ratio(self) -> float:
        """How many times faster than PyTorch: SDPA's median over ours."""
        return self._against_sdpa("tilewright")

    @property
    def noise(self) -> float:
        """SDPA over itself; 1 on a machine without noise."""
        return self._against_sdpa("sdpa again")

    @property
    def gflops(self) -> float:
        """Gigaflops a second of ours, counted as FlashAttention's papers do."""
        factor = 1.0 if self.direction == "forward" else 3.5
        return factor * self.case.flops / self.timings["tilewright"].median / 1e6

    def to_dict(self) -> dict[str, Any]:
        timings = {name: asdict(timing) for name, timing in self.timings.items()}
        return {"case": self.case.to_dict(), "direction": self.direction, "ms": timings} | {
            "ratio": self.ratio,
            "noise": self.noise,
            "gflops": self.gflops,
        }

    def _against_sdpa(self, name: str) -> float:
        return self.timings["sdpa"].median / self.timings[name].median


def run(
    cases: Sequence[Case], on_case: Callable[[Case], None], seconds: float = 4.0
) -> Iterator[Row]:
    """Time each case, forward and forward with backward; `on_case` is told before each.

    `seconds` is about how long each contender runs in each.
    """
    for case in cases:
        on_case(case)
        torch.manual_seed(0)
        ways = {
            "tilewright": contenders.ours(case),
            "sdpa": contenders.sdpa(case),
            "sdpa again": contenders.sdpa(case),
        }
        for direction, method in PASSES.items():
            timings = alternate(
                {name: getattr(way, method) for name, way in ways.items()}, Plan(seconds)
            )
            yield Row(case, direction, timings)


def write_jsonl(path: Path, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    """One line for the machine and the command, then one a row."""
    lines = [machine, *(row.to_dict() for row in rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
