"""What has no forward kernel is said before it is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from tilewright.kernels import catalog
from tilewright.kernels.sm90.fa3.spec import ForwardSpec


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"packed": True}, "dense tiles"),
        ({"cluster": 2}, "its own CTA"),
        ({"takes_late": True}, "one tile is taken ahead"),
        ({"tiles_ahead": 2}, "one tile is taken ahead"),
        ({"carries_over": True, "q_in_registers": True}, "all blocks"),
        ({"skips_hidden": True, "ping_pong": False}, "all blocks"),
        ({"starts_two": True}, "all blocks"),
        ({"overlap": False}, "all blocks"),
        ({"v_stages": 1}, "while the one before is multiplied"),
    ],
)
def test_without_specialised_warps_some_mechanisms_are_not_there(how: dict[str, Any], reason: str):
    assert ForwardSpec(**how).why_illegal() is None
    why = ForwardSpec(**how, specialised=False).why_illegal() or ""
    assert why.startswith("specialised=False") and reason in why
    assert ForwardSpec(specialised=False).why_illegal() is None


def test_every_kernel_of_the_catalog_is_legal_and_specialised():
    of_family = [x.spec for x in catalog.kernels("sm_90a") if x.family == catalog.FA3_FORWARD]
    assert of_family and {spec.why_illegal() for spec in of_family} == {None}
    assert all(spec.specialised for spec in of_family)
