"""Every probe gives its exact result, in every schedule, without a race."""

from __future__ import annotations

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


def _check(emulator: Emulator, case: Case, options: Options) -> None:
    emulator.options = options
    tensors = case.tensors()
    result = emulator(*tensors)
    assert not result.reports
    split = len(tensors) - case.outputs
    for got, wanted in zip(tensors[split:], case.expected(*tensors[:split]), strict=True):
        np.testing.assert_array_equal(got, wanted)
