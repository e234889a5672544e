"""A sweep finds the variants of a case in a bundle, tells them apart, and launches them rightly."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.bench import sweep
from tilewright.bench.gpu.cases import Choice, cases
from tilewright.bench.gpu.contenders import draw
from tilewright.bench.gpu.records import Record
from tilewright.jit.cache import Folder, Product
from tilewright.jit.key import key_of
from tilewright.kernels import catalog
from tilewright.launch import fa3

(CAUSAL,) = cases(Choice(names=("grid d128 causal 8k",)))
(VARLEN,) = cases(Choice(names=("varlen mixed d128",)))


def fill(folder: Path, specs: list[Any]) -> None:
    for spec in specs:
        key = key_of(catalog.Kernel(catalog.FA3_FORWARD, spec, fa3.ARCH))
        product = Product({".so": repr(asdict(spec)).encode()}, {})
        Folder(folder).make(key, lambda product=product: product)


def test_choices_multiply_and_what_is_illegal_is_left_out() -> None:
    spec = sweep.spec_of(CAUSAL)
    found = sweep.varied(spec, ["tile_kv=64,96", "ping_pong=true,false", "tile_q=64,1000"])
    assert {(s.tile_kv, s.ping_pong, s.tile_q) for s in found} == {
        (tile_kv, ping_pong, 64) for tile_kv in (64, 96) for ping_pong in (True, False)
    }
    assert sweep.varied(spec, []) == [spec]


@pytest.mark.parametrize("choice", ["head_dim=64", "speed=9", "tile_kv"])
def test_a_choice_that_no_spec_has_is_refused(choice: str) -> None:
    with pytest.raises(ValueError, match="FIELD=VALUE"):
        sweep.varied(sweep.spec_of(CAUSAL), [choice])


def test_variants_of_the_case_are_found_and_told_apart(tmp_path: Path) -> None:
    spec = sweep.spec_of(CAUSAL)
    other = replace(spec, packed=True)
    fill(tmp_path, [replace(spec, tile_kv=64), replace(spec, tile_kv=96), other])
    assert set(sweep.fitting([tmp_path], CAUSAL)) == {"tile_kv=64", "tile_kv=96"}
    (entry,) = sweep.fitting([tmp_path], VARLEN).values()
    assert entry.identity["spec"]["packed"]


def test_a_damaged_variant_is_named(tmp_path: Path) -> None:
    fill(tmp_path, [sweep.spec_of(CAUSAL)])
    next(tmp_path.glob("*.so")).write_bytes(b"")
    with pytest.raises(ValueError, match="damaged"):
        sweep.fitting([tmp_path], CAUSAL)


@pytest.mark.parametrize("case", [CAUSAL, VARLEN], ids=lambda case: case.group)
def test_a_variant_is_called_as_the_kernel_wants(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep.device, "processors", lambda where: 132)
    monkeypatch.setattr(sweep.device, "no_sink", lambda where, heads: f"sink {heads}")
    monkeypatch.setattr(sweep.device, "tile_counter", lambda where: "counter")
    called: list[tuple[Any, ...]] = []
    small = replace(case, seqlen_q=16, seqlen_k=16, batch=2, lengths=case.lengths and (16, 3))
    operands = draw(small, "cpu")
    out = sweep.variant(lambda *args: called.append(args))(small, operands)(*operands.inputs)
    (args,) = called
    assert args[:3] == operands.inputs and args[3] is out
    assert out.shape == operands.dout.shape and out.dtype == torch.bfloat16
    assert args[4].shape == ((16, 19) if case.lengths else (2, 16, 16))
    assert args[5:11] == ("sink 16", *[operands.bounds] * 4, "counter")
    assert args[11:] == (128**-0.5, 0.0, fa3.NO_BOUND, 0, 0, 132)


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
