"""The instructions, one function each, registered under their PTX spelling.

A function gets the instruction and the lanes it is bound to, checks what it does not know, and
returns what happens at each execution (or None where nothing does). See docs/emulator.md for a
worked example.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tilewright.emulator.errors import Unsupported
from tilewright.emulator.parse import Instruction

if TYPE_CHECKING:
    from tilewright.emulator.registers import Lanes

Effect = Callable[[], Any]
Bind = Callable[[Instruction, "Lanes"], "Effect | None"]

_FILES = (
    "integer",
    "logic",
    "float",
    "convert",
    "memory",
    "launch",
    "atomics",
    "control",
    "warp",
    "barriers",
    "mma_sync",
    "wgmma",
    "tma",
    "bulk",
    "tcgen05",
    "tcgen05_mma",
    "tcgen05_cp",
)


@dataclass(frozen=True)
class Entry:
    """A registered spelling.

    `together`: how many neighbouring threads must execute it as one (32: .sync, 128: a warpgroup).
    `starts`: it begins a basic block of its own.
    `blocking`: its effect returns the mask of lanes that pass; it has parked the others.
    `polls`: a loop over it waits for another thread. `effects`: others can see that it ran.
    `unit`: the functional unit to count it for, `weight` operations a lane.
    """

    spelling: str
    pattern: re.Pattern[str]
    bind: Bind
    together: int = 0
    starts: bool = False
    blocking: bool = False
    polls: bool = False
    effects: bool = False
    unit: str | None = None
    weight: Callable[[Instruction], int] | int = 1

    def work(self, instruction: Instruction) -> int:
        return self.weight(instruction) if callable(self.weight) else self.weight


_entries: dict[str, list[Entry]] = {}


def instruction(spelling: str, **properties: Any) -> Callable[[Bind], Bind]:
    """Register a function. In `spelling`, <.a|.b> is a choice and {.a|.b} an optional one."""

    def register(bind: Bind) -> Bind:
        family = re.match(r"[\w]+", spelling)
        assert family
        entry = Entry(spelling, _pattern(spelling), bind, **properties)
        _entries.setdefault(family[0], []).append(entry)
        return bind

    return register


def _pattern(spelling: str) -> re.Pattern[str]:
    pieces = []
    for piece in re.findall(r"<[^>]*>|\{[^}]*\}|[^<{]+", spelling):
        if piece[0] in "<{":
            choices = "|".join(re.escape(c) for c in piece[1:-1].split("|"))
            pieces.append(f"(?:{choices})" + ("?" if piece[0] == "{" else ""))
        else:
            pieces.append(re.escape(piece))
    return re.compile("".join(pieces))


@cache
def lookup(opcode: str) -> Entry:
    """The entry of an opcode; raises Unsupported and names the spellings that are known."""
    if not _entries:
        for name in _FILES:
            importlib.import_module(f"{__name__}.{name}")
    family = opcode.split(".")[0]
    for entry in _entries.get(family, []):
        if entry.pattern.fullmatch(opcode):
            return entry
    known = "; ".join(e.spelling for e in _entries.get(family, [])) or "none of this family"
    raise Unsupported(f"instruction {opcode} is not known (known: {known})")
