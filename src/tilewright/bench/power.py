"""A GPU's SM clock and power while the benchmark runs, sampled in a thread of its own."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from tilewright.bench.timing import Load, Span

INTERVAL = 0.01  # seconds between two samples

Reading = tuple[float, float]  # MHz, watts


class Sampler:
    """Samples from `with` on; called with spans of time, gives the medians over them.

    The driver refreshes its reading of the power every 20 to 100 ms, so that batches shorter than
    this share their watts with whoever runs before them; the clock is that of the moment.
    """

    def __init__(self, readings: Callable[[], Iterator[Reading]]) -> None:
        self._readings = readings
        self._times: list[float] = []
        self._values: list[Reading] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(timeout=5)

    def __call__(self, spans: list[Span]) -> Load:
        found: list[Reading] = []
        for start, end in spans:
            first, last = bisect_left(self._times, start), bisect_right(self._times, end)
            found += self._values[first:last]
        if not found:
            return Load()
        mhz, watts = (statistics.median(values) for values in zip(*found, strict=True))
        return Load(mhz, watts)

    def _sample(self) -> None:
        for value in self._readings():
            self._values.append(value)  # before its time: a reader looks the times up first
            self._times.append(time.perf_counter())
            if self._is_over.wait(INTERVAL):
                return


def sampler(device: torch.device) -> Sampler:
    """Of a CUDA device, through NVML's Python package or, without it, through nvidia-smi."""
    # CUDA may number its devices otherwise than the driver does; the UUID is the same.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".replace("GPU-GPU-", "GPU-")
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return Sampler(lambda: _nvidia_smi(uuid))
    return Sampler(lambda: _nvml(pynvml, uuid))


def _nvml(nvml: Any, uuid: str) -> Iterator[Reading]:
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    while True:
        mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        # nvmlDeviceGetPowerUsage would be the average of a second.
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(field.nvmlReturn)
        yield float(mhz), field.value.uiVal / 1e3


def _nvidia_smi(uuid: str) -> Iterator[Reading]:
    query = "--query-gpu=clocks.sm,power.draw.instant"
    command = ["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits", "-lms", "20"]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in tool.stdout or ():
            mhz, watts = map(float, line.split(","))
            yield mhz, watts
    finally:
        tool.terminate()
        tool.wait()
