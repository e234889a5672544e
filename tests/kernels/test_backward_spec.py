"""What the chip cannot give a backward kernel is said before it is compiled."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tilewright.kernels import catalog
from tilewright.kernels.sm90.fa3_backward.spec import ORDER, BackwardSpec

WIDE: dict[str, Any] = {
    **{"head_dim": 192, "tile_kv": 64, "q_stages": 3, "do_stages": 2},
    **{"adds_beside_dV": ("S", "write"), "adds_beside_dK": ("dQ",)},
}


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"head_dim": 256, "head_dim_v": 256}, "tile 64x128"),
        ({"head_dim": 128, "head_dim_v": 256, "tile_kv": 64}, "head_dim=128"),
        ({"head_dim": 192, "tile_kv": 64, "keys_in_registers": True}, "keys_in_registers"),
        ({"head_dim": 256, "head_dim_v": 256, "tile_kv": 64}, "B of shared memory"),
        ({"q_stages": 2}, "a step holds three"),
        ({"shares_loads": True}, "two CTAs"),
        ({"head_dim": 192, "tile_kv": 64, "shares_loads": True, "packed": True}, "none to zero"),
        ({"adds_beside_dV": ("S",)}, "the order says where"),
        (WIDE | {"adds_beside_dK": ()}, "adds_beside_dK=: want some of dQ dS dK send"),
        (WIDE | {"adds_beside_dV": ("write", "S")}, "comes by them as S P write dV"),
        (WIDE | {"head_dim": 256, "head_dim_v": 256, "q_stages": 2}, "as write S P"),
    ],
)
def test_a_spec_takes_what_fits(how: dict[str, Any], reason: str):
    assert reason in (BackwardSpec(**how).why_illegal() or "")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"order": ORDER[1:]}, "once"),
        ({"order": (*ORDER, "add")}, "once"),
        ({"order": ("P", *(x for x in ORDER if x != "P"))}, "want S before P"),
        ({"order": (*(x for x in ORDER if x != "dK"), "dK")}, "dK before write"),
        ({"order": (*(x for x in ORDER if x != "delta"), "delta")}, "delta before dS"),
        ({"has_softcap": True}, "want dS before dV"),
    ],
)
def test_a_step_uses_nothing_before_it_is_made(how: dict[str, Any], reason: str):
    assert reason in (BackwardSpec(**how).why_illegal() or "")
    assert BackwardSpec().why_illegal() is None


def test_two_dS_of_each_cta_are_kept_where_they_fit():
    dims = {64: 4, 128: 2, 192: 2, 256: 1}
    for dim, slots in dims.items():
        spec = catalog.tiled_backward(BackwardSpec(head_dim=dim, head_dim_v=dim))
        assert spec.ds_slots == slots and spec.cluster == (2 if dim > 128 else 1)


def test_every_kernel_of_the_catalog_is_legal():
    of_family = [x.spec for x in catalog.kernels("sm_90a") if x.family == catalog.FA3_BACKWARD]
    assert of_family and {spec.why_illegal() for spec in of_family} == {None}


def test_a_tile_has_the_words_that_the_scheduler_writes():
    pytest.importorskip("cutlass", reason="operands are the DSL's")
    from tilewright.kernels.sm90.fa3.operands import TILE_WORDS
    from tilewright.kernels.sm90.fa3_backward.operands import Tile

    assert len(fields(Tile)) == TILE_WORDS


def test_a_multiply_is_waited_for_with_those_before_it_and_once(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("cutlass", reason="a step is made of the DSL's")
    from tilewright.kernels.sm90.fa3_backward import step

    left_under_way: list[int] = []
    monkeypatch.setattr(step.matmul, "wait", left_under_way.append)
    multiplies = step.Multiplies()
    for name in ("S", "dK", "dP", "dV"):
        multiplies.issued(name)
    for name in ("dK", "S", "dV"):
        multiplies.wait_for(name)
    assert left_under_way == [2, 0] and not multiplies.names
