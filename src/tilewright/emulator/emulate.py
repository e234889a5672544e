"""Emulate an exported kernel: its PTX, its host function, tensors in host memory."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.emulator.chip import chip_for
from tilewright.emulator.counters import Counters
from tilewright.emulator.host import DeviceTensor, Host, Launch, cache_dir
from tilewright.emulator.machine import Machine, Options
from tilewright.emulator.parallel import is_divisible
from tilewright.emulator.parallel import run as run_parallel
from tilewright.emulator.parse import Kernel, parse

_PARSER = Path(__file__).with_name("parse.py")


@dataclass
class Result:
    """What one call did: counters of each launch, and reports of what was wrong but not fatal."""

    launches: list[Counters] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)


Progress = Callable[[str, int, int], None]  # kernel, clusters that have ended, all of them


class Emulator:
    """A compiled CuTe DSL function that runs on the CPU.

    `ptx` is the text of the PTX module and `object_path` the object that `export_to_c` wrote.
    Calling it takes the arguments of the function, tensors in host memory (numpy or torch), and
    returns a Result. Raises InvalidPtx or ValueError for input that does not fit, and the
    EmulationError that names the fault where the kernel does something wrong. `progress` is told
    of each launch and, where one process runs it, of each cluster that has ended.
    """

    def __init__(
        self,
        ptx: str,
        object_path: str | Path,
        arch: str,
        options: Options | None = None,
        progress: Progress | None = None,
    ):
        self.chip = chip_for(arch)
        self.kernels = parsed(ptx)
        for kernel in self.kernels.values():
            if kernel.target != arch:
                raise ValueError(f"the PTX is for {kernel.target}, not for {arch}")
        self.options = options or Options()
        self.progress = progress or (lambda kernel, ended, clusters: None)
        self.host = Host(object_path, self.chip, self.kernels)

    def __call__(self, *arguments: Any) -> Result:
        launches, tensors = self.host.call(*arguments)
        result = Result()
        for launch in launches:
            counters, reports = self._run(launch, tensors)
            result.launches.append(counters)
            result.reports += reports
        return result

    def _run(self, launch: Launch, tensors: list[DeviceTensor]) -> tuple[Counters, list[str]]:
        """Counters and race reports of one launch."""
        kernel = self.kernels[launch.kernel]
        machine = Machine(kernel, launch, tensors, self.chip, self.options)
        clusters, ended = len(machine.positions()), itertools.count(1)
        self.progress(kernel.name, 0, clusters)
        if self.options.workers > 1 and is_divisible(kernel):
            return run_parallel(kernel, launch, tensors, self.chip, self.options)
        machine.on_cluster_end = lambda: self.progress(kernel.name, next(ended), clusters)
        return machine.run(), machine.races.reports if machine.races else []


def parsed(ptx: str) -> dict[str, Kernel]:
    """The kernels of a PTX module, from the cache on disk if it was parsed before."""
    digest = hashlib.sha256(ptx.encode() + _PARSER.read_bytes()).hexdigest()[:24]
    entry = cache_dir() / f"kernels-{digest}.pickle"
    try:
        return pickle.loads(entry.read_bytes())
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError):
        kernels = parse(ptx)
        scratch = entry.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(pickle.dumps(kernels))
        scratch.replace(entry)  # whole or not at all, also with another process at it
        return kernels
