"""Rules on storage: what is not part of the problem is never read, what is spoilt stays local.

`Path.run` fills all storage that belongs to no sequence with NaN, the incoming gradients' too, so
every other test of a layout holds this rule as well.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.layouts import LAYOUTS, PAGE_SIZE
from tests.paths import Path
from tests.problems import cumulative, random_batch, random_qkv
from tests.tolerance import assert_accurate
from tilewright import attention_decode, attention_varlen

RAGGED = [layout for layout in LAYOUTS if layout != "dense"]
ALIENS = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("layout", RAGGED)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_storage_outside_the_problem_never_reaches_a_result(
    path: Path, layout: str, causal: bool
) -> None:
    batch = random_batch([(4, 3), (4, 9), (4, 6)], (4, 2), with_sink=True, with_dlse=True)
    assert_accurate(path.run(batch, layout, causal=causal), batch, causal=causal)


@pytest.mark.parametrize("layout", RAGGED)
def test_storage_outside_the_problem_has_zero_out_and_zero_gradients(
    path: Path, layout: str
) -> None:
    got = path.run(random_batch([(4, 3), (4, 9), (4, 6)]), layout)
    for name, tensor in zip(("out", "dq", "dk", "dv"), got.outside, strict=True):
        assert torch.equal(tensor, torch.zeros_like(tensor)), name
    assert sum(tensor.shape[0] for tensor in got.outside) > 0


def test_lse_outside_the_problem_is_minus_infinity(device: str) -> None:
    q, bounds = torch.ones(7, 2, 16, device=device), cumulative([2, 3]).to(device)
    _, lse = attention_varlen(q, q, q, bounds, bounds, return_lse=True)
    assert torch.isneginf(lse[:, 5:]).all() and torch.isfinite(lse[:, :5]).all()


@pytest.mark.parametrize("alien", ALIENS)
@pytest.mark.parametrize("backend", [None, "cpu_fused", "portable"])
def test_free_slots_of_a_cache_are_never_read(backend: str | None, alien: float) -> None:
    """A cache of 128 with lengths [32, 64, 96, 48]."""
    q, k, v = random_qkv(4, 1, 128, (4, 2), 64)
    lengths = torch.tensor([32, 64, 96, 48], dtype=torch.int32)
    clean = attention_decode(q, k, v, cache_seqlens=lengths, backend=backend)
    for b, length in enumerate(lengths.tolist()):
        k[b, length:], v[b, length:] = alien, alien
    assert torch.equal(attention_decode(q, k, v, cache_seqlens=lengths, backend=backend), clean)


@pytest.mark.parametrize("backend", [None, "cpu_fused", "portable"])
def test_the_unused_part_of_a_shared_page_is_never_read(backend: str | None) -> None:
    """Sequence 0 ends inside page 1, sequence 1 goes on in it; then the rest is NaN."""
    q, k, v = random_qkv(3, 1, PAGE_SIZE, dim=32)
    k[1, 3:], v[1, 3:] = math.nan, math.nan
    table = torch.tensor([[0, 1], [2, 1]], dtype=torch.int32)
    lengths = torch.tensor([PAGE_SIZE + 2, PAGE_SIZE + 3], dtype=torch.int32)
    keys = {"cache_seqlens": lengths, "block_table": table, "backend": backend}
    out = attention_decode(q[:2], k, v, **keys)
    assert torch.isfinite(out).all()
    k[1, 2], v[1, 2] = math.nan, math.nan  # part of sequence 1 only
    spoilt = attention_decode(q[:2], k, v, **keys)
    assert torch.equal(spoilt[0], out[0]) and torch.isnan(spoilt[1]).all()


@pytest.mark.parametrize("entry", [-1, 10**6])
def test_entries_of_a_block_table_past_the_length_are_never_read(device: str, entry: int) -> None:
    q, k, v = (x.to(device) for x in random_qkv(1, 1, 4))
    lengths = torch.tensor([3], dtype=torch.int32, device=device)
    table = torch.tensor([[0, entry, entry]], dtype=torch.int32, device=device)
    out = attention_decode(q, k, v, cache_seqlens=lengths, block_table=table)
    want = attention_decode(q, k, v, cache_seqlens=lengths)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alien", ALIENS)
@pytest.mark.parametrize("which", ["q", "dout"])
def test_a_spoilt_query_row_spoils_that_row_only(
    path: Path, layout: str, alien: float, which: str
) -> None:
    """Its own dq, and dk and dv of the keys that it sees; never another row."""
    clean = random_batch([(6, 6), (6, 6)], (4, 2))
    batch = random_batch([(6, 6), (6, 6)], (4, 2))
    getattr(batch.sequences[0], which)[2, 0] = alien
    want = path.run(clean, layout, causal=True)
    got = path.run(batch, layout, causal=True)
    rows = [0, 1, 3, 4, 5]
    for name in ("out", "lse", "dq"):
        a, b = getattr(got, name), getattr(want, name)
        assert_rows_agree(a[0][rows], b[0][rows], name)
        assert_rows_agree(a[0][2, 1:], b[0][2, 1:], f"{name} of the other heads")
        assert_rows_agree(a[1], b[1], f"{name} of the other sequence")
    for name in ("dk", "dv"):
        a, b = getattr(got, name), getattr(want, name)
        assert_rows_agree(a[0][3:], b[0][3:], f"{name} of keys that the row does not see")
        assert_rows_agree(a[1], b[1], f"{name} of the other sequence")
    assert not torch.isfinite(got.dq[0][2, 0]).all(), "the spoilt row is spoilt"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alien", ALIENS)
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_spoilt_key_spoils_only_the_rows_that_see_it(
    path: Path, layout: str, alien: float, which: str
) -> None:
    clean = random_batch([(6, 6), (6, 6)], (4, 2))
    batch = random_batch([(6, 6), (6, 6)], (4, 2))
    getattr(batch.sequences[0], which)[4, 1, 3] = alien
    want = path.run(clean, layout, causal=True)
    got = path.run(batch, layout, causal=True)
    for name in ("out", "lse", "dq"):
        a, b = getattr(got, name), getattr(want, name)
        assert_rows_agree(a[0][:4], b[0][:4], name)
        assert_rows_agree(a[0][:, :2], b[0][:, :2], f"{name} of the other key head's group")
        assert_rows_agree(a[1], b[1], f"{name} of the other sequence")
    if which == "v":
        assert_rows_agree(got.lse[0], want.lse[0], "lse, which has no v in it")
        assert not torch.isfinite(got.out[0][4:, 2:, 3]).any(), "the value is seen"
    else:
        assert not torch.isfinite(got.dq[0][4:, 2:]).all(), "the key is seen"


def test_a_spoilt_key_outside_every_window_spoils_nothing(tiled_path: Path) -> None:
    batch = random_batch([(3, 9)])
    batch.sequences[0].k[1], batch.sequences[0].v[2] = math.nan, math.inf
    got = tiled_path.run(batch, window=(2, 0))
    for name, (tensor,) in got.named()[:5]:
        assert torch.isfinite(tensor).all(), name


def assert_rows_agree(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert torch.isfinite(got).all(), f"{what} is spoilt"
    # Without the spoilt value another engine may have computed it, so bits may differ.
    torch.testing.assert_close(got, want, msg=lambda text: f"{what}: {text}")
