"""A kernel's callable: from this process, the bundles, the disk cache, or the compiler."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewright.jit.cache import Entry, Folder, Product
from tilewright.jit.key import DSL, FFI, Kernel, Key, key_of, toolchain, toolchain_digest

BUNDLES, CACHE = "TILEWRIGHT_BUNDLE", "TILEWRIGHT_CACHE_DIR"
log = logging.getLogger("tilewright")
_LOCK = threading.RLock()
_loaded: dict[Kernel, Callable[..., Any]] = {}


def load(kernel: Kernel) -> Callable[..., Any]:
    """The compiled kernel, as a function of what its `trace` gave fake operands for.

    Compiles if neither a bundle (TILEWRIGHT_BUNDLE, a path list) nor the disk cache
    (TILEWRIGHT_CACHE_DIR, else ~/.cache/tilewright) has it, and says so in the log "tilewright".
    Raises RuntimeError if that is not possible either, and says what is missing.
    """
    if function := _loaded.get(kernel):
        return function
    if reason := _why_not_load():
        raise RuntimeError(f"no {kernel}: {reason}")
    with _LOCK:
        if kernel not in _loaded:
            _loaded[kernel] = _function(entry_of(kernel))
        return _loaded[kernel]


def why_unavailable(kernel: Kernel) -> str | None:
    """Why `load` would raise; None if it would not. Imports nothing, and compiles nothing."""
    if kernel in _loaded:
        return None
    return _why(kernel, os.environ.get(BUNDLES), os.environ.get(CACHE))


def entry_of(kernel: Kernel) -> Entry:
    """The compiled kernel on disk, compiled if need be."""
    key = key_of(kernel)
    if entry := _stored(key):
        return entry
    if reason := _why_not_compile():
        raise RuntimeError(f"no {kernel}: {reason}")
    return cache().make(key, lambda: produce(kernel, "first call"))


def cache() -> Folder:
    """The disk cache, a folder of its own for each toolchain."""
    home = os.environ.get(CACHE) or Path.home() / ".cache" / "tilewright"
    return Folder(Path(home) / f"dsl-{toolchain()[DSL]}-{toolchain_digest()}")


def bundles() -> list[Folder]:
    paths = (os.environ.get(BUNDLES) or "").split(os.pathsep)
    return [Folder(Path(path), strict=False) for path in paths if path]


def produce(kernel: Kernel, occasion: str | None = None) -> Product:
    """Compile and link. An `occasion` is for the log."""
    from tilewright.jit.compile import compile
    from tilewright.jit.link import link, runtime

    if occasion:
        # A warning, because it is shown where nobody has set up logging, and takes seconds.
        log.warning("compiling %s for %s (%s)", kernel, kernel.arch, occasion)
    compiled = compile(kernel)
    files = {
        ".so": link(compiled.object),
        ".o": compiled.object,
        ".ptx": compiled.ptx,
        ".cubin": compiled.cubin,
    }
    facts = asdict(compiled.resources) | {"seconds": round(compiled.seconds, 2)}
    return Product(files, facts, runtime())


def _function(entry: Entry) -> Callable[..., Any]:
    import tvm_ffi

    return tvm_ffi.load_module(str(entry.library)).get_function(entry.name)


def _stored(key: Key) -> Entry | None:
    return next(filter(None, (folder.find(key) for folder in (*bundles(), cache()))), None)


@lru_cache(maxsize=4096)
def _why(kernel: Kernel, *_environment: str | None) -> str | None:
    if reason := _why_not_load():
        return reason
    return None if _stored(key_of(kernel)) else _why_not_compile()


def _why_not_load() -> str | None:
    if toolchain()[FFI] is None:
        return f"{FFI} is not installed, through which kernels are called"
    return None


def _why_not_compile() -> str | None:
    from tilewright.jit.link import linker

    if toolchain()[DSL] is None:
        looked = os.environ.get(BUNDLES)
        bundle = f"{BUNDLES}={looked} has none of these sources" if looked else f"no {BUNDLES} set"
        return (
            f"it is not compiled yet ({bundle}), and {DSL} is not installed. Install "
            f"tilewright[cuda], or set {BUNDLES} to a folder made by `tilewright build`"
        )
    if linker() is None:
        return "it is not compiled yet, and there is no C compiler to link it with (CC, gcc)"
    return None
