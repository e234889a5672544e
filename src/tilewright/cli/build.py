"""`tilewright build`: compile kernels ahead of time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from tilewright.jit.cache import Entry
    from tilewright.kernels.catalog import Kernel


def build(
    arch: Annotated[str | None, typer.Option(help="What to compile for: sm_90a.")] = None,
    out: Annotated[Path | None, typer.Option(help="The bundle's folder.")] = None,
    jobs: Annotated[
        int, typer.Option(help="Processes that compile at a time; each takes 1 GB.", min=1)
    ] = os.cpu_count() or 1,
    match: Annotated[str, typer.Option(help="Only the kernels whose names contain this.")] = "",
    keep: Annotated[bool, typer.Option(help="Keep objects, PTX and cubins too.")] = False,
    held: Annotated[
        Path | None, typer.Option("--list", help="Print what this bundle holds.")
    ] = None,
) -> None:
    """Compile kernels without a GPU, for machines without a compiler.

    Prints what each takes of a GPU. Where `TILEWRIGHT_BUNDLE` names the folder, calls find them.
    """
    if held is not None:
        _list(held)
        return
    if arch is None or out is None:
        raise typer.BadParameter("want --arch and --out, or --list")
    chosen = [kernel for kernel in _kernels(arch) if match in str(kernel)]
    if not chosen:
        raise typer.BadParameter(f"--match {match!r}: no kernel for {arch} has that in its name")
    _show(_compile(chosen, out, jobs, keep))


def _kernels(arch: str) -> Sequence[Kernel]:
    from tilewright.jit.target import ARCHS
    from tilewright.kernels import catalog

    able = [known for known in ARCHS.values() if catalog.kernels(known)]
    if arch not in able:
        raise typer.BadParameter(f"--arch {arch!r}: there are kernels for {', '.join(able)}")
    return catalog.kernels(arch)


def _compile(kernels: Sequence[Kernel], out: Path, jobs: int, keep: bool) -> list[Entry]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from tilewright.jit import bundle

    parts = bundle.ALL_PARTS if keep else bundle.LIBRARY_ONLY
    entries, failures = [], 0
    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=len(kernels))
        for kernel, outcome in bundle.build(kernels, out, jobs, parts):
            progress.advance(task)
            if isinstance(outcome, Exception):
                failures += 1
                typer.echo(f"{kernel}: {type(outcome).__name__}: {outcome}", err=True)
            else:
                entries.append(outcome)
    if failures:
        typer.echo(f"{failures} of {len(kernels)} kernels failed", err=True)
        raise typer.Exit(1)
    return entries


def _list(path: Path) -> None:
    from tilewright.jit.cache import Folder, Rejected

    if not path.is_dir():
        raise typer.BadParameter(f"--list {path}: there is no such folder")
    found = list(Folder(path).entries())
    _show([entry for entry in found if not isinstance(entry, Rejected)])
    rejected = [entry for entry in found if isinstance(entry, Rejected)]
    for reason in rejected:
        typer.echo(reason, err=True)
    if rejected:
        raise typer.Exit(1)


def _show(entries: Sequence[Entry]) -> None:
    from tilewright.cli.terminal import show

    show([_table(entries)])
    size = sum({file: file.stat().st_size for e in entries for file in e.files.values()}.values())
    slowest = max((entry.facts["seconds"] for entry in entries), default=0)
    typer.echo(
        f"\n{len(entries)} kernels, {size / 1e6:.1f} MB; the slowest compiled in {slowest} s"
    )
    for toolchain in {str(entry.toolchain): entry.toolchain for entry in entries}.values():
        versions = (f"{name} {version}" for name, version in toolchain.items() if version)
        typer.echo(f"made with {', '.join(versions)}")


def _table(entries: Sequence[Entry]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", overflow="fold")
    for title in ("regs", "spilled", "stack", "smem", "s"):
        table.add_column(title, justify="right")
    for entry in sorted(entries, key=lambda entry: entry.name):
        facts = entry.facts
        spilled = facts["spill_stores"] + facts["spill_loads"]
        numbers = facts["registers"], spilled, facts["stack"], facts["smem"], facts["seconds"]
        table.add_row(entry.name, *map(str, numbers))
    return table
