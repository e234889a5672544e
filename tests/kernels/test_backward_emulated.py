"""Emulated: the PTX of the backward's main kernels is right, free of races and deadlocks.

Copies and multiplies complete as early as they may, as late as they may, and at random.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.kernels.compiled import emulator
from tests.kernels.small import Small
from tests.kernels.small_backward import Results, assert_right, attend_backward, small_problems
from tests.kernels.workspace import rows_of
from tilewright.emulator import Options
from tilewright.kernels import catalog
from tilewright.kernels.catalog import Kernel
from tilewright.kernels.sm90.fa3.spec import DTYPES
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec

KERNELS = [x for x in catalog.kernels("sm_90a") if x.family == catalog.FA3_BACKWARD]
FLOAT16, BFLOAT16 = ([x for x in KERNELS if x.spec.dtype == t] for t in DTYPES)
# The last that the catalog lists of a head dim.
FLOAT16_TO_RUN = list({(x.spec.head_dim, x.spec.head_dim_v): x for x in FLOAT16}.values())
# Those of dense calls under a causal mask.
IN_TURNS = [
    x
    for x in BFLOAT16
    if x.spec.deterministic
    and (x.spec.bounded_left, x.spec.bounded_right, x.spec.packed) == (False, True, False)
]
ORDERS = ("eager", "late", "random")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("entry_of")]


def emulate(kernel: Kernel, small: Small, order: str) -> Results:
    run = emulator(kernel)
    run.options = Options(order, races=True)
    results = attend_backward(run, kernel.spec, small)
    assert not results.call.reports
    return results


@pytest.mark.parametrize("kernel", BFLOAT16, ids=str)
def test_every_kernel_in_every_order(kernel: Kernel) -> None:
    """Which may not change a bit, but of sums of dQ that several CTAs add to as they come."""
    small = small_problems(kernel.spec)["edges"]
    first, *others = (emulate(kernel, small, order) for order in ORDERS)
    for other in others:
        assert torch.equal(other.dk, first.dk) and torch.equal(other.dv, first.dv)
        for at in first.work.at:
            a, b = (rows_of(x.work.dq_sum)[at] for x in (first, other))
            assert torch.equal(a, b) or not kernel.spec.deterministic
        assert_right(other, kernel.spec, small)
    assert_right(first, kernel.spec, small)


@pytest.mark.parametrize("kernel", IN_TURNS, ids=str)
def test_turns_of_heads_that_share_keys(kernel: Kernel) -> None:
    """Tiles then go through the queries the other way round, and take turns in the other order."""
    edges = small_problems(kernel.spec)["edges"]
    small = replace(edges, heads=(2, 1), ctas=2 * kernel.spec.cluster)
    first, *others = (emulate(kernel, small, order) for order in ORDERS)
    assert_right(first, kernel.spec, small)
    for other, at in product(others, first.work.at):
        assert torch.equal(rows_of(other.work.dq_sum)[at], rows_of(first.work.dq_sum)[at])


@pytest.mark.parametrize("kernel", BFLOAT16, ids=str)
def test_heads_that_share_keys(kernel: Kernel) -> None:
    """Or many sequences. What waits for what is as at the edges: one order does."""
    small = small_problems(kernel.spec)["heads"]
    assert_right(emulate(kernel, small, "random"), kernel.spec, small)


def test_a_step_in_another_order_than_any_of_the_catalog() -> None:
    """dK is issued after dS is made: the Q of the step before is let go when it has been read."""
    order = ("lse", "S", "P", "dP", "dV", "delta", "dS", "dK", "write", "dQ", "add")
    spec = replace(catalog.tiled_backward(BackwardSpec(head_dim=64, head_dim_v=64)), order=order)
    kernel = Kernel(catalog.FA3_BACKWARD, replace(spec, q_stages=3), "sm_90a")
    small = small_problems(kernel.spec)["edges"]
    assert_right(emulate(kernel, small, "late"), kernel.spec, small)


@pytest.mark.parametrize("dim", [192, 256])
def test_additions_at_every_place_of_a_step(dim: int) -> None:
    """In turns, which must begin with a block's first part and end with its last."""
    features = BackwardSpec(head_dim=dim, head_dim_v=dim, bounded_right=True, deterministic=True)
    spec = catalog.tiled_backward(features)
    of_dV, of_dK = spec.places
    spec = replace(spec, adds_beside_dV=of_dV, adds_beside_dK=of_dK)
    small = replace(small_problems(spec)["edges"], ctas=2 * spec.cluster)
    kernel = Kernel(catalog.FA3_BACKWARD, spec, "sm_90a")
    first, other = (emulate(kernel, small, order) for order in ("late", "random"))
    assert_right(first, spec, small)
    for at in first.work.at:
        assert torch.equal(rows_of(other.work.dq_sum)[at], rows_of(first.work.dq_sum)[at])


@pytest.mark.parametrize("kernel", FLOAT16_TO_RUN, ids=str)
def test_float16(kernel: Kernel) -> None:
    """As bfloat16 but for the type, which is that of the multiplies (test_compiled.py): one order,
    one problem, and of a head dim the one kernel that does the most."""
    small = small_problems(kernel.spec)["edges"]
    assert_right(emulate(kernel, small, "late"), kernel.spec, small)


def test_each_kernel_has_a_twin_in_the_other_dtype() -> None:
    half, brain = ({replace(x.spec, dtype="") for x in xs} for xs in (FLOAT16, BFLOAT16))
    assert half == brain
