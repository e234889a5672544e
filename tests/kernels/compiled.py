"""Kernels that tests compile, each once for as long as the kernels' sources stay."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tilewright.emulator import Emulator
from tilewright.jit import bundle
from tilewright.jit.cache import Entry, Folder
from tilewright.kernels.catalog import Kernel

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Folder(ROOT / ".cache" / "kernels", parts=bundle.ALL_PARTS)


def compile_all(kernels: Iterable[Kernel]) -> dict[Kernel, Entry | Exception]:
    """In as many processes as there are cores: each kernel's entry, or what compiling it raised."""
    return dict(bundle.build(list(kernels), FOLDER.path, os.cpu_count() or 1, FOLDER.parts))


@lru_cache(maxsize=1)  # to read PTX takes as long as to run it on a small problem
def emulator(kernel: Kernel) -> Emulator:
    """A kernel, compiled here if it has to be, as something to call with tensors on the CPU."""
    files = bundle.make(kernel, FOLDER).files
    return Emulator(files[".ptx"].read_text(), files[".o"], kernel.arch)
