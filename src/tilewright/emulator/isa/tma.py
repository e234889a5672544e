"""Tensor copies through TMA: load, store, reduce, multicast (PTX ISA 9.7.9.27)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.emulator.cta import PARAM_WINDOW
from tilewright.emulator.errors import OutOfBounds, expect
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.memory import global_addresses, shared_addresses
from tilewright.emulator.memory import OFFSET_MASK
from tilewright.emulator.parse import Address, Instruction
from tilewright.emulator.registers import Lanes
from tilewright.emulator.tensor_map import (
    TensorMap,
    chunk_index,
    decode,
    load_box,
    read_chunks,
    store_box,
    write_chunks,
)

_DIMS = "<.1d|.2d|.3d|.4d|.5d>"


def issues(lanes: Lanes, *operands: np.ndarray) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(warp, operand values) of each copy that the lanes issue.

    The copy engine takes one request a warp: lanes of a warp with equal operands make one copy.
    """
    seen = set()
    for lane in range(lanes.count):
        values = tuple(int(o[lane] if len(o) > 1 else o[0]) for o in operands)
        warp = int(lanes.threads[lane]) // 32
        if (warp, values) not in seen:
            seen.add((warp, values))
            yield warp, values


def tensor_map_at(lanes: Lanes, address: int) -> TensorMap:
    """The tensor map at a parameter's or a global address."""
    machine = lanes.cta.machine
    if address >= PARAM_WINDOW:
        offset = address - PARAM_WINDOW
        raw = machine.launch.params[offset : offset + 64]
    else:
        tensor = machine.memory.tensor(address)
        raw = tensor.bytes[address - tensor.address :][:64].tobytes()
    if address % 64 or len(raw) < 64:
        raise OutOfBounds(f"tensor map at {address:#x}: not 64-byte aligned or cut off")
    if raw not in machine.tensor_maps:
        machine.tensor_maps[raw] = decode(raw)
    return machine.tensor_maps[raw]


def _coordinates(lanes: Lanes, address: Address) -> list[np.ndarray]:
    return [lanes.read(c, np.int32) for c in address.coordinates]


def destinations(address: int, cta_mask: int | None) -> list[int]:
    """The same offset in every CTA of the multicast mask, or the address alone."""
    if cta_mask is None:
        return [address]
    return [rank << 24 | address & OFFSET_MASK for rank in range(16) if cta_mask >> rank & 1]


@instruction(
    "cp.async.bulk.tensor" + _DIMS + "<.shared::cta|.shared::cluster>.global{.tile}"
    ".mbarrier::complete_tx::bytes{.multicast::cluster}{.cta_group::1|.cta_group::2}"
    "{.L2::cache_hint}{.cta_group::1|.cta_group::2}",
    effects=True,
)
def tma_load(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.27.1.2 cp.async.bulk.tensor, global to shared: the whole box counts as bytes."""
    to, source, signal, *rest = ins.operands
    source = expect(source, Address)
    multicast = "multicast::cluster" in ins.parts
    cta_mask = lanes.read(rest[0], np.uint16) if multicast else None
    operands = (
        shared_addresses(lanes, to),
        global_addresses(lanes, Address(source.base)),
        shared_addresses(lanes, signal),
    )
    coordinates, machine, cluster = (
        _coordinates(lanes, source),
        lanes.cta.machine,
        lanes.cta.cluster,
    )
    races, place = machine.races, lanes.place
    assert place

    def issue(warp: int, values: tuple[int, ...]) -> None:
        address, map_address, barrier, mask, *start = values
        map_ = tensor_map_at(lanes, map_address)
        targets = destinations(address, mask if multicast else None)
        signals = destinations(barrier, mask if multicast else None)
        agent: Any = races.issue(lanes.cta, warp, "TMA load") if races else None

        def run() -> None:
            data = load_box(map_, machine.memory, tuple(start))
            for target, signal in zip(targets, signals, strict=True):
                cluster.shared.check_range(target, map_.box_bytes)
                index = chunk_index(map_, target)
                if races:
                    races.units_access(agent, index << 4, 16, True, place)
                write_chunks(cluster.shared, index, data)
                mbarrier = cluster.mbarriers.at(signal)
                if races:
                    races.async_arrive(mbarrier, agent, place)
                mbarrier.complete(map_.box_bytes)

        lanes.cta.count(warp, "TMA load bytes", map_.box_bytes)
        lanes.cta.count(warp, "shared bytes written by TMA", map_.box_bytes * len(targets))
        machine.queue.submit(object(), run, place)

    def effect() -> None:
        at = [get() for get in operands]
        masks = cta_mask if cta_mask is not None else np.zeros(1, np.uint16)
        for warp, values in issues(lanes, *at, masks, *coordinates):
            issue(warp, values)

    return effect


@instruction(
    "cp.async.bulk.tensor" + _DIMS + ".global.shared::cta{.tile}.bulk_group{.L2::cache_hint}",
    effects=True,
)
@instruction(
    "cp.reduce.async.bulk.tensor" + _DIMS + ".global.shared::cta<.add|.min|.max|.and|.or"
    "|.xor>{.tile}.bulk_group{.L2::cache_hint}",
    effects=True,
)
def tma_store(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.27.1.2 and .3 cp(.reduce).async.bulk.tensor, shared to global: clipped at the edges."""
    target, source, *_ = ins.operands
    target = expect(target, Address)
    reduction = next((p for p in ins.parts if p in ("add", "min", "max", "and", "or", "xor")), None)
    maps = global_addresses(lanes, Address(target.base))
    sources, coordinates = shared_addresses(lanes, source), _coordinates(lanes, target)
    machine, cluster, races = lanes.cta.machine, lanes.cta.cluster, lanes.cta.machine.races
    place, initialised = lanes.place, machine.options.initialised
    assert place

    def issue(warp: int, values: tuple[int, ...]) -> Any:
        address, map_address, *start = values
        map_ = tensor_map_at(lanes, map_address)
        cluster.shared.check_range(address, map_.box_bytes)
        index = chunk_index(map_, address)
        agent: Any = races.issue(lanes.cta, warp, "TMA store") if races else None

        def run() -> None:
            if races:
                races.units_access(agent, index << 4, 16, False, place)
            if initialised:
                cluster.shared.need_written(np.concatenate([2 * index, 2 * index + 1]), 8)
            store_box(
                map_, machine.memory, tuple(start), read_chunks(cluster.shared, index), reduction
            )

        lanes.cta.count(warp, "TMA store bytes", map_.box_bytes)
        operation = machine.queue.submit(object(), run, place)
        cluster.group(("bulk", lanes.cta.rank, warp)).open.append((operation, agent))

    def effect() -> None:
        for warp, values in issues(lanes, sources(), maps(), *coordinates):
            issue(warp, values)

    return effect


@instruction("cp.async.bulk.prefetch.tensor" + _DIMS + ".L2.global{.tile}{.L2::cache_hint}")
def tma_prefetch(ins: Instruction, lanes: Lanes) -> None:
    """9.7.9.27.1.4 cp.async.bulk.prefetch.tensor: no effect on values."""
