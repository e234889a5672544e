"""Register budgets, dependent launches, instructions without effect here (PTX ISA 9.7.12-9.7.20).

Branches, ret and exit end a basic block and are not bound: see program.py.
"""

from __future__ import annotations

import numpy as np

from tilewright.emulator.errors import EmulationError, ResourceMisuse, expect
from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.memory import SHARED_WINDOW
from tilewright.emulator.parse import Immediate, Instruction
from tilewright.emulator.registers import Lanes


@instruction("setmaxnreg<.inc|.dec>.sync.aligned.u32", together=32, effects=True)
def setmaxnreg(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.20.5 setmaxnreg: a warp's budget; the budgets of all warps must fit the CTA's pool.

    The warps of a warpgroup execute it with one value, perhaps at different places.
    """
    count = ins.operands[0]
    count = expect(count, Immediate)
    if not 24 <= count.bits <= 256 or count.bits % 8:
        raise ResourceMisuse(f"setmaxnreg {count.bits}: wanted 24 to 256 in steps of 8")
    budgets, grow = lanes.cta.register_budgets, ins.parts[1] == "inc"
    # An increase waits for registers of the CTA's own pool, which is what its launch allotted: at
    # the most this, so that more would never come.
    pool = lanes.cta.machine.chip.registers // lanes.cta.threads // 8 * 8 * lanes.cta.threads

    def effect() -> None:
        for warp in lanes.warps:
            old = budgets.get(warp)
            if old and grow != (count.bits >= old):
                raise ResourceMisuse(f"setmaxnreg.{ins.parts[1]} from {old} to {count.bits}")
            budgets[warp] = count.bits
        if 32 * sum(budgets.values()) > pool:
            raise ResourceMisuse(
                f"setmaxnreg: budgets {budgets} of the warps need "
                f"{32 * sum(budgets.values())} registers, the CTA has {pool}"
            )

    return effect


@instruction("griddepcontrol.launch_dependents")
@instruction("griddepcontrol.wait")
def griddepcontrol(ins: Instruction, lanes: Lanes) -> None:
    """9.7.13.14 griddepcontrol: launches run one after the other here, so all have completed."""


@instruction("nanosleep.u32")
def nanosleep(ins: Instruction, lanes: Lanes) -> None:
    """9.7.20.2 nanosleep: time does not pass here."""


@instruction("brkpt")
def brkpt(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.20.1 brkpt: a failed assertion of the kernel."""

    def effect() -> None:
        raise EmulationError("the kernel executed brkpt")

    return effect


@instruction("isspacep.shared")
def isspacep(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.9.19 isspacep: whether a generic address lies in the shared window."""
    a, d = lanes.read(ins.operands[1], np.uint64), lanes.write(ins.operands[0], np.bool_)
    return lambda: np.greater_equal(a, np.uint64(SHARED_WINDOW), d)
