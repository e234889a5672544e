"""What each functional unit had to do, counted from executed instructions.

Units: `mma <shape> <types>` in FLOP; `fma`, `alu`, `special`, `convert`, `branch` in operations a
lane; `shared load`, `shared store`, `global load`, `tma load` and the like in bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .machine import Cluster


@dataclass
class Counters:
    """Counts of one kernel launch: in all, by role (warps that ran the same blocks), by branch.

    `branches` maps the place of a conditional branch to warps that took it and that did not.
    """

    kernel: str
    ctas: int = 0
    total: Counter[str] = field(default_factory=Counter)
    roles: dict[str, Counter[str]] = field(default_factory=dict)
    executed: set[int] = field(default_factory=set)  # PTX lines
    dynamic: dict[int, Counter[str]] = field(default_factory=dict)  # warp -> unit -> amount

    def add(self, warp: int, unit: str, amount: int) -> None:
        """Count work that only execution knows, such as the bytes of a box."""
        counter = self.dynamic.get(warp)
        if counter is None:
            counter = self.dynamic[warp] = Counter()
        counter[unit] += amount

    def to_json(self) -> str:
        return json.dumps({"kernel": self.kernel, "ctas": self.ctas, "total": self.total,
                           "roles": self.roles}, indent=1)  # fmt: skip

    def table(self) -> str:
        """A line a unit, a column a role."""
        names = ["total", *self.roles]
        columns: list[Any] = [self.total, *self.roles.values()]
        units = sorted(self.total)
        width = max((len(u) for u in units), default=4)
        rows = ["  ".join([" " * width, *(f"{n:>14}" for n in names)])]
        for unit in units:
            cells = (f"{c.get(unit, 0):>14,}" for c in columns)
            rows.append("  ".join([f"{unit:<{width}}", *cells]))
        return "\n".join(rows)


def collect(counters: Counters, clusters: list[Cluster]) -> Counters:
    """Sum the executions of every bound block into units, then warps into roles."""
    warps: dict[int, Counter[str]] = {w: Counter(c) for w, c in counters.dynamic.items()}
    visited: dict[int, set[int]] = {}
    for cta in (cta for cluster in clusters for cta in cluster.ctas):
        for pc, by_mask in cta.bounds.items():
            for bound in by_mask.values():
                _count_block(bound, pc, warps, visited)
                counters.executed.update(place.line for place in bound.places if bound.executions)
    roles: dict[frozenset[int], list[int]] = {}
    for warp in sorted(warps):
        roles.setdefault(frozenset(visited.get(warp, ())), []).append(warp)
    for members in roles.values():
        name = f"warps {members[0]}-{members[-1]}" if len(members) > 1 else f"warp {members[0]}"
        counters.roles[name] = sum((warps[w] for w in members), Counter())
    counters.total = sum(counters.roles.values(), Counter())
    return counters


def _count_block(bound: Any, pc: int, warps: dict[int, Counter[str]], visited: Any) -> None:
    work: Counter[str] = Counter()
    for instruction, entry in zip(bound.block.instructions, bound.block.entries, strict=True):
        if entry.unit:
            work[entry.unit] += entry.work(instruction)
        work["instructions"] += 1
    for warp in bound.lanes.warps:
        lanes = (bound.mask >> (32 * warp) & 0xFFFFFFFF).bit_count()
        visited.setdefault(warp, set()).add(pc)
        counter = warps.setdefault(warp, Counter())
        for unit, amount in work.items():
            counter[unit] += amount * bound.executions * (1 if unit == "instructions" else lanes)
