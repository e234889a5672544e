"""The mask hook says the same as the square mask that transformers would make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers")

from transformers import masking_utils as hf

from tilewright.integrations.transformers_masks import Side, Visibility, visibility
from tilewright.masks import Mask

BATCH = 3


def band_of(mask: Mask, rows: int, keys: int) -> Tensor:
    """(rows, keys) bool by the definition of a band that ends in the bottom-right corner."""
    distance = torch.arange(keys)[None, :] - (torch.arange(rows)[:, None] + keys - rows)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.left is not None:
        seen &= distance >= -mask.left
    if mask.right is not None:
        seen &= distance <= mask.right
    return seen


def rows_of(side: Side, total: int) -> list[Tensor]:
    index = torch.arange(total) if side.index is None else side.index
    return list(index.tensor_split(side.cu_seqlens[1:-1].long()))


def unfold(seen: Visibility) -> tuple[Tensor, Tensor]:
    """(batch, queries, keys) bool, and which queries (batch, queries) are part of the problem."""
    batch, queries, keys = seen.lengths
    square = torch.zeros(batch, queries, keys, dtype=torch.bool)
    if seen.key_side is None:
        square[:, :, : seen.keys] = band_of(seen.mask, queries, seen.keys)
        return square, torch.ones(batch, queries, dtype=torch.bool)
    query_side = seen.query_side or Side.whole(batch, queries, torch.device("cpu"))
    flat = torch.zeros(batch * queries, batch * seen.keys, dtype=torch.bool)
    counted = torch.zeros(batch * queries, dtype=torch.bool)
    key_rows = rows_of(seen.key_side, batch * seen.keys)
    for rows, columns in zip(rows_of(query_side, batch * queries), key_rows, strict=True):
        counted[rows] = True
        flat[rows[:, None], columns] = band_of(seen.mask, len(rows), len(columns))
    by_batch = flat.view(batch, queries, batch, seen.keys)
    for b in range(batch):
        square[b, :, : seen.keys] = by_batch[b, :, b]
        assert not by_batch[b, :, torch.arange(batch) != b].any()
    return square, counted.view(batch, queries)


def padding(kind: str, positions: int, lengths: list[int]) -> Tensor | None:
    if kind == "none":
        return None
    keep = torch.arange(positions) < torch.tensor(lengths).clamp(max=positions)[:, None]
    return keep.flip(1) if kind == "left" else keep


BANDS: dict[str, Callable[[int], Any]] = {
    "causal": lambda window: hf.causal_mask_function,
    "full": lambda window: hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function,
}


@given(
    band=st.sampled_from(sorted(BANDS)),
    window=st.integers(1, 9),
    queries=st.integers(1, 6),
    past=st.integers(0, 6),
    free=st.integers(0, 4),
    kind=st.sampled_from(["none", "left", "right"]),
    lengths=st.lists(st.integers(0, 12), min_size=BATCH, max_size=BATCH),
)
def test_hook_agrees_with_the_square_mask(
    band: str,
    window: int,
    queries: int,
    past: int,
    free: int,
    kind: str,
    lengths: list[int],
) -> None:
    """Queries at the end of a cache that may have `free` slots after them."""
    if band == "full":
        free = 0  # nothing but the padding mask would hide them
    arguments = {
        "batch_size": BATCH,
        "q_length": queries,
        "kv_length": past + queries + free,
        "q_offset": past,
        "mask_function": BANDS[band](window),
        "attention_mask": padding(kind, past + queries, lengths),
    }
    seen = visibility(**arguments)
    got, counted = unfold(seen)
    expected = hf.sdpa_mask(**arguments, allow_is_causal_skip=False)
    expected = expected[:, 0].expand_as(got)
    assert torch.equal(got[counted], expected[counted])
    if kind == "none":
        assert counted.all()
    elif band != "full" and seen.key_side is not None:
        assert torch.equal(counted, arguments["attention_mask"][:, past:])


@given(
    window=st.integers(1, 5),
    length=st.integers(1, 9),
    lengths=st.lists(st.integers(0, 9), min_size=BATCH, max_size=BATCH),
    kind=st.sampled_from(["none", "left", "right"]),
)
def test_two_sided_window(window: int, length: int, lengths: list[int], kind: str) -> None:
    function = hf.sliding_window_bidirectional_mask_function(window)
    keep = padding(kind, length, lengths)
    arguments = {"batch_size": BATCH, "q_length": length, "kv_length": length}
    got, counted = unfold(visibility(**arguments, mask_function=function, attention_mask=keep))
    expected = hf.sdpa_mask(
        **arguments, mask_function=function, attention_mask=keep, allow_is_causal_skip=False
    )
    assert torch.equal(got[counted], expected[:, 0].expand_as(got)[counted])


@pytest.mark.parametrize("window", [None, 2])
def test_packed_sequences(window: int | None) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    names = hf.find_packed_sequence_indices(positions)
    base = BANDS["window"](window) if window else hf.causal_mask_function
    function = hf.and_masks(base, hf.packed_sequence_mask_function(names))
    if hasattr(hf, "remap_positions_for_packed_sequence"):
        remapped = hf.remap_positions_for_packed_sequence(base, positions)
        function = hf.and_masks(remapped, hf.packed_sequence_mask_function(names))
    arguments = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function}
    seen = visibility(**arguments)
    assert seen.key_side is not None
    assert seen.key_side.cu_seqlens.tolist() == [0, 3, 5, 6, 12]
    got, counted = unfold(seen)
    assert counted.all()
    assert torch.equal(got, hf.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0])


def test_window_cache_that_dropped_its_oldest_keys() -> None:
    """It holds w - 1 keys before the queries, from position `kv_offset` on."""
    keep = torch.ones(BATCH, 12, dtype=torch.bool)
    keep[0, :9] = False
    arguments = {
        "batch_size": BATCH,
        "q_length": 2,
        "kv_length": 5,
        "q_offset": 10,
        "kv_offset": 7,
        "mask_function": hf.sliding_window_causal_mask_function(4),
        "attention_mask": keep,
    }
    got, counted = unfold(visibility(**arguments))
    assert counted.all()
    expected = hf.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    assert torch.equal(got, expected)


def test_padding_inside_a_sequence() -> None:
    """Harmless where only order counts, refused where distance does."""
    keep = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    arguments = {"batch_size": 1, "q_length": 2, "kv_length": 6, "q_offset": 4}
    arguments |= {"attention_mask": keep}
    got, counted = unfold(visibility(**arguments))
    assert counted.all()
    assert torch.equal(got, hf.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0])
    with pytest.raises(NotImplementedError, match="padding lies inside a sequence"):
        visibility(**arguments, mask_function=hf.sliding_window_causal_mask_function(3))


def test_full_padding_mask_makes_a_dense_problem() -> None:
    seen = visibility(2, 4, 4, attention_mask=torch.ones(2, 4, dtype=torch.bool))
    assert seen == Visibility((2, 4, 4), 4, Mask.causal())


def test_prepared_mask_comes_back_as_it_is() -> None:
    seen = visibility(1, 4, 4)
    assert visibility(1, 4, 4, attention_mask=seen) is seen
    assert (seen.ndim, len(seen.shape)) == (4, 4)


def lookalike(b: int, h: int, q: Any, k: Any) -> Any:
    return k <= q


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (hf.or_masks(hf.causal_mask_function, hf.bidirectional_mask_function), "or_masks"),
        (hf.and_masks(hf.causal_mask_function, lookalike), "lookalike"),
        (hf.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)), "chunked_overlay"),
        (hf.padding_mask_function(torch.ones(1, 4)), "padding_mask_function"),
        (hf.add_offsets_to_mask_function(hf.causal_mask_function, 0, 1), "add_offsets"),
    ],
)
def test_function_that_is_no_band_is_refused(function: Any, named: str) -> None:
    with pytest.raises(NotImplementedError, match=f"mask function {named}.*want causal"):
        visibility(1, 4, 4, mask_function=function)


def test_remapped_positions_without_packing_are_refused() -> None:
    if not hasattr(hf, "remap_positions_for_packed_sequence"):
        pytest.skip("transformers is older than remapped positions")
    positions = torch.arange(4)[None] * 2
    function = hf.remap_positions_for_packed_sequence(hf.causal_mask_function, positions)
    with pytest.raises(NotImplementedError, match="remap_positions"):
        visibility(1, 4, 4, mask_function=function)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask[:, :, :, :2],
        lambda mask: torch.zeros(1, 1, 4, 4) + mask,
        lambda mask: mask + torch.zeros(1, 1, 4, 4),
        lambda mask: torch.where(mask, 0.0, 1.0),
    ],
)
def test_model_that_computes_with_its_mask_is_told_so(use: Callable[[Any], Any]) -> None:
    with pytest.raises(NotImplementedError, match="computes with its attention mask"):
        use(visibility(1, 4, 4))


def test_square_padding_mask_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"attention_mask has shape \(1, 4, 4\)"):
        visibility(1, 4, 4, attention_mask=torch.ones(1, 4, 4))
