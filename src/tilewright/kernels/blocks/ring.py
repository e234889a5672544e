"""A ring of slots in shared memory, handed back and forth by two rows of mbarriers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32


@dataclass(frozen=True)
class Ring:
    """Slot n of a stream lies at `index(n)`. A producer waits until it is empty and fills it; the
    consumers wait until it is full and arrive once each when they have read it.

    Both sides count slots from 0 over the whole life of the kernel; the parity of the round is what
    an mbarrier wants to know.
    """

    barriers: cute.Pointer  # of Int64: `stages` of full, then `stages` of empty
    stages: int
    ctas: int = 1  # of the cluster, whose producers each fill a part of the slot in all of them

    def initialise(self, producers: int, consumers: int) -> None:
        """By one thread, before a fence and a barrier of the whole CTA."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.barriers + stage, producers)
            empty = self.barriers + self.stages + stage
            cute.arch.mbarrier_init(empty, consumers * self.ctas)

    def index(self, n: Int32) -> Int32:
        return n & (self.stages - 1) if self._is_power_of_2 else n % self.stages

    @property
    def _is_power_of_2(self) -> bool:
        return self.stages & (self.stages - 1) == 0

    def full(self, n: Int32) -> cute.Pointer:
        return self.barriers + self.index(n)

    def empty(self, n: Int32) -> cute.Pointer:
        return self.barriers + self.stages + self.index(n)

    def wait_full(self, n: Int32) -> None:
        cute.arch.mbarrier_wait(self.full(n), self._round(n))

    def is_full(self, n: Int32) -> Boolean:
        """A look that does not wait. Taken early, it hides the latency of a wait that is over."""
        return cute.arch.mbarrier_test_wait(self.full(n), self._round(n))

    def wait_empty(self, n: Int32) -> None:
        # The round before the first one counts as complete, so a fresh ring is empty.
        cute.arch.mbarrier_wait(self.empty(n), self._round(n) ^ 1)

    def is_empty(self, n: Int32) -> Boolean:
        """A look that does not wait, as `is_full` is one."""
        return cute.arch.mbarrier_test_wait(self.empty(n), self._round(n) ^ 1)

    def expect(self, n: Int32, num_bytes: int) -> cute.Pointer:
        """Announce `num_bytes` of TMA; the barrier that the copies must complete on."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(n), num_bytes)
        return self.full(n)

    def publish(self, n: Int32) -> None:
        """One arrival a warp, of a slot that its lanes have written."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full(n))

    def release(self, n: Int32) -> None:
        """One arrival a warp, at each producer: the lanes of a warp read together."""
        with cute.arch.elect_one():
            if self.ctas == 1:
                cute.arch.mbarrier_arrive(self.empty(n))
            else:
                for rank in range(self.ctas):
                    cute.arch.mbarrier_arrive(self.empty(n), rank)

    def _round(self, n: Int32) -> Int32:
        if self._is_power_of_2:
            return (n >> self.stages.bit_length() - 1) & 1
        return (n // self.stages) & 1
