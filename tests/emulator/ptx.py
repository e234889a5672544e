"""Runs PTX written by hand: a body of instructions, one pointer parameter for each array."""

from __future__ import annotations

import struct

import numpy as np

from tilewright.emulator.chip import chip_for
from tilewright.emulator.counters import Counters
from tilewright.emulator.host import REGION_BITS, Launch, device_tensor
from tilewright.emulator.machine import Machine, Options
from tilewright.emulator.parse import parse

_TEMPLATE = """
.version 9.0
.target {arch}
.address_size 64
.visible .entry kernel({params})
{{
    .reg .pred %p<16>;
    .reg .b16 %h<16>;
    .reg .b32 %r<64>;
    .reg .b64 %d<16>;
    .shared .align 128 .b8 buffer[4096];
{loads}
{body}
    ret;
}}
"""


class Program:
    """`body` sees the arrays' addresses in %d0, %d1, ... and 4 KiB of shared memory `buffer`."""

    def __init__(
        self,
        body: str,
        *arrays: np.ndarray,
        arch: str = "sm_90a",
        threads: int = 32,
        cluster: int = 1,
        grid: int | None = None,
    ):
        names = [f"array{i}" for i in range(len(arrays))]
        loads = "\n".join(f"    ld.param.u64 %d{i}, [{n}];" for i, n in enumerate(names))
        params = ", ".join(f".param .u64 {n}" for n in names)
        text = _TEMPLATE.format(arch=arch, params=params, loads=loads, body=body)
        (self.kernel,) = parse(text).values()
        self.chip = chip_for(arch)
        self.tensors = [
            device_tensor(a, n, (i + 1) << REGION_BITS)
            for i, (a, n) in enumerate(zip(arrays, names, strict=True))
        ]
        packed = struct.pack(f"<{len(arrays)}Q", *(t.address for t in self.tensors))
        self.launch = Launch(
            "kernel", (grid or cluster, 1, 1), (threads, 1, 1), (cluster, 1, 1), 0, packed
        )

    def run(self, **options: object) -> tuple[Counters, list[str]]:
        """The counters and the race reports."""
        chosen = Options(**options)  # type: ignore[arg-type]
        machine = Machine(self.kernel, self.launch, self.tensors, self.chip, chosen)
        counters = machine.run()
        return counters, machine.races.reports if machine.races else []
