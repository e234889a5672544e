"""The command line. Each command has a file or folder of its own and imports what is heavy late."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewright import __version__
from tilewright.cli.bench import SETTINGS, bench
from tilewright.cli.build import build
from tilewright.cli.demo import demo
from tilewright.cli.doctor import doctor
from tilewright.cli.emulate import emulate

app = typer.Typer(
    help="Exact, IO-aware attention: see it at work, and which path it takes on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # which joins the lines of a docstring's paragraphs
    pretty_exceptions_show_locals=False,
)
app.command()(demo)
app.command()(doctor)
app.command(context_settings=SETTINGS)(bench)
app.command()(emulate)
app.command()(build)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """What stands before a command."""
