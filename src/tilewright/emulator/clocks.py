"""Vector clocks and the memory of past accesses, which race detection is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tilewright.emulator.memory import OFFSET_MASK

if TYPE_CHECKING:
    from tilewright.emulator.machine import Cluster

SHARED_WORDS = 1 << 16  # shared memory of a CTA in 4-byte words
TENSOR_WORDS = 8 * 512  # halves of a quarter: 16 lanes, the least that an access spans
_POOL = 32  # asynchronous operations that are told apart at a time


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


def common(clocks: list[Clock]) -> Clock:
    """A new clock that knows what each of the clocks knows."""
    return Clock(
        np.minimum.reduce([c.known for c in clocks]),
        np.minimum.reduce([c.visible for c in clocks]),
        np.minimum.reduce([c.inits for c in clocks]),
    )


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

    def with_clock(self, clock: Clock) -> Agent:
        """The same agent at this moment, as one that knows `clock`."""
        return Agent(self.slot, clock, self.name, self.state, self.is_async)

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
        self.warps = [
            self._agent(i, f"CTA {i // self.warps_per_cta} warp {i % self.warps_per_cta}", False)
            for i in range(self.warp_count)
        ]
        self.pipes = [
            self._agent(self.warp_count + _POOL + r, f"CTA {r} tensor-core pipe", True)
            for r in range(ranks)
        ]
        self.fences: list[Clock | None] = [None] * self.warp_count
        self.shared = Shadow(self.slots, ranks * SHARED_WORDS, "shared")
        self.tensor = Shadow(self.slots, ranks * TENSOR_WORDS, "tensor memory")

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


def shared_words(addresses: np.ndarray, size: int) -> np.ndarray:
    """The shadow words that accesses of `size` bytes at shared addresses touch."""
    at = np.asarray(addresses).astype(np.int64).ravel()
    words = (at >> 24) * SHARED_WORDS + ((at & OFFSET_MASK) >> 2)
    if size > 4:
        words = (words[:, None] + np.arange(size // 4)).ravel()
    return words
