"""On a GPU, only what is right gets a time, and what has none says why. The CPU stands in here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilewright.bench.cases import Case
from tilewright.bench.gpu import check, contenders, run
from tilewright.bench.gpu.contenders import Attend, Operands, Refused
from tilewright.bench.timing import Plan
from tilewright.masks import Mask

CASES = [
    Case("grid", "bfloat16", 192, 192, 2, 2, 64, Mask.full(), 2),
    Case("gqa", "bfloat16", 160, 160, 4, 2, 64, Mask.causal(), 2),
    Case("latent", "bfloat16", 160, 160, 2, 2, 48, Mask.causal(), 1, (), 32),
    Case("window", "bfloat16", 200, 200, 4, 2, 64, Mask(50, 0), 1),
    Case("varlen", "bfloat16", 130, 130, 2, 2, 64, Mask.causal(), 3, (130, 7, 64)),
]
DIRECTIONS = ("forward", "backward")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.group)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(contenders, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(run, "draw", lambda case: contenders.draw(case, "cpu"))
    monkeypatch.setattr(run, "matmul", lambda: lambda: None)
    monkeypatch.setattr(run, "cuda_clock", lambda run, launches: 2.0)


def attend_of(name: str, case: Case, operands: Operands) -> Attend:
    return contenders.CONTENDERS[name](case, operands)


@each_case
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["tilewright", "cudnn", "flex"])
@pytest.mark.filterwarnings("ignore")
def test_contenders_agree_with_float32(name: str, direction: str, case: Case, on_cpu: None) -> None:
    if name == "flex" and direction == "backward":
        pytest.skip("FlexAttention has no backward pass on a CPU")
    if name == "cudnn" and case.group in ("window", "varlen"):
        pytest.skip("SDPA has no window, and no causal packed batch on a CPU")
    operands = contenders.draw(case, "cpu")
    wanted = check.expected(case, operands, direction)
    found = run.computation(attend_of(name, case, operands), operands, direction)()
    assert check.error(found, wanted, direction) <= check.bound(direction)


def test_a_backward_pass_is_that_of_a_second_call() -> None:
    """The first is not what a training spends its time on."""
    operands, calls = contenders.draw(CASES[0], "cpu"), []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(q)
        return len(calls) * q + 0.0 * (k.sum() + v.sum())

    dq, _, _ = run.computation(attend, operands, "backward")()
    assert torch.equal(dq, 2 * operands.dout)


@each_case
def test_a_missing_key_tile_and_a_nan_are_wrong(case: Case) -> None:
    operands = contenders.draw(case, "cpu")
    (out,) = wanted = check.expected(case, operands, "forward")
    assert not out.isnan().any()
    spoilt = out.clone()
    spoilt[..., -1, 0, 0] = torch.nan
    assert not check.error((spoilt,), wanted, "forward") <= check.ROW_BOUND
    off = out.clone()
    off[..., -1, 0, :] *= 1 + 2.0**-3.5
    assert not check.error((off,), wanted, "forward") <= check.ROW_BOUND
    with pytest.raises(ValueError, match="shape"):
        check.error((out[1:],), wanted, "forward")


def test_bounds_leave_room_for_two_roundings_and_no_more() -> None:
    case = CASES[0]
    operands = contenders.draw(case, "cpu")
    wanted = check.expected(case, operands, "forward")
    rounded = tuple(x.bfloat16() for x in wanted)
    assert 2.0**-10 < check.error(rounded, wanted, "forward") < 2.0**-8


def test_what_the_heads_share_is_cut_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[1]
    operands = contenders.draw(case, "cpu")
    for direction in DIRECTIONS:
        whole = check.expected(case, operands, direction)
        monkeypatch.setattr(check, "LOGITS", 1)
        for a, b in zip(whole, check.expected(case, operands, direction), strict=True):
            torch.testing.assert_close(a, b)


def test_what_is_wrong_or_refused_has_a_reason_and_no_time(on_cpu: None) -> None:
    def refuses(case: Case, operands: Operands) -> Attend:
        raise Refused("no such option")

    def breaks(case: Case, operands: Operands) -> Attend:
        def attend(*inputs: Tensor) -> Tensor:
            raise RuntimeError("unsupported head dim\nand a long story")

        return attend

    def altered(change: Callable[[Tensor], Tensor]) -> Callable[[Case, Operands], Attend]:
        return lambda case, operands: (
            lambda *inputs: change(contenders.ours(case, operands)(*inputs))
        )

    ways = {
        "tilewright": contenders.ours,
        "cudnn": refuses,
        "fa2": breaks,
        "flex": altered(lambda out: out * 1.05),
        "fa4": altered(lambda out: out * torch.nan),
    }
    found = run.run_case(CASES[0], "forward", plan=Plan(0.0), ways=ways)
    records = {record.contender: record for record in found}
    assert set(records) == {*ways, "cublas"}
    ours = records["tilewright"]
    assert ours.ms == 2.0 and ours.backend and ours.why_none is None
    assert ours.tflops == 4 * 192 * 192 * 64 * 2 * 2 / 2.0 / 1e9
    assert records["cublas"].tflops == 2 * 8192**3 / 2.0 / 1e9
    assert records["cudnn"].why_none == "no such option"
    assert records["fa2"].why_none == "RuntimeError: unsupported head dim"
    assert all("wrong" in (records[name].why_none or "") for name in ("flex", "fa4"))
    assert all(records[name].ms is None for name in ("cudnn", "fa2", "flex", "fa4"))


GRID = Case("grid", "bfloat16", 1024, 1024, 1, 1, 64, Mask.causal(), 1)


def test_a_backward_pass_is_also_timed_bound_to_equal_bits(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"tilewright": contenders.ours}
    found = {r.contender: r for r in run.run_case(GRID, "backward", plan=Plan(0.0), ways=ways)}
    assert list(found) == ["tilewright", "deterministic", "cublas"]
    bound = found["deterministic"]
    assert bound.tflops == 2.5 * 4 * 1024**2 * 64 / 2 / 2.0 / 1e9 and bound.why_none is None
    assert found["tilewright"].backend == "cpu_fused"
    forward = run.run_case(GRID, "forward", plan=Plan(0.0), ways=ways)
    assert "deterministic" not in {r.contender for r in forward}
    other = run.run_case(CASES[0], "backward", plan=Plan(0.0), ways=ways)
    assert "deterministic" not in {r.contender for r in other}
    without_ours = run.run_case(GRID, "backward", plan=Plan(0.0), ways={"other": contenders.ours})
    assert "deterministic" not in {r.contender for r in without_ours}

    calls: list[int] = []

    def restless(case: Case, operands: Operands) -> Attend:
        """Other bits of dq each time, by less than its rounding to bfloat16 may be off."""

        def spoil(grad: Tensor) -> Tensor:
            calls.append(1)
            return grad * (1.0 + 2.0**-8 * (len(calls) % 2))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = q * 1.0
            q.register_hook(spoil)
            return contenders.ours(case, operands)(q, k, v)

        return attend

    monkeypatch.setattr(run, "ours_deterministic", restless)
    found = {r.contender: r for r in run.run_case(GRID, "backward", plan=Plan(0.0), ways=ways)}
    assert found["deterministic"].ms is None
    assert found["deterministic"].why_none == "wrong: a second run gave other bits"


def test_who_raises_while_it_is_timed_is_left_out_and_the_others_go_on(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def tires(case: Case, operands: Operands) -> Attend:
        def attend(*inputs: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) > 3:
                raise RuntimeError("out of breath")
            return contenders.ours(case, operands)(*inputs)

        return attend

    def clock(run: Callable[[], object], launches: int) -> float:
        run()
        return 2.0

    monkeypatch.setattr(run, "cuda_clock", clock)
    ways = {"tilewright": contenders.ours, "fa4": tires}
    found = {r.contender: r for r in run.run_case(CASES[0], "forward", plan=Plan(0.0), ways=ways)}
    assert len(calls) == 4
    assert found["tilewright"].ms == found["cublas"].ms == 2.0
    assert found["fa4"].ms is None
    assert found["fa4"].why_none == "while timed: RuntimeError: out of breath"


def test_a_run_has_the_host_time_the_ceilings_and_every_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(run, "host_time", lambda: calls.append("host") or ())
    monkeypatch.setattr(run, "ceilings", lambda *_: calls.append("ceilings") or ())
    monkeypatch.setattr(run, "run_case", lambda case, *_: calls.append(case.group) or ())
    told: list[str] = []
    assert list(run.run([CASES[0]] * 13, "forward", told.append)) == []
    assert calls == ["host", "ceilings", *["grid"] * 12, "ceilings", "grid"]
    assert told == ["host", *["grid d64 full 192"] * 13]
