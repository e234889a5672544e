"""A basic block bound to the threads that run it: a list of calls on views of their registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import length_hint
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.emulator.errors import EmulationError
from tilewright.emulator.parse import Address
from tilewright.emulator.program import Block
from tilewright.emulator.registers import Lanes, RegisterFile, registers_of

if TYPE_CHECKING:
    from tilewright.emulator.cta import CTA


class Bound:
    """Executable form of a block for one set of threads of one CTA context."""

    def __init__(self, cta: CTA, block: Block, mask: int):
        self.block = block
        self.mask = mask
        self.executions = self.taken_warps = self.other_warps = 0
        self.gather: _Gather | None = None
        start = (mask & -mask).bit_length() - 1
        run = mask >> start
        if run & (run + 1) == 0:
            window = slice(start, start + run.bit_length())
            self.lanes = Lanes(cta, cta.registers, window, np.arange(window.start, window.stop))
        else:
            threads = np.array([t for t in range(cta.threads) if mask >> t & 1])
            self.lanes = Lanes(cta, cta.scratch(), slice(0, len(threads)), threads)
            self.gather = _Gather(cta.registers, self.lanes, block)
        self.effects: list[Callable[[], Any]] = []
        self.places = []
        for instruction, entry in zip(block.instructions, block.entries, strict=True):
            self.lanes.place = instruction.place
            try:
                effect = entry.bind(instruction, self.lanes)
            except EmulationError as error:
                raise error.at(instruction.place) from None
            if effect is not None:
                self.effects.append(effect)
                self.places.append(instruction.place)
        self.touched = _written_rows(block) if cta.touched is not None else None
        self.warpgroups = sorted({w // 4 for w in self.lanes.warps})
        self.predicate = None
        if block.predicate is not None:
            self.predicate = self.lanes.read(block.predicate, np.bool_)

    def run(self) -> int:
        """Executes the block once; returns the mask of lanes that pass a blocking instruction."""
        self.executions += 1
        passed = self.mask
        if self.gather:
            self.gather.load()
        remaining = iter(self.effects)
        try:
            if self.block.blocking:
                passed = next(remaining)()
            for effect in remaining:
                effect()
        except EmulationError as error:
            index = len(self.effects) - length_hint(remaining) - 1
            raise error.at(self.places[index]) from None
        if self.gather:
            self.gather.store()
        touched = self.lanes.cta.touched
        if touched is not None:
            for group in self.warpgroups:
                touched[group, self.touched] = True
        return passed

    def taken(self) -> int:
        """The mask of lanes that go to the block's `taken` side."""
        assert self.predicate is not None
        count = np.count_nonzero(self.predicate)
        if count in (0, self.lanes.count):
            taken = 0 if (count == 0) != self.block.negated else self.mask
            self.taken_warps += len(self.lanes.warps) if taken else 0
            self.other_warps += 0 if taken else len(self.lanes.warps)
            return taken
        bits = lane_bits(self.lanes, self.predicate)
        taken = self.mask & ~bits if self.block.negated else bits
        for warp in self.lanes.warps:
            self.taken_warps += bool(taken >> (32 * warp) & 0xFFFFFFFF)
            self.other_warps += bool((self.mask & ~taken) >> (32 * warp) & 0xFFFFFFFF)
        return taken


def _written_rows(block: Block) -> np.ndarray:
    """The 32-bit registers that a block writes, wgmma accumulators aside."""
    firsts = [
        replace(i, operands=i.operands[:1])
        for i in block.instructions
        if i.operands
        and not i.opcode.startswith("wgmma")
        and not isinstance(i.operands[0], Address)
    ]
    return registers_of(firsts).get(32, np.array([], int))


def lane_bits(lanes: Lanes, chosen: np.ndarray) -> int:
    """The CTA's thread mask of the lanes for which the boolean array `chosen` holds."""
    threads = lanes.threads
    if threads[-1] - threads[0] + 1 == lanes.count:
        packed = np.packbits(chosen, bitorder="little").tobytes()
        return int.from_bytes(packed, "little") << int(threads[0])
    return sum(1 << int(t) for t in threads[chosen])


class _Gather:
    """Copies the registers of threads that are no slice into the scratch file and back."""

    def __init__(self, main: RegisterFile, lanes: Lanes, block: Block):
        self.main, self.scratch, self.lanes = main, lanes.file, lanes
        self.rows = registers_of(block.instructions)
        if block.predicate is not None:
            rows = self.rows.get(1, np.array([], int))
            self.rows[1] = np.union1d(rows, [block.predicate.index]).astype(int)

    def load(self) -> None:
        count, threads = self.lanes.count, self.lanes.threads
        self.scratch.special[:, :count] = self.main.special[:, threads]
        for width, rows in self.rows.items():
            self.scratch.arrays[width][rows, :count] = self.main.arrays[width][
                np.ix_(rows, threads)
            ]

    def store(self) -> None:
        count, threads = self.lanes.count, self.lanes.threads
        for width, rows in self.rows.items():
            self.main.arrays[width][np.ix_(rows, threads)] = self.scratch.arrays[width][
                rows, :count
            ]
