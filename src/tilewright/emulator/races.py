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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .bound import lane_bits
from .errors import Place
from .memory import OFFSET_MASK

if TYPE_CHECKING:
    from .asynchronous import Groups
    from .barriers import ClusterBarrier, MBarrier, NamedBarrier
    from .cta import CTA
    from .machine import Cluster, Machine
    from .registers import Lanes

_WORDS = 1 << 16  # shared memory of a CTA in 4-byte words
_TENSOR_WORDS = 8 * 512  # halves of a quarter: 16 lanes, the least that an access spans
_POOL = 32  # asynchronous operations that are told apart at a time
_MAX_REPORTS = 20


@dataclass
class Clock:
    """`known[agent]`: moments that happened before; `visible`: those the async proxy sees too.

    `inits`: moments whose mbarrier.init alone is known, by fence.mbarrier_init.
    """

    known: np.ndarray
    visible: np.ndarray
    inits: np.ndarray

    @classmethod
    def zero(cls, slots: int) -> Clock:
        return cls(*(np.zeros(slots, np.int64) for _ in range(3)))

    def copy(self) -> Clock:
        return Clock(self.known.copy(), self.visible.copy(), self.inits.copy())

    def join(self, other: Clock | None) -> None:
        if other is not None:
            np.maximum(self.known, other.known, out=self.known)
            np.maximum(self.visible, other.visible, out=self.visible)
            np.maximum(self.inits, other.inits, out=self.inits)


def merged(first: Clock | None, second: Clock) -> Clock:
    """A new clock that knows what both know."""
    result = second.copy()
    result.join(first)
    return result


@dataclass
class Agent:
    """A warp, or one asynchronous operation from its issue on."""

    slot: int
    clock: Clock
    name: str
    state: ClusterState
    is_async: bool = True

    @property
    def moment(self) -> int:
        return int(self.clock.known[self.slot])

    def advance(self) -> None:
        """What follows is not covered by clocks that were handed on before."""
        self.clock.known[self.slot] += 1


class Shadow:
    """The last write of every word and the last read of it by every agent."""

    def __init__(self, slots: int, words: int, name: str):
        self.name = name
        self.writer = np.zeros(words, np.int16)
        self.write_moment = np.zeros(words, np.int32)
        self.write_place = np.zeros(words, np.int32)
        self.read_moment = np.zeros((slots, words), np.int32)
        self.read_place = np.zeros((slots, words), np.int32)
        self.readers: set[int] = set()


class ClusterState:
    """Clocks and shadows of one cluster context; moments only grow, so reuse needs no clearing."""

    def __init__(self, cluster: Cluster):
        self.warps_per_cta = -(-cluster.ctas[0].threads // 32)
        ranks = len(cluster.ctas)
        self.warp_count = ranks * self.warps_per_cta
        # Agents: warps, a pool of operations, one tensor-core pipe a CTA.
        self.slots = self.warp_count + _POOL + ranks
        self.next_operation = 0
        self.moments = np.ones(self.slots, np.int64)
        self.warps = [self._agent(i, f"CTA {i // self.warps_per_cta} warp {i % self.warps_per_cta}",
                                  False) for i in range(self.warp_count)]  # fmt: skip
        self.pipes = [self._agent(self.warp_count + _POOL + r, f"CTA {r} tensor-core pipe", True)
                      for r in range(ranks)]  # fmt: skip
        self.fences: list[Clock | None] = [None] * self.warp_count
        self.shared = Shadow(self.slots, ranks * _WORDS, "shared")
        self.tensor = Shadow(self.slots, ranks * _TENSOR_WORDS, "tensor memory")

    def _agent(self, slot: int, name: str, is_async: bool) -> Agent:
        clock = Clock.zero(self.slots)
        clock.known[slot] = 1
        return Agent(slot, clock, name, self, is_async)

    def start(self) -> None:
        """A new cluster: everything that earlier ones did is known to all."""
        for agent in self.warps + self.pipes:
            np.maximum(self.moments, agent.clock.known, out=self.moments)
        for agent in self.warps + self.pipes:
            agent.clock.known[:] = self.moments
            agent.clock.visible[:] = agent.clock.inits[:] = self.moments
            agent.advance()
        self.fences = [None] * self.warp_count

    def operation(self, issuers: Iterable[Agent], name: str) -> Agent:
        """A new asynchronous operation that starts after what its issuers did so far."""
        slot = self.warp_count + self.next_operation % _POOL
        self.next_operation += 1
        self.moments[slot] += 1
        issuers = list(issuers)
        clock = issuers[0].clock.copy()
        for issuer in issuers:
            clock.join(issuer.clock)
            issuer.advance()
        clock.known[slot] = self.moments[slot]
        return Agent(slot, clock, name, self)


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
        return [self._warp(cta, w) for w in range(-(-mask.bit_length() // 32))
                if mask >> (32 * w) & 0xFFFFFFFF]  # fmt: skip

    # Accesses

    def lanes_access(self, lanes: Lanes, addresses: np.ndarray, size: int, write: bool,
                     place: Place | None) -> None:  # fmt: skip
        """Every lane accesses `size` bytes of shared memory."""
        warp_of_lane = lanes.threads // 32
        for warp in lanes.warps:
            self.warp_access(lanes.cta, warp, addresses[warp_of_lane == warp], size, write, place)

    def rows_access(self, lanes: Lanes, rows: np.ndarray, size: int, write: bool,
                    place: Place | None) -> None:  # fmt: skip
        """Warp by warp, [warp, row] addresses of `size` bytes."""
        for warp, addresses in zip(lanes.warps, rows, strict=True):
            self.warp_access(lanes.cta, warp, addresses, size, write, place)

    def warp_access(self, cta: CTA, warp: int, addresses: np.ndarray, size: int, write: bool,
                    place: Place | None) -> None:  # fmt: skip
        state, words = self._state(cta), _words(addresses, size)
        self._access(state, state.shared, self._warp(cta, warp), words, write, place)

    def units_access(self, agent: Agent, addresses: np.ndarray, size: int, write: bool,
                     place: Place | None) -> None:  # fmt: skip
        """An asynchronous operation accesses `size` bytes of shared memory at each address."""
        self._access(agent.state, agent.state.shared, agent, _words(addresses, size), write, place)

    def tensor_access(self, cta: CTA, rank: int, who: Agent | int | None, lane: int, height: int,
                      column: int, width: int, write: bool, place: Place | None) -> None:  # fmt: skip
        """A warp or an operation accesses a rectangle of tensor memory."""
        state = self._state(cta)
        agent = self._warp(cta, who) if isinstance(who, int) else who
        assert agent
        groups = np.arange(lane // 16, (lane + height - 1) // 16 + 1)[:, None]
        words = (rank * _TENSOR_WORDS + groups * 512 + np.arange(column, column + width)).ravel()
        self._access(state, state.tensor, agent, words, write, place)

    def _access(self, state: ClusterState, shadow: Shadow, agent: Agent, words: np.ndarray,
                write: bool, place: Place | None) -> None:  # fmt: skip
        known, number = agent.clock.known, self._place_number(place)
        writer, moment = shadow.writer[words], shadow.write_moment[words]
        unknown = known[writer] < moment
        if unknown.any():
            at = int(np.argmax(unknown))
            self._report(state, shadow, "write", int(shadow.write_place[words[at]]), int(writer[at]),
                         agent, "write" if write else "read", int(words[at]), place)  # fmt: skip
        elif agent.is_async and not write and shadow is state.shared:
            generic = writer < state.warp_count
            hidden = generic & (agent.clock.visible[writer] < moment)
            if hidden.any():
                at = int(np.argmax(hidden))
                self._report(state, shadow, "generic write", int(shadow.write_place[words[at]]),
                             int(writer[at]), agent, "read without fence.proxy.async between",
                             int(words[at]), place)  # fmt: skip
        if not write:
            shadow.read_moment[agent.slot, words] = agent.moment
            shadow.read_place[agent.slot, words] = number
            shadow.readers.add(agent.slot)
            return
        for slot in shadow.readers:
            late = shadow.read_moment[slot, words] > known[slot]
            if slot != agent.slot and late.any():
                word = int(words[int(np.argmax(late))])
                self._report(state, shadow, "read", int(shadow.read_place[slot, word]), slot, agent,
                             "write", word, place)  # fmt: skip
        shadow.writer[words] = agent.slot
        shadow.write_moment[words] = agent.moment
        shadow.write_place[words] = number

    def _place_number(self, place: Place | None) -> int:
        if place is None:
            return 0
        number = self._place_numbers.get(id(place))
        if number is None:
            number = self._place_numbers[id(place)] = len(self._places)
            self._places.append(place)
        return number

    def _report(self, state: ClusterState, shadow: Shadow, first: str, first_place: int, slot: int,
                agent: Agent, second: str, word: int, place: Place | None) -> None:  # fmt: skip
        key = (first, first_place, second, place.line if place else 0)
        if key in self._seen or len(self.reports) >= _MAX_REPORTS:
            return
        self._seen.add(key)
        if shadow is state.shared:
            where = f"shared {word // _WORDS}:{word % _WORDS * 4:#x}"
        else:
            where = f"tensor memory of CTA {word // _TENSOR_WORDS}, column {word % 512}"
        other = (state.warps[slot].name if slot < state.warp_count else "an asynchronous operation")
        self.reports.append(f"race at {where}: {first} by {other} at {self._places[first_place]}\n"
                            f"  and {second} by {agent.name} at {place}: nothing orders them")  # fmt: skip

    def report_unwaited(self, cta: CTA, warp: int, group: Groups) -> None:
        """A CTA ended; shared memory may go to another while the copies of `group` read it."""
        place = [*(o for g in group.committed for o in g), *group.open][0][0].place
        if ("unwaited", place.line) not in self._seen:
            self._seen.add(("unwaited", place.line))
            self.reports.append(f"CTA {cta.index} ends while a bulk copy of warp {warp} may still read its "
                                f"shared memory, no wait_group covers it: {place}")  # fmt: skip

    # Asynchronous operations

    def issue(self, cta: CTA, warp: int, name: str, warps: Iterable[int] | None = None) -> Agent:
        """A new operation issued by a warp, or by several together."""
        issuers = [self._warp(cta, w) for w in warps or [warp]]
        return self._state(cta).operation(issuers, name)

    def pipe_issue(self, cta: CTA, warp: int) -> Agent:
        """A product in the CTA's tensor-core pipe: after all that is in the pipe before it."""
        pipe, issuer = self._state(cta).pipes[cta.rank], self._warp(cta, warp)
        pipe.clock.join(issuer.clock)
        issuer.advance()
        return Agent(pipe.slot, pipe.clock.copy(), pipe.name, pipe.state)

    def pipe(self, cta: CTA) -> Agent:
        """A commit: what it signals covers the pipe so far."""
        pipe = self._state(cta).pipes[cta.rank]
        agent = Agent(pipe.slot, pipe.clock.copy(), pipe.name, pipe.state)
        pipe.advance()
        return agent

    def join(self, cta: CTA, warp: int, agent: Agent) -> None:
        """A warp has waited for an operation."""
        self._warp(cta, warp).clock.join(agent.clock)

    def async_arrive(self, barrier: MBarrier, agent: Agent) -> None:
        self._check_init(barrier, agent, None)
        barrier.clock = merged(barrier.clock, agent.clock)

    # Barriers and fences

    def barrier_init(self, lanes: Lanes, addresses: np.ndarray, place: Place | None) -> None:
        for lane, address in enumerate(addresses):
            warp = self._warp(lanes.cta, int(lanes.threads[lane]) // 32)
            barrier = lanes.cta.cluster.mbarriers.at(int(address))
            barrier.initialised = (warp.slot, warp.moment, place)

    def _check_init(self, barrier: MBarrier, agent: Agent, place: Place | None) -> None:
        slot, moment, where = barrier.initialised
        seen = agent.clock.visible if agent.is_async else agent.clock.known
        if max(seen[slot], agent.clock.inits[slot]) < moment:
            key = ("init", where.line if where else 0, agent.is_async)
            if key not in self._seen:
                self._seen.add(key)
                self.reports.append(f"race: {agent.name} uses {barrier}, whose init at {where} is "
                                    "not ordered before it (fence or barrier missing)")  # fmt: skip

    def _released(self, agent: Agent, release: bool) -> Clock:
        """What an arrival hands on; a relaxed one only what fences before it covered."""
        clock = agent.clock.copy()
        if not release:
            clock = merged(agent.state.fences[agent.slot], Clock.zero(agent.state.slots))
            clock.inits = agent.clock.inits.copy()
        agent.advance()
        return clock

    def barrier_arrive(self, barrier: MBarrier, lanes: Lanes, chosen: np.ndarray, release: bool,
                       place: Place | None) -> None:  # fmt: skip
        for warp in self._warps(lanes.cta, lane_bits(lanes, chosen)):
            self._check_init(barrier, warp, place)
            barrier.clock = merged(barrier.clock, self._released(warp, release))

    def barrier_wait(self, barrier: MBarrier, lanes: Lanes, chosen: np.ndarray) -> None:
        for warp in self._warps(lanes.cta, lane_bits(lanes, chosen)):
            self._check_init(barrier, warp, None)
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
        """fence.mbarrier_init: inits so far become visible to all of the cluster and every proxy."""
        for warp in self._warps(lanes.cta, lanes.mask):
            np.maximum(warp.clock.inits, warp.clock.known, out=warp.clock.inits)
            warp.advance()


def _words(addresses: np.ndarray, size: int) -> np.ndarray:
    """The shadow words that accesses of `size` bytes at shared addresses touch."""
    at = np.asarray(addresses).astype(np.int64).ravel()
    words = (at >> 24) * _WORDS + ((at & OFFSET_MASK) >> 2)
    if size > 4:
        words = (words[:, None] + np.arange(size // 4)).ravel()
    return words
