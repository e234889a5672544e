"""What each functional unit had to do, counted from executed instructions.

Units: `MMA <shape> <type> FLOP`; `fma`, `alu`, `special` and `convert` in operations;
`shared load`, `global store`, `TMA load bytes` and the like in bytes; `mbarrier wait` in lanes;
`instructions` in warps. Straight-line work is counted by block: what a block contains times how
often which lanes ran it, so that counting costs nothing while the kernel runs.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tilewright.emulator.program import Block

if TYPE_CHECKING:
    from tilewright.emulator.bound import Bound
    from tilewright.emulator.cta import CTA


@dataclass
class Counters:
    """Counts of one kernel launch: in all, by role, by CTA, by branch.

    A role is a set of warps that executed the same blocks. `branches` maps the place of a
    conditional branch to how many warps took it and how many did not (a warp that splits counts
    twice): a softmax that may skip its rescale shows here how often it did. `executed` holds the
    PTX lines that ran.
    """

    kernel: str
    total: Counter[str] = field(default_factory=Counter)
    roles: dict[str, Counter[str]] = field(default_factory=dict)
    ctas: dict[tuple[int, int, int], Counter[str]] = field(default_factory=dict)
    branches: dict[str, tuple[int, int]] = field(default_factory=dict)
    executed: set[int] = field(default_factory=set)

    def to_json(self) -> str:
        """Everything but the executed lines."""
        return json.dumps(
            {
                "kernel": self.kernel,
                "total": self.total,
                "roles": self.roles,
                "ctas": {",".join(map(str, k)): v for k, v in self.ctas.items()},
                "branches": self.branches,
            },
            indent=1,
        )

    def table(self) -> str:
        """A line a unit, a column a role."""
        columns = {"total": self.total, **self.roles}
        width = max((len(u) for u in self.total), default=4)
        rows = ["  ".join([" " * width, *(f"{name:>14}" for name in columns)])]
        for unit in sorted(self.total):
            cells = (f"{column.get(unit, 0):>14,}" for column in columns.values())
            rows.append("  ".join([f"{unit:<{width}}", *cells]))
        return "\n".join(rows)


class Tally:
    """Gathers the counts of CTAs as they end."""

    def __init__(self, kernel: str, blocks: dict[int, Block]):
        self.counters = Counters(kernel)
        self.units = sorted({e.unit for b in blocks.values() for e in b.entries if e.unit})
        self.units.append("instructions")
        self.work = {pc: self._work(block) for pc, block in blocks.items()}
        self.warps: dict[int, Counter[str]] = {}
        self.visited: dict[int, set[int]] = {}

    def _work(self, block: Block) -> np.ndarray:
        """Amounts a lane, [unit]; `instructions` a warp."""
        work = np.zeros(len(self.units), np.int64)
        for instruction, entry in zip(block.instructions, block.entries, strict=True):
            if entry.unit:
                work[self.units.index(entry.unit)] += entry.work(instruction)
        work[-1] = len(block.instructions) + (block.branch is not None)
        return work

    def end(self, cta: CTA) -> None:
        """Take over the counts of a CTA that has ended, and clear them in its context."""
        counts = np.zeros((-(-cta.threads // 32), len(self.units)), np.int64)
        for pc, bounds in cta.bounds.items():
            for bound in bounds.values():
                if bound.executions:
                    self._add_block(pc, bound, counts)
        totals = Counter(dict(zip(self.units, counts.sum(0).tolist(), strict=True)))
        for warp, row in enumerate(counts):
            counter = Counter(dict(zip(self.units, row.tolist(), strict=True)))
            counter.update(cta.dynamic.get(warp, {}))
            self.warps.setdefault(warp, Counter()).update(counter)
            totals.update(cta.dynamic.get(warp, {}))
        self.counters.ctas[cta.index] = +totals
        cta.dynamic.clear()

    def _add_block(self, pc: int, bound: Bound, counts: np.ndarray) -> None:
        warps = bound.lanes.warps
        lanes = np.array([(bound.mask >> (32 * w) & 0xFFFFFFFF).bit_count() for w in warps])
        amounts = lanes[:, None] * self.work[pc]
        amounts[:, -1] = self.work[pc][-1]
        counts[warps] += bound.executions * amounts
        for warp in warps:
            self.visited.setdefault(warp, set()).add(pc)
        self.counters.executed.update(place.line for place in bound.places)
        branch = bound.block.branch
        if branch is not None and bound.block.predicate is not None:
            key = str(branch.place)
            taken, other = self.counters.branches.get(key, (0, 0))
            self.counters.branches[key] = (taken + bound.taken_warps, other + bound.other_warps)
        bound.executions = bound.taken_warps = bound.other_warps = 0

    def merge(self, other: Tally) -> None:
        """Add what another process counted."""
        for warp, counter in other.warps.items():
            self.warps.setdefault(warp, Counter()).update(counter)
            self.visited.setdefault(warp, set()).update(other.visited.get(warp, ()))
        self.counters.ctas |= other.counters.ctas
        self.counters.executed |= other.counters.executed
        for place, (taken, not_taken) in other.counters.branches.items():
            first, second = self.counters.branches.get(place, (0, 0))
            self.counters.branches[place] = (first + taken, second + not_taken)

    def finish(self) -> Counters:
        """The totals, with warps grouped into roles."""
        roles: dict[frozenset[int], list[int]] = {}
        for warp in sorted(self.warps):
            roles.setdefault(frozenset(self.visited.get(warp, ())), []).append(warp)
        for members in roles.values():
            name = f"warps {members[0]}-{members[-1]}" if len(members) > 1 else f"warp {members[0]}"
            self.counters.roles[name] = sum((self.warps[w] for w in members), Counter())
        self.counters.total = sum(self.counters.roles.values(), Counter())
        return self.counters
