"""Peak memory is linear in the sequence length."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Measured in a process of its own: what other tests left in the allocator would hide a peak.
PROGRAM = """
import resource, sys, torch
from tilewright import attention

rows, backend = int(sys.argv[1]), sys.argv[2]

def run(n):
    q, k, v = (torch.ones(1, n, 1, 64, requires_grad=True) for _ in range(3))
    torch.autograd.grad(attention(q, k, v, causal=True, backend=backend).sum(), (q, k, v))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

run(64)  # what is loaded once is not part of the question
before = peak()
run(rows)
print(peak() - before)
"""
MEGABYTE = 1 << 20
BACKENDS = ["cpu_fused", "portable"]


def peak_of(rows: int, backend: str) -> int:
    """Bytes that forward and backward take beyond what the process had, all tensors included."""
    command = [sys.executable, "-c", PROGRAM, str(rows), backend]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_32k_tokens_take_less_than_256_megabytes(backend: str) -> None:
    """One head, D = 64, forward and backward; the logits alone would be 4 GiB."""
    assert peak_of(32 * 1024, backend) < 256 * MEGABYTE


@pytest.mark.parametrize("backend", BACKENDS)
def test_twice_the_rows_take_about_twice_the_memory(backend: str) -> None:
    """Quadratic memory would be four times it; what tiles take is constant."""
    small, large = (peak_of(rows, backend) for rows in (3000, 6000))
    assert large < 2.5 * small + 8 * MEGABYTE
