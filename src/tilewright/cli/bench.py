"""`tilewright bench`: how fast this machine's path is beside PyTorch's own attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.terminal import show, show_json

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.bench.run import Row


def bench(
    group: Annotated[
        str, typer.Option(help="Cases whose group starts with this, such as dense or varlen.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; both by default.")] = "",
    longest: Annotated[int, typer.Option(help="Leave out sequences longer than this.")] = 8192,
    seconds: Annotated[float, typer.Option(help="About how long each way runs in a case.")] = 4.0,
    out: Annotated[
        Path | None, typer.Option(help="Write results.jsonl and README.md into this folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time tilewright beside scaled_dot_product_attention, in turns, on this machine's CPU."""
    from rich.console import Console
    from rich.progress import Progress

    from tilewright.bench import cases
    from tilewright.bench import run as runner

    chosen = [
        case
        for case in cases.dense_cases() + cases.other_cases()
        if case.group.startswith(group)
        and case.dtype.startswith(dtype)
        and max(case.seqlen_q, case.seqlen_k) <= longest
    ]
    if not chosen:
        raise typer.BadParameter(f"no case has group {group!r}, dtype {dtype!r} up to {longest}")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(chosen) + 1)

        def on_case(case: cases.Case) -> None:
            what = f"{case.group} {case.dtype} {case.mask} {case.seqlen_q}x{case.seqlen_k}"
            progress.update(task, advance=1, description=what)

        rows = list(runner.run(chosen, on_case, seconds))
    machine = _machine()
    if out is not None:
        _write(out, machine, rows)
    if json:
        show_json({"machine": machine, "rows": [row.to_dict() for row in rows]})
    else:
        show([_table(rows), *_summary(rows)])


def _machine() -> dict[str, Any]:
    from datetime import date

    from tilewright.machine import describe

    machine = describe()
    return {
        "command": " ".join(["tilewright", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "processor": f"{machine.cpu}, {machine.cores} cores, {machine.instruction_set}",
        "threads": machine.threads,
        "system": machine.system,
        "python": machine.python,
        "torch": machine.packages["torch"],
        "tilewright": machine.packages["tilewright"],
    }


def _table(rows: list[Row]) -> Table:
    from rich.table import Table

    from tilewright.bench import report

    title = "SDPA's time over tilewright's: above 1, tilewright is faster"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in report.HEADER:
        table.add_column(name, justify="left" if name == "problem" else "right")
    for line in report.table(rows):
        table.add_row(*line)
    return table


def _summary(rows: list[Row]) -> list[str]:
    from tilewright.bench import report

    return report.summary(rows)


def _write(out: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    from tilewright.bench import report, run

    out.mkdir(parents=True, exist_ok=True)
    run.write_jsonl(out / "results.jsonl", machine, rows)
    (out / "README.md").write_text(report.markdown(rows, machine), encoding="utf-8")
