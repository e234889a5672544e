"""An H200 computed the bits that the emulator is held to in test_probes.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="the probes are CuTe DSL programs")

from tests.emulator.cases import CASES

REFERENCE = np.load(Path(__file__).parent / "probes" / "h200.npz")
RECORDED = sorted({name.rpartition(", output ")[0] for name in REFERENCE.files} - {""})
HOPPER = {case.name: case for case in CASES if {"sm_80", "sm_90a"} & set(case.archs)}


@pytest.mark.parametrize("name", RECORDED)
def test_the_gpu_gave_the_expected_bits(name: str) -> None:
    case = HOPPER[name]  # a record whose case is gone proves nothing
    tensors = case.tensors()
    split = len(tensors) - case.outputs
    for output, wanted in enumerate(case.expected(*tensors[:split])):
        bits = np.ascontiguousarray(wanted)[..., None].view(np.uint8)
        np.testing.assert_array_equal(REFERENCE[f"{name}, output {output}"], bits)


def test_the_reference_names_its_machine_and_holds_every_probe() -> None:
    assert "H200" in str(REFERENCE["machine"])
    assert set(RECORDED) == set(HOPPER), "record h200.npz anew, as hardware.py says"
    assert len(REFERENCE.files) == 1 + sum(HOPPER[name].outputs for name in RECORDED)
