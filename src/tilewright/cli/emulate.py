"""`tilewright emulate`: run an exported kernel's PTX on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tilewright.emulator.invoke import Problem


def emulate(
    kernel: Annotated[
        Path, typer.Argument(help="The exported object, KERNEL.o; its PTX is KERNEL.ptx.")
    ],
    arch: Annotated[str, typer.Option(help="sm_80, sm_90a or sm_100a.")],
    shape: Annotated[str, typer.Option(help="Batch, length, heads, head dim: 1,256,1,128.")],
    causal: Annotated[bool, typer.Option(help="Compare with causal attention.")] = False,
    schedule: Annotated[
        str, typer.Option(help="When asynchronous work completes: eager, late or random.")
    ] = "eager",
    as_json: Annotated[bool, typer.Option("--json", help="Print the counters as JSON.")] = False,
) -> None:
    """Execute a kernel for Ampere, Hopper or Blackwell without a GPU.

    Prints what the kernel did wrong, how far its outputs are from float64 where the problem is
    known, and what each functional unit had to do.
    """
    from rich.console import Console
    from rich.progress import Progress

    from tilewright.emulator import EmulationError, Options
    from tilewright.emulator.invoke import emulate as run

    problem = _problem(shape, causal)
    options = Options(schedule=schedule, races=True)
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("compiled host function", total=None)

            def on_cluster(name: str, ended: int, clusters: int) -> None:
                progress.update(task, description=name[:40], completed=ended, total=clusters)

            found = run(kernel, arch, problem, options=options, progress=on_cluster)
    except (EmulationError, ValueError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
    for launch in found.result.launches:
        typer.echo(launch.to_json() if as_json else launch.table())
    for name, error in found.errors.items():
        typer.echo(f"{name}: largest difference from float64 {error:.2e}", err=as_json)
    for report in found.result.reports:
        typer.echo(report, err=as_json)
    if found.result.reports:
        raise typer.Exit(1)


def _problem(shape: str, is_causal: bool) -> Problem:
    from tilewright.emulator.invoke import Problem

    try:
        batch, length, heads, dim = (int(extent) for extent in shape.split(","))
    except ValueError:
        raise typer.BadParameter(f"{shape!r}: wanted four integers, as 1,256,1,128") from None
    if min(batch, length, heads, dim) < 1:
        raise typer.BadParameter(f"{shape!r}: every extent must be at least 1")
    return Problem(batch, length, heads, dim, key_length=length, is_causal=is_causal)
