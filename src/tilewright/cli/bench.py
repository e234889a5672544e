"""`tilewright bench`: how fast this machine's path is beside its peers."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from tilewright.cli.terminal import show


def bench(context: typer.Context) -> None:
    """Time tilewright beside its peers, in turns, on this machine: `--help` has the options."""
    from tilewright.bench.command import main

    with RichScreen() as screen:
        main(context.args, "tilewright bench", screen)


# The options are the parser's of `python -m tilewright.bench`, which typer hands on unread.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class RichScreen:
    """Tables on standard output, a line of progress on standard error."""

    def __init__(self) -> None:
        self._status = Status("", console=Console(stderr=True))

    def __enter__(self) -> RichScreen:
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        self._status.update(f"{what} ({done + 1} of {total})")
        self._status.start()

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._status.stop()
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in header:
            is_name = name == "problem"
            table.add_column(name, justify="left" if is_name else "right", no_wrap=is_name)
        for row in rows:
            table.add_row(*row)
        show([table])

    def lines(self, lines: Sequence[str]) -> None:
        self._status.stop()
        show(lines)
