"""What the doctor found, for a reader or for a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from tilewright.cli import terminal
from tilewright.cli.doctor.problems import Verdict
from tilewright.dispatch import BACKENDS
from tilewright.machine import Machine


def show(machine: Machine, verdicts: Sequence[Verdict], as_json: bool) -> None:
    if as_json:
        terminal.show_json(to_dict(machine, verdicts))
        return
    terminal.show([_machine(machine), _versions(machine), _backends(), _paths(machine, verdicts)])


def to_dict(machine: Machine, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "machine": asdict(machine),
        "paths": [
            {"case": verdict.case, "dtype": verdict.dtype, **verdict.explanation.to_dict()}
            for verdict in verdicts
        ],
    }


def _machine(machine: Machine) -> Table:
    facts = terminal.facts()
    facts.add_row("System", machine.system)
    facts.add_row("CPU", f"{machine.cpu} ({machine.instruction_set})")
    facts.add_row("Cores", f"{machine.cores}; PyTorch uses {machine.threads} threads")
    if machine.memory_gib is not None:
        facts.add_row("Memory", f"{machine.memory_gib:.1f} GiB")
    for gpu in machine.gpus:
        about = f"compute capability {gpu.compute_capability}, {gpu.memory_gib:.0f} GiB"
        facts.add_row("GPU", f"{gpu.name} ({about})")
    if not machine.gpus:
        facts.add_row("GPU", machine.gpu_note or "none")
    if machine.driver:
        facts.add_row("Driver", machine.driver)
    facts.add_row("CUDA", machine.cuda or "PyTorch was built without it")
    return facts


def _versions(machine: Machine) -> Table:
    facts = terminal.facts()
    facts.add_row("Python", machine.python)
    for package, version in machine.packages.items():
        facts.add_row(package, version or Text("not installed", style="dim"))
    return facts


def _backends() -> Table:
    facts = terminal.facts()
    facts.title, facts.title_justify = "Paths, the preferred one first", "left"
    for name, backend in BACKENDS.items():
        facts.add_row(name, backend.summary)
    return facts


def _paths(machine: Machine, verdicts: Sequence[Verdict]) -> Table:
    """One row a case; dtypes that get the same answer share it."""
    title = f"Which path a call takes on {machine.device}, and why no other one"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("Problem", no_wrap=True)
    table.add_column("Path")
    table.add_column("Not")
    for case, of_case in groupby(verdicts, key=lambda verdict: verdict.case):
        answers: dict[tuple[str, str], list[str]] = {}
        for verdict in of_case:
            explanation = verdict.explanation
            lines = [f"{name}: {reason}" for name, reason in explanation.rejected.items()]
            reasons = "\n".join(lines + explanation.of_backward())
            answers.setdefault((explanation.backend, reasons), []).append(verdict.dtype)
        for (backend, reasons), dtypes in answers.items():
            about = Text.assemble(case, "\n", (", ".join(dtypes), "dim"))
            table.add_row(about, Text(backend, style="cyan"), Text(reasons))
    return table
