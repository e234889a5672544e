"""Loads and stores of every state space (PTX ISA 9.7.9.8-9.7.9.14)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tilewright.emulator.cta import PARAM_WINDOW
from tilewright.emulator.errors import OutOfBounds, Unsupported, expect
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.types import type_of
from tilewright.emulator.memory import SHARED_WINDOW
from tilewright.emulator.parse import Address, Instruction, Operand, Register, Symbol
from tilewright.emulator.registers import Lanes

_TYPES = "<.b8|.b16|.b32|.b64|.u8|.u16|.u32|.u64|.s8|.s16|.s32|.s64|.f32|.f64>"
_VECTORS = "{.v2|.v4|.v8}"
_CACHE = (
    "{.L1::no_allocate|.L1::evict_last|.L1::evict_first|.L1::evict_normal|.L1::evict_unchanged"
    "|.ca|.cg|.cs|.lu|.cv|.wb|.wt}{.L2::evict_last|.L2::evict_first|.L2::evict_normal}"
    "{.L2::cache_hint}{.L2::64B|.L2::128B|.L2::256B}"
)
_ORDER = "{.weak|.relaxed.cta|.relaxed.cluster|.relaxed.gpu|.relaxed.sys|.acquire.cta|.acquire.cluster|.acquire.gpu|.acquire.sys|.volatile}"  # noqa: E501
_RELEASE = _ORDER.replace("acquire", "release")


def bytes_moved(ins: Instruction) -> int:
    """Bytes one lane loads or stores."""
    return type_of(ins.parts[-1]).itemsize * count_of(ins)


def count_of(ins: Instruction) -> int:
    return next((int(p[1:]) for p in ins.parts if p in ("v2", "v4", "v8")), 1)


def shared_addresses(lanes: Lanes, operand: Operand) -> Any:
    """A function that computes the shared address (uint32) of every lane."""
    operand = expect(operand, Address)
    base = operand.base
    wide = isinstance(base, Register) and base.width == 64
    source = lanes.read(base, np.uint64 if wide else np.uint32)
    if len(source) != lanes.count:
        source = np.repeat(source, lanes.count)
    if wide:
        # A 64-bit operand holds a generic address or a zero-extended shared one; the low 32 bits
        # are the shared address in both.
        source = source.view(np.uint32)[::2]
    offset = np.uint32(operand.offset & 0xFFFFFFFF)
    return (lambda: source + offset) if operand.offset else (lambda: source)


def global_addresses(lanes: Lanes, operand: Operand) -> Any:
    operand = expect(operand, Address)
    source = lanes.read(operand.base, np.uint64)
    offset = np.uint64(operand.offset & (2**64 - 1))
    if len(source) != lanes.count:
        source = np.repeat(source, lanes.count)
    return (lambda: source + offset) if operand.offset else (lambda: source)


def _destinations(ins: Instruction, lanes: Lanes) -> list[np.ndarray]:
    """Where a load puts its elements: registers may be wider, then values are extended."""
    kind = type_of(ins.parts[-1])
    views = []
    for register in lanes.vector(ins.operands[0]):
        if isinstance(register, Register) and register.width > 8 * kind.itemsize:
            kind = np.dtype(f"{'i' if kind.kind == 'i' else 'u'}{register.width // 8}")
        views.append(lanes.write(register, kind))
    return views


@instruction("ld.param" + _VECTORS + _TYPES)
def ld_param(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.8 ld.param: a constant of the launch."""
    address = expect(ins.operands[1], Address)
    offset = (
        lanes.cta.symbol_address(expect(address.base, Symbol).name) - PARAM_WINDOW + address.offset
    )
    kind, params = type_of(ins.parts[-1]), lanes.cta.machine.launch.params
    values = np.frombuffer(params, kind, count_of(ins), offset)
    pairs = list(zip(_destinations(ins, lanes), values, strict=True))

    def effect() -> None:
        for d, value in pairs:
            d[:] = value

    return effect


@instruction(
    "ld" + _ORDER + "<.shared|.shared::cta|.shared::cluster>" + _VECTORS + _TYPES,
    unit="shared load",
    weight=bytes_moved,
)
def ld_shared(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.8 ld.shared."""
    kind, count = type_of(ins.parts[-1]), count_of(ins)
    addresses, destinations = shared_addresses(lanes, ins.operands[1]), _destinations(ins, lanes)
    return _load_shared(lanes, addresses, kind, count, destinations)


def _load_shared(
    lanes: Lanes, addresses: Any, kind: np.dtype, count: int, destinations: list[np.ndarray]
) -> Effect:
    shared, machine, unit = lanes.cta.cluster.shared, lanes.cta.machine, kind.itemsize
    view = shared.views[unit].view(kind)
    columns = [(view[i:], shared.marks[unit][i:], d) for i, d in enumerate(destinations)]
    full, size = shared.all_written[unit], unit * count
    shift, check = np.uint32(unit.bit_length() - 1), machine.options.initialised
    place, races = lanes.place, machine.races
    same = all(d.dtype == kind for d in destinations)

    def effect() -> None:
        at = addresses()
        shared.check(at, size)
        index = at >> shift
        if races:
            races.lanes_access(lanes, at, size, False, place)
        for values, marks, d in columns:
            if check and not (marks.take(index) == full).all():
                shared.need_written(index, unit)
                shared.need_written(index + (size // unit - 1), unit)
            if same:
                values.take(index, out=d, mode="clip")
            else:
                d[:] = values.take(index)

    return effect


@instruction(
    "ld{.weak}.global{.nc}" + _CACHE + _VECTORS + _TYPES, unit="global load", weight=bytes_moved
)
def ld_global(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.8, 9.7.9.9 ld.global: bounds are those of the tensor that the address lies in."""
    return _load_global(ins, lanes, global_addresses(lanes, ins.operands[1]))


@instruction(
    "ld<.relaxed|.acquire|.volatile>{.cta|.cluster|.gpu|.sys}.global" + _CACHE + _VECTORS + _TYPES,
    unit="global load",
    weight=bytes_moved,
    polls=True,
)
def ld_global_polled(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.8 ld.acquire, ld.relaxed, ld.volatile: may be a loop's look at another CTA's flag."""
    return _load_global(ins, lanes, global_addresses(lanes, ins.operands[1]))


def _load_global(ins: Instruction, lanes: Lanes, addresses: Any) -> Effect:
    kind, count = type_of(ins.parts[-1]), count_of(ins)
    destinations, memory = _destinations(ins, lanes), lanes.cta.machine.memory
    unit = kind.itemsize

    def effect() -> None:
        for chosen, tensor, offsets in memory.parts(addresses(), unit * count):
            view, index = memory.view(tensor, unit).view(kind), offsets // unit
            for i, d in enumerate(destinations):
                d[chosen] = view[index + i]

    return effect


def _sources(ins: Instruction, lanes: Lanes) -> list[np.ndarray]:
    kind = type_of(ins.parts[-1])
    return [lanes.wide(o, kind) for o in lanes.vector(ins.operands[1])]


@instruction(
    "st" + _RELEASE + "<.shared|.shared::cta|.shared::cluster>" + _VECTORS + _TYPES,
    effects=True,
    unit="shared store",
    weight=bytes_moved,
)
def st_shared(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.12 st.shared."""
    kind, count = type_of(ins.parts[-1]), count_of(ins)
    return _store_shared(
        lanes, shared_addresses(lanes, ins.operands[0]), kind, count, _sources(ins, lanes)
    )


def _store_shared(
    lanes: Lanes, addresses: Any, kind: np.dtype, count: int, sources: list[np.ndarray]
) -> Effect:
    shared, unit, place = lanes.cta.cluster.shared, kind.itemsize, lanes.place
    view, marks, full = shared.views[unit].view(kind), shared.marks[unit], shared.all_written[unit]
    columns = [(view[i:], marks[i:], s) for i, s in enumerate(sources)]
    shift, races, size = np.uint32(unit.bit_length() - 1), lanes.cta.machine.races, unit * count

    def effect() -> None:
        at = addresses()
        shared.check(at, size)
        index = at >> shift
        for values, mark, source in columns:
            values[index] = source
            mark[index] = full
        if races:
            races.lanes_access(lanes, at, size, True, place)

    return effect


@instruction(
    "st" + _RELEASE + ".global" + _CACHE + _VECTORS + _TYPES,
    effects=True,
    unit="global store",
    weight=bytes_moved,
)
def st_global(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.12 st.global."""
    kind, count = type_of(ins.parts[-1]), count_of(ins)
    addresses, sources = global_addresses(lanes, ins.operands[0]), _sources(ins, lanes)
    memory, unit = lanes.cta.machine.memory, kind.itemsize

    def effect() -> None:
        for chosen, tensor, offsets in memory.parts(addresses(), unit * count):
            view, index = memory.view(tensor, unit).view(kind), offsets // unit
            for i, source in enumerate(sources):
                view[index + i] = source[chosen] if len(source) > 1 else source

    return effect


@instruction(
    "ld" + _ORDER + ".local" + _CACHE + _VECTORS + _TYPES, unit="local load", weight=bytes_moved
)
def ld_local(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.8 ld.local: memory of the thread, spilled or indexed arrays."""
    kind, addresses = type_of(ins.parts[-1]), _local_addresses(lanes, ins.operands[1])
    destinations = _destinations(ins, lanes)
    view, unit = lanes.cta.local, kind.itemsize

    def effect() -> None:
        at = _inside_local(lanes, addresses(), bytes_moved(ins))
        for i, d in enumerate(destinations):
            columns = at[:, None] + np.arange(i * unit, (i + 1) * unit)
            d[:] = view[lanes.threads[:, None], columns].copy().view(kind)[:, 0]

    return effect


@instruction(
    "st" + _ORDER + ".local" + _CACHE + _VECTORS + _TYPES, unit="local store", weight=bytes_moved
)
def st_local(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.12 st.local."""
    kind, addresses = type_of(ins.parts[-1]), _local_addresses(lanes, ins.operands[0])
    sources, unit = _sources(ins, lanes), kind.itemsize

    def effect() -> None:
        at = _inside_local(lanes, addresses(), bytes_moved(ins))
        for i, source in enumerate(sources):
            columns = at[:, None] + np.arange(i * unit, (i + 1) * unit)
            raw = np.ascontiguousarray(np.broadcast_to(source, lanes.count)).view(np.uint8)
            lanes.cta.local[lanes.threads[:, None], columns] = raw.reshape(-1, unit)

    return effect


def _local_addresses(lanes: Lanes, operand: Operand) -> Any:
    operand = expect(operand, Address)
    base, offset = lanes.read(operand.base, np.uint64), operand.offset
    return lambda: np.broadcast_to(base.astype(np.int64) + offset, lanes.count)


def _inside_local(lanes: Lanes, addresses: np.ndarray, size: int) -> np.ndarray:
    if addresses.min() < 0 or addresses.max() + size > lanes.cta.local.shape[1]:
        raise OutOfBounds(f"local address {int(addresses.max())} of {lanes.cta.local.shape[1]}")
    return addresses


def generic_is_shared(lanes: Lanes, addresses: np.ndarray) -> bool:
    """Whether generic addresses lie in the shared window; raises where lanes disagree."""
    inside = addresses >= np.uint64(SHARED_WINDOW)
    if inside.any() and not inside.all():
        raise Unsupported("generic access to shared and global memory by one instruction")
    return bool(inside[0])


@instruction(
    "ld{.weak|.relaxed|.acquire|.volatile}{.cta|.cluster|.gpu|.sys}" + _VECTORS + _TYPES,
    polls=True,
    unit="global load",
    weight=bytes_moved,
)
def ld_generic(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.8 ld without a state space: the address says which."""
    kind, count = type_of(ins.parts[-1]), count_of(ins)
    addresses, destinations = global_addresses(lanes, ins.operands[1]), _destinations(ins, lanes)
    shared = _load_shared(
        lanes, shared_addresses(lanes, ins.operands[1]), kind, count, destinations
    )
    other = _load_global(ins, lanes, addresses)
    return lambda: shared() if generic_is_shared(lanes, addresses()) else other()


@instruction("prefetch{.global|.local}<.L1|.L2|.tensormap>")
@instruction("prefetch.tensormap")
@instruction("discard.global.L2")
@instruction("applypriority.global.L2::evict_normal")
def prefetch(ins: Instruction, lanes: Lanes) -> None:
    """9.7.9.15 prefetch: no effect on values."""


@instruction("createpolicy.fractional<.L2::evict_first|.L2::evict_last|.L2::evict_normal>.b64")
def createpolicy(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.18 createpolicy: cache policies do not matter here; any value does."""
    return partial(np.copyto, lanes.write(ins.operands[0], np.uint64), np.uint64(0))
