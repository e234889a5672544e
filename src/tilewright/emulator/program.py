"""Basic blocks of a kernel: where straight-line execution starts, ends, and may block."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewright.emulator.errors import Unsupported
from tilewright.emulator.isa import Entry, lookup
from tilewright.emulator.parse import Instruction, Kernel, Pair, Register

EXIT = 1 << 60  # the program counter of a thread that has ended


@dataclass
class Block:
    """Instructions without a branch among them.

    Program counters are even for instruction index i (2i) and odd (2i + 1) for the guarded
    instructions that follow a test block. With `predicate`, lanes where it differs from `negated`
    go to `taken`; the others to `next`.
    """

    pc: int
    instructions: list[Instruction] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    next: int = EXIT
    taken: int = EXIT
    predicate: Register | None = None
    negated: bool = False
    branch: Instruction | None = None
    together: int = 0
    blocking: bool = False
    polls: bool = False
    effects: bool = False

    def append(self, instruction: Instruction, entry: Entry) -> None:
        self.instructions.append(instruction)
        self.entries.append(entry)
        self.together = max(self.together, entry.together)
        self.blocking |= entry.blocking
        self.polls |= entry.polls
        self.effects |= entry.effects


def blocks_of(kernel: Kernel) -> dict[int, Block]:
    """The blocks by program counter. Raises Unsupported for an instruction nobody registered."""
    code = kernel.instructions
    leaders = _leaders(code)
    blocks: dict[int, Block] = {}
    i = 0
    while i < len(code):
        block = Block(2 * i)
        guarded = code[i].guard is not None and not _is_branch(code[i])
        if guarded:
            end = _guarded_run(code, i, leaders)
            block.predicate, block.negated = code[i].guard, code[i].guard_negated
            block.branch, block.taken, block.next = code[i], 2 * i + 1, 2 * end
            blocks[block.pc] = block
            block = Block(2 * i + 1)
        end = _fill(block, code, i, leaders)
        blocks[block.pc] = block
        i = end
    return blocks


def _fill(block: Block, code: list[Instruction], i: int, leaders: set[int]) -> int:
    """Appends the instructions from `i` on; returns where the next block starts."""
    first, guard = i, (code[i].guard, code[i].guard_negated)
    while i < len(code) and (i == first or i not in leaders):
        instruction = code[i]
        same_guard = (instruction.guard, instruction.guard_negated) == guard
        if guard[0] and not same_guard:
            break  # before a jump too: threads that skip this block take it
        if _is_branch(instruction):
            return _end_in_branch(block, instruction, i)
        if not same_guard:
            break
        entry = _lookup(instruction)
        # A block that must run converged, or that may block, starts with that instruction: what
        # stands before it is visible to threads that it may have to wait for.
        starts_own = entry.blocking or entry.starts or entry.together > block.together
        if block.instructions and starts_own:
            break
        block.append(instruction, entry)
        i += 1
        if entry.blocking or (guard[0] and _writes(instruction, guard[0])):
            break
    block.next = 2 * i if i < len(code) else EXIT
    return i


def _end_in_branch(block: Block, instruction: Instruction, i: int) -> int:
    block.branch = instruction
    target = 2 * instruction.target if instruction.parts[0] == "bra" else EXIT
    if instruction.guard is None:
        block.next = target
    else:
        block.predicate, block.negated = instruction.guard, instruction.guard_negated
        block.taken, block.next = target, 2 * (i + 1)
    return i + 1


def _leaders(code: list[Instruction]) -> set[int]:
    leaders = {0}
    for i, instruction in enumerate(code):
        if _is_branch(instruction):
            leaders |= {i + 1, instruction.target} if instruction.target >= 0 else {i + 1}
    return leaders


def _guarded_run(code: list[Instruction], i: int, leaders: set[int]) -> int:
    """The end of the instructions that one guard test covers."""
    scratch = Block(0)
    return _fill(scratch, code, i, leaders)


def _is_branch(instruction: Instruction) -> bool:
    return instruction.parts[0] in ("bra", "ret", "exit", "trap")


def _writes(instruction: Instruction, register: Register) -> bool:
    first = instruction.operands[0] if instruction.operands else None
    return register in ((first.first, first.second) if isinstance(first, Pair) else (first,))


def _lookup(instruction: Instruction) -> Entry:
    try:
        return lookup(instruction.opcode)
    except Unsupported as error:
        raise error.at(instruction.place) from None
