"""Object code -> a library that loads with PyTorch and TVM FFI alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

_COMPILERS = ("gcc", "cc", "clang")


def linker() -> str | None:
    """The C compiler that links: $CC, or one that PATH has."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", ""), *_COMPILERS))), None)


def link(code: bytes) -> bytes:
    """The library, which looks for the DSL's runtime in its own folder.

    Raises RuntimeError if there is no C compiler, or if it fails.
    """
    import tvm_ffi.libinfo

    program = linker()
    if program is None:
        raise RuntimeError(f"linking a kernel takes a C compiler: CC, {', '.join(_COMPILERS)}")
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        source, library = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        source.write_bytes(code)
        # Both libraries have a SONAME, which is all that the result keeps of them.
        needed = [str(runtime()), tvm_ffi.libinfo.find_libtvm_ffi()]
        command = [program, "-shared", "-o", library, source, *needed, "-Wl,-rpath,$ORIGIN"]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{program} could not link a kernel:\n{ended.stderr}")
        return library.read_bytes()


@lru_cache(maxsize=1)
def runtime() -> Path:
    """The DSL's runtime library, which every kernel calls CUDA through."""
    # Its packages are put on the path by a .pth file, which pyright does not run.
    from cutlass.base_dsl.env_manager import (  # pyright: ignore[reportMissingImports]
        get_prefix_dsl_libs,
    )

    for path in map(Path, (get_prefix_dsl_libs("CUTE_DSL") or "").split(os.pathsep)):
        if path.name == "libcute_dsl_runtime.so":
            return path
    raise RuntimeError("nvidia-cutlass-dsl has no libcute_dsl_runtime.so: install it with [cu13]")
