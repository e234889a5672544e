"""A folder of compiled kernels, which several processes may read and fill at once.

An entry is STEM.json, and the files that it names with their checksums: a library STEM-CONTENT.so,
and beside it the DSL's runtime, which all libraries of a folder share. A library is in place before
the JSON that names it is, and both come by a rename, so that a reader sees all of an entry or none.
A disk cache and a bundle differ in what they ask of an entry, see `Folder`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.jit.key import FFI, Key

FORMAT = 1
log = logging.getLogger("tilewright")


class Rejected(Exception):
    """Why an entry is not to be used."""


@dataclass(frozen=True)
class Product:
    """What a compilation made: files by suffix, ".so" the library, and numbers."""

    files: Mapping[str, bytes]
    facts: Mapping[str, Any]
    runtime: Path | None = None


@dataclass(frozen=True)
class Entry:
    """A compiled kernel on disk. `facts` are the numbers of its compilation."""

    name: str
    identity: dict[str, Any]
    toolchain: dict[str, str | None]
    facts: dict[str, Any]
    files: dict[str, Path] = field(repr=False)

    @property
    def library(self) -> Path:
        return self.files[".so"]


@dataclass(frozen=True)
class Folder:
    """`strict` takes only what the toolchain at hand would have made, as a cache must.

    Otherwise an entry may come from anywhere, as a bundle's do, if this host can load it. An entry
    without all of `parts` counts as none.
    """

    path: Path
    strict: bool = True
    parts: tuple[str, ...] = (".so",)

    def find(self, key: Key) -> Entry | None:
        """The entry of a key. A damaged or foreign one counts as none, with a warning."""
        path = self.path / f"{key.stem}.json"
        if not path.exists():
            return None
        try:
            entry = _read(path)
            self._check(entry, key)
        except Rejected as reason:
            log.warning("%s is not used: %s", path, reason)
            return None
        return entry if entry.files.keys() >= set(self.parts) else None

    def make(self, key: Key, produce: Callable[[], Product]) -> Entry:
        """The entry of a key, by `produce` if there is none. One process produces, others wait.

        Raises RuntimeError if the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._lock(key):
                return self.find(key) or self._write(key, produce())
        except OSError as error:
            raise RuntimeError(f"cannot keep {key.name} in {self.path}: {error}") from error

    def entries(self) -> Iterator[Entry | Rejected]:
        """All that there is, by name, and what is wrong with the rest."""
        for path in sorted(self.path.glob("*.json")):
            try:
                yield _read(path)
            except Rejected as reason:
                yield Rejected(f"{path.name}: {reason}")

    def _check(self, entry: Entry, key: Key) -> None:
        if (entry.name, entry.identity) != (key.name, key.identity):
            raise Rejected("it is of another kernel")
        theirs, ours = entry.toolchain, key.toolchain
        if not self.strict:
            theirs, ours = _loadable(theirs), _loadable(ours)
        if theirs != ours:
            raise Rejected(f"it was made by {theirs}, and here is {ours}")

    def _write(self, key: Key, product: Product) -> Entry:
        metadata: dict[str, Any] = {
            "format": FORMAT,
            "name": key.name,
            "identity": key.identity,
            "toolchain": key.toolchain,
            "facts": dict(product.facts),
            "files": {},
        }
        for suffix in self.parts:
            data = product.files[suffix]
            digest = hashlib.sha256(data).hexdigest()
            path = self.path / f"{key.stem}-{digest[:8]}{suffix}"
            _replace(path, lambda file, data=data: file.write_bytes(data))
            metadata["files"][suffix] = {"name": path.name, "sha256": digest}
        if product.runtime:
            metadata["files"]["runtime"] = self._share(product.runtime)
        path = self.path / f"{key.stem}.json"
        _replace(path, lambda file: file.write_text(json.dumps(metadata, indent=1), "utf-8"))
        return _read(path)

    def _share(self, runtime: Path) -> dict[str, str]:
        path, digest = self.path / runtime.name, _digest_of(runtime)
        if not path.exists() or _digest_of(path) != digest:
            _replace(path, lambda file: shutil.copyfile(runtime, file))
        return {"name": path.name, "sha256": digest}

    @contextmanager
    def _lock(self, key: Key) -> Iterator[None]:
        import fcntl  # which only systems have that the DSL runs on

        locks = self.path / ".locks"
        locks.mkdir(exist_ok=True)
        with open(locks / key.stem, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _read(path: Path) -> Entry:
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        if metadata["format"] != FORMAT:
            raise Rejected(f"its format is {metadata['format']!r}, not {FORMAT}")
        files = {
            suffix: (path.parent / Path(file["name"]).name, file["sha256"])
            for suffix, file in metadata["files"].items()
        }
        for file, digest in files.values():
            if _digest_of(file) != digest:
                raise Rejected(f"{file.name} is damaged")
        return Entry(
            metadata["name"],
            metadata["identity"],
            metadata["toolchain"],
            metadata["facts"],
            {suffix: file for suffix, (file, _) in files.items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Rejected(f"{type(error).__name__}: {error}") from error


def _loadable(toolchain: Mapping[str, str | None]) -> tuple[str | None, list[str]]:
    """What of a toolchain decides whether a library loads: the host, and TVM FFI's interface."""
    return toolchain.get("host"), (toolchain.get(FFI) or "").split(".")[:2]


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(descriptor)
    try:
        write(Path(name))
        os.chmod(name, 0o644)  # a temporary file is its owner's alone, a bundle everyone's
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _digest_of(path: Path) -> str:
    status = path.stat()
    return _digest(path, status.st_mtime_ns, status.st_size, status.st_ino)


@cache  # the runtime has 40 MB, and is named by every entry
def _digest(path: Path, *_version: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
