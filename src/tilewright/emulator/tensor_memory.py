"""Tensor memory of one CTA: 128 lanes x 512 columns of 32-bit cells, and who holds which columns.

PTX ISA 9.7.16.1 (tensor memory), 9.7.16.7 (allocation). Address: lane << 16 | column.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewright.emulator.errors import OutOfBounds, ResourceMisuse, Uninitialised

LANES, COLUMNS = 128, 512


class Rectangle(NamedTuple):
    """Cells that one access covers."""

    lane: int
    height: int
    column: int
    width: int

    @property
    def window(self) -> tuple[slice, slice]:
        return (
            slice(self.lane, self.lane + self.height),
            slice(self.column, self.column + self.width),
        )

    def __str__(self) -> str:
        lanes, columns = self.window
        return f"lanes {lanes.start}..{lanes.stop}, columns {columns.start}..{columns.stop}"


class TensorMemory:
    """`cells` [lane, column] as uint32; `written` marks cells that hold a value."""

    def __init__(self) -> None:
        self.cells = np.zeros((LANES, COLUMNS), np.uint32)
        self.written = np.zeros((LANES, COLUMNS), np.bool_)
        self.reset()

    def reset(self) -> None:
        self.allocations: dict[int, int] = {}  # first column -> columns
        self.may_allocate = True
        self.written[...] = False

    def free_start(self, columns: int) -> int | None:
        """The first column of a free range, or None while it has to wait for a dealloc."""
        for start in range(0, COLUMNS - columns + 1, 32):
            if all(start + columns <= a or start >= a + n for a, n in self.allocations.items()):
                return start
        return None

    def allocate(self, columns: int) -> int | None:
        if columns not in (32, 64, 128, 256, 512):
            raise ResourceMisuse(
                f"tcgen05.alloc of {columns} columns: wanted 32 to 512, power of 2"
            )
        if not self.may_allocate:
            raise ResourceMisuse("tcgen05.alloc after relinquish_alloc_permit")
        start = self.free_start(columns)
        if start is not None:
            self.allocations[start] = columns
            self.written[:, start : start + columns] = False
        return start

    def deallocate(self, start: int, columns: int) -> None:
        if self.allocations.get(start) != columns:
            raise ResourceMisuse(
                f"tcgen05.dealloc of {columns} columns at {start}: allocated are {self.allocations}"
            )
        del self.allocations[start]

    def check(self, r: Rectangle) -> None:
        """Raises OutOfBounds unless the rectangle lies within one allocation."""
        end = r.column + r.width
        inside = any(a <= r.column and end <= a + n for a, n in self.allocations.items())
        if not inside or r.lane + r.height > LANES:
            raise OutOfBounds(f"tensor memory {r}: allocated are {self.allocations}")

    def need_written(self, r: Rectangle) -> None:
        if not self.written[r.window].all():
            raise Uninitialised(f"tensor memory {r} is read, not all of it was written")
