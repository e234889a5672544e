"""Bulk copies without a tensor map, cp.async, and their groups (PTX ISA 9.7.9.25)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.emulator.errors import OutOfBounds, expect
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.memory import global_addresses, shared_addresses
from tilewright.emulator.isa.tma import issues
from tilewright.emulator.isa.types import BF16, TYPES
from tilewright.emulator.parse import Immediate, Instruction
from tilewright.emulator.registers import Lanes


@instruction(
    "cp.async.bulk<.shared::cta|.shared::cluster>.global.mbarrier::complete_tx::bytes"
    "{.L2::cache_hint}",
    effects=True,
)
def bulk_load(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.25.4.1 cp.async.bulk, global to shared."""
    to, source, size, signal, *_ = ins.operands
    operands = (
        shared_addresses(lanes, to),
        global_addresses(lanes, source),
        shared_addresses(lanes, signal),
    )
    memory = lanes.cta.machine.memory

    def fetch(address: int, count: int, agent: Any) -> np.ndarray:
        chosen = memory.parts(np.array([address], np.uint64), 16)[0]
        start = int(chosen[2][0])
        if start + count > len(chosen[1].bytes):
            raise OutOfBounds(
                f"{count} bytes at offset {start} of {chosen[1].name}, {len(chosen[1].bytes)} bytes"
            )
        return chosen[1].bytes[start : start + count]

    return _to_shared(ins, lanes, operands, lanes.read(size, np.uint32), fetch, "bulk load")


@instruction("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", effects=True)
def bulk_exchange(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.25.4.1 cp.async.bulk, shared to the shared memory of another CTA."""
    to, source, size, signal = ins.operands
    operands = (
        shared_addresses(lanes, to),
        shared_addresses(lanes, source),
        shared_addresses(lanes, signal),
    )
    shared, races, place = lanes.cta.cluster.shared, lanes.cta.machine.races, lanes.place

    def fetch(address: int, count: int, agent: Any) -> np.ndarray:
        shared.check_range(address, count)
        if races:
            races.units_access(agent, np.arange(address, address + count, 16), 16, False, place)
        if lanes.cta.machine.options.initialised:
            shared.need_written(np.arange(address // 4, (address + count) // 4), 4)
        return shared.data[address : address + count]

    return _to_shared(ins, lanes, operands, lanes.read(size, np.uint32), fetch, "DSMEM copy")


def _to_shared(
    ins: Instruction, lanes: Lanes, operands: Any, sizes: np.ndarray, fetch: Any, name: str
) -> Effect:
    machine, cluster, races = lanes.cta.machine, lanes.cta.cluster, lanes.cta.machine.races
    place = lanes.place
    assert place

    def issue(warp: int, values: tuple[int, ...]) -> None:
        target, source, signal, count = values
        if count % 16 or target % 16 or source % 16:
            raise OutOfBounds(
                f"{ins.opcode}: {count} bytes from {source:#x} to {target:#x} are not "
                "multiples of 16"
            )
        agent: Any = races.issue(lanes.cta, warp, name) if races else None

        def run() -> None:
            data = fetch(source, count, agent)
            cluster.shared.check_range(target, count)
            if races:
                units = np.arange(target, target + count, 16)
                races.units_access(agent, units, 16, True, place)
            cluster.shared.data[target : target + count] = data
            cluster.shared.written[target : target + count] = 1
            barrier = cluster.mbarriers.at(signal)
            if races:
                races.async_arrive(barrier, agent, place)
            barrier.complete(count)

        lanes.cta.count(warp, f"{name} bytes", count)
        machine.queue.submit(object(), run, place)

    def effect() -> None:
        for warp, values in issues(lanes, *(get() for get in operands), sizes):
            issue(warp, values)

    return effect


@instruction("cp.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}", effects=True)
@instruction(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}<.add|.min|.max|.and"
    "|.or|.xor>{.noftz}<.f16|.bf16|.f32|.f64|.u32|.s32|.u64|.b32|.b64>",
    effects=True,
)
def bulk_store(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.25.4.1 and .2 cp(.reduce).async.bulk, shared to global."""
    reduces = ins.parts[1] == "reduce"
    kind = np.dtype(np.uint8)
    if reduces:
        kind = BF16 if ins.parts[-1] == "bf16" else TYPES[ins.parts[-1]]
    operation = (
        {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[next(p for p in ins.parts if p in ("add", "min", "max", "and", "or", "xor"))]
        if reduces
        else None
    )
    targets, sources = (
        global_addresses(lanes, ins.operands[0]),
        shared_addresses(lanes, ins.operands[1]),
    )
    sizes, cta, place = lanes.read(ins.operands[2], np.uint32), lanes.cta, lanes.place
    machine, shared, races = cta.machine, cta.cluster.shared, cta.machine.races
    assert place

    def issue(warp: int, values: tuple[int, ...]) -> None:
        target, source, count = values
        shared.check_range(source, count)
        _, tensor, offsets = machine.memory.parts(np.array([target], np.uint64), 16)[0]
        start = int(offsets[0])
        if count % 16 or source % 16 or start + count > len(tensor.bytes):
            raise OutOfBounds(
                f"{ins.opcode}: {count} bytes from shared {source:#x} to offset {start} "
                f"of {tensor.name}, {len(tensor.bytes)} bytes"
            )
        agent: Any = races.issue(cta, warp, "bulk store") if races else None

        def run() -> None:
            if races:
                units = np.arange(source, source + count, 16)
                races.units_access(agent, units, 16, False, place)
            if machine.options.initialised:
                shared.need_written(np.arange(source // 4, (source + count) // 4), 4)
            data = shared.data[source : source + count].view(kind)
            into = tensor.bytes[start : start + count].view(kind)
            into[:] = operation(into, data) if operation else data

        cta.count(warp, "bulk reduce bytes" if reduces else "bulk store bytes", count)
        submitted = machine.queue.submit(object(), run, place)
        cta.cluster.group(("bulk", cta.rank, warp)).open.append((submitted, agent))

    def effect() -> None:
        for warp, values in issues(lanes, targets(), sources(), sizes):
            issue(warp, values)

    return effect


@instruction("cp.async.bulk.commit_group", effects=True)
def bulk_commit(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.25.4.4 cp.async.bulk.commit_group."""
    return _commit(lanes, "bulk")


@instruction("cp.async.bulk.wait_group{.read}", effects=True)
def bulk_wait(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.25.4.5 cp.async.bulk.wait_group: until the sources were read, or all is done."""
    return _wait(ins, lanes, "bulk")


@instruction("cp.async.commit_group", effects=True)
def async_commit(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.25.3.2 cp.async.commit_group."""
    return _commit(lanes, "async")


@instruction("cp.async.wait_group", effects=True)
@instruction("cp.async.wait_all", effects=True)
def async_wait(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.25.3.3 cp.async.wait_group."""
    return _wait(ins, lanes, "async")


def _commit(lanes: Lanes, kind: str) -> Effect:
    cta = lanes.cta

    def effect() -> None:
        for warp in lanes.warps:
            cta.cluster.group((kind, cta.rank, warp)).commit()

    return effect


def _wait(ins: Instruction, lanes: Lanes, kind: str) -> Effect:
    everything = ins.parts[-1] == "wait_all"
    allowed = 0
    if not everything:
        allowed = expect(ins.operands[0], Immediate).bits
    cta = lanes.cta

    def effect() -> None:
        for warp in lanes.warps:
            group = cta.cluster.group((kind, cta.rank, warp))
            if everything:
                group.commit()
            for agent in group.wait(allowed):
                if agent is not None and cta.machine.races:
                    cta.machine.races.join(cta, warp, agent)

    return effect


def _async_bytes(ins: Instruction) -> int:
    size = ins.operands[2]
    size = expect(size, Immediate)
    return size.bits


@instruction(
    "cp.async<.ca|.cg><.shared|.shared::cta>.global{.L2::cache_hint}{.L2::64B|.L2::128B|.L2::256B}",
    effects=True,
    unit="cp.async bytes",
    weight=_async_bytes,
)
def cp_async(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.25.3.1 cp.async: `cp-size` bytes a lane, of which `src-size` are read, the rest 0."""
    cta, size, place = lanes.cta, _async_bytes(ins), lanes.place
    targets, sources = (
        shared_addresses(lanes, ins.operands[0]),
        global_addresses(lanes, ins.operands[1]),
    )
    reads = lanes.read(ins.operands[3], np.uint32) if len(ins.operands) > 3 else None
    machine, shared, races = cta.machine, cta.cluster.shared, cta.machine.races
    assert place
    word = min(size, 8)

    def effect() -> None:
        to, source = targets().copy(), sources().copy()
        wanted = np.broadcast_to(size if reads is None else reads, lanes.count)
        shared.check(to, size)
        agents: list[Any] = [
            races.issue(cta, w, "cp.async") if races else None for w in lanes.warps
        ]

        def run() -> None:
            data = _fetch(machine.memory, source, wanted, size)
            index = (to // word)[:, None] + np.arange(size // word, dtype=np.uint32)
            if races:
                for warp, agent in zip(lanes.warps, agents, strict=True):
                    races.units_access(agent, to[lanes.threads // 32 == warp], size, True, place)
            shared.views[word][index] = data.view(f"u{word}").reshape(index.shape)
            shared.mark(index, word)

        operation = machine.queue.submit(object(), run, place)
        for warp, agent in zip(lanes.warps, agents, strict=True):
            cta.cluster.group(("async", cta.rank, warp)).open.append((operation, agent))

    return effect


def _fetch(memory: Any, source: np.ndarray, wanted: np.ndarray, size: int) -> np.ndarray:
    """[lane, byte]: `wanted` bytes from each source, then zeros."""
    data = np.zeros((len(source), size), np.uint8)
    for count in np.unique(wanted[wanted > 0]):
        lanes = np.flatnonzero(wanted == count)
        for chosen, tensor, offsets in memory.parts(source[lanes], 1):
            if int(offsets.max()) + count > len(tensor.bytes):
                raise OutOfBounds(
                    f"{count} bytes at offset {int(offsets.max())} of {tensor.name}, "
                    f"{len(tensor.bytes)} bytes"
                )
            data[lanes[chosen], :count] = tensor.bytes[offsets[:, None] + np.arange(count)]
    return data


@instruction(
    "st.async{.weak}{.shared::cluster}.mbarrier::complete_tx::bytes{.v2|.v4}"
    "<.b32|.u32|.s32|.f32|.b64|.u64|.s64|.f64>",
    effects=True,
)
def st_async(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.13 st.async: store to a CTA of the cluster and count the bytes at its mbarrier."""
    kind, cta, place = TYPES[ins.parts[-1]], lanes.cta, lanes.place
    targets, signals = (shared_addresses(lanes, ins.operands[i]) for i in (0, 2))
    sources = [lanes.read(o, kind) for o in lanes.vector(ins.operands[1])]
    size, shared, races = kind.itemsize * len(sources), cta.cluster.shared, cta.machine.races
    warp_of_lane = lanes.threads // 32
    assert place

    def issue(warp: int, to: np.ndarray, barrier: np.ndarray, values: np.ndarray) -> None:
        agent: Any = races.issue(cta, warp, "st.async") if races else None

        def run() -> None:
            index = (to // kind.itemsize)[:, None] + np.arange(len(sources))
            if races:
                races.units_access(agent, to, size, True, place)
            shared.views[kind.itemsize].view(kind)[index] = values
            shared.mark(index, kind.itemsize)
            for address in np.unique(barrier):
                mbarrier = cta.cluster.mbarriers.at(int(address))
                if races:
                    races.async_arrive(mbarrier, agent, place)
                mbarrier.complete(size * int(np.count_nonzero(barrier == address)))

        cta.count(warp, "DSMEM store bytes", size * len(to))
        cta.machine.queue.submit(object(), run, place)

    def effect() -> None:
        to, barrier = targets().copy(), signals().copy()
        shared.check(to, size)
        values = np.stack([np.broadcast_to(s, lanes.count) for s in sources], 1)
        for warp in lanes.warps:
            chosen = warp_of_lane == warp
            issue(warp, to[chosen], barrier[chosen], values[chosen])

    return effect
