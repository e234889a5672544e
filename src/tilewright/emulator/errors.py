"""What the emulator reports: one exception class a kind of fault, each naming its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Place:
    """Where an instruction stands: its PTX line and, if line info exists, its Python line."""

    line: int
    text: str
    source: str | None = None

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 120 else self.text[:117] + "..."
        source = f" ({self.source})" if self.source else ""
        return f"PTX line {self.line}{source}: {text}"


class EmulationError(Exception):
    """A fault of the emulated kernel; `place` is the instruction that showed it."""

    def __init__(self, message: str, place: Place | None = None):
        self.message = message
        self.place = place
        super().__init__(f"{message}\n  at {place}" if place else message)

    def at(self, place: Place) -> EmulationError:
        """The same fault with its place, unless it already has one."""
        return self if self.place else type(self)(self.message, place)


class Unsupported(EmulationError, NotImplementedError):
    """An instruction, modifier, type or descriptor field that the emulator does not know."""


class InvalidPtx(EmulationError, ValueError):
    """Text that is not the PTX of a kernel for the architecture asked for."""


class Deadlock(EmulationError):
    """No thread can run and not all have exited."""


class OutOfBounds(EmulationError):
    """An access outside every tensor, shared memory or tensor memory, or a misaligned one."""


class Uninitialised(EmulationError):
    """A read of memory that nothing has written."""


class BarrierMisuse(EmulationError):
    """Over-arrival, wrong byte counts, use before init, re-init, or divergent barriers."""


class ResourceMisuse(EmulationError):
    """Tensor memory allocated twice or never freed, registers beyond the setmaxnreg pool."""


def expect(operand: object, kind: type[_Kind]) -> _Kind:
    """The operand, if it is of the kind that the instruction takes."""
    if not isinstance(operand, kind):
        raise Unsupported(f"the operand {operand}; want one of kind {kind.__name__}")
    return operand
