"""What the commands' output has in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table


def show(tables: Sequence[RenderableType]) -> None:
    """Print tables with a blank line before each."""
    # A text of others may hold [brackets], which are no markup.
    console = Console(highlight=False, markup=False)
    for table in tables:
        console.print()
        console.print(table)


def show_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


def facts() -> Table:
    """An empty table of a name and what there is to say about it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=10)
    table.add_column()
    return table
