"""Runs the clusters of one launch on several cores, where they cannot depend on each other."""

from __future__ import annotations

import mmap
import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np

from tilewright.emulator.chip import Chip
from tilewright.emulator.counters import Counters
from tilewright.emulator.errors import EmulationError
from tilewright.emulator.host import DeviceTensor, Launch
from tilewright.emulator.machine import Machine, Options
from tilewright.emulator.parse import Kernel

# What lets one CTA see or change what another does.
_SHARES = ("atom", "red.", "cp.reduce", "ld.acquire", "ld.relaxed", "ld.volatile", "clusterlaunch")


def is_divisible(kernel: Kernel) -> bool:
    """Whether no cluster can see another: none of the instructions they would need is there."""
    return not any(i.opcode.startswith(_SHARES) for i in kernel.instructions)


def run(
    kernel: Kernel, launch: Launch, tensors: list[DeviceTensor], chip: Chip, options: Options
) -> tuple[Counters, list[str]]:
    """Counters and race reports, as of one Machine; the clusters are dealt out to processes.

    The processes write to shared copies of the tensors, which are copied back at the end.
    """
    copies = [replace(t, bytes=_shared_copy(t.bytes)) for t in tensors]
    machine = Machine(kernel, launch, copies, chip, options)
    positions = machine.positions()
    context = multiprocessing.get_context("fork")
    workers = []
    for i in range(min(options.workers, len(positions))):
        receiver, sender = context.Pipe(duplex=False)
        share = positions[i :: options.workers]
        process = context.Process(target=_work, args=(machine, share, sender), daemon=True)
        process.start()
        sender.close()
        workers.append((process, receiver))
    reports: dict[str, None] = {}
    for process, receiver in workers:
        try:
            answer = receiver.recv()
        except EOFError:
            raise EmulationError("a worker process ended without an answer") from None
        process.join()
        if isinstance(answer, Exception):
            raise answer
        tally, found = answer
        machine.tally.merge(tally)
        reports |= dict.fromkeys(found)
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.bytes[:] = copy.bytes
    return machine.tally.finish(), list(reports)


def _work(machine: Machine, share: list[tuple[int, int, int]], sender: Connection) -> None:
    try:
        machine.execute(share)
        reports = machine.races.reports if machine.races else []
        sender.send((machine.tally, reports))
    except Exception as error:  # the parent raises it
        sender.send(error)


def _shared_copy(data: np.ndarray) -> np.ndarray:
    if not len(data):
        return data
    memory = np.frombuffer(mmap.mmap(-1, len(data)), np.uint8)
    memory[:] = data
    return memory
