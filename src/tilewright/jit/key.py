"""What a compiled kernel is known by: all that could change its code."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import tilewright.kernels

DSL, FFI = "nvidia-cutlass-dsl", "apache-tvm-ffi"
# Which of the libraries is there decides which CUDA the DSL compiles with.
_PACKAGES = (DSL, f"{DSL}-libs-cu12", f"{DSL}-libs-cu13", FFI)


class Kernel(Protocol):
    """One thing to compile; `kernels.catalog.Kernel` is one. Hashable.

    `str` of it is a C identifier. The operands' signature follows from the spec.
    """

    @property
    def family(self) -> str: ...

    @property
    def spec(self) -> Any: ...  # a frozen dataclass of plain values

    @property
    def arch(self) -> str: ...

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The function to compile and the fake operands to compile it with."""
        ...


@dataclass(frozen=True)
class Key:
    """`identity` is what is compiled, `toolchain` what compiles it."""

    name: str
    identity: dict[str, Any]
    toolchain: dict[str, str | None]

    @property
    def stem(self) -> str:
        """The name of its files: an entry of one folder is found without the compiler at hand."""
        return f"{self.name}-{_digest(self.identity)}"


def key_of(kernel: Kernel) -> Key:
    identity = {
        "family": kernel.family,
        "spec": asdict(kernel.spec),
        "arch": kernel.arch,
        "sources": sources_digest(),
    }
    # What JSON makes of it is what is compared with a file.
    return Key(str(kernel), json.loads(json.dumps(identity)), dict(toolchain()))


@lru_cache(maxsize=1)
def toolchain() -> dict[str, str | None]:
    """Versions of what compiles, None where there is none, and the host that the code is for."""
    host = f"{platform.system()} {platform.machine()}"
    return {package: _version(package) for package in _PACKAGES} | {"host": host}


def toolchain_digest() -> str:
    return _digest(toolchain())


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Of every file that a kernel may consist of."""
    total = hashlib.sha256()
    for name, data in _sources():
        total.update(f"{name}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()[:16]


def _sources() -> Iterator[tuple[str, bytes]]:
    (root,) = map(Path, tilewright.kernels.__path__)
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix(), path.read_bytes()


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
