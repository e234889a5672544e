"""Deletes one synchronisation of a kernel at a time: what the detectors must notice."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from tilewright.emulator.parse import Immediate, Instruction, Kernel

# Prefix of the opcode -> the instruction that stands in for the deleted one.
_NOTHING = "griddepcontrol.wait"
SYNCHRONISATIONS = ("mbarrier.try_wait", "mbarrier.test_wait", "mbarrier.arrive", "mbarrier.init",
                    "bar.", "barrier.", "fence.", "wgmma.fence", "wgmma.commit_group",
                    "wgmma.wait_group", "cp.async.wait", "cp.async.commit",
                    "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "tcgen05.commit",
                    "tcgen05.wait::st")  # fmt: skip


def synchronisations(kernel: Kernel) -> Iterator[int]:
    """The indices of the instructions that synchronise."""
    for i, instruction in enumerate(kernel.instructions):
        if instruction.opcode.startswith(SYNCHRONISATIONS):
            yield i


def without(kernel: Kernel, index: int) -> Kernel:
    """The kernel with one synchronisation deleted; a wait is replaced by success."""
    mutant = copy.copy(kernel)
    mutant.instructions = list(kernel.instructions)
    mutant.instructions[index] = _deleted(kernel.instructions[index])
    return mutant


def _deleted(instruction: Instruction) -> Instruction:
    if instruction.parts[1] in ("try_wait", "test_wait"):
        zero = Immediate(0)
        return replace(instruction, opcode="setp.eq.b32",
                       operands=(instruction.operands[0], zero, zero))  # fmt: skip
    return replace(instruction, opcode=_NOTHING, operands=())
