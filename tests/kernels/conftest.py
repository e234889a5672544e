"""The kernels that the selected tests are about, compiled together."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from tests.kernels.compiled import compile_all
from tilewright.jit.cache import Entry
from tilewright.kernels.catalog import Kernel

_SEEN = pytest.StashKey[dict[Kernel, Entry]]()


@pytest.fixture(scope="session")
def entry_of(request: pytest.FixtureRequest) -> Callable[[Kernel], Entry]:
    """A kernel on disk: its files by suffix are ".o" and ".ptx", ".cubin" and ".so".

    Raises what its compilation did.
    """
    pytest.importorskip("cutlass", reason="the compiler is the DSL's")
    items = (getattr(item, "callspec", None) for item in request.session.items)
    kernels = {call.params["kernel"] for call in items if call and "kernel" in call.params}
    outcomes = compile_all(kernel for kernel in kernels if isinstance(kernel, Kernel))
    seen = {kernel: x for kernel, x in outcomes.items() if isinstance(x, Entry)}
    request.config.stash[_SEEN] = seen

    def find(kernel: Kernel) -> Entry:
        outcome = outcomes[kernel]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return find


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    entries = terminalreporter.config.stash.get(_SEEN, {})
    if entries:
        seconds = {kernel: entry.facts["seconds"] for kernel, entry in entries.items()}
        slowest = max(seconds, key=lambda kernel: seconds[kernel])
        terminalreporter.write_line(
            f"{len(seconds)} kernels compiled, in {statistics.median(seconds.values()):.1f} s each,"
            f" the slowest, {slowest}, in {seconds[slowest]:.1f} s"
        )
