"""Deletes one synchronisation of a kernel at a time, and says whether anything noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tilewright.emulator import EmulationError, Emulator, Options, Result
from tilewright.emulator.parse import Immediate, Instruction, Kernel

_NOTHING = "griddepcontrol.wait"  # stands in for a deleted instruction
SYNCHRONISATIONS = (
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    "mbarrier.arrive",
    "mbarrier.init",
    "bar.",
    "barrier.",
    "fence.",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
    "cp.async.wait",
    "cp.async.commit",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "tcgen05.commit",
    "tcgen05.wait::st",
)
# Peeks that succeed hide the wait behind them, so waits are also tried with failing peeks.
OPTIONS = (
    Options(races=True),
    Options(races=True, schedule="late"),
    Options(races=True, failing_peeks=True),
)


@dataclass(frozen=True)
class Mutant:
    """The deletion of the `ordinal`-th instruction that starts with `opcode`, at a PTX line."""

    opcode: str
    ordinal: int
    line: int
    caught_by: str | None


def mutants(emulator: Emulator, run: Callable[[], tuple[Result, bool]]) -> Iterator[Mutant]:
    """Every executed synchronisation of the emulator's only kernel, deleted in turn.

    `run` calls the emulator and returns its result and whether the outputs are right.
    """
    ((name, kernel),) = emulator.kernels.items()
    executed = set()
    for options in OPTIONS:
        emulator.options = options
        executed |= run()[0].launches[0].executed
    seen: dict[str, int] = {}
    for i, instruction in enumerate(kernel.instructions):
        opcode = next((s for s in SYNCHRONISATIONS if instruction.opcode.startswith(s)), None)
        if opcode is None or instruction.place.line not in executed:
            continue
        seen[opcode] = seen.get(opcode, 0) + 1
        emulator.kernels[name] = _without(kernel, i)
        yield Mutant(opcode, seen[opcode], instruction.place.line, _caught(emulator, run))
    emulator.kernels[name] = kernel


def _caught(emulator: Emulator, run: Callable[[], tuple[Result, bool]]) -> str | None:
    for options in OPTIONS:
        emulator.options = options
        try:
            result, right = run()
        except EmulationError as error:
            return type(error).__name__
        if result.reports:
            return "race"
        if not right:
            return "wrong result"
    return None


def _without(kernel: Kernel, index: int) -> Kernel:
    """The kernel with one synchronisation deleted; a wait is replaced by success."""
    mutant = copy.copy(kernel)
    mutant.instructions = list(kernel.instructions)
    mutant.instructions[index] = _deleted(kernel.instructions[index])
    return mutant


def _deleted(instruction: Instruction) -> Instruction:
    if instruction.parts[1] in ("try_wait", "test_wait"):
        zero = Immediate(0)
        return replace(
            instruction, opcode="setp.eq.b32", operands=(instruction.operands[0], zero, zero)
        )
    return replace(instruction, opcode=_NOTHING, operands=())
