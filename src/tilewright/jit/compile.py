"""Kernel -> object code for an architecture, by CuTe DSL. Needs no GPU."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.jit.key import Kernel

_OPTIONS = (
    "--enable-tvm-ffi --keep-ptx --keep-cubin --gpu-arch {arch} --dump-dir {folder}"
    # ptxas tells what it spent only here; the remarks are where the DSL writes what it says.
    " --ptxas-options '-v' --remark-filter .* --remark-output {folder}/remarks.yaml"
)
_ARCH = "CUTE_DSL_ARCH"
_LOCK = threading.RLock()  # the DSL's state is the process's


@dataclass(frozen=True)
class Resources:
    """What a thread, and a CTA, of a kernel takes."""

    registers: int  # a thread's at launch; setmaxnreg moves them later
    spill_stores: int  # bytes that a thread's store instructions write, each counted once
    spill_loads: int
    stack: int  # bytes a thread
    smem: int  # bytes a CTA

    @property
    def spill_bytes(self) -> int:
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True)
class Compiled:
    object: bytes  # exports the TVM FFI function of the kernel's name, and nothing else
    ptx: bytes
    cubin: bytes
    resources: Resources
    seconds: float


def compile(kernel: Kernel) -> Compiled:
    """Trace and compile a kernel. Takes seconds.

    Raises ImportError without the DSL, ValueError for a name that C does not take, and RuntimeError
    if the compiler says nothing of the resources.
    """
    name = str(kernel)
    if not name.isidentifier() or "cutlass" in name:
        # ptxas treats kernels with "cutlass" in their name differently (NVIDIA/cutlass 3389).
        raise ValueError(f"kernel is {name!r}; want a C identifier without 'cutlass'")
    with _LOCK, _target(kernel.arch), tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        import cutlass.cute as cute  # pyright: ignore[reportMissingImports]

        function, operands = kernel.trace()
        _name(function, name)
        started = time.perf_counter()
        options = _OPTIONS.format(arch=kernel.arch, folder=folder)
        compiled: Any = cute.compile(function, *operands, options=options)
        exported = Path(folder, "kernel.o")
        compiled.export_to_c(str(exported), function_name=name, export_only_tvm_ffi_symbols=True)
        seconds = time.perf_counter() - started
        (ptx,), (cubin,) = Path(folder).glob("*.ptx"), Path(folder).glob("*.cubin")
        remarks = Path(folder, "remarks.yaml").read_text(encoding="utf-8")
        return Compiled(
            exported.read_bytes(), ptx.read_bytes(), cubin.read_bytes(), _read(remarks), seconds
        )


@contextmanager
def _target(arch: str) -> Iterator[None]:
    """Trace for `arch`, whatever GPU there is. The option of that name alone acts too late."""
    was_imported = "cutlass" in sys.modules
    before = os.environ.get(_ARCH)
    os.environ[_ARCH] = arch  # read when the DSL is imported
    try:
        from cutlass.cutlass_dsl import CuTeDSL  # pyright: ignore[reportMissingImports]

        environment: Any = CuTeDSL._get_dsl().envar
        previous = environment._arch if was_imported else before  # None: found when asked for
        environment.arch = arch
        try:
            yield
        finally:
            environment.arch = previous
    finally:
        os.environ.pop(_ARCH)
        if before is not None:
            os.environ[_ARCH] = before


def _name(function: Any, name: str) -> None:
    """Name the launched kernel, as profilers show it, and its host function."""
    for member in vars(type(function)).values():
        if hasattr(member, "set_name_prefix"):
            member.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)


# Where something spills, another remark repeats the figures in other words.
_SPENT = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<spill_stores>\d+) bytes spill stores, "
    r"(?P<spill_loads>\d+) bytes spill loads\s.* Used (?P<registers>\d+) registers"
)
_ALLOCATED = re.compile(r"Shared memory allocated: (?P<smem>\d+) bytes")


def _read(remarks: str) -> Resources:
    """The resources, of the remarks of one kernel: what ptxas says, and the sum of allocations."""
    spent, allocated = list(_SPENT.finditer(remarks)), list(_ALLOCATED.finditer(remarks))
    if len(spent) != 1 or len(allocated) > 1:
        raise RuntimeError(f"want the resources of one kernel from the compiler, got:\n{remarks}")
    facts = {"smem": "0"} | {
        k: v for found in spent + allocated for k, v in found.groupdict().items()
    }
    return Resources(**{name: int(number) for name, number in facts.items()})
