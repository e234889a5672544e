"""`import tilewright` is cheap: no GPU library, no model library, no terminal library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import tilewright
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "loaded": sorted(sys.modules.keys() - before)}))
"""
UNWANTED = (
    "cutlass",
    "matplotlib",
    "rich",
    "sentence_transformers",
    "tilewright.bench",
    "tilewright.cli",
    "tilewright.compat",
    "tilewright.emulator",
    "tilewright.integrations",
    "transformers",
    "tvm_ffi",
    "typer",
)
MOST_SECONDS = 0.1
ATTEMPTS = 5


def import_freshly() -> dict:
    """What `import tilewright` adds to `import torch`, in an interpreter of its own."""
    command = [sys.executable, "-c", IMPORT]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def first_import() -> dict:
    # Compiles the bytecode too, which a first import of a fresh clone has to.
    return import_freshly()


@pytest.mark.parametrize("module", UNWANTED)
def test_import_leaves_out(first_import: dict, module: str):
    assert "tilewright" in first_import["loaded"]
    assert module not in first_import["loaded"]


def test_import_adds_under_a_tenth_of_a_second_to_torch(first_import: dict):
    # The least of several runs: a busy machine only ever adds to it. One run below is enough.
    seconds = []
    while len(seconds) < ATTEMPTS and min(seconds, default=MOST_SECONDS) >= MOST_SECONDS:
        seconds.append(import_freshly()["seconds"])
    assert min(seconds) < MOST_SECONDS
