"""How far each kernel is from the tensor cores' floor, and how busy the chip's units are meanwhile.

    python tools/counters.py --pass forward
    python tools/counters.py --pass backward --seqlen 4096

One launch of each dense bfloat16 kernel at 16k tokens and hidden size 2048, under Nsight Compute
(`ncu`, found on PATH) with the clocks left free: cycles do not depend on them. The floor is FLOP /
(SMs * 4096), over the pairs that the mask lets see each other. Needs a GPU that FA-3 runs on, and
wants TILEWRIGHT_BUNDLE: what a bundle has not is compiled first, under the profiler.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import tilewright
from tilewright.masks import Mask

TOKENS, HIDDEN = 16384, 2048
SMS, FLOP_A_CYCLE = 132, 4096  # of an H200; a cycle of an SM's tensor cores, in bfloat16
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
MASKS = {"full": Mask.full(), "causal": Mask.causal(), "window": Mask(1023, 0)}
# How the names of a pass's kernels begin, but for those around the backward's main one.
KERNELS = {"forward": "fa3_forward_bf16", "backward": "fa3_backward_bf16"}
CYCLES = "gpc__cycles_elapsed.max"
# A unit's name, and the metric of the share of time that it is busy, in percent.
UNITS = {
    "issue slots": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "special functions": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared memory, L1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}


@dataclass(frozen=True)
class Launch:
    dims: tuple[int, int]  # of q and k, and of v
    mask: str
    seqlen: int
    direction: str

    @property
    def heads(self) -> int:
        return HIDDEN // self.dims[0]

    @property
    def flop(self) -> int:
        dim, dim_v = self.dims
        multiplies = dim + dim_v if self.direction == "forward" else 3 * dim + 2 * dim_v
        mask = MASKS[self.mask]
        pairs = sum(
            row + 1 - max(0, row - mask.left if mask.left is not None else 0)
            if mask.right == 0
            else self.seqlen
            for row in range(self.seqlen)
        )
        return 2 * multiplies * pairs * self.heads * (TOKENS // self.seqlen)

    @property
    def floor(self) -> int:
        return self.flop // (SMS * FLOP_A_CYCLE)

    def __str__(self) -> str:
        dim, dim_v = self.dims
        return f"d{dim}{'' if dim == dim_v else f'/{dim_v}'} {self.mask}"

    def run(self) -> None:
        """The kernel once, between the profiler's start and stop."""
        batch, (dim, dim_v), mask = TOKENS // self.seqlen, self.dims, MASKS[self.mask]
        q, k, v = (
            torch.randn(batch, self.seqlen, self.heads, d, device="cuda", dtype=torch.bfloat16)
            for d in (dim, dim, dim_v)
        )
        is_forward = self.direction == "forward"
        for x in (q, k, v):
            x.requires_grad_(not is_forward)
        for is_counted in (False, True):
            out = None if is_forward else tilewright.attention(q, k, v, window=_window(mask))
            if is_counted:
                torch.cuda.profiler.start()
            if out is None:
                tilewright.attention(q, k, v, window=_window(mask))
            else:
                torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def _window(mask: Mask) -> tuple[int | None, int | None]:
    return mask.left, mask.right


def launches(direction: str, seqlen: int) -> Iterator[Launch]:
    for dims in DIMS:
        for mask in MASKS:
            yield Launch(dims, mask, seqlen, direction)


def profile(direction: str, seqlen: int) -> list[dict[str, str]]:
    """A row of metrics for each launch, as ncu names them."""
    metrics = ",".join([CYCLES, *UNITS.values()])
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", metrics, "--kernel-name", f"regex:{KERNELS[direction]}"]
    command += ["--page", "raw", "--csv"]
    command += [sys.executable, __file__, "--pass", direction, "--seqlen", str(seqlen), "--launch"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    begin = printed.index('"ID"')
    _, *rows = csv.DictReader(io.StringIO(printed[begin:]))  # the first holds the units
    return rows


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description="Cycles and busy units of every kernel.")
    parser.add_argument("--pass", dest="direction", choices=("forward", "backward"), required=True)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    planned = list(launches(options.direction, options.seqlen))
    if options.launch:
        for launch in planned:
            launch.run()
        return
    print("| | cycles | of the floor |", " | ".join(f"{unit}" for unit in UNITS), "|")
    print("|---|---:|---:|" + "---:|" * len(UNITS))
    for launch, row in zip(planned, profile(options.direction, options.seqlen), strict=True):
        cycles = _number(row[CYCLES])
        shares = " | ".join(f"{_number(row[name]):.0f} %" for name in UNITS.values())
        print(f"| {launch} | {cycles:,.0f} | {launch.floor / cycles:.2f} | {shares} |")


if __name__ == "__main__":
    main()
