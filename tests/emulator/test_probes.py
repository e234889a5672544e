"""Every probe gives its exact result, in every schedule, without a race."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the probes are CuTe DSL programs")

import numpy as np

from tests.emulator import dsl
from tests.emulator.cases import CASES, Case
from tilewright.emulator import Emulator, Options

OPTIONS = [
    Options(races=True),
    Options(schedule="late", races=True),
    Options(schedule="random", seed=1, failing_peeks=True, races=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_probe_is_exact_in_every_schedule(case: Case) -> None:
    for arch in case.archs:
        dsl.use_arch(arch)  # building may already ask for the target
        function, traced = case.build()
        emulator = dsl.emulated(arch, function, *traced)
        for options in OPTIONS:
            _check(emulator, case, options)


REFERENCE = Path(__file__).with_name("h200.npz")


@pytest.mark.skipif(not REFERENCE.exists(), reason="no outputs of an H200: see h200.py")
def test_a_hopper_gpu_gave_the_same_bits() -> None:
    reference = np.load(REFERENCE)
    compared = 0
    for case in CASES:
        tensors = case.tensors()
        split = len(tensors) - case.outputs
        for i, wanted in enumerate(case.expected(*tensors[:split]), split):
            if (key := f"{case.name}.{i}") in reference:
                got = reference[key]
                np.testing.assert_array_equal(got, wanted.view(got.dtype), err_msg=key)
                compared += 1
    assert compared == len(reference) - 1  # "machine" names the GPU


def _check(emulator: Emulator, case: Case, options: Options) -> None:
    emulator.options = options
    tensors = case.tensors()
    result = emulator(*tensors)
    assert not result.reports
    split = len(tensors) - case.outputs
    for got, wanted in zip(tensors[split:], case.expected(*tensors[:split]), strict=True):
        np.testing.assert_array_equal(got, wanted)
