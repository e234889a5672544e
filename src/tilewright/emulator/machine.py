"""Runs one launch: clusters of CTAs over the grid, until all threads have ended or none can run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.emulator.asynchronous import Groups, Queue
from tilewright.emulator.barriers import ClusterBarrier, MBarriers, describe_threads
from tilewright.emulator.chip import Chip
from tilewright.emulator.counters import Counters, Tally
from tilewright.emulator.cta import CTA, SHARED_BASE
from tilewright.emulator.errors import Deadlock, ResourceMisuse
from tilewright.emulator.host import DeviceTensor, Launch
from tilewright.emulator.memory import Global, Shared
from tilewright.emulator.parse import Instruction, Kernel
from tilewright.emulator.program import blocks_of
from tilewright.emulator.races import Races
from tilewright.emulator.tensor_memory import TensorMemory


@dataclass(frozen=True)
class Options:
    """How to run. `schedule`: when asynchronous work completes (eager, late, random by `seed`).

    `failing_peeks`: the first look at every mbarrier phase fails, so that slow paths run.
    `races`: detect races by happens-before. `initialised`: reads of unwritten memory are errors.
    `resident`: how many clusters may be started before the first has ended. `workers`: processes
    that share the clusters of a launch whose clusters cannot see each other.
    """

    schedule: str = "eager"
    seed: int = 0
    failing_peeks: bool = False
    races: bool = False
    initialised: bool = True
    resident: int = 64
    workers: int = 1


class Cluster:
    """CTAs that share a shared-memory address space; a context reused along the grid."""

    def __init__(self, machine: Machine, ranks: int):
        self.machine = machine
        size = machine.kernel.static_shared
        size = (-(-size // 1024) * 1024 if size else 0) + machine.launch.shared_bytes
        self.shared = Shared(ranks, SHARED_BASE, size)
        self.ctas = [CTA(self, rank) for rank in range(ranks)]

    def start(self, position: tuple[int, int, int]) -> None:
        """Start the cluster whose first CTA stands at grid `position`."""
        self.shared.reset()
        self.mbarriers = MBarriers()
        self.groups: dict[Any, Groups] = {}
        cx, cy, _ = self.machine.launch.cluster
        for rank, cta in enumerate(self.ctas):
            offset = (rank % cx, rank // cx % cy, rank // (cx * cy))
            cta.start((position[0] + offset[0], position[1] + offset[1], position[2] + offset[2]))
            if cta.tensor_memory:
                cta.tensor_memory.reset()
        self.barrier = ClusterBarrier(self.ctas)

    def group(self, key: Any) -> Groups:
        """The commit groups of the issuer `key`."""
        if key not in self.groups:
            self.groups[key] = Groups(self.machine.queue)
        return self.groups[key]

    @property
    def alive(self) -> bool:
        return any(cta.live for cta in self.ctas)

    def finish(self) -> None:
        """Checks at the end of the CTAs' lives."""
        for cta in self.ctas:
            if cta.tensor_memory and cta.tensor_memory.allocations:
                raise ResourceMisuse(
                    f"CTA {cta.index} ends with tensor memory allocated: "
                    f"{cta.tensor_memory.allocations}"
                )
        if races := self.machine.races:
            for (kind, rank, warp), group in self.groups.items():
                if kind == "bulk" and (group.open or group.committed):
                    races.report_unwaited(self.ctas[rank], warp, group)
            races.check_unobserved(self)


class Machine:
    """One launch of one kernel on the tensors it was called with."""

    def __init__(
        self,
        kernel: Kernel,
        launch: Launch,
        tensors: list[DeviceTensor],
        chip: Chip,
        options: Options,
    ):
        _check_launch(kernel, launch, chip)
        self.kernel, self.launch, self.chip, self.options = kernel, launch, chip, options
        self.blocks = blocks_of(kernel)
        self._pcs = {id(b.instructions[0]): b for b in self.blocks.values() if b.blocking}
        self.memory = Global(tensors)
        self.queue = Queue(options.schedule, options.seed)
        self.races = Races(self) if options.races else None
        self.tally = Tally(kernel.name, self.blocks)
        self.epoch = 0  # grows whenever something happened that a polling thread could see
        self.tensor_maps: dict[bytes, Any] = {}
        self.pending: deque[tuple[int, int, int]] = deque()  # clusters that have not started
        self._timeout_epoch = -1
        self._free: list[Cluster] = []
        self.peeked: dict[Any, int] = {}
        self.on_cluster_end: Callable[[], None] = lambda: None

    def run(self) -> Counters:
        """Run all clusters to the end; raises what the kernel did wrong."""
        self.execute(self.positions())
        return self.tally.finish()

    def positions(self) -> list[tuple[int, int, int]]:
        """Where in the grid the clusters start, in launch order."""
        (gx, gy, gz), (cx, cy, cz) = self.launch.grid, self.launch.cluster
        return [
            (x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx)
        ]

    def execute(self, positions: list[tuple[int, int, int]]) -> None:
        """Run the clusters at these positions to their end."""
        self.pending = deque(positions)
        active: list[Cluster] = []
        with np.errstate(all="ignore"):
            while self.pending or active:
                if not active:
                    active.append(self._start(self.pending.popleft()))
                progress = [cta.run() for cluster in active for cta in cluster.ctas if cta.live]
                for done in [c for c in active if not c.alive]:
                    self._end(done)
                    active.remove(done)
                if any(progress) or not active or self._unstick(active):
                    continue
                if not self.pending or len(active) >= self.options.resident:
                    raise Deadlock(self._deadlock_report(active))
                active.append(self._start(self.pending.popleft()))

    def cancel_next(self) -> tuple[int, int, int] | None:
        """Take the next cluster that has not started off the grid; its position."""
        return self.pending.popleft() if self.pending else None

    def pc_of(self, instruction: Instruction) -> int:
        """The program counter of the block that starts with a blocking instruction."""
        return self._pcs[id(instruction)].pc

    def next_pc(self, instruction: Instruction) -> int:
        """Where threads continue after a blocking instruction."""
        return self._pcs[id(instruction)].next

    def new_tensor_memory(self, cta: CTA) -> TensorMemory | None:
        return TensorMemory() if self.chip.tensor_memory_columns else None

    def _start(self, position: tuple[int, int, int]) -> Cluster:
        if self._free:
            cluster = self._free.pop()
        else:
            x, y, z = self.launch.cluster
            cluster = Cluster(self, x * y * z)
        cluster.start(position)
        if self.races:
            self.races.start(cluster)
        return cluster

    def _end(self, cluster: Cluster) -> None:
        while self.queue.complete_one():
            pass
        cluster.finish()
        for cta in cluster.ctas:
            self.tally.end(cta)
        self._free.append(cluster)
        self.on_cluster_end()

    def _unstick(self, active: list[Cluster]) -> bool:
        """Nothing ran: complete asynchronous work, let incomplete warps go on, or time waits out.

        A time-out is only worth it when something happened since the last one.
        """
        if self.queue.complete_one():
            self.epoch += 1
            return True
        ctas = [cta for cluster in active for cta in cluster.ctas]
        if any([cta.release_held() for cta in ctas]):
            return True
        if self._timeout_epoch == self.epoch:
            return False
        self._timeout_epoch = self.epoch
        woken = False
        for cluster in active:
            for barrier in cluster.mbarriers.table.values():
                waiters, barrier.waiters = barrier.waiters, []
                for waiter in waiters:
                    waiter.cta.timed_out |= waiter.mask
                    waiter.wake()
                    woken = True
        return woken

    def _deadlock_report(self, active: list[Cluster]) -> str:
        lines = ["no thread can run and not all have ended"]
        for cluster in active:
            lines += [
                f"{b}: {self._who(w.cta, w.mask, w.pc)}"
                for b in cluster.mbarriers.table.values()
                for w in b.waiters
            ]
            lines += [
                f"cluster barrier ({cluster.barrier.arrived} arrived): "
                f"{self._who(w.cta, w.mask, w.pc)}"
                for w in cluster.barrier.waiters
            ]
            for cta in cluster.ctas:
                lines += self._waiting_in(cta)
        return "\n  ".join(lines)

    def _waiting_in(self, cta: CTA) -> list[str]:
        """What the threads of a CTA wait for beside mbarriers and the cluster."""
        lines = []
        for number, named in cta.named_barriers.table.items():
            name = f"named barrier {number} ({named.arrived} of "
            name += f"{named.expected or cta.live.bit_count()} threads arrived)"
            lines += [f"{name}: {self._who(cta, w.mask, w.pc)}" for w in named.waiters]
        lines += [
            f"polls without change: {self._who(cta, m, pc)}" for pc, m in cta.spinning.items()
        ]
        lines += [
            f"waits for the rest of its warp: {self._who(cta, m, pc)}" for pc, m in cta.held.items()
        ]
        return lines

    def _who(self, cta: CTA, mask: int, pc: int) -> str:
        block = self.blocks.get(pc)
        place = block.instructions[0].place if block and block.instructions else "the end"
        return f"CTA {cta.index} {describe_threads(mask)}, at {place}"


def _check_launch(kernel: Kernel, launch: Launch, chip: Chip) -> None:
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    shared = launch.shared_bytes + kernel.static_shared
    if kernel.target != chip.arch:
        raise ValueError(f"kernel {kernel.name} is PTX for {kernel.target}, not for {chip.arch}")
    if shared > chip.shared_bytes:
        raise ValueError(
            f"kernel {kernel.name} wants {shared} bytes of shared memory, "
            f"{chip.arch} has {chip.shared_bytes}"
        )
    if threads > chip.max_threads or (kernel.max_threads and threads > kernel.max_threads):
        raise ValueError(
            f"kernel {kernel.name} is launched with {threads} threads, at most "
            f"{min(chip.max_threads, kernel.max_threads or 1024)} are possible"
        )
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise ValueError(f"grid {launch.grid} is no multiple of the cluster {launch.cluster}")
