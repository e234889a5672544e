"""Races by happens-before: vector clocks over warps and asynchronous operations.

A clock says, for every agent, up to which of its moments things are known to have happened. Warps
and operations hand clocks on through barriers. Two accesses race if one is a write and the later
agent does not know the earlier one's moment. A second clock follows the fences between proxies:
the asynchronous proxy sees a generic write only if a fence.proxy.async stands between them.

Modelled: shared memory in words of 4 bytes, tensor memory in groups of 16 lanes x 1 column, and
the initialisation of mbarriers. Not modelled: global memory, and lanes of one warp against each
other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tilewright.emulator.bound import lane_bits
from tilewright.emulator.clocks import (
    SHARED_WORDS,
    TENSOR_WORDS,
    Agent,
    Clock,
    ClusterState,
    Shadow,
    common,
    merged,
    shared_words,
)
from tilewright.emulator.cta import RANK_SHIFT
from tilewright.emulator.errors import Place

if TYPE_CHECKING:
    from tilewright.emulator.asynchronous import Groups
    from tilewright.emulator.barriers import ClusterBarrier, MBarrier, NamedBarrier
    from tilewright.emulator.cta import CTA
    from tilewright.emulator.machine import Cluster, Machine
    from tilewright.emulator.registers import Lanes
    from tilewright.emulator.tensor_memory import Rectangle

_MAX_REPORTS = 20


class Past(NamedTuple):
    """An earlier access: what it was, whose, the number of its place, and the shadow word."""

    kind: str
    slot: int
    place: int
    word: int


class Collective(NamedTuple):
    """An operation that warps issue together, as agents that differ in what they know: all that
    any of the warps knows (`whole`), what one of them knows (`shares`), what each does (`common`).
    """

    whole: Agent
    shares: list[Agent]
    common: Agent


class Races:
    """The detector of one launch. `reports` holds each pair of places once."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.states: dict[int, ClusterState] = {}
        self.reports: list[str] = []
        self._seen: set[Any] = set()
        self._places: list[Place] = []
        self._place_numbers: dict[int, int] = {}

    def start(self, cluster: Cluster) -> None:
        if id(cluster) not in self.states:
            self.states[id(cluster)] = ClusterState(cluster)
        self.states[id(cluster)].start()

    def _state(self, cta: CTA) -> ClusterState:
        return self.states[id(cta.cluster)]

    def _warp(self, cta: CTA, warp: int) -> Agent:
        state = self._state(cta)
        return state.warps[cta.rank * state.warps_per_cta + warp]

    def _warps(self, cta: CTA, mask: int) -> list[Agent]:
        return [
            self._warp(cta, w)
            for w in range(-(-mask.bit_length() // 32))
            if mask >> (32 * w) & 0xFFFFFFFF
        ]

    # Accesses

    def lanes_access(
        self, lanes: Lanes, addresses: np.ndarray, size: int, write: bool, place: Place
    ) -> None:
        """Every lane accesses `size` bytes of shared memory."""
        warp_of_lane = lanes.threads // 32
        for warp in lanes.warps:
            self.warp_access(lanes.cta, warp, addresses[warp_of_lane == warp], size, write, place)

    def rows_access(
        self, lanes: Lanes, rows: np.ndarray, size: int, write: bool, place: Place
    ) -> None:
        """Warp by warp, [warp, row] addresses of `size` bytes."""
        for warp, addresses in zip(lanes.warps, rows, strict=True):
            self.warp_access(lanes.cta, warp, addresses, size, write, place)

    def warp_access(
        self,
        cta: CTA,
        warp: int,
        addresses: np.ndarray,
        size: int,
        write: bool,
        place: Place,
    ) -> None:
        agent = self._warp(cta, warp)
        self._access(agent.state.shared, agent, shared_words(addresses, size), write, place)

    def units_access(
        self, agent: Agent, addresses: np.ndarray, size: int, write: bool, place: Place
    ) -> None:
        """An asynchronous operation accesses `size` bytes of shared memory at each address."""
        self._access(agent.state.shared, agent, shared_words(addresses, size), write, place)

    def tensor_access(
        self, cta: CTA, who: Agent | int, r: Rectangle, write: bool, place: Place
    ) -> None:
        """A warp or an operation accesses a rectangle of the CTA's tensor memory."""
        state = self._state(cta)
        agent = self._warp(cta, who) if isinstance(who, int) else who
        groups = np.arange(r.lane // 16, (r.lane + r.height - 1) // 16 + 1)[:, None]
        words = cta.rank * TENSOR_WORDS + groups * 512 + np.arange(r.column, r.column + r.width)
        self._access(state.tensor, agent, words.ravel(), write, place)

    def _access(
        self, shadow: Shadow, agent: Agent, words: np.ndarray, write: bool, place: Place
    ) -> None:
        """Compares an access with the past of its words, then becomes part of their past."""
        self._after_writes(shadow, agent, words, write, place)
        number = self._place_number(place)
        if not write:
            shadow.read_moment[agent.slot, words] = agent.moment
            shadow.read_place[agent.slot, words] = number
            shadow.readers.add(agent.slot)
            return
        for slot in shadow.readers - {agent.slot}:
            late = shadow.read_moment[slot, words] > agent.clock.known[slot]
            if late.any():
                word = int(words[np.argmax(late)])
                past = Past("read", slot, int(shadow.read_place[slot, word]), word)
                self._report(shadow, past, agent, "write", place)
        shadow.writer[words] = agent.slot
        shadow.write_moment[words] = agent.moment
        shadow.write_place[words] = number

    def _after_writes(
        self, shadow: Shadow, agent: Agent, words: np.ndarray, write: bool, place: Place
    ) -> None:
        writer, moment = shadow.writer[words], shadow.write_moment[words]
        wrong = agent.clock.known[writer] < moment
        kind, access = "write", "write" if write else "read"
        if agent.is_async and not write and shadow is agent.state.shared and not wrong.any():
            generic = writer < agent.state.warp_count
            wrong = generic & (agent.clock.visible[writer] < moment)
            kind, access = "generic write", "read without fence.proxy.async between"
        if wrong.any():
            at = int(np.argmax(wrong))
            word = int(words[at])
            past = Past(kind, int(writer[at]), int(shadow.write_place[word]), word)
            self._report(shadow, past, agent, access, place)

    def _place_number(self, place: Place) -> int:
        number = self._place_numbers.get(id(place))
        if number is None:
            number = self._place_numbers[id(place)] = len(self._places)
            self._places.append(place)
        return number

    def _report(self, shadow: Shadow, past: Past, agent: Agent, access: str, place: Place) -> None:
        key = (past.kind, past.place, access, place.line)
        if key in self._seen or len(self.reports) >= _MAX_REPORTS:
            return
        self._seen.add(key)
        state, word = agent.state, past.word
        if shadow is state.shared:
            where = f"shared {word // SHARED_WORDS}:{word % SHARED_WORDS * 4:#x}"
        else:
            where = f"tensor memory of CTA {word // TENSOR_WORDS}, column {word % 512}"
        by_warp = past.slot < state.warp_count
        other = state.warps[past.slot].name if by_warp else "an asynchronous operation"
        self.reports.append(
            f"race at {where}: {past.kind} by {other} at {self._places[past.place]}\n"
            f"  and {access} by {agent.name} at {place}: nothing orders them"
        )

    def report_unwaited(self, cta: CTA, warp: int, group: Groups) -> None:
        """A CTA ended; shared memory may go to another while the copies of `group` read it."""
        place = [*(o for g in group.committed for o in g), *group.open][0][0].place
        if ("unwaited", place.line) not in self._seen:
            self._seen.add(("unwaited", place.line))
            self.reports.append(
                f"CTA {cta.index} ends while a bulk copy of warp {warp} may still read its "
                f"shared memory, no wait_group covers it: {place}"
            )

    def check_unobserved(self, cluster: Cluster) -> None:
        """Clusters end: an arrival that no thread of its CTA knows of may come after the CTA."""
        for barrier in cluster.mbarriers.table.values():
            cta = cluster.ctas[barrier.address >> RANK_SHIFT]
            warps = self._warps(cta, (1 << cta.threads) - 1)
            for slot, (moment, place) in barrier.asynchronous.items():
                known = max(warp.clock.known[slot] for warp in warps)
                if known < moment and ("unobserved", place.line) not in self._seen:
                    self._seen.add(("unobserved", place.line))
                    self.reports.append(
                        f"CTA {cta.index} may end before an arrival at its {barrier}, which none "
                        f"of its threads waits for: {place}"
                    )

    # Asynchronous operations

    def issue(self, cta: CTA, warp: int, name: str, warps: Iterable[int] | None = None) -> Agent:
        """A new operation issued by a warp, or by several together."""
        issuers = [self._warp(cta, w) for w in warps or [warp]]
        return self._state(cta).operation(issuers, name)

    def issue_together(self, cta: CTA, warps: range, name: str) -> Collective:
        """A new operation that several warps issue, none of which waits for the others."""
        clocks = [self._warp(cta, w).clock.copy() for w in warps]
        clocks.append(common(clocks))
        whole = self.issue(cta, warps[0], name, warps)
        for clock in clocks:
            clock.known[whole.slot] = whole.moment
        *shares, by_all = (whole.with_clock(clock) for clock in clocks)
        return Collective(whole, shares, by_all)

    def pipe_issue(self, cta: CTA, warp: int) -> Agent:
        """A product in the CTA's tensor-core pipe: after all that is in the pipe before it."""
        pipe, issuer = self._state(cta).pipes[cta.rank], self._warp(cta, warp)
        pipe.clock.join(issuer.clock)
        issuer.advance()
        return pipe.with_clock(pipe.clock.copy())

    def pipe(self, cta: CTA) -> Agent:
        """A commit: what it signals covers the pipe so far."""
        pipe = self._state(cta).pipes[cta.rank]
        agent = pipe.with_clock(pipe.clock.copy())
        pipe.advance()
        return agent

    def join(self, cta: CTA, warp: int, agent: Agent) -> None:
        """A warp has waited for an operation."""
        self._warp(cta, warp).clock.join(agent.clock)

    def async_arrive(self, barrier: MBarrier, agent: Agent, place: Place) -> None:
        self._check_init(barrier, agent)
        barrier.asynchronous[agent.slot] = (agent.moment, place)
        barrier.clock = merged(barrier.clock, agent.clock)

    # Barriers and fences

    def barrier_init(self, lanes: Lanes, addresses: np.ndarray, place: Place) -> None:
        for lane, address in enumerate(addresses):
            warp = self._warp(lanes.cta, int(lanes.threads[lane]) // 32)
            barrier = lanes.cta.cluster.mbarriers.at(int(address))
            barrier.initialised = (warp.slot, warp.moment, place)

    def _check_init(self, barrier: MBarrier, agent: Agent) -> None:
        slot, moment, where = barrier.initialised
        seen = agent.clock.visible if agent.is_async else agent.clock.known
        if max(seen[slot], agent.clock.inits[slot]) < moment:
            key = ("init", where.line if where else 0, agent.is_async)
            if key not in self._seen:
                self._seen.add(key)
                self.reports.append(
                    f"race: {agent.name} uses {barrier}, whose init at {where} is "
                    "not ordered before it (fence or barrier missing)"
                )

    def _released(self, agent: Agent, release: bool) -> Clock:
        """What an arrival hands on; a relaxed one only what fences before it covered."""
        clock = agent.clock.copy()
        if not release:
            clock = merged(agent.state.fences[agent.slot], Clock.zero(agent.state.slots))
            clock.inits = agent.clock.inits.copy()
        agent.advance()
        return clock

    def barrier_arrive(
        self, barrier: MBarrier, lanes: Lanes, chosen: np.ndarray, release: bool
    ) -> None:
        for warp in self._warps(lanes.cta, lane_bits(lanes, chosen)):
            self._check_init(barrier, warp)
            barrier.clock = merged(barrier.clock, self._released(warp, release))

    def barrier_wait(self, barrier: MBarrier, lanes: Lanes, chosen: np.ndarray) -> None:
        for warp in self._warps(lanes.cta, lane_bits(lanes, chosen)):
            self._check_init(barrier, warp)
            warp.clock.join(barrier.released)

    def named_arrive(self, barrier: NamedBarrier, cta: CTA, mask: int) -> None:
        for warp in self._warps(cta, mask):
            barrier.clock = merged(barrier.clock, warp.clock)
            warp.advance()

    def named_release(self, barrier: NamedBarrier) -> None:
        for waiter in barrier.waiters:
            for warp in self._warps(waiter.cta, waiter.mask):
                warp.clock.join(barrier.clock)

    def cluster_arrive(self, barrier: ClusterBarrier, lanes: Lanes, release: bool) -> None:
        for warp in self._warps(lanes.cta, lanes.mask):
            barrier.clock = merged(barrier.clock, self._released(warp, release))

    def cluster_wait(self, barrier: ClusterBarrier, lanes: Lanes) -> None:
        for warp in self._warps(lanes.cta, lanes.mask):
            warp.clock.join(barrier.released)

    def fence(self, lanes: Lanes) -> None:
        """Makes later relaxed arrivals hand on what happened before the fence."""
        state = self._state(lanes.cta)
        for warp in self._warps(lanes.cta, lanes.mask):
            state.fences[warp.slot] = warp.clock.copy()
            warp.advance()

    def fence_proxy(self, lanes: Lanes) -> None:
        """What happened before becomes visible to the asynchronous proxy."""
        for warp in self._warps(lanes.cta, lanes.mask):
            np.maximum(warp.clock.visible, warp.clock.known, out=warp.clock.visible)
            warp.advance()

    def fence_init(self, lanes: Lanes) -> None:
        """fence.mbarrier_init: inits so far become visible to the cluster and every proxy."""
        for warp in self._warps(lanes.cta, lanes.mask):
            np.maximum(warp.clock.inits, warp.clock.known, out=warp.clock.inits)
            warp.advance()
