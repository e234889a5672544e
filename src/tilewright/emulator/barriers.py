"""mbarriers, named barriers and the cluster barrier: their state and who waits for them.

PTX ISA 9.7.13 (parallel synchronisation), 9.7.13.15 (mbarrier).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tilewright.emulator.errors import BarrierMisuse, Place

if TYPE_CHECKING:
    from tilewright.emulator.cta import CTA
    from tilewright.emulator.races import Clock


@dataclass
class Waiters:
    """Threads parked at `pc`, which they execute (again) when they are woken."""

    cta: CTA
    pc: int
    mask: int

    def wake(self) -> None:
        self.cta.enter(self.pc, self.mask)


def describe_threads(mask: int) -> str:
    """A mask as warps: 'warps 0-3' or 'warp 2 (1 thread)'."""
    warps = [w for w in range(-(-mask.bit_length() // 32)) if mask >> (32 * w) & 0xFFFFFFFF]
    if not warps:
        return "no thread"
    runs: list[list[int]] = []
    for warp in warps:
        if runs and runs[-1][-1] == warp - 1:
            runs[-1][-1:] = [warp] if len(runs[-1]) == 2 else [warp - 1, warp]
        else:
            runs.append([warp])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    partial = "" if mask.bit_count() == 32 * len(warps) else f" ({mask.bit_count()} threads)"
    return f"warp{'s' if len(warps) > 1 else ''} {text}{partial}"


@dataclass
class MBarrier:
    """One mbarrier object. `phase` counts completed phases; `tx` the bytes still to come."""

    address: int
    expected: int
    pending: int
    tx: int = 0
    phase: int = 0
    waiters: list[Waiters] = field(default_factory=list)
    clock: Clock | None = None  # of the arrivals in this phase
    released: Clock | None = None  # of all arrivals up to the last completed phase
    initialised: tuple[int, int, Place | None] = (0, 0, None)  # agent and moment of the init
    # Of the last arrival of every asynchronous agent: its moment and the instruction.
    asynchronous: dict[int, tuple[int, Place]] = field(default_factory=dict)

    def arrive(self, count: int) -> int:
        """`count` arrivals; returns the phase that they belong to."""
        phase = self.phase
        if count > self.pending:
            raise BarrierMisuse(f"{count} arrivals where {self.pending} are pending at {self}")
        self.pending -= count
        self.settle()
        return phase

    def expect(self, count: int) -> None:
        self.tx += count

    def complete(self, count: int) -> None:
        self.tx -= count
        self.settle()

    def settle(self) -> None:
        """Ends the phase if every arrival and every byte has come."""
        if self.pending or self.tx:
            return
        self.phase += 1
        self.pending = self.expected
        self.released, self.clock = self.clock, self.clock
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.wake()

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity has completed: a fresh barrier passes parity 1."""
        return (self.phase & 1) != parity

    def __str__(self) -> str:
        where = f"mbarrier {self.address >> 24}:{self.address & 0xFFFFFF:#x}"
        return (
            f"{where} (phase {self.phase}, {self.pending} of {self.expected} arrivals pending, "
            f"{self.tx} bytes to come)"
        )


class MBarriers:
    """The mbarriers of a cluster by shared address."""

    def __init__(self) -> None:
        self.table: dict[int, MBarrier] = {}

    def init(self, address: int, count: int) -> None:
        if address & 7:
            raise BarrierMisuse(f"mbarrier.init at {address:#x}, which is not a multiple of 8")
        if not 0 < count < 1 << 20:
            raise BarrierMisuse(f"mbarrier.init with a count of {count}")
        old = self.table.get(address)
        if old and (old.waiters or old.tx or old.pending != old.expected):
            raise BarrierMisuse(f"init again while in use: {old}")
        self.table[address] = MBarrier(address, count, count)

    def invalidate(self, address: int) -> None:
        self.at(address)
        del self.table[address]

    def at(self, address: int) -> MBarrier:
        try:
            return self.table[address]
        except KeyError:
            raise BarrierMisuse(
                f"no mbarrier was initialised at {address >> 24}:{address & 0xFFFFFF:#x}"
            ) from None


@dataclass
class NamedBarrier:
    expected: int | None  # None: every live thread of the CTA
    arrived: int = 0
    waiters: list[Waiters] = field(default_factory=list)
    clock: Clock | None = None


class NamedBarriers:
    """The sixteen barriers of a CTA (bar, barrier). Each counts threads, a warp at a time."""

    def __init__(self, cta: CTA):
        self.cta = cta
        self.table: dict[int, NamedBarrier] = {}

    def arrive(self, number: int, count: int | None, mask: int, resume: int | None) -> None:
        """The threads of `mask` arrive; with `resume` they wait, and continue there."""
        if not 0 <= number < 16:
            raise BarrierMisuse(f"named barrier {number}: there are 16")
        if count is not None and (count <= 0 or count % 32):
            raise BarrierMisuse(f"named barrier {number} with {count} threads: not whole warps")
        barrier = self.table.setdefault(number, NamedBarrier(count))
        if barrier.expected != count:
            raise BarrierMisuse(
                f"named barrier {number}: {count} threads expected here, "
                f"{barrier.expected} by who came first"
            )
        threads = mask.bit_count()
        if barrier.expected is not None and barrier.arrived + threads > barrier.expected:
            raise BarrierMisuse(
                f"named barrier {number}: {barrier.arrived + threads} threads "
                f"arrive where {barrier.expected} are expected"
            )
        barrier.arrived += threads
        if races := self.cta.machine.races:
            races.named_arrive(barrier, self.cta, mask)
        if resume is not None:
            barrier.waiters.append(Waiters(self.cta, resume, mask))
        self._settle(number, barrier)

    def check(self) -> None:
        """Threads have ended: barriers that expect every live thread may be complete."""
        for number, barrier in list(self.table.items()):
            self._settle(number, barrier)

    def _settle(self, number: int, barrier: NamedBarrier) -> None:
        expected = barrier.expected
        if expected is None:
            expected = self.cta.live.bit_count()
        if barrier.arrived < expected:
            return
        del self.table[number]
        if races := self.cta.machine.races:
            races.named_release(barrier)
        for waiter in barrier.waiters:
            waiter.wake()


class ClusterBarrier:
    """barrier.cluster: every live thread of the cluster arrives, then waits."""

    def __init__(self, ctas: list[CTA]):
        self.ctas = ctas
        self.phase = 0
        self.arrived = 0
        self.seen = [np.full(cta.threads, -1) for cta in ctas]  # phase of a thread's last arrival
        self.waiters: list[Waiters] = []
        self.clock: Clock | None = None
        self.released: Clock | None = None

    def arrive(self, cta: CTA, threads: np.ndarray) -> None:
        seen = self.seen[cta.rank]
        if (seen[threads] == self.phase).any():
            raise BarrierMisuse("barrier.cluster.arrive twice without a wait between")
        seen[threads] = self.phase
        self.arrived += len(threads)
        self.check()

    def check(self) -> None:
        if self.arrived and self.arrived >= sum(c.live.bit_count() for c in self.ctas):
            self.phase += 1
            self.arrived = 0
            self.released, self.clock = self.clock, None
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                waiter.wake()

    def passed(self, cta: CTA, threads: np.ndarray) -> np.ndarray:
        """Which of the threads may leave barrier.cluster.wait."""
        seen = self.seen[cta.rank][threads]
        if (seen < 0).any():
            raise BarrierMisuse("barrier.cluster.wait without an arrive before")
        passed = seen < self.phase
        self.seen[cta.rank][threads[passed]] = -1
        return passed
