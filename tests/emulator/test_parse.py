"""Text that is not the PTX of a kernel is refused, with the line that showed it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.ptx import Program
from tilewright.emulator.errors import InvalidPtx, Unsupported
from tilewright.emulator.parse import parse


@pytest.mark.parametrize(
    "text",
    ["mov.u32 %r0, 1;", "done:", "}", ".reg .b32 %r<4>;", ".local .b8 spill[4];"],
)
def test_what_belongs_into_a_kernel_is_refused_outside(text: str) -> None:
    with pytest.raises(InvalidPtx, match=r"PTX line 3.*outside of a kernel"):
        parse(f".version 9.0\n.target sm_90a\n{text}\n")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("bra nowhere;", "label nowhere is not defined"),
        ("@%q9 mov.u32 %r0, 1;", "predicate %q9 is not declared"),
        ("ld.shared.b32 %r0, [];", r"cannot parse the address \[\]"),
        (".reg .b99 %x<2>;", "cannot parse"),
    ],
)
def test_what_cannot_be_resolved_is_named(body: str, wanted: str) -> None:
    with pytest.raises(InvalidPtx, match=wanted):
        Program(body)


def test_an_operand_of_another_kind_is_named_with_its_place() -> None:
    program = Program("ld.global.b32 %r1, %d0;", np.zeros(32, np.uint32))
    with pytest.raises(Unsupported, match=r"want one of kind Address[\s\S]*PTX line \d+"):
        program.run()
