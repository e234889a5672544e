"""Compiled kernels for tests, each compiled once for as long as the kernels' sources stay."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.jit import bundle
from tilewright.jit.cache import Entry, Folder
from tilewright.kernels.catalog import Kernel

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Folder(ROOT / ".cache" / "kernels", parts=bundle.ALL_PARTS)
_SEEN = pytest.StashKey[dict[str, Entry]]()


@pytest.fixture(scope="session")
def compile_all(request: pytest.FixtureRequest) -> Callable[[list[Kernel]], dict[Kernel, Entry]]:
    """Compiles kernels in as many processes as there are cores. Raises what a compilation does."""
    pytest.importorskip("cutlass", reason="the compiler is the DSL's")
    seen = request.config.stash.setdefault(_SEEN, {})

    def run(kernels: list[Kernel]) -> dict[Kernel, Entry]:
        entries = {}
        for kernel, outcome in bundle.build(
            kernels, FOLDER.path, os.cpu_count() or 1, FOLDER.parts
        ):
            if isinstance(outcome, Exception):
                raise outcome
            entries[kernel] = seen[str(kernel)] = outcome
        return entries

    return run


@pytest.fixture(scope="session")
def compiled() -> Callable[[Kernel], Entry]:
    """One kernel on disk: its files by suffix are ".o" and ".ptx", ".cubin" and ".so"."""
    pytest.importorskip("cutlass", reason="the compiler is the DSL's")
    return lambda kernel: bundle.make(kernel, FOLDER)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    entries = terminalreporter.config.stash.get(_SEEN, {})
    if entries:
        seconds = {name: entry.facts["seconds"] for name, entry in entries.items()}
        slowest = max(seconds, key=lambda name: seconds[name])
        terminalreporter.write_line(
            f"{len(seconds)} kernels compiled, in {statistics.median(seconds.values()):.1f} s each,"
            f" the slowest, {slowest}, in {seconds[slowest]:.1f} s"
        )
