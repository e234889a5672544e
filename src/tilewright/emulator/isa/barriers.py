"""Barriers between threads: named, cluster and mbarrier; fences (PTX ISA 9.7.13)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.emulator.barriers import MBarrier, Waiters
from tilewright.emulator.bound import lane_bits
from tilewright.emulator.errors import Unsupported
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.memory import shared_addresses
from tilewright.emulator.parse import Instruction, Sink
from tilewright.emulator.registers import Lanes


def _named(ins: Instruction, lanes: Lanes, wait: bool) -> Effect:
    numbers = lanes.read(ins.operands[0], np.uint32)
    counts = lanes.read(ins.operands[1], np.uint32) if len(ins.operands) > 1 else None
    pc = lanes.cta.machine.next_pc(ins) if wait else None
    barriers = lanes.cta

    def effect() -> int:
        for number in np.unique(numbers):
            chosen = np.broadcast_to(numbers == number, lanes.count)
            mask = lane_bits(lanes, chosen)
            count = None
            if counts is not None:
                count = int(np.broadcast_to(counts, lanes.count)[np.argmax(chosen)])
            barriers.named_barriers.arrive(int(number), count, mask, pc)
        return 0

    return effect


@instruction("bar{.cta}.sync", together=32, blocking=True, effects=True)
@instruction("barrier{.cta}.sync{.aligned}", together=32, blocking=True, effects=True)
def bar_sync(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.1 bar.sync: arrive at a named barrier and wait for `count` threads."""
    return _named(ins, lanes, wait=True)


@instruction("bar{.cta}.arrive", together=32, effects=True)
@instruction("barrier{.cta}.arrive{.aligned}", together=32, effects=True)
def bar_arrive(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.1 bar.arrive: arrive without waiting."""
    return _named(ins, lanes, wait=False)


@instruction("barrier.cluster.arrive{.release|.relaxed}{.aligned}", together=32, effects=True)
def cluster_arrive(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.3 barrier.cluster.arrive."""
    cta, release = lanes.cta, "relaxed" not in ins.parts

    def effect() -> None:
        if races := cta.machine.races:
            races.cluster_arrive(cta.cluster.barrier, lanes, release)
        cta.cluster.barrier.arrive(cta, lanes.threads)

    return effect


@instruction("barrier.cluster.wait{.acquire}{.aligned}", together=32, blocking=True)
def cluster_wait(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.3 barrier.cluster.wait: until every thread of the cluster has arrived."""
    cta, pc = lanes.cta, lanes.cta.machine.pc_of(ins)

    def effect() -> int:
        barrier = cta.cluster.barrier
        passed = lane_bits(lanes, barrier.passed(cta, lanes.threads))
        if waiting := lanes.mask & ~passed:
            barrier.waiters.append(Waiters(cta, pc, waiting))
        if passed and cta.machine.races:
            cta.machine.races.cluster_wait(barrier, lanes)
        return passed

    return effect


def each_address(lanes: Lanes, addresses: np.ndarray) -> Any:
    """(address, lane flags) for every distinct address."""
    first = int(addresses[0])
    if lanes.count == 1 or not (addresses != addresses[0]).any():
        return [(first, np.ones(lanes.count, np.bool_))]
    return [(int(a), addresses == a) for a in np.unique(addresses)]


_SPACE = "<.shared|.shared::cta|.shared::cluster>"
_SEM = "{.release|.relaxed}{.cta|.cluster}"


@instruction("mbarrier.init{.shared|.shared::cta}.b64", effects=True)
def mbarrier_init(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.15.9 mbarrier.init: a barrier that expects `count` arrivals a phase."""
    addresses, counts = (
        shared_addresses(lanes, ins.operands[0]),
        lanes.read(ins.operands[1], np.uint32),
    )
    cta, place = lanes.cta, lanes.place

    def effect() -> None:
        at = addresses()
        cta.cluster.shared.check(at, 8)
        for address, count in zip(at, np.broadcast_to(counts, lanes.count), strict=True):
            cta.cluster.mbarriers.init(int(address), int(count))
        if races := cta.machine.races:
            races.barrier_init(lanes, at, place)

    return effect


@instruction("mbarrier.inval{.shared|.shared::cta}.b64", effects=True)
def mbarrier_inval(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.15.10 mbarrier.inval."""
    addresses, cta = shared_addresses(lanes, ins.operands[0]), lanes.cta

    def effect() -> None:
        for address in np.unique(addresses()):
            cta.cluster.mbarriers.invalidate(int(address))

    return effect


def _arrive(ins: Instruction, lanes: Lanes, expects: bool, arrives: bool) -> Effect:
    """arrive, arrive.expect_tx and expect_tx: bytes first, then the arrival."""
    operands = list(ins.operands)
    has_state = arrives and len(operands) > 1 and not hasattr(operands[0], "coordinates")
    state = operands.pop(0) if has_state else Sink()
    addresses = shared_addresses(lanes, operands[0])
    amount = lanes.read(operands[1], np.uint32) if len(operands) > 1 else np.array([1], np.uint32)
    d, cta = lanes.write(state, np.uint64), lanes.cta
    races = cta.machine.races
    release = "relaxed" not in ins.parts

    def effect() -> None:
        for address, chosen in each_address(lanes, addresses()):
            barrier = cta.cluster.mbarriers.at(address)
            amounts = int(np.broadcast_to(amount, lanes.count)[chosen].sum())
            if races:
                races.barrier_arrive(barrier, lanes, chosen, release)
            if expects:
                barrier.expect(amounts)
            if arrives:
                count = int(np.count_nonzero(chosen)) if expects else amounts
                d[chosen] = barrier.arrive(count)

    return effect


@instruction("mbarrier.arrive" + _SEM + _SPACE + ".b64", effects=True, unit="mbarrier arrive")
def mbarrier_arrive(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.15.13 mbarrier.arrive: `count` arrivals (1 if not given); the state is the phase."""
    return _arrive(ins, lanes, expects=False, arrives=True)


@instruction(
    "mbarrier.arrive.expect_tx" + _SEM + _SPACE + ".b64", effects=True, unit="mbarrier arrive"
)
def mbarrier_arrive_expect_tx(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.15.13 mbarrier.arrive.expect_tx: expect bytes, then arrive once."""
    return _arrive(ins, lanes, expects=True, arrives=True)


@instruction("mbarrier.expect_tx{.relaxed}{.cta|.cluster}" + _SPACE + ".b64", effects=True)
def mbarrier_expect_tx(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.15.11 mbarrier.expect_tx."""
    return _arrive(ins, lanes, expects=True, arrives=False)


@instruction("mbarrier.complete_tx{.relaxed}{.cta|.cluster}" + _SPACE + ".b64", effects=True)
def mbarrier_complete_tx(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.15.12 mbarrier.complete_tx: count bytes as come, without a copy."""
    addresses, amounts = (
        shared_addresses(lanes, ins.operands[0]),
        lanes.read(ins.operands[1], np.uint32),
    )

    def effect() -> None:
        for address, chosen in each_address(lanes, addresses()):
            count = int(np.broadcast_to(amounts, lanes.count)[chosen].sum())
            lanes.cta.cluster.mbarriers.at(address).complete(count)

    return effect


_WAIT = "{.parity}{.acquire|.relaxed}{.cta|.cluster}<.shared|.shared::cta>.b64"


@instruction("mbarrier<.try_wait>" + _WAIT, blocking=True, unit="mbarrier wait")
@instruction("mbarrier<.test_wait>" + _WAIT, blocking=True, unit="mbarrier wait")
def mbarrier_wait(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.15.16 mbarrier.test_wait, try_wait: whether a phase has completed.

    A thread may be delayed at any instruction, so lanes that would see false are parked until the
    phase completes, or until nothing else can run (a time-out): then they get false.
    """
    cta, machine = lanes.cta, lanes.cta.machine
    pc, addresses = machine.pc_of(ins), shared_addresses(lanes, ins.operands[1])
    parity = "parity" in ins.parts
    wanted = lanes.read(ins.operands[2], np.uint32 if parity else np.uint64)
    p = lanes.write(ins.operands[0], np.bool_)
    acquire = "relaxed" not in ins.parts

    def look(barrier: MBarrier, phase: int, chosen: np.ndarray, late: int) -> int:
        """One phase of one barrier; returns the lanes that pass."""
        mask = lane_bits(lanes, chosen)
        done = barrier.passed(phase) if parity else barrier.phase > phase
        if done and _looks_first(cta, barrier, pc, mask):
            done, late = False, mask
        p[chosen] = done
        if done and machine.races and acquire:
            machine.races.barrier_wait(barrier, lanes, chosen)
        if not done and mask & ~late:
            barrier.waiters.append(Waiters(cta, pc, mask & ~late))
        return mask if done else mask & late

    def effect() -> int:
        passed, late = 0, cta.timed_out & lanes.mask
        cta.timed_out &= ~lanes.mask
        phases = np.broadcast_to(wanted, lanes.count)
        for address, at in each_address(lanes, addresses()):
            barrier = cta.cluster.mbarriers.at(address)
            for phase in np.unique(phases[at]):
                passed |= look(barrier, int(phase), at & (phases == phase), late)
        return passed

    return effect


def _looks_first(cta: Any, barrier: MBarrier, pc: int, mask: int) -> bool:
    """With failing peeks, the first look at a phase fails: a loop looks again, a peek does not."""
    machine = cta.machine
    if not machine.options.failing_peeks:
        return False
    key = (id(cta), barrier.address, pc, mask)
    if machine.peeked.get(key) == barrier.phase:
        return False
    machine.peeked[key] = barrier.phase
    return True


@instruction("fence.mbarrier_init.release.cluster", effects=True)
def fence_mbarrier_init(ins: Instruction, lanes: Lanes) -> Effect | None:
    """9.7.13.4 fence.mbarrier_init: earlier inits become visible to the cluster."""
    races = lanes.cta.machine.races
    return (lambda: races.fence_init(lanes)) if races else None


@instruction("fence.proxy.async{.global|.shared::cta|.shared::cluster}", effects=True)
@instruction(
    "fence.proxy.async::generic<.acquire|.release>.sync_restrict"
    "<.shared::cta.cluster|.shared::cluster.cluster>",
    effects=True,
)
def fence_proxy_async(ins: Instruction, lanes: Lanes) -> Effect | None:
    """9.7.13.4 fence.proxy.async: orders generic accesses with those of the async proxy."""
    races = lanes.cta.machine.races
    return (lambda: races.fence_proxy(lanes)) if races else None


@instruction("fence.proxy.alias")
@instruction("fence.proxy.tensormap::generic<.release|.acquire><.cta|.cluster|.gpu|.sys>")
def fence_proxy_other(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.4: proxies that the emulator does not model."""
    raise Unsupported(ins.opcode)


@instruction("fence<.sc|.acq_rel|.acquire|.release><.cta|.cluster|.gpu|.sys>", effects=True)
@instruction("membar<.cta|.gl|.sys>", effects=True)
def fence(ins: Instruction, lanes: Lanes) -> Effect | None:
    """9.7.13.4 fence: accesses before it are ordered with accesses after it."""
    races = lanes.cta.machine.races
    return (lambda: races.fence(lanes)) if races else None
