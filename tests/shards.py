"""Every n-th test, so that several processes share a run: `--shard 2/8`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """The `number`-th of `count`, from 1 on."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        number, count = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= count:
            raise argparse.ArgumentTypeError(f"{text!r}; want I/N with I from 1 to N, as 2/8")
        return cls(number, count)

    def split(self, items: Sequence[T]) -> tuple[list[T], list[T]]:
        """What this shard takes and what it leaves. Neighbours, which cost alike, go apart."""
        places = range(self.number - 1, len(items), self.count)
        taken = [items[i] for i in places]
        return taken, [item for i, item in enumerate(items) if i not in places]
