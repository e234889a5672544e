"""A folder of kernels that were compiled ahead of time, for machines that cannot compile."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from tilewright.jit.cache import Entry, Folder
from tilewright.jit.key import Kernel, key_of
from tilewright.jit.loader import produce

LIBRARY_ONLY = (".so",)
ALL_PARTS = (".so", ".o", ".ptx", ".cubin")


def build(
    kernels: Sequence[Kernel], path: Path, jobs: int, parts: tuple[str, ...] = LIBRARY_ONLY
) -> Iterator[tuple[Kernel, Entry | Exception]]:
    """Compile what the folder does not have yet, in `jobs` processes.

    Yields each kernel as it is ready, with its entry or with what its compilation raised.
    """
    # A fork would inherit the locks of this process's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(kernels))), mp_context=context) as pool:
        folder = Folder(path, parts=parts)
        started = {pool.submit(make, kernel, folder): kernel for kernel in kernels}
        for future in as_completed(started):
            yield started[future], _outcome(future)


def _outcome(future: Future[Entry]) -> Entry | Exception:
    try:
        return future.result()
    except Exception as error:  # the compiler's, or that its process has died
        return error


def make(kernel: Kernel, folder: Folder) -> Entry:
    return folder.make(key_of(kernel), partial(produce, kernel))
