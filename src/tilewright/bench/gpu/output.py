"""The files of a run on a GPU: a line a record as it comes, then a page and pictures."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tilewright.bench.gpu import plots, report
from tilewright.bench.gpu.records import CEILINGS, CUBLAS, Record, read
from tilewright.machine import describe

PEERS = ("flash-attn-4", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi")


class Output:
    """Below ROOT/<gpu>, one file a pass; nothing is written without a root."""

    def __init__(self, root: Path | None, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.records: list[Record] = []
        self.folder = None if root is None else root / slug(facts["gpu"])
        self._begun: set[str] = set()

    def resume(self, direction: str) -> set[str]:
        """Take up an earlier run's file, and name the cases that it has whole."""
        path = self._file(direction)
        if path is None or not path.exists():
            return set()
        earlier = read([path])
        self.records += earlier
        self._begun.add(direction)
        # cuBLAS comes last in a case.
        return {r.name for r in earlier if r.contender == CUBLAS and r.name != CEILINGS}

    def add(self, record: Record, direction: str) -> None:
        """At once, so that a run that is cut short keeps what it has measured."""
        record = replace(record, machine=self.facts)
        self.records.append(record)
        path = self._file(direction)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = "a" if direction in self._begun else "w"
        self._begun.add(direction)
        with path.open(mode, encoding="utf-8") as file:
            file.write(record.to_json() + "\n")

    def _file(self, direction: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{direction}.jsonl"

    def finish(self) -> None:
        if self.folder is not None:
            render(self.records, self.folder)


def render(records: Sequence[Record], folder: Path) -> None:
    """Write README.md and, with matplotlib, the PNGs."""
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    names = plots.draw(records, folder) if has_matplotlib else []
    (folder / "README.md").write_text(report.markdown(records, names), encoding="utf-8")


def slug(gpu: str) -> str:
    """A folder's name: "NVIDIA H200" gives nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def facts(command: str) -> dict[str, Any]:
    machine = describe()
    return {
        "command": command,
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": machine.driver,
        "cuda": machine.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": machine.python,
        "torch": machine.packages["torch"],
        "tilewright": machine.packages["tilewright"],
        **{name: _version(name) for name in PEERS},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
