"""Tensor memory of sm_100a: allocation, loads, stores, waits, commits (PTX ISA 9.7.16.7 on)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tilewright.emulator.errors import (
    BarrierMisuse,
    OutOfBounds,
    ResourceMisuse,
    Unsupported,
    expect,
)
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.memory import shared_addresses
from tilewright.emulator.isa.tma import destinations, issues
from tilewright.emulator.parse import Address, Immediate, Instruction
from tilewright.emulator.registers import Lanes
from tilewright.emulator.tensor_memory import LANES, Rectangle, TensorMemory


def tensor_memory(lanes: Lanes) -> TensorMemory:
    memory = lanes.cta.tensor_memory
    if memory is None:
        raise Unsupported(f"tensor memory on {lanes.cta.machine.chip.arch}", lanes.place)
    return memory


def _one_warp(ins: Instruction, lanes: Lanes) -> int:
    if lanes.count != 32:
        raise BarrierMisuse(f"{ins.opcode} by {lanes.count} threads, wanted one whole warp")
    return lanes.warps[0]


_GROUPS = "<.cta_group::1|.cta_group::2>"


@instruction(
    "tcgen05.alloc" + _GROUPS + ".sync.aligned{.shared::cta}.b32", together=32, effects=True
)
def alloc(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.16.7.1 tcgen05.alloc: columns for the CTA (or the pair); the address goes to shared."""
    warp, memory, cta = _one_warp(ins, lanes), tensor_memory(lanes), lanes.cta
    addresses, columns = (
        shared_addresses(lanes, ins.operands[0]),
        lanes.read(ins.operands[1], np.uint32),
    )
    shared, place = cta.cluster.shared, lanes.place

    def effect() -> None:
        at, count = addresses()[:1], int(columns[0])
        start = memory.allocate(count)
        if start is None:
            raise ResourceMisuse(
                f"tcgen05.alloc of {count} columns waits for ever: allocated are "
                f"{memory.allocations}"
            )
        shared.check(at, 4)
        shared.views[4][at >> 2] = start
        shared.mark(at >> 2, 4)
        if cta.machine.races:
            cta.machine.races.warp_access(cta, warp, at, 4, True, place)

    return effect


@instruction("tcgen05.dealloc" + _GROUPS + ".sync.aligned.b32", together=32, effects=True)
def dealloc(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.16.7.1 tcgen05.dealloc: for the race detector a write, as another CTA may follow."""
    warp, memory, cta, place = _one_warp(ins, lanes), tensor_memory(lanes), lanes.cta, lanes.place
    address, count = (lanes.read(o, np.uint32) for o in ins.operands)
    assert place

    def effect() -> None:
        start, columns = int(address[0]) & 0xFFFF, int(count[0])
        memory.deallocate(start, columns)
        if races := cta.machine.races:
            races.tensor_access(cta, warp, Rectangle(0, LANES, start, columns), True, place)

    return effect


@instruction("tcgen05.relinquish_alloc_permit" + _GROUPS + ".sync.aligned", together=32)
def relinquish(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.16.7.1 tcgen05.relinquish_alloc_permit: this CTA allocates no more."""
    memory = tensor_memory(lanes)

    def effect() -> None:
        memory.may_allocate = False

    return effect


# Lanes that a shape spans and, for one repetition, registers a thread holds and columns it covers.
_SHAPES = {
    "32x32b": (32, 1, 1),
    "16x32bx2": (16, 1, 1),
    "16x64b": (16, 1, 2),
    "16x128b": (16, 2, 4),
    "16x256b": (16, 4, 8),
}


@cache
def fragment(shape: str, repeat: int, second: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) offsets of register [i, thread]: 9.7.16.2.3, figures of the fragments.

    .16x32bx2: threads 16 to 31 access the same lanes as 0 to 15, `second` columns further.
    """
    _, registers, columns = _SHAPES[shape]
    i, t = np.arange(registers * repeat)[:, None], np.arange(32)[None, :]
    block, r = i // registers, i % registers
    if shape == "32x32b":
        row, column = t + 0 * i, r + 0 * t
    elif shape == "16x32bx2":
        row, column = t % 16 + 0 * i, r + t // 16 * second
    elif shape == "16x64b":
        row, column = t // 4 + 8 * (t % 2) + 0 * i, t // 2 % 2 + 0 * i
    elif shape == "16x128b":
        row, column = t // 4 + 8 * r, t % 4 + 0 * r
    else:
        row, column = t // 4 + 8 * (r // 2), 2 * (t % 4) + r % 2
    return row, block * columns + column


_REPEATS = "<.x1|.x2|.x4|.x8|.x16|.x32|.x64|.x128>"
_LD_SHAPES = "<.32x32b|.16x32bx2|.16x64b|.16x128b|.16x256b>"


class _Transfer:
    """A bound tcgen05.ld or st: registers [i, lane] against cells of each warp's quarter."""

    def __init__(self, ins: Instruction, lanes: Lanes):
        if lanes.count % 32:
            raise BarrierMisuse(f"{ins.opcode} by an incomplete warp")
        self.lanes, self.place, self.memory = lanes, lanes.place, tensor_memory(lanes)
        self.shape, repeat = ins.parts[4], int(ins.parts[5][1:])
        operands = [o for o in ins.operands if not isinstance(o, Immediate)]
        splits = [o.bits for o in ins.operands if isinstance(o, Immediate)]
        if len(operands) != 2 or len(splits) != (self.shape == "16x32bx2"):
            raise Unsupported(f"{ins.opcode} with {len(ins.operands)} operands")
        address, registers = operands if ins.parts[1] == "st" else operands[::-1]
        self.starts = (0, *splits)
        self.rows, self.columns = fragment(self.shape, repeat, self.starts[-1])
        self.height, self.width = _SHAPES[self.shape][0], _SHAPES[self.shape][2] * repeat
        self.bytes_moved = 4 * self.height * self.width * len(self.starts)
        address = expect(address, Address)
        self.base, self.offset = lanes.read(address.base, np.uint32), address.offset
        self.registers, self.numbers = lanes.rows(registers)
        if len(self.numbers) != len(self.rows):
            raise Unsupported(f"{ins.opcode} with {len(self.numbers)} registers")

    def rectangles(self, warp_index: int) -> list[Rectangle]:
        """The cells that a warp accesses, one rectangle, or two of .16x32bx2."""
        address = (
            int(self.base[32 * warp_index] if len(self.base) > 1 else self.base[0]) + self.offset
        )
        lane, column = address >> 16, address & 0xFFFF
        warp = self.lanes.warps[warp_index]
        if lane // 32 != warp % 4:
            raise OutOfBounds(
                f"warp {warp} accesses tensor memory lane {lane}; it reaches lanes "
                f"{32 * (warp % 4)} to {32 * (warp % 4) + 31}"
            )
        found = [Rectangle(lane, self.height, column + s, self.width) for s in self.starts]
        for rectangle in found:
            self.memory.check(rectangle)
        return found


@instruction("tcgen05.ld.sync.aligned" + _LD_SHAPES + _REPEATS + ".b32", together=32, effects=True)
def load(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.16.8.1 tcgen05.ld: tensor memory to registers.

    The manual asks for tcgen05.wait::ld before the registers are used. Compiled kernels that are
    known to be right leave it out (the hardware tracks the registers), so it is there at once.
    """
    transfer = _Transfer(ins, lanes)
    machine, cta, memory = lanes.cta.machine, lanes.cta, transfer.memory
    place = lanes.place
    initialised, races = machine.options.initialised, machine.races

    def effect() -> None:
        for i, warp in enumerate(lanes.warps):
            found = transfer.rectangles(i)
            for r in found:
                if initialised:
                    memory.need_written(r)
                if races:
                    races.tensor_access(cta, warp, r, False, place)
            first = found[0]
            cells = memory.cells[first.lane + transfer.rows, first.column + transfer.columns]
            transfer.registers[transfer.numbers, 32 * i : 32 * i + 32] = cells
            cta.count(warp, "tensor memory bytes loaded", transfer.bytes_moved)

    return effect


@instruction("tcgen05.st.sync.aligned" + _LD_SHAPES + _REPEATS + ".b32", together=32, effects=True)
def store(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.16.8.2 tcgen05.st: registers to tensor memory, complete at tcgen05.wait::st."""
    transfer = _Transfer(ins, lanes)
    machine, cta, memory = lanes.cta.machine, lanes.cta, transfer.memory
    place = lanes.place
    assert place

    def issue(i: int, warp: int) -> None:
        found = transfer.rectangles(i)
        first = found[0]
        values = transfer.registers[transfer.numbers, 32 * i : 32 * i + 32]
        agent: Any = machine.races.issue(cta, warp, "tcgen05.st") if machine.races else None

        def run() -> None:
            memory.cells[first.lane + transfer.rows, first.column + transfer.columns] = values
            for r in found:
                memory.written[r.window] = True
                if machine.races:
                    machine.races.tensor_access(cta, agent, r, True, place)

        operation = machine.queue.submit(("tcgen05.st", id(cta), warp), run, place)
        cta.cluster.group(("tcgen05.st", cta.rank, warp)).open.append((operation, agent))
        cta.count(warp, "tensor memory bytes stored", transfer.bytes_moved)

    def effect() -> None:
        for i, warp in enumerate(lanes.warps):
            issue(i, warp)

    return effect


@instruction("tcgen05.wait::ld.sync.aligned", together=32)
def wait_load(ins: Instruction, lanes: Lanes) -> None:
    """9.7.16.8.3 tcgen05.wait::ld: loads complete at once here, see tcgen05.ld."""


@instruction("tcgen05.wait::st.sync.aligned", together=32, effects=True)
def wait_store(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.16.8.3 tcgen05.wait::st: the warp's stores so far are complete."""
    cta = lanes.cta

    def effect() -> None:
        for warp in lanes.warps:
            group = cta.cluster.group(("tcgen05.st", cta.rank, warp))
            group.commit()
            for agent in group.wait(0):
                if agent is not None and cta.machine.races:
                    cta.machine.races.join(cta, warp, agent)

    return effect


@instruction("tcgen05.fence<::before_thread_sync|::after_thread_sync>", effects=True)
def fence(ins: Instruction, lanes: Lanes) -> None:
    """9.7.16.11.1 tcgen05.fence: orders tcgen05 work with barriers of threads.

    Commits and waits already do so here; the fence adds nothing that the emulator checks.
    """


@instruction(
    "tcgen05.commit" + _GROUPS + ".mbarrier::arrive::one{.shared::cluster}"
    "{.multicast::cluster}.b64",
    effects=True,
)
def commit(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.16.10.1 tcgen05.commit: one arrival when the products issued so far are complete."""
    addresses, cta, place = shared_addresses(lanes, ins.operands[0]), lanes.cta, lanes.place
    multicast = "multicast::cluster" in ins.parts
    masks = lanes.read(ins.operands[1], np.uint16) if multicast else np.zeros(1, np.uint16)
    machine = cta.machine
    assert place

    def issue(warp: int, address: int, mask: int) -> None:
        agent: Any = machine.races.pipe(cta) if machine.races else None

        def run() -> None:
            for target in destinations(address, mask if multicast else None):
                barrier = cta.cluster.mbarriers.at(target)
                if machine.races:
                    machine.races.async_arrive(barrier, agent, place)
                barrier.arrive(1)

        machine.queue.submit(("tcgen05", id(cta)), run, place)

    def effect() -> None:
        for warp, (address, mask) in issues(lanes, addresses(), masks):
            issue(warp, address, mask)

    return effect
