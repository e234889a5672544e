"""Emulated: the forward kernels' PTX is right, free of races and deadlocks, in every order.

Copies and multiplies complete as early as they may, as late as they may, and at random.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.compiled import emulator
from tests.kernels.small import Results, Small, assert_right, attend, growing, small_problems
from tilewright.emulator import Options
from tilewright.kernels import catalog
from tilewright.kernels.catalog import Kernel
from tilewright.kernels.sm90.fa3.spec import DTYPES, ForwardSpec

KERNELS = [x for x in catalog.kernels("sm_90a") if x.family == catalog.FA3_FORWARD]
ORDERS = ("eager", "late", "random")
CAUSAL = ForwardSpec(bounded_right=True)
# What a spec may ask for beside its tiles. The catalog chooses some of it for some head dims.
MECHANISMS: list[dict[str, Any]] = [
    {"ping_pong": False},
    {"overlap": False},
    {"stores_by_tma": True},
    {"tiles_ahead": 2},
    {"takes_late": True},
    {"q_in_registers": True},
    {"q_in_registers": True, "carries_over": True},
    {"rescale_threshold": 8.0},
    {"rescale_threshold": 8.0, "goes_ahead": True},
    {"starts_two": True, "tile_kv": 64},
    {"ping_pong": False, "skips_hidden": True},
    {"ping_pong": False, "skips_hidden": True, "tile_kv": 32, "bounded_left": True},
    {"longest_first": False},
    {"dynamic": False},
    {"cluster": 2, "bounded_right": False},
    {"dynamic": False, "cluster": 2, "bounded_right": False},
    {"specialised": False},
    {
        **{"specialised": False, "dynamic": False, "bounded_right": False, "ping_pong": False},
        **{"head_dim": 64, "head_dim_v": 64, "tile_q": 192, "k_stages": 3, "v_stages": 3},
        **{"rescale_threshold": 8.0, "goes_ahead": True, "stores_by_tma": True},
    },
]


def variant(**mechanism: Any) -> Kernel:
    return Kernel(catalog.FA3_FORWARD, replace(CAUSAL, **mechanism), "sm_90a")


VARIANTS = [variant(**x) for x in MECHANISMS]
POLYNOMIAL = variant(exp2_emulated=4)
AHEAD = [x for x in KERNELS if x.spec.goes_ahead and x.spec.dtype == "bfloat16"]
AHEAD = [x for x in AHEAD if not x.spec.packed]  # which decides what is loaded and stored

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("entry_of")]


def emulate(kernel: Kernel, small: Small, order: str) -> Results:
    run = emulator(kernel)
    run.options = Options(order, races=True)
    results = attend(run, kernel.spec, small)
    assert not results.call.reports
    return results


def emulate_in(orders: tuple[str, ...], kernel: Kernel, small: Small) -> Results:
    """Orders of completion may not change a bit."""
    first, *others = (emulate(kernel, small, order) for order in orders)
    for other in others:
        assert torch.equal(other.out, first.out) and torch.equal(other.lse, first.lse)
    return first


@pytest.mark.parametrize("name", ["edges", "heads"])
@pytest.mark.parametrize("kernel", [x for x in KERNELS if x.spec.dtype == "bfloat16"], ids=str)
def test_every_kernel_in_every_order(kernel: Kernel, name: str) -> None:
    small = small_problems(kernel.spec)[name]
    assert_right(emulate_in(ORDERS, kernel, small), kernel.spec, small)


@pytest.mark.parametrize("kernel", [x for x in KERNELS if x.spec.dtype == "float16"], ids=str)
def test_float16(kernel: Kernel) -> None:
    """As bfloat16 but for the type and the threshold: one order and one problem do."""
    small = small_problems(kernel.spec)["edges"]
    assert_right(emulate(kernel, small, "late"), kernel.spec, small)


def test_each_kernel_has_a_twin_in_the_other_dtype() -> None:
    half, brain = (
        {replace(x.spec, dtype="", rescale_threshold=0.0) for x in KERNELS if x.spec.dtype == t}
        for t in DTYPES
    )
    assert half == brain


@pytest.mark.parametrize("kernel", VARIANTS, ids=map(str, MECHANISMS))
def test_every_mechanism(kernel: Kernel) -> None:
    """Where it is about the maxima of rows, also with such as grow from block to block."""
    smalls = [small_problems(kernel.spec)["edges"]]
    if kernel.spec.rescale_threshold:
        smalls.append(growing(kernel.spec))
    for small in smalls:
        assert_right(emulate_in(ORDERS, kernel, small), kernel.spec, small)


@pytest.mark.parametrize("kernel", [POLYNOMIAL], ids=str)
def test_exp2_by_polynomial_is_exact_enough_for_out_but_not_for_lse(kernel: Kernel) -> None:
    """Its relative error is 8.8e-5, and lse is float32. So no kernel of the catalog has it."""
    small = small_problems(kernel.spec)["edges"]
    results = emulate_in(ORDERS, kernel, small)
    with pytest.raises(AssertionError, match="lse is off"):
        assert_right(results, kernel.spec, small)


@pytest.mark.parametrize("kernel", AHEAD, ids=str)
def test_blocks_whose_maxima_were_guessed_too_low_are_multiplied_again(kernel: Kernel) -> None:
    """Only those: where all logits are about the same, nothing is."""
    flat, steep = (emulate(kernel, growing(kernel.spec, x), "late") for x in (1e-3, 3.0))
    assert_right(steep, kernel.spec, growing(kernel.spec))
    less, more = (_multiplies(results) for results in (flat, steep))
    assert less < more


def _multiplies(results: Results) -> int:
    (launch,) = results.call.launches
    return sum(flop for unit, flop in launch.total.items() if unit.startswith("MMA"))
