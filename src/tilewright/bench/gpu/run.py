"""Checking and timing the cases on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewright
from tilewright.bench.cases import Case
from tilewright.bench.gpu import check
from tilewright.bench.gpu.cases import flops, is_timed_deterministic, name
from tilewright.bench.gpu.contenders import (
    CONTENDERS,
    DETERMINISTIC,
    OURS,
    Attend,
    Operands,
    Refused,
    Way,
    draw,
    heads_first,
    our_path,
    ours_deterministic,
)
from tilewright.bench.gpu.records import CEILINGS, COPY, CUBLAS, HOST, Record
from tilewright.bench.timing import (
    Plan,
    Run,
    Timing,
    Watch,
    alternate,
    cuda_clock,
    host_clock,
)

PLAN = Plan(seconds=0.2, batch_ms=15.0, warm_up=1, min_rounds=7)
QUICK = replace(PLAN, seconds=0.06, batch_ms=8.0)
CEILINGS_EVERY = 12  # cases
MATMUL = 8192  # rows, columns and depth
COPIED = 1 << 30  # bytes, each read and written
HOST_PLAN = Plan(seconds=0.0, batch_ms=0.0, warm_up=2, min_rounds=20)
HOST_CALLS = 50  # between two synchronisations; more would fill the queue and wait for the device


def plan(seconds: float | None, is_quick: bool) -> Plan:
    chosen = QUICK if is_quick else PLAN
    return chosen if seconds is None else replace(chosen, seconds=seconds)


def run(
    cases: Sequence[Case],
    direction: str,
    on_case: Callable[[str], None],
    watch: Watch | None = None,
    plan: Plan = PLAN,
    ways: Mapping[str, Way] = CONTENDERS,
) -> Iterator[Record]:
    """Host time first, then each case, with the ceilings every few of them."""
    on_case(HOST)
    yield from host_time()
    for index, case in enumerate(cases):
        if index % CEILINGS_EVERY == 0:
            yield from ceilings(watch, plan)
        on_case(name(case))
        yield from run_case(case, direction, watch, plan, ways)


def run_case(
    case: Case,
    direction: str,
    watch: Watch | None = None,
    plan: Plan = PLAN,
    ways: Mapping[str, Way] = CONTENDERS,
) -> Iterator[Record]:
    """Every contender that gets the case right, beside cuBLAS, in alternation."""
    operands = draw(case)
    wanted = check.expected(case, operands, direction)
    runs: dict[str, Run] = {}
    records = []
    if direction == "backward" and OURS in ways and is_timed_deterministic(case):
        ways = {**ways, DETERMINISTIC: ours_deterministic}
    for contender, way in ways.items():
        run, record = prepare((contender, way), case, operands, direction, wanted)
        records.append(record)
        if run is not None:
            runs[contender] = run
    del wanted
    timings, broken = in_turns({**runs, CUBLAS: matmul()}, plan, watch)
    records.append(Record(name(case), direction, CUBLAS, case.to_dict()))
    for record in records:
        contender = record.contender
        if contender in timings:
            work = 2 * MATMUL**3 if contender == CUBLAS else flops(case, direction)
            yield timed(record, timings[contender], work)
        else:
            yield replace(record, why_none=broken.get(contender, record.why_none))


def prepare(
    named: tuple[str, Way], case: Case, operands: Operands, direction: str, wanted: Sequence[Tensor]
) -> tuple[Run | None, Record]:
    """The computation to time, or None and in the record why there is none."""
    contender, way = named
    record = Record(name(case), direction, contender, case.to_dict())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run = computation(way(case, operands), operands, direction)
            results = run()
            error = check.error(results, wanted, direction)
            is_repeatable = contender != DETERMINISTIC or equal_bits(results, run())
            if contender == OURS:
                record = replace(record, backend=our_path(case, operands, direction))
        except Refused as refusal:
            return None, replace(record, why_none=str(refusal))
        except Exception as failure:  # of any library, in any way of its own
            torch.cuda.synchronize()  # raises if the device itself is spoilt: nothing can follow
            return None, replace(record, why_none=reason(failure, said))
    record = replace(record, error=error)
    if not error <= check.bound(direction):  # NaN is wrong too
        why = (
            f"wrong: relative error {error:.1e}, at the most {check.bound(direction):.1e} is right"
        )
        return None, replace(record, why_none=why)
    if not is_repeatable:
        return None, replace(record, why_none="wrong: a second run gave other bits")
    return run, record


class Broken(Exception):
    """A contender raised while it was timed; the cause is what it raised."""


def in_turns(
    runs: Mapping[str, Run], plan: Plan, watch: Watch | None
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Timings of the contenders that got through, and the reasons of those that raised.

    Once one has raised, the others start anew without it, so that all have met the same rounds.
    """

    def guarded(contender: str) -> Run:
        def run() -> object:
            try:
                return runs[contender]()
            except Exception as failure:  # of any library, in any way of its own
                raise Broken(contender) from failure

        return run

    broken: dict[str, str] = {}
    while True:
        left = {contender: guarded(contender) for contender in runs if contender not in broken}
        try:
            return alternate(left, plan, cuda_clock, watch), broken
        except Broken as stop:
            torch.cuda.synchronize()  # raises if the device itself is spoilt
            broken[stop.args[0]] = f"while timed: {reason(stop.__cause__, ())}"


def equal_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def computation(
    attend: Attend, operands: Operands, direction: str
) -> Callable[[], tuple[Tensor, ...]]:
    if direction == "forward":

        def forward() -> tuple[Tensor]:
            with torch.no_grad():
                return (attend(*operands.inputs),)

        return forward
    leaves = [x.detach().requires_grad_() for x in operands.inputs]
    with torch.enable_grad():
        # As in any step of a training but the first, in which some prepare what comes after.
        attend(*leaves)
        out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, operands.dout, retain_graph=True)


def reason(failure: BaseException | None, said: Sequence[warnings.WarningMessage]) -> str:
    """The first lines of what a library raised and warned of, where SDPA gives its reasons."""
    lines = [f"{type(failure).__name__}: {failure}", *(str(entry.message) for entry in said)]
    firsts = [line.strip().splitlines()[0][:200] for line in lines if line.strip()]
    return "; ".join(dict.fromkeys(firsts[:4]))


def timed(record: Record, timing: Timing, work: float) -> Record:
    """`work` in operations or, of the copy, in bytes."""
    return replace(
        record,
        ms=timing.median,
        ms_min=timing.least,
        rounds=timing.rounds,
        tflops=work / timing.median / 1e9,
        mhz=timing.load.mhz,
        watts=timing.load.watts,
    )


def matmul() -> Run:
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.mm(a, b)


def ceilings(watch: Watch | None = None, plan: Plan = PLAN) -> Iterator[Record]:
    source = torch.randn(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    ways: dict[str, Run] = {CUBLAS: matmul(), COPY: lambda: target.copy_(source)}
    timings = alternate(ways, plan, cuda_clock, watch)
    for contender, work in ((CUBLAS, 2 * MATMUL**3), (COPY, 2 * COPIED)):
        yield timed(Record(CEILINGS, "forward", contender), timings[contender], work)


def host_time() -> Iterator[Record]:
    """Of one eager forward call on a problem that takes the device no time."""
    q, k, v = (torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    views = heads_first((q, k, v))
    ways: dict[str, Callable[[], Any]] = {
        OURS: lambda: tilewright.attention(q, k, v),
        "sdpa": lambda: scaled_dot_product_attention(*views),
    }
    backend = tilewright.explain(q, k, v).backend
    with torch.no_grad():
        for way in ways.values():
            way()
        timings = alternate(ways, HOST_PLAN, lambda run, _: host_clock(run, HOST_CALLS))
    for contender, timing in timings.items():
        record = Record(HOST, "forward", contender, backend=backend if contender == OURS else None)
        yield replace(record, ms=timing.median, ms_min=timing.least, rounds=timing.rounds)
