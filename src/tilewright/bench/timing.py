"""Timing several ways to compute the same thing against each other in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch

Run = Callable[[], object]
Clock = Callable[[Run, int], float]  # milliseconds a launch, of that many launches in a row
Span = tuple[float, float]  # of time.perf_counter

HEAD_START = 2_000_000  # GPU clock cycles, about 1 ms


@dataclass(frozen=True)
class Load:
    """What the device did meanwhile: medians of its SM clock and of its power."""

    mhz: float | None = None
    watts: float | None = None


Watch = Callable[[list[Span]], Load]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one launch of a contender, over its rounds."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    least: float
    rounds: int
    load: Load = Load()


@dataclass(frozen=True)
class Plan:
    """How long to time."""

    seconds: float = 4.0  # about how long each contender runs in all, within the bounds on rounds
    batch_ms: float = 0.0  # of launches between two readings of the clock; 0: one launch
    warm_up: int = 0  # rounds that do not count
    min_rounds: int = 5
    max_rounds: int = 60

    def launches(self, ms: float) -> int:
        return max(1, round(self.batch_ms / ms))

    def rounds(self, batch_ms: float) -> int:
        return min(max(int(self.seconds * 1e3 / batch_ms), self.min_rounds), self.max_rounds)


def alternate(
    contenders: Mapping[str, Run],
    plan: Plan = Plan(),
    clock: Clock | None = None,
    watch: Watch | None = None,
) -> dict[str, Timing]:
    """Run the contenders in turns, so that the machine's drift meets all of them alike.

    In each round they run in another order. There are as many rounds as planned, and as many more
    as it takes for the orders to be balanced: see `balanced_orders`. `clock` is `wall_clock` by
    default; on a GPU it is `cuda_clock`, and `watch` a `power.Sampler`.
    """
    clock = clock or wall_clock
    first = {name: clock(run, 1) for name, run in contenders.items()}
    launches = {name: plan.launches(ms) for name, ms in first.items()}
    wanted = plan.rounds(max(first[name] * launches[name] for name in contenders))
    rounds = -(-wanted // cycle(len(contenders))) * cycle(len(contenders))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    spans: dict[str, list[Span]] = {name: [] for name in contenders}
    names = list(contenders)
    for order in islice(balanced_orders(names), plan.warm_up + rounds):
        for name in order:
            start = time.perf_counter()
            times[name].append(clock(contenders[name], launches[name]))
            spans[name].append((start, time.perf_counter()))
    counted = slice(plan.warm_up, None)
    return {
        name: _summary(times[name][counted], watch(spans[name][counted]) if watch else Load())
        for name in names
    }


def balanced_orders(names: Sequence[str]) -> Iterator[list[str]]:
    """An order for each round, in which everybody runs behind everybody else equally often.

    Whoever runs behind somebody finds the caches, the allocator and the power budget as that one
    left them: on a board at its power limit, two copies of one kernel differed by 3 %. So many
    orders are balanced as `cycle` says.
    Source: E. J. Williams, Australian Journal of Scientific Research A 2, 1949, 149-168.
    """
    number = len(names)
    zigzag = [i // 2 if i % 2 == 0 else number - 1 - i // 2 for i in range(number)]
    for index in count():
        order = [names[(i + index) % number] for i in zigzag]
        yield order[::-1] if number % 2 and index // number % 2 else order


def cycle(number: int) -> int:
    """How many orders of so many names are balanced: as many, or twice as many if those are odd."""
    return number if number % 2 == 0 or number == 1 else 2 * number


def wall_clock(run: Run, launches: int) -> float:
    """Of work that is done when `run` returns."""
    start = time.perf_counter()
    for _ in range(launches):
        run()
    return (time.perf_counter() - start) * 1e3 / launches


def cuda_clock(run: Run, launches: int) -> float:
    """Of work on the current CUDA stream, by events on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # The device spins while the first launches queue up, else their host time would be measured.
    torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(launches):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / launches


def host_clock(run: Run, launches: int) -> float:
    """Of the caller's thread alone: the device works on after the call returned."""
    torch.cuda.synchronize()
    ms = wall_clock(run, launches)
    torch.cuda.synchronize()
    return ms


def _summary(values: list[float], load: Load) -> Timing:
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, low, high, min(values), len(values), load)
