"""One CTA: its threads, where each stands, and which set of them runs next.

`ready` maps a program counter to the mask of threads that stand there. The lowest program counter
runs first, so that threads that diverged meet again at the join; a block with a .sync instruction
is held until every live thread of its warps has come.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.emulator.barriers import NamedBarriers
from tilewright.emulator.bound import Bound
from tilewright.emulator.program import EXIT, Block
from tilewright.emulator.registers import SPECIALS, RegisterFile

if TYPE_CHECKING:
    from tilewright.emulator.machine import Cluster

SHARED_BASE = 1024  # the first KiB of the shared window belongs to the system on sm_90 and later
PARAM_WINDOW = 1 << 60
RANK_SHIFT = 24


class CTA:
    """A context that runs one CTA after another; views bound to its registers stay valid."""

    def __init__(self, cluster: Cluster, rank: int):
        self.cluster = cluster
        self.machine = cluster.machine
        self.rank = rank
        launch, kernel = self.machine.launch, self.machine.kernel
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.registers = RegisterFile(kernel.registers, self.threads)
        self._scratch: RegisterFile | None = None
        self.shared_origin = (rank << RANK_SHIFT) + SHARED_BASE
        self.tensor_memory = self.machine.new_tensor_memory(self)
        # 32-bit registers that a warpgroup wrote since its last wgmma.fence: [warpgroup, register]
        self.touched: np.ndarray | None = None
        if self.machine.races and any(i.opcode.startswith("wgmma") for i in kernel.instructions):
            self.touched = np.zeros((-(-self.threads // 128), kernel.registers[32]), np.bool_)
        self.local = np.zeros((self.threads, max(kernel.local_bytes, 1)), np.uint8)
        self.dynamic: dict[int, Counter[str]] = {}  # warp -> unit -> amount
        self.register_budgets: dict[int, int] = {}  # warp -> registers a thread after setmaxnreg
        self.bounds: dict[int, dict[int, Bound]] = {pc: {} for pc in self.machine.blocks}
        self._whole: dict[int, set[int]] = {32: set(), 64: set(), 128: set()}

    def start(self, index: tuple[int, int, int]) -> None:
        """Become the CTA at grid position `index`, all threads at the first instruction."""
        self.index = index
        self.live = (1 << self.threads) - 1
        self.ready: dict[int, int] = {0: self.live}
        self.held: dict[int, int] = {}
        self.spinning: dict[int, int] = {}
        self.polled: dict[int, int] = {}
        self.timed_out = 0
        self.named_barriers = NamedBarriers(self)
        self.register_budgets.clear()
        self.registers.poison()
        self._set_specials()

    def scratch(self) -> RegisterFile:
        if self._scratch is None:
            self._scratch = RegisterFile(self.machine.kernel.registers, self.threads)
        return self._scratch

    def count(self, warp: int, unit: str, amount: int) -> None:
        """Count work that only execution knows, such as the bytes of a box."""
        self.dynamic.setdefault(warp, Counter())[unit] += amount

    def symbol_address(self, name: str) -> int:
        """The address of a parameter or shared variable; dynamic shared memory follows static."""
        kernel = self.machine.kernel
        if name in kernel.params:
            return PARAM_WINDOW + kernel.params[name].offset
        if name in kernel.local:
            return kernel.local[name].offset
        variable = kernel.shared[name]
        offset = variable.offset if variable.size else -(-kernel.static_shared // 1024) * 1024
        return self.shared_origin + offset

    def enter(self, pc: int, mask: int) -> None:
        """`mask` stands at `pc` and may run."""
        if pc == EXIT:
            self.live &= ~mask
            # A warp may be complete now because its missing threads have ended.
            for held_pc, held in self.held.items():
                self.ready[held_pc] = self.ready.get(held_pc, 0) | held
            self.held.clear()
            self.named_barriers.check()
            return
        self.ready[pc] = self.ready.get(pc, 0) | self.held.pop(pc, 0) | mask

    def run(self) -> bool:
        """Run until no thread is ready; false if nothing ran."""
        machine = self.machine
        if self.spinning and machine.epoch != self.spin_epoch:
            for pc, mask in self.spinning.items():
                self.enter(pc, mask)
            self.spinning = {}
        progress = False
        while self.ready:
            pc = min(self.ready)
            progress |= self._execute(machine.blocks[pc], self.ready.pop(pc))
            if machine.queue.random:
                machine.queue.tick()
        return progress

    def _execute(self, block: Block, mask: int) -> bool:
        machine = self.machine
        if block.together and (mask := self._whole_part(block, mask)) == 0:
            return False
        if block.polls and self.polled.get(block.pc) == machine.epoch:
            # Nothing changed since this loop last looked: let others run first.
            self.spinning[block.pc] = self.spinning.get(block.pc, 0) | mask
            self.spin_epoch = machine.epoch
            return False
        self._run_block(block, mask)
        return True

    def _run_block(self, block: Block, mask: int) -> None:
        bound = self.bounds[block.pc].get(mask)
        if bound is None:
            bound = self.bounds[block.pc][mask] = Bound(self, block, mask)
        passed = bound.run()
        if block.effects:
            self.machine.epoch += 1
        if block.polls:
            self.polled[block.pc] = self.machine.epoch
        taken = bound.taken() & passed if passed and block.predicate is not None else 0
        if taken:
            self.enter(block.taken, taken)
        if passed & ~taken:
            self.enter(block.next, passed & ~taken)

    def _whole_part(self, block: Block, mask: int) -> int:
        """The threads of `mask` whose warps (or warpgroups) are complete, as one slice.

        The others are held, or stay ready where they only make the set no slice.
        """
        together = block.together
        if mask in self._whole[together]:
            return mask
        whole = 0
        for start in range(0, self.threads, together):
            group = ((1 << together) - 1) << start
            if mask & group and (mask & group) == (self.live & group):
                whole |= mask & group
        if mask & ~whole:
            self.held[block.pc] = self.held.get(block.pc, 0) | (mask & ~whole)
        if not whole:
            return 0
        lowest = whole & -whole
        # Adding the lowest bit carries through the first run of ones and leaves the rest.
        first = whole & ~(whole + lowest)
        if whole & ~first:
            self.ready[block.pc] = whole & ~first
        if first == mask and self.live == (1 << self.threads) - 1:
            self._whole[together].add(mask)
        return first

    def release_held(self) -> bool:
        """Let incomplete warps run: nothing else can, so they will never be joined."""
        if not self.held:
            return False
        pc, mask = self.held.popitem()
        self.machine.epoch += 1
        self._run_block(self.machine.blocks[pc], mask)
        return True

    def _set_specials(self) -> None:
        launch, cluster = self.machine.launch, self.machine.launch.cluster
        thread = np.arange(self.threads)
        bx, by, _ = launch.block
        values: dict[str, Any] = {
            "tid.x": thread % bx,
            "tid.y": thread // bx % by,
            "tid.z": thread // (bx * by),
            "laneid": thread % 32,
            "warpid": thread // 32,
            "nwarpid": -(-self.threads // 32),
            "cluster_ctarank": self.rank,
            "smid": 0,
            "cluster_nctarank": cluster[0] * cluster[1] * cluster[2],
            "dynamic_smem_size": launch.shared_bytes,
            "total_smem_size": launch.shared_bytes + self.machine.kernel.static_shared,
            "lanemask_eq": 1 << thread % 32,
            "lanemask_lt": (1 << thread % 32) - 1,
            "lanemask_le": (2 << thread % 32) - 1,
            "lanemask_ge": ~((1 << thread % 32) - 1) & 0xFFFFFFFF,
            "lanemask_gt": ~((2 << thread % 32) - 1) & 0xFFFFFFFF,
        }
        for i, axis in enumerate("xyz"):
            values |= {
                f"ntid.{axis}": launch.block[i],
                f"ctaid.{axis}": self.index[i],
                f"nctaid.{axis}": launch.grid[i],
                f"cluster_nctaid.{axis}": cluster[i],
                f"clusterid.{axis}": self.index[i] // cluster[i],
                f"nclusterid.{axis}": launch.grid[i] // cluster[i],
                f"cluster_ctaid.{axis}": self.index[i] % cluster[i],
            }
        for row, name in enumerate(SPECIALS):
            self.registers.special[row] = values.get(name, 0)
