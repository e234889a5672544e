"""Work that runs beside the threads: copies, tensor-core products, their commits.

Operations of one pipe complete in order; pipes are independent. The schedule decides when: `eager`
at issue, `late` only when no thread can run without it, `random` at any moment, from a seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from tilewright.emulator.errors import EmulationError, Place

SCHEDULES = ("eager", "late", "random")


@dataclass
class Operation:
    """`run` moves the data and signals its completion; `place` is the instruction that issued."""

    pipe: Hashable
    run: Callable[[], None]
    place: Place
    done: bool = False

    def complete(self) -> None:
        self.done = True
        try:
            self.run()
        except EmulationError as error:
            raise error.at(self.place) from None


class Queue:
    """All operations in flight, of every CTA."""

    def __init__(self, schedule: str, seed: int):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r}: wanted one of {', '.join(SCHEDULES)}")
        self.eager = schedule == "eager"
        self.random = random.Random(seed) if schedule == "random" else None
        self.pipes: dict[Hashable, deque[Operation]] = {}

    def submit(self, pipe: Hashable, run: Callable[[], None], place: Place) -> Operation:
        """Issue an operation. It may complete before this returns."""
        operation = Operation(pipe, run, place)
        if self.eager:
            operation.complete()
        else:
            self.pipes.setdefault(pipe, deque()).append(operation)
        return operation

    def complete_one(self) -> bool:
        """Complete one operation because nothing else can happen; false if none is in flight."""
        if not self.pipes:
            return False
        pipes = list(self.pipes)
        self._step(self.random.choice(pipes) if self.random else pipes[0])
        return True

    def tick(self) -> None:
        """In a random schedule, perhaps complete an operation now."""
        assert self.random
        while self.pipes and self.random.random() < 0.3:
            self._step(self.random.choice(list(self.pipes)))

    def finish(self, operation: Operation) -> None:
        """Complete `operation` and what stands before it in its pipe: a thread waits for it."""
        while not operation.done:
            self._step(operation.pipe)

    def pending(self, pipe: Hashable) -> bool:
        return pipe in self.pipes

    def _step(self, pipe: Hashable) -> None:
        operations = self.pipes[pipe]
        operation = operations.popleft()
        if not operations:
            del self.pipes[pipe]
        operation.complete()


@dataclass
class Groups:
    """The commit groups of one issuer: wgmma, cp.async and bulk copies share this protocol."""

    queue: Queue
    open: list[tuple[Operation, Any]] = field(
        default_factory=list
    )  # with the race detector's agent
    committed: deque[list[tuple[Operation, Any]]] = field(default_factory=deque)
    # wgmma: products in flight by accumulator (first row, first thread)
    accumulators: dict[tuple[int, int], int] = field(default_factory=dict)
    fenced: bool = False  # wgmma: a fence stands between the last register access and the next mma

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def wait(self, allowed: int) -> list[Any]:
        """Complete all but the newest `allowed` groups; returns the agents that are done."""
        finished: list[Any] = []
        while len(self.committed) > allowed:
            for operation, agent in self.committed.popleft():
                self.queue.finish(operation)
                finished.append(agent)
        return finished
