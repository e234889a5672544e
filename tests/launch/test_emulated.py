"""Calls of the public functions, through the launcher and the compiled host function, to the
kernel's PTX on the emulator: what is passed is what was compiled for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.compiled import emulator
from tests.launch.standin import StandIn
from tests.layouts import place
from tests.paths import Path, by_formula
from tests.problems import random_batch
from tests.tolerance import assert_accurate, assert_forward_accurate
from tilewright import attention, attention_varlen, jit
from tilewright.emulator import Emulator
from tilewright.kernels import catalog
from tilewright.kernels.catalog import Kernel

pytest.importorskip("cutlass", reason="the DSL is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture
def emulated(hopper: StandIn, monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that were loaded."""
    loaded = []

    def load(kernel: Kernel) -> Emulator:
        loaded.append(kernel)
        return emulator(kernel)

    monkeypatch.setattr(jit, "load", load)
    return loaded


def test_dense(emulated: list[Kernel]) -> None:
    """Another head dim than the tiles', a sink, a window that is open on the left."""
    options = {"window": (None, 3), "scale": -0.2}
    batch = random_batch([(20, 30)] * 2, (4, 2), (40, 56), torch.bfloat16, with_sink=True)
    q, k, v = (torch.stack([getattr(x, n) for x in batch.sequences]) for n in "qkv")
    out, lse = attention(q, k, v, sink=batch.sink, return_lse=True, backend="fa3", **options)
    assert_forward_accurate(out, lse, batch, torch.float32, **options)
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
    assert_forward_accurate(
        parts(out), [x.T for x in parts(lse.T)], batch, torch.float32, **options
    )
    assert not placement.queries.outside(out).any()
    assert torch.isneginf(placement.queries.outside(lse.T[..., None])).all()
    assert [kernel.spec.packed for kernel in emulated] == [True]


@pytest.mark.parametrize(
    ("layout", "options"),
    [("dense", {"window": (40, 3)}), ("used", {"causal": True, "softcap": 3.0})],
    ids=["dense", "varlen"],
)
def test_values_that_are_not_finite_reach_the_rows_that_see_them(
    emulated: list[Kernel], layout: str, options: dict[str, Any]
) -> None:
    """And not those of the same tile that do not, where a probability of 0 would make a NaN."""
    lengths = [(20, 150)] * 2 if layout == "dense" else [(20, 150), (3, 0), (70, 66)]
    clean, batch = (
        random_batch(lengths, (4, 2), (40, 56), torch.bfloat16, with_sink=True) for _ in range(2)
    )
    for x, keys in zip(batch.sequences, ([144, 92], [110], [60]), strict=False):
        for key, alien in zip(keys, (math.nan, -math.inf), strict=False):
            x.v[key:, 1, key % 56] = alien
    got = Path("fa3").run(batch, layout, **options)
    spoilt = by_formula(batch, torch.float64, **options).out
    for out, want, without in zip(
        got.out, spoilt, by_formula(clean, torch.float64, **options).out, strict=True
    ):
        is_spoilt = ~want.isfinite()
        assert is_spoilt.any() or not without.any(), "a sequence with keys is spoilt"
        assert not out[is_spoilt].isfinite().any()
        out[is_spoilt] = without[is_spoilt].to(out.dtype)
    assert_forward_accurate(got.out, [x.T for x in got.lse], clean, torch.float32, **options)


@pytest.mark.parametrize(
    ("layout", "dtype", "options"),
    [
        ("dense", torch.bfloat16, {"window": (None, 3), "scale": -0.2}),
        ("used", torch.float16, {"window": (9, 4), "softcap": 3.0, "deterministic": True}),
    ],
    ids=["dense", "varlen"],
)
def test_gradients(
    emulated: list[Kernel], layout: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Through all three kernels, of a sink and of lse too."""
    lengths = [(20, 30)] * 2 if layout == "dense" else [(20, 30), (3, 0), (0, 5), (70, 50)]
    batch = random_batch(lengths, (4, 2), (40, 56), dtype, with_sink=True, with_dlse=True)
    got = Path("fa3").run(batch, layout, **options)
    assert_accurate(got, batch, **options)
    for rows in got.outside:
        assert not rows.any()
    families = catalog.FA3_FORWARD, catalog.FA3_PREPARE, catalog.FA3_BACKWARD, catalog.FA3_FINISH
    assert tuple(x.family for x in emulated) == families


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("layout", ["dense", "used"])
def test_gradients_that_a_spoilt_row_has_nothing_to_do_with_are_sound(
    emulated: list[Kernel], layout: str, which: str
) -> None:
    """Though a tile multiplies them with it."""
    lengths = [(20, 30)] * 2 if layout == "dense" else [(20, 30), (3, 0), (70, 66)]
    clean, batch = (random_batch(lengths, (4, 2), (40, 56), torch.bfloat16) for _ in range(2))
    getattr(batch.sequences[0], which)[17, 1, 5] = math.nan
    got = Path("fa3").run(batch, layout, causal=True)
    spoilt, want = (by_formula(x, torch.float64, causal=True) for x in (batch, clean))
    kinds = set()
    for name in ("dq", "dk", "dv"):
        for a, b, c in zip(*(getattr(x, name) for x in (got, spoilt, want)), strict=True):
            is_sound = b.isfinite().all(-1)
            kinds |= set(is_sound.flatten().tolist())
            torch.testing.assert_close(a[is_sound].double(), c[is_sound], rtol=0.05, atol=0.05)
            a[is_sound] = torch.nan
            assert not a.isfinite().all(-1).any()
    assert kinds == {False, True}
