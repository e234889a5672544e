"""Contenders take turns, in batches of equal length, and each is charged what it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice, pairwise, permutations

import pytest

from tilewright.bench import power
from tilewright.bench.timing import (
    Load,
    Plan,
    Span,
    alternate,
    balanced_orders,
    cycle,
    wall_clock,
)

COSTS = {"a": 1.0, "b": 4.0, "c": 30.0}  # milliseconds a launch


class FakeDevice:
    """A device whose launches take as long as they say; it slows down as it gets warm."""

    def __init__(self, drift: float = 0.0) -> None:
        self.calls: list[str] = []
        self.batches: list[tuple[str, int]] = []
        self.drift = drift

    def contenders(self) -> dict[str, Callable[[], None]]:
        return {name: partial(self.calls.append, name) for name in COSTS}

    def clock(self, run: Callable[[], object], launches: int) -> float:
        for _ in range(launches):
            run()
        name = self.calls[-1]
        self.batches.append((name, launches))
        return COSTS[name] * (1 + self.drift * len(self.batches))


def test_each_round_starts_with_another_contender() -> None:
    device = FakeDevice()
    timings = alternate(device.contenders(), Plan(seconds=0.3), device.clock)
    order = [name for name, _ in device.batches]
    assert order[:3] == ["a", "b", "c"]  # the calibration
    assert sorted(order[3::3][:3]) == sorted(order[12::3][:3]) == ["a", "b", "c"]
    assert all(order.count(name) == len(order) // 3 for name in COSTS)
    assert {name: timing.median for name, timing in timings.items()} == COSTS


@pytest.mark.parametrize("names", ["abcd", "abcdef", "abc", "abcde"])
def test_everybody_runs_behind_everybody_else_equally_often(names: str) -> None:
    rounds = cycle(len(names))
    orders = list(islice(balanced_orders(list(names)), rounds))
    assert all(sorted(order) == list(names) for order in orders)
    behind = Counter(pair for order in orders for pair in pairwise(order))
    assert behind == dict.fromkeys(permutations(names, 2), rounds // len(names))


def test_a_batch_is_as_long_as_planned_for_slow_and_fast_contenders() -> None:
    device = FakeDevice()
    alternate(device.contenders(), Plan(seconds=0.3, batch_ms=20.0), device.clock)
    assert set(device.batches[3:]) == {("a", 20), ("b", 5), ("c", 1)}


@pytest.mark.parametrize("seconds, rounds", [(0.0, 6), (0.3, 12), (60.0, 60)])
def test_rounds_follow_the_seconds_within_their_bounds(seconds: float, rounds: int) -> None:
    device = FakeDevice()
    timings = alternate(device.contenders(), Plan(seconds, warm_up=2), device.clock)
    assert {timing.rounds for timing in timings.values()} == {rounds}
    assert len(device.batches) == 3 * (1 + 2 + rounds)


def test_warm_up_rounds_do_not_count() -> None:
    values = iter([1.0, 50.0, *[2.0] * 5])  # the calibration, the warm-up, the rounds
    plan = Plan(seconds=0.0, warm_up=1)
    (timing,) = alternate({"a": lambda: None}, plan, lambda run, launches: next(values)).values()
    assert (timing.low, timing.median, timing.high) == (2.0, 2.0, 2.0)


def test_the_least_is_kept_beside_the_median() -> None:
    device = FakeDevice(drift=0.01)
    timing = alternate(device.contenders(), Plan(seconds=0.0), device.clock)["a"]
    assert COSTS["a"] < timing.least < timing.low < timing.median < timing.high


def test_drift_meets_all_contenders_alike() -> None:
    timings = alternate(
        (device := FakeDevice(drift=0.001)).contenders(), Plan(seconds=0.0), device.clock
    )
    slowdowns = [timings[name].median / cost for name, cost in COSTS.items()]
    assert max(slowdowns) / min(slowdowns) < 1.002


def test_each_contender_is_watched_over_its_own_counted_batches() -> None:
    seen: list[list[Span]] = []

    def watch(spans: list[Span]) -> Load:
        seen.append(spans)
        return Load(mhz=float(len(seen)))

    device = FakeDevice()
    timings = alternate(device.contenders(), Plan(0.0, warm_up=3), device.clock, watch)
    assert [timing.load.mhz for timing in timings.values()] == [1.0, 2.0, 3.0]
    assert [len(spans) for spans in seen] == [6, 6, 6]
    spans = sorted(span for of_one in seen for span in of_one)
    assert all(one[1] <= other[0] for one, other in zip(spans, spans[1:], strict=False))


def test_the_wall_clock_divides_by_the_launches() -> None:
    calls: list[int] = []
    assert wall_clock(lambda: calls.append(0), 7) < 100
    assert len(calls) == 7


def test_samples_count_only_inside_the_spans() -> None:
    sampler = power.Sampler(lambda: iter(()))
    sampler._times = [0.0, 1.0, 2.0, 3.0, 4.0]
    sampler._values = [(1980.0, 100.0), (1500.0, 650.0), (1600.0, 700.0), (9.0, 9.0), (1e4, 1e4)]
    assert sampler([(0.5, 1.5), (1.9, 2.1)]) == Load(1550.0, 675.0)
    assert sampler([(2.4, 2.6)]) == Load()


def test_the_sampler_stops_with_its_block() -> None:
    with power.Sampler(lambda: iter(lambda: (1.0, 2.0), None)) as sampler:
        sampler._thread.join(0.05)
    assert not sampler._thread.is_alive()
    assert sampler._times
    assert sampler([(0.0, float("inf"))]) == Load(1.0, 2.0)
