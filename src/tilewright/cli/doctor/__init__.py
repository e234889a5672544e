"""`tilewright doctor`: this machine, and which path typical problems take on it."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Describe this machine, and which path typical problems take on it and why.

    Nothing is computed. The output is what a bug report should carry.
    """
    # PyTorch takes seconds to load, which --help need not wait for.
    from rich.console import Console

    from tilewright.cli.doctor import report
    from tilewright.cli.doctor.problems import explain_all
    from tilewright.machine import describe

    with Console(stderr=True).status("Looking at the machine") as status:
        machine = describe()
        status.update("Asking for paths")
        verdicts = explain_all(machine.device)
    report.show(machine, verdicts, as_json)
