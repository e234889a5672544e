"""Compiles CuTe DSL functions without a GPU and runs them on the emulator."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.emulator import Emulator, Options


def use_arch(arch: str) -> None:
    """Make `arch` the target of everything that the DSL traces from now on."""
    os.environ["CUTE_DSL_ARCH"] = arch  # read when the DSL is first imported
    from cutlass.cutlass_dsl import CuTeDSL

    CuTeDSL._get_dsl().envar._arch = arch


def compile_for(
    arch: str, function: Callable[..., Any], *arguments: Any, compiler: Any = None, **keywords: Any
) -> tuple[str, Path]:
    """The PTX text and the exported object of `function` traced with `arguments`."""
    use_arch(arch)
    import cutlass.cute as cute

    folder = Path(tempfile.mkdtemp(prefix="emulated-"))
    options = f"{keywords.pop('options', '')} --enable-tvm-ffi --gpu-arch {arch} --keep-ptx"
    compiled = (compiler or cute.compile)(
        function, *arguments, options=f"{options} --dump-dir {folder}", **keywords
    )
    object_path = folder / "kernel.o"
    compiled.export_to_c(str(object_path), function_name="entry")
    ptx = compiled.__ptx__  # the text, or the path of the dump
    return (ptx if "\n" in ptx else Path(ptx).read_text()), object_path


def emulated(
    arch: str,
    function: Callable[..., Any],
    *arguments: Any,
    options: Options | None = None,
    **keywords: Any,
) -> Emulator:
    """`function`, compiled for `arch`, as something to call with host tensors."""
    ptx, object_path = compile_for(arch, function, *arguments, **keywords)
    return Emulator(ptx, object_path, arch, options)
