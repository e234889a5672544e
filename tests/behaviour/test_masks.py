"""Rules on masks: causal, windows, what they do together, and what PyTorch calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tests.layouts import LAYOUTS
from tests.paths import Path
from tests.problems import random_batch
from tests.tolerance import assert_accurate

LENGTHS = [(2, 5), (5, 2), (5, 5), (1, 7), (7, 1)]


def seen_by(path: Path, rows: int, keys: int, layout: str = "dense", **options: Any) -> list[str]:
    """The mask that a path applies, as "110" a row: dv of row i alone tells the keys it sees."""
    picture = []
    for i in range(rows):
        batch = random_batch([(rows, keys)], heads=(1, 1))
        batch.sequences[0].dout.zero_()[i] = 1.0
        dv = path.run(batch, layout, **options).dv[0]
        picture.append("".join("1" if row.any() else "0" for row in dv))
    return picture


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_is_aligned_to_the_bottom_right(path: Path, layout: str) -> None:
    assert seen_by(path, 2, 5, layout, causal=True) == ["11110", "11111"]
    assert seen_by(path, 5, 2, layout, causal=True) == ["00", "00", "00", "10", "11"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_causal_is_accurate_for_every_pair_of_lengths(path: Path, layout: str) -> None:
    batch = random_batch(LENGTHS)
    assert_accurate(path.run(batch, layout, causal=True), batch, causal=True)


@pytest.mark.parametrize("lengths", [(2, 5), (5, 5), (129, 200)], ids=str)
def test_causal_agrees_with_pytorchs_lower_right_bias(path: Path, lengths: tuple[int, int]) -> None:
    batch = random_batch([lengths])
    (x,) = batch.sequences
    want = scaled_dot_product_attention(
        *(t[None].double().transpose(1, 2) for t in (x.q, x.k, x.v)),
        attn_mask=causal_lower_right(*lengths),
    )
    got = path.run(batch, causal=True)
    # Weights and out are each rounded to bfloat16, by 2^-9 of themselves.
    size = 0.0 if x.v.dtype == torch.float32 else x.v.abs().max().item()
    limits = {"rtol": 0, "atol": 2**-8 * size} if size else {}
    torch.testing.assert_close(got.out[0].float(), want.float().transpose(1, 2)[0], **limits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_includes_both_ends(tiled_path: Path, layout: str) -> None:
    assert seen_by(tiled_path, 4, 4, layout, window=(1, 2)) == ["1110", "1111", "0111", "0011"]
    assert seen_by(tiled_path, 2, 5, layout, window=(1, 0)) == ["00110", "00011"]
    assert seen_by(tiled_path, 4, 2, layout, window=(0, 1)) == ["00", "10", "11", "01"]
    assert seen_by(tiled_path, 3, 3, layout, window=(0, 0)) == ["100", "010", "001"]


@pytest.mark.parametrize("unbounded", [None, -1])
def test_a_window_may_be_unbounded_on_one_side(tiled_path: Path, unbounded: int | None) -> None:
    assert seen_by(tiled_path, 3, 4, window=(1, unbounded)) == ["1111", "0111", "0011"]
    assert seen_by(tiled_path, 3, 4, window=(unbounded, 1)) == ["1110", "1111", "1111"]
    assert seen_by(tiled_path, 2, 3, window=(unbounded, unbounded)) == ["111", "111"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_without_left_bound_is_causal(path: Path, layout: str) -> None:
    batch = random_batch(LENGTHS)
    window, causal = path.run(batch, layout, window=(-1, 0)), path.run(batch, layout, causal=True)
    for (_, a), (_, b) in zip(window.named(), causal.named(), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounds_that_exceed_the_keys_are_no_bounds(path: Path, layout: str) -> None:
    batch = random_batch([(6, 4), (6, 9), (6, 6)])
    wide, full = path.run(batch, layout, window=(1 << 40, 15)), path.run(batch, layout)
    for (name, a), (_, b) in zip(wide.named(), full.named(), strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, msg=name)
    assert_accurate(wide, batch)


def test_masks_intersect(tiled_path: Path) -> None:
    assert seen_by(tiled_path, 4, 4, causal=True, window=(1, 2)) == ["1000", "1100", "0110", "0011"]
    assert seen_by(tiled_path, 2, 4, causal=True, window=(None, 3)) == ["1110", "1111"]
    assert seen_by(tiled_path, 2, 4, causal=True, window=(0, None)) == ["0010", "0001"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {"window": (3, 2)},
        {"window": (0, 0)},
        {"window": (2, None)},
        {"window": (None, 4)},
        {"causal": True, "window": (4, 1)},
        {"causal": True, "window": (3, -1), "softcap": 2.0},
    ],
    ids=str,
)
def test_windows_are_accurate(tiled_path: Path, layout: str, options: dict[str, Any]) -> None:
    batch = random_batch(LENGTHS, heads=(4, 2), with_sink=True, with_dlse=True)
    assert_accurate(tiled_path.run(batch, layout, **options), batch, **options)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [((129, 129), {"window": (32, 64)}), ((600, 1100), {"window": (64, 0)})],
    ids=str,
)
def test_windows_over_several_tiles_are_accurate(
    tiled_path: Path, lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    batch = random_batch([lengths])
    assert_accurate(tiled_path.run(batch, **options), batch, **options)


@pytest.mark.parametrize("lengths", [(128, 32), (256, 128), (600, 1100), (1100, 600)], ids=str)
def test_causal_over_several_tiles_is_accurate(path: Path, lengths: tuple[int, int]) -> None:
    batch = random_batch([lengths], with_dlse=lengths == (128, 32))
    assert_accurate(path.run(batch, causal=True), batch, causal=True)
