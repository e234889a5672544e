"""Calls of the public functions, through the launcher and the compiled host function, to the
kernel's PTX on the emulator: what is passed is what was compiled for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch

from tests.launch.standin import StandIn
from tests.layouts import place
from tests.paths import by_formula
from tests.problems import Batch, random_batch
from tests.tolerance import assert_error_within, sizes_of_terms
from tilewright import attention, attention_varlen, jit
from tilewright.emulator import Emulator
from tilewright.kernels.catalog import Kernel

pytest.importorskip("cutlass", reason="the DSL is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture
def emulated(hopper: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath) -> list[Kernel]:
    """The kernels that were loaded."""
    from tilewright.jit.compile import compile

    loaded = []

    def load(kernel: Kernel) -> Callable[..., Any]:
        loaded.append(kernel)
        compiled = compile(kernel)
        file = tmp_path / f"{kernel}.o"
        file.write_bytes(compiled.object)
        return Emulator(compiled.ptx.decode(), file, kernel.arch)

    monkeypatch.setattr(jit, "load", load)
    return loaded


def assert_accurate(
    out: list[torch.Tensor], lse: list[torch.Tensor], batch: Batch, **options: Any
) -> None:
    exact = by_formula(batch, torch.float64, **options)
    plain = by_formula(batch, batch.dtype, **options)
    plain_lse = by_formula(batch, torch.float32, **options).lse
    sizes, logit = sizes_of_terms(batch, options)
    assert_error_within("out", out, exact.out, plain.out, sizes.out, logit)
    assert_error_within("lse", lse, exact.lse, plain_lse, sizes.lse, logit)


def test_dense(emulated: list[Kernel]) -> None:
    """Another head dim than the tiles', a sink, a window that is open on the left."""
    options = {"window": (None, 3), "scale": -0.2}
    batch = random_batch([(20, 30)] * 2, (4, 2), (40, 56), torch.bfloat16, with_sink=True)
    q, k, v = (torch.stack([getattr(x, n) for x in batch.sequences]) for n in "qkv")
    out, lse = attention(q, k, v, sink=batch.sink, return_lse=True, backend="fa3", **options)
    assert_accurate(list(out), [x.T for x in lse], batch, **options)
    assert [kernel.spec.packed for kernel in emulated] == [False]


def test_varlen(emulated: list[Kernel]) -> None:
    """Of other sequences than `cu_seqlens` alone tells, one of them empty, NaN around them."""
    options = {"window": (9, 4), "softcap": 3.0}
    batch = random_batch([(20, 30), (3, 0), (0, 5), (7, 50)], (2, 1), (64, 64), torch.float16)
    placement = place("used", batch)
    q = placement.queries.store([x.q for x in batch.sequences])
    k, v = (placement.keys.store([getattr(x, n) for x in batch.sequences]) for n in "kv")
    out, lse = attention_varlen(
        q, k, v, return_lse=True, backend="fa3", **placement.arguments, **options
    )
    parts = placement.queries.parts_of
    assert_accurate(parts(out), parts(lse.T), batch, **options)
    assert not placement.queries.outside(out).any()
    assert torch.isneginf(placement.queries.outside(lse.T[..., None])).all()
    assert [kernel.spec.packed for kernel in emulated] == [True]
