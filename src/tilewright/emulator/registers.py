"""Registers as arrays [register, thread], and the lanes of one basic block as views of them.

All threads of a CTA that stand at the same instruction run it together: an instruction is one numpy
call over a slice of threads. Sets of threads that are no slice are gathered into a scratch file
around the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.emulator.errors import InvalidPtx, Place, Unsupported
from tilewright.emulator.parse import (
    Immediate,
    Instruction,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from tilewright.emulator.cta import CTA

_STORAGE = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: np.dtype("V16")}
# Registers start with a pattern that is a NaN in every float format and an odd address.
_POISON = {1: False, 16: 0xFFFD, 32: 0xFFFDFFFD, 64: 0xFFFDFFFDFFFDFFFD, 128: b"\xfd\xff" * 8}

SPECIALS = (
    "tid.x",
    "tid.y",
    "tid.z",
    "ntid.x",
    "ntid.y",
    "ntid.z",
    "ctaid.x",
    "ctaid.y",
    "ctaid.z",
    "nctaid.x",
    "nctaid.y",
    "nctaid.z",
    "laneid",
    "warpid",
    "nwarpid",
    "smid",
    "clusterid.x",
    "clusterid.y",
    "clusterid.z",
    "nclusterid.x",
    "nclusterid.y",
    "nclusterid.z",
    "cluster_ctaid.x",
    "cluster_ctaid.y",
    "cluster_ctaid.z",
    "cluster_nctaid.x",
    "cluster_nctaid.y",
    "cluster_nctaid.z",
    "cluster_ctarank",
    "cluster_nctarank",
    "clock",
    "dynamic_smem_size",
    "total_smem_size",
    "lanemask_lt",
    "lanemask_le",
    "lanemask_eq",
    "lanemask_ge",
    "lanemask_gt",
)


class RegisterFile:
    """`counts` registers of each width for `threads` threads, and the special registers."""

    def __init__(self, counts: dict[int, int], threads: int):
        self.threads = threads
        self.arrays = {
            width: np.full((max(counts.get(width, 0), 1), threads), _POISON[width], dtype)
            for width, dtype in _STORAGE.items()
        }
        self.special = np.zeros((len(SPECIALS), threads), np.uint32)

    def poison(self) -> None:
        for width, array in self.arrays.items():
            array[...] = _POISON[width]


class Lanes:
    """The threads that execute a block: what an instruction is bound to.

    `threads` are their indices in the CTA and `mask` the same as bits.
    """

    def __init__(self, cta: CTA, file: RegisterFile, window: slice, threads: np.ndarray):
        self.cta = cta
        self.file = file
        self.window = window
        self.threads = threads
        self.count = len(threads)
        self.mask = sum(1 << int(t) for t in threads)
        self.warps = sorted({int(t) // 32 for t in threads})
        self.place = Place(0, "")  # of the instruction that is being bound

    def read(self, operand: Operand, dtype: Any) -> np.ndarray:
        """A source as an array that broadcasts to the lanes; a register of another width raises."""
        dtype = np.dtype(dtype)
        if isinstance(operand, Register):
            return self._view(operand, dtype)
        if isinstance(operand, Immediate):
            return _constant(operand, dtype)
        if isinstance(operand, Special):
            return (
                self.special(operand.name).astype(dtype)
                if dtype.itemsize != 4
                else (self.special(operand.name).view(dtype))
            )
        if isinstance(operand, Symbol):
            return np.array([self.cta.symbol_address(operand.name)], np.uint64).astype(dtype)
        raise Unsupported(f"operand {operand} as a source", self.place)

    def write(self, operand: Operand, dtype: Any) -> np.ndarray:
        """A destination of exactly `dtype`'s width."""
        if isinstance(operand, Sink):
            return np.empty(self.count, dtype)
        if not isinstance(operand, Register):
            raise Unsupported(f"operand {operand} as a destination", self.place)
        return self._view(operand, np.dtype(dtype))

    def wide(self, operand: Operand, dtype: Any) -> np.ndarray:
        """A register that may be wider than `dtype`, as st and cvt allow; immediates too."""
        dtype = np.dtype(dtype)
        if not isinstance(operand, Register) or operand.width == 8 * dtype.itemsize:
            return self.read(operand, dtype)
        words = self._view(operand, np.dtype(_STORAGE[operand.width]))
        return words.view(dtype)[:: words.itemsize // dtype.itemsize]

    def predicate(self, operand: Operand) -> tuple[np.ndarray, bool]:
        """A predicate and whether it stands negated."""
        if isinstance(operand, Not):
            return self.predicate(operand.operand)[0], True
        return self.read(operand, np.bool_), False

    def vector(self, operand: Operand) -> list[Operand]:
        return list(operand.items) if isinstance(operand, Vector) else [operand]

    def pair(self, operand: Operand) -> tuple[Operand, Operand]:
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())

    def rows(self, operand: Operand, dtype: Any = np.uint32) -> tuple[np.ndarray, np.ndarray]:
        """The 32-bit register array and the row numbers of a vector, for one indexed access."""
        registers = self.vector(operand)
        if not all(isinstance(r, Register) and r.width == 32 for r in registers):
            raise InvalidPtx("a vector of 32-bit registers is wanted", self.place)
        rows = np.array([r.index for r in registers if isinstance(r, Register)])
        return self.file.arrays[32].view(dtype)[:, self.window], rows

    def special(self, name: str) -> np.ndarray:
        if name not in SPECIALS:
            raise Unsupported(f"special register %{name}", self.place)
        return self.file.special[SPECIALS.index(name), self.window]

    def _view(self, register: Register, dtype: np.dtype) -> np.ndarray:
        width = 1 if dtype == np.bool_ else dtype.itemsize * 8
        if width != register.width:
            # A view of another width would read and write its neighbours in silence.
            raise InvalidPtx(
                f"a {register.width}-bit register where {width} bits are wanted", self.place
            )
        return self.file.arrays[width][register.index, self.window].view(dtype)


def _constant(operand: Immediate, dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_:
        return np.array([bool(operand.bits)])
    if operand.width == 0 and dtype.kind == "f":
        return np.array([operand.bits], dtype)
    bits = operand.bits
    if operand.width == 32 and dtype.itemsize == 8 and dtype.kind == "f":
        return np.array([bits], np.uint32).view(np.float32).astype(dtype)
    raw = np.array([bits & (2 ** (8 * dtype.itemsize) - 1)], np.uint64)
    return raw.astype(f"u{dtype.itemsize}").view(dtype)


def registers_of(instructions: list[Instruction]) -> dict[int, np.ndarray]:
    """Every register named in a block, by width."""
    found: dict[int, set[int]] = {}

    def visit(operand: Any) -> None:
        if isinstance(operand, Register):
            found.setdefault(operand.width, set()).add(operand.index)
        for part in ("items", "first", "second", "base", "operand", "coordinates"):
            inner = getattr(operand, part, None)
            for item in inner if isinstance(inner, tuple) else (inner,):
                if item is not None:
                    visit(item)

    for instruction in instructions:
        for operand in instruction.operands:
            visit(operand)
    return {width: np.array(sorted(rows)) for width, rows in found.items()}
