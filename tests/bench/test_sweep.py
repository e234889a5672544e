"""A sweep finds the variants of a case in a bundle, tells them apart, and launches them rightly."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launch.contract import PROCESSORS
from tests.launch.standin import StandIn
from tilewright import jit
from tilewright.bench import sweep
from tilewright.bench.cases import Case
from tilewright.bench.gpu import check, run
from tilewright.bench.gpu.cases import Choice, cases
from tilewright.bench.gpu.contenders import Operands, draw
from tilewright.bench.gpu.records import Record
from tilewright.bench.timing import Load
from tilewright.jit.cache import Folder, Product
from tilewright.jit.key import key_of
from tilewright.kernels import catalog
from tilewright.kernels.sm90.fa3.spec import ForwardSpec
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec
from tilewright.launch import device, fa3

(CAUSAL,) = cases(Choice(names=("grid d128 causal 8k",)))
(VARLEN,) = cases(Choice(names=("varlen mixed d128",)))


# Of each pass, a field to vary and two values of it that are legal.
VARIED = {"forward": ("tile_kv", 64, 96), "backward": ("do_stages", 2, 3)}
each_direction = pytest.mark.parametrize("direction", list(VARIED))


def fill(folder: Path, specs: list[Any], direction: str) -> None:
    for spec in specs:
        key = key_of(catalog.Kernel(sweep.FAMILIES[direction], spec, fa3.ARCH))
        product = Product({".so": repr(asdict(spec)).encode()}, {})
        Folder(folder).make(key, lambda product=product: product)


def test_choices_multiply_and_what_is_illegal_is_left_out() -> None:
    spec = sweep.spec_of(CAUSAL, "forward")
    assert isinstance(spec, ForwardSpec)
    found = sweep.varied(spec, ["tile_kv=64,96", "ping_pong=true,false", "tile_q=64,1000"])
    assert {(s.tile_kv, s.ping_pong, s.tile_q) for s in found} == {
        (tile_kv, ping_pong, 64) for tile_kv in (64, 96) for ping_pong in (True, False)
    }


@each_direction
def test_without_choices_there_is_the_dispatchers_kernel(direction: str) -> None:
    spec = sweep.spec_of(CAUSAL, direction)
    assert sweep.varied(spec, []) == [spec]
    assert catalog.Kernel(sweep.FAMILIES[direction], spec, fa3.ARCH) in catalog.kernels(fa3.ARCH)


def test_an_order_is_words_and_an_illegal_one_is_left_out() -> None:
    orders = [
        "lse S add dK P dP dV delta dS write dQ",
        "lse S dK add P dP dV delta dS write dQ",
        "lse S add dK P dP dV delta write dS dQ",
    ]
    spec = sweep.spec_of(CAUSAL, "backward")
    assert isinstance(spec, BackwardSpec)
    found = sweep.varied(spec, [f"order={','.join(orders)}", "deterministic=true,false"])
    assert {(s.order, s.deterministic) for s in found} == {
        (tuple(order.split()), flag) for order in orders[:2] for flag in (True, False)
    }


@each_direction
@pytest.mark.parametrize("choice", ["head_dim=64", "speed=9", "tile_kv"])
def test_a_choice_that_no_spec_has_is_refused(choice: str, direction: str) -> None:
    with pytest.raises(ValueError, match="FIELD=VALUE"):
        sweep.varied(sweep.spec_of(CAUSAL, direction), [choice])


@each_direction
def test_variants_of_the_case_are_found_and_told_apart(tmp_path: Path, direction: str) -> None:
    spec = sweep.spec_of(CAUSAL, direction)
    name, *values = VARIED[direction]
    specs = [replace(spec, **{name: value}) for value in values]
    fill(tmp_path, [*specs, replace(spec, packed=True)], direction)
    found = sweep.fitting([tmp_path], CAUSAL, direction)
    assert set(found) == {f"{name}={value}" for value in values}
    (entry,) = sweep.fitting([tmp_path], VARLEN, direction).values()
    assert entry.identity["spec"]["packed"]


def test_variants_of_the_other_pass_do_not_fit(tmp_path: Path) -> None:
    for direction in VARIED:
        fill(tmp_path, [sweep.spec_of(CAUSAL, direction)], direction)
    for direction in VARIED:
        (entry,) = sweep.fitting([tmp_path], CAUSAL, direction).values()
        assert entry.identity["family"] == sweep.FAMILIES[direction]


def test_orders_are_told_apart_by_their_words(tmp_path: Path) -> None:
    choice = "order=lse S add dK P dP dV delta dS write dQ,lse S dK add P dP dV delta dS write dQ"
    fill(tmp_path, sweep.varied(sweep.spec_of(CAUSAL, "backward"), [choice]), "backward")
    found = sweep.fitting([tmp_path], CAUSAL, "backward")
    assert set(found) == {f"order={order}" for order in choice.removeprefix("order=").split(",")}


@each_direction
def test_a_damaged_variant_is_named(tmp_path: Path, direction: str) -> None:
    fill(tmp_path, [sweep.spec_of(CAUSAL, direction)], direction)
    next(tmp_path.glob("*.so")).write_bytes(b"")
    with pytest.raises(ValueError, match="damaged"):
        sweep.fitting([tmp_path], CAUSAL, direction)


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The dispatcher's kernels, which judge what they are passed; the CPU passes for a GPU."""
    made = StandIn()
    counter = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(jit, "load", made.load)
    monkeypatch.setattr(device, "processors", lambda where: PROCESSORS)
    monkeypatch.setattr(device, "no_sink", lambda where, heads: torch.full((heads,), -math.inf))
    monkeypatch.setattr(device, "tile_counter", lambda where: counter)
    return made


def results(
    case: Case, direction: str, spec: Any, standin: StandIn, folder: Path
) -> tuple[Operands, tuple[Tensor, ...]]:
    """Of a small case, from a variant with this spec."""
    small = replace(case, seqlen_q=16, seqlen_k=16, batch=2, lengths=case.lengths and (16, 3))
    fill(folder, [spec], direction)
    (entry,) = sweep.fitting([folder], case, direction).values()
    function = standin.load(catalog.Kernel(sweep.FAMILIES[direction], spec, fa3.ARCH))
    operands = draw(small, "cpu")
    attend = sweep.way(function, entry, direction)(small, operands)
    found = run.computation(attend, operands, direction)()
    wanted = check.expected(small, operands, direction)
    assert check.error(found, wanted, direction) <= check.bound(direction)
    return operands, found


each_case = pytest.mark.parametrize("case", [CAUSAL, VARLEN], ids=lambda case: case.group)


@each_case
def test_a_forward_variant_is_called_as_the_kernel_wants(
    case: Case, standin: StandIn, tmp_path: Path
) -> None:
    spec = replace(sweep.spec_of(case, "forward"), tile_kv=64)
    operands, (out,) = results(case, "forward", spec, standin, tmp_path)
    (given,) = standin.calls
    assert given["out"] is out and (given["q"], given["k"], given["v"]) == operands.inputs
    assert given["cu_seqlens_q"] is given["cu_seqlens_k"] is operands.bounds
    assert (given["left"], given["right"]) == (fa3.NO_BOUND, 0)


@each_case
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_backward_variant_is_the_main_kernel_of_a_whole_pass(
    case: Case, is_deterministic: bool, standin: StandIn, tmp_path: Path
) -> None:
    usual = sweep.spec_of(case, "backward")
    # The stand-in wants as many turns as these tiles need.
    spec: Any = replace(usual, **{"deterministic": is_deterministic, "tile_q": 128})
    results(case, "backward", spec, standin, tmp_path)
    families = [kernel.family for kernel in standin.kernels]
    assert families == [catalog.FA3_PREPARE, catalog.FA3_BACKWARD, catalog.FA3_FINISH]
    assert standin.kernels[1].spec == spec


def test_a_bundle_without_a_variant_of_the_pass_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, [sweep.spec_of(CAUSAL, "forward")], "forward")
    arguments = ["--pass", "backward", "--bundle", str(tmp_path), "--case", "grid d128 causal 8k"]
    with pytest.raises(SystemExit):
        sweep.main(arguments)
    assert "no backward variant for --case 'grid d128 causal 8k'" in capsys.readouterr().err


@each_direction
def test_make_compiles_variants_of_the_pass(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *values = VARIED[direction]
    monkeypatch.setattr(sweep, "produce", lambda kernel: Product({".so": b"code"}, {}))
    arguments = ["--pass", direction, "--bundle", str(tmp_path), "--case", "grid d128 causal 8k"]
    sweep.main([*arguments, "--make", "--vary", f"{name}={','.join(map(str, values))}"])
    found = sweep.fitting([tmp_path], CAUSAL, direction)
    assert set(found) == {f"{name}={value}" for value in values}


@each_direction
def test_the_pass_that_was_asked_for_is_timed(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[str, set[str]]] = []

    def run_case(case: Case, direction: str, watch: Any, plan: Any, ways: Any) -> list[Record]:
        timed.append((direction, set(ways)))
        return []

    monkeypatch.setattr(run, "run_case", run_case)
    monkeypatch.setattr(sweep, "_load", lambda entry: None)
    fill(tmp_path, [sweep.spec_of(CAUSAL, direction)], direction)
    entries = sweep.fitting([tmp_path], CAUSAL, direction)
    options = argparse.Namespace(direction=direction, peers="cudnn", seconds=0.0, batch_ms=0.0)
    sweep.sweep(CAUSAL, entries, options, lambda spans: Load())
    assert timed == [(direction, {*entries, "cudnn"})]


def test_the_table_is_sorted_and_knows_the_peak_of_the_clock() -> None:
    records = [
        Record("c", "forward", "slow", ms=2.0, ms_min=1.9, tflops=300.0, mhz=1500.0, watts=600.0),
        Record("c", "forward", "broken", why_none="wrong"),
        Record("c", "forward", "cudnn", ms=1.0, ms_min=0.9, tflops=600.0),
        Record("c", "forward", "cublas", ms=1.6, ms_min=1.5, tflops=750.0),
    ]
    rows = {row[0]: row[1:] for row in sweep.table(records, 132)}
    assert list(rows) == ["cublas", "cudnn", "slow", "broken"]
    peak = 132 * 4096 * 1500e6 / 1e12
    want = ("300.0", "2.0000", "1.9000", "0.500", "0.400", f"{300 / peak:.3f}", "1500", "600")
    assert rows["slow"] == want
    assert set(rows["broken"]) == {"-"}
