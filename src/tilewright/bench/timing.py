"""Timing several ways to compute the same thing against each other in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

MIN_ROUNDS, MAX_ROUNDS = 5, 60


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contender over its rounds."""

    median: float
    low: float  # first quartile
    high: float  # third quartile


def alternate(contenders: dict[str, Callable[[], None]], seconds: float = 4.0) -> dict[str, Timing]:
    """Run the contenders in turns, so that the machine's drift meets all of them alike.

    `seconds` is about how long each of them runs in all, within the bounds on the rounds.

    Each round starts with another contender: whoever runs first after somebody else finds the
    caches and the allocator as that one left them.
    """
    first = {name: _milliseconds(run) for name, run in contenders.items()}
    rounds = int(seconds * 1e3 / max(first.values()))
    rounds = min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(_milliseconds(contenders[name]))
    return {name: _summary(values) for name, values in times.items()}


def _milliseconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _summary(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, low, high)
