"""Copies from shared to tensor memory (PTX ISA 9.7.16.9.2, 9.7.16.2.3)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tilewright.emulator.cta import CTA
from tilewright.emulator.errors import expect
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.tcgen05 import tensor_memory
from tilewright.emulator.isa.tma import issues
from tilewright.emulator.layouts import operand_index, tcgen05_descriptor
from tilewright.emulator.parse import Address, Instruction
from tilewright.emulator.registers import Lanes
from tilewright.emulator.tensor_memory import Rectangle

_CP = "tcgen05.cp<.cta_group::1|.cta_group::2>"


@cache
def _target_lanes(rows: int, multicast: str) -> np.ndarray:
    """[copy, row] of tensor memory. A warp reaches 32 lanes; each warp of a set gets a copy."""
    row = np.arange(rows)
    if multicast == "warpx4":
        return row + 32 * np.arange(4)[:, None]
    if multicast == "warpx2::02_13":
        return row + 64 * np.arange(2)[:, None]
    if multicast == "warpx2::01_23":
        return row // 32 * 64 + row % 32 + 32 * np.arange(2)[:, None]
    return (32 * row if rows == 4 else row)[None, :]


@instruction(_CP + "<.128x256b|.4x256b|.128x128b>", effects=True)
@instruction(_CP + ".64x128b<.warpx2::02_13|.warpx2::01_23>", effects=True)
@instruction(_CP + ".32x128b.warpx4", effects=True)
def cp(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.16.9.2 tcgen05.cp: rows of 16 or 32 bytes to lanes; .cta_group::2: in both CTAs.

    Each CTA of a pair copies from its own shared memory. In order with the products of the CTA.
    """
    tensor_memory(lanes)
    copy = _Copy(ins, lanes)

    def effect() -> None:
        for warp, (address, descriptor) in issues(lanes, *copy.sources):
            copy.issue(warp, address, descriptor)

    return effect


class _Copy:
    """A bound tcgen05.cp."""

    def __init__(self, ins: Instruction, lanes: Lanes):
        self.place, self.cta = lanes.place, lanes.cta
        self.ctas = 2 if ins.parts[2] == "cta_group::2" else 1
        rows, bits = ins.parts[3].removesuffix("b").split("x")
        self.rows, self.columns = int(rows), int(bits) // 32
        self.lanes = _target_lanes(self.rows, ins.parts[-1])
        target = ins.operands[0]
        target = expect(target, Address)
        self.offset = target.offset
        self.sources = [
            lanes.read(target.base, np.uint32),
            lanes.read(ins.operands[1], np.uint64),
        ]

    def issue(self, warp: int, address: int, descriptor: int) -> None:
        machine, first = self.cta.machine, self.cta.rank & ~1
        members = self.cta.cluster.ctas[first : first + 2] if self.ctas == 2 else [self.cta]
        agent: Any = machine.races.pipe_issue(self.cta, warp) if machine.races else None

        def run() -> None:
            for cta in members:
                self._run(cta, address + self.offset, descriptor, agent)

        machine.queue.submit(("tcgen05", id(self.cta)), run, self.place)
        bytes_read = 4 * self.rows * self.columns
        self.cta.count(warp, "shared bytes read by tcgen05.cp", bytes_read)
        self.cta.count(warp, "tensor memory bytes stored", bytes_read * len(self.lanes))

    def _run(self, cta: CTA, address: int, descriptor: int, agent: Any) -> None:
        words = self._read(cta, descriptor, agent)
        memory, column = cta.tensor_memory, address & 0xFFFF
        assert memory
        lanes = (address >> 16) + self.lanes
        for r in self._rectangles(lanes, column):
            memory.check(r)
            if cta.machine.races:
                cta.machine.races.tensor_access(cta, agent, r, True, self.place)
        memory.cells[lanes, column : column + self.columns] = words
        memory.written[lanes, column : column + self.columns] = True

    def _rectangles(self, lanes: np.ndarray, column: int) -> list[Rectangle]:
        """All shapes but .4x256b fill every lane from the first to the last."""
        if self.rows == 4:
            return [Rectangle(int(lane), 1, column, self.columns) for lane in lanes[0]]
        return [Rectangle(int(lanes.min()), int(np.ptp(lanes)) + 1, column, self.columns)]

    def _read(self, cta: CTA, descriptor: int, agent: Any) -> np.ndarray:
        """[row, column] of the matrix, row by row, that the descriptor places."""
        matrix, shared, origin = tcgen05_descriptor(descriptor), cta.cluster.shared, cta.rank << 24
        index = operand_index(matrix, self.rows, self.columns, 4, False)
        shared.check_range(origin | int(index.min()) * 4, 1)
        shared.check_range(origin | int(index.max()) * 4, 4)
        index = index + origin // 4
        if cta.machine.races:
            cta.machine.races.units_access(agent, index * 4, 4, False, self.place)
        if cta.machine.options.initialised:
            shared.need_written(index, 4)
        return shared.views[4][index]
