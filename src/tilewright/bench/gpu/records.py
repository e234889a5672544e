"""What one contender did in one case: a line of the results file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

CUBLAS, COPY = "cublas", "copy"
CEILINGS = "ceilings"  # the case of what bounds everything else
HOST = "host"  # the case of one eager call's host time


@dataclass(frozen=True)
class Record:
    """`ms` and `ms_min` are None where the contender refused the case or computed it wrong; then
    `why_none` says which. `tflops` is also the copy's, in TB/s."""

    name: str
    direction: str  # forward or backward
    contender: str
    case: dict[str, Any] = field(default_factory=dict)
    ms: float | None = None
    ms_min: float | None = None
    rounds: int = 0
    tflops: float | None = None
    mhz: float | None = None
    watts: float | None = None
    error: float | None = None  # against float32, by the rule of check.py
    backend: str | None = None  # the path that tilewright took
    why_none: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read(paths: Iterable[Path]) -> list[Record]:
    known = {entry.name for entry in fields(Record)}
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Record(**{key: value for key, value in json.loads(line).items() if key in known})
        for line in lines
    ]
