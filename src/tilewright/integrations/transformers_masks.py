"""What a transformers model asks of a mask, as bands and lengths instead of a square tensor.

transformers describes a mask by a function of query and key indices and a padding mask of the keys.
The functions that it builds itself are known by their code, and their parameters are read from
their closures; whatever else a function is made of, it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as hf

from tilewright.masks import Mask

_NO_TENSOR = (
    "the model computes with its attention mask, which 'tilewright' holds as lengths; want "
    "attn_implementation='sdpa' or 'eager' for this model"
)


@dataclass(frozen=True)
class Side:
    """Queries, or keys, of a padded batch as the rows of packed sequences."""

    index: Tensor | None  # (total,) rows of the flattened (batch * length) that count; None: all
    cu_seqlens: Tensor  # (sequences + 1,) int32
    longest: int

    @classmethod
    def kept(cls, keep: Tensor) -> Side:
        """The rows that `keep` (batch, length) bool marks."""
        lengths = keep.sum(dim=-1, dtype=torch.int32)
        return cls(keep.flatten().nonzero()[:, 0], _cumulative(lengths), largest(lengths))

    @classmethod
    def whole(cls, batch: int, length: int, device: torch.device) -> Side:
        """All rows, one sequence a batch entry."""
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        return cls(None, ends, length)

    @classmethod
    def runs(cls, names: Tensor) -> Side:
        """All rows, one sequence a run of equal `names` (batch, length)."""
        starts = torch.ones_like(names, dtype=torch.bool)
        starts[:, 1:] = names[:, 1:] != names[:, :-1]
        first = starts.flatten().nonzero()[:, 0].to(torch.int32)
        cu_seqlens = torch.cat((first, first.new_tensor([names.numel()])))
        return cls(None, cu_seqlens, largest(cu_seqlens.diff()))


@dataclass(frozen=True)
class Visibility:
    """What the attention layers of one forward pass receive as their mask.

    Of the keys the first `keys` count. Without `key_side` all queries and keys are one dense
    problem. `query_side` is None where padding hides keys and queries may be another sequence's.
    """

    lengths: tuple[int, int, int]  # batch, queries, keys as the layers hold them
    keys: int
    mask: Mask
    query_side: Side | None = None
    key_side: Side | None = None

    @property
    def has_padding(self) -> bool:
        return self.key_side is not None and self.key_side.index is not None

    # transformers takes what has four dimensions for a mask that is prepared already.
    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, queries, keys = self.lengths
        return batch, 1, queries, keys

    @property
    def ndim(self) -> int:
        return 4

    def __len__(self) -> int:
        return self.lengths[0]

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(_NO_TENSOR)

    @classmethod
    def __torch_function__(cls, *call: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(_NO_TENSOR)


@torch.compiler.disable  # it looks into tensors and closures, which no graph can hold
def visibility(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = hf.causal_mask_function,
    attention_mask: Tensor | Visibility | None = None,
    **unused: Any,
) -> Visibility:
    """transformers' mask hook: what its `sdpa_mask` makes a tensor of.

    Reads the padding mask, which waits for an accelerator, once a forward pass.

    Args:
        batch_size, q_length, kv_length: sizes of the queries and keys that attention will get.
        q_offset, kv_offset: positions of the first query and key.
        mask_function: whether the query at a position may see the key at a position.
        attention_mask: (batch, positions), whether the key at a position is no padding.

    Raises:
        NotImplementedError: the mask is not a band with lengths; the message says what it is.
    """
    if isinstance(attention_mask, Visibility):
        return attention_mask
    band, names = _read(mask_function)
    # Distance from the last query to the last key; 0 where queries end the keys, as with a cache.
    beyond = kv_offset + kv_length - int(q_offset) - q_length
    keys, mask = _aligned(band, kv_length, beyond)
    lengths = (batch_size, q_length, kv_length)
    if names is not None:
        side = Side.runs(names)
        return Visibility(lengths, keys, mask, side, side)
    keep = _kept_keys(attention_mask, range(kv_offset, kv_offset + keys))
    if keep is None:
        return Visibility(lengths, keys, mask)
    if band == Mask.full():
        return Visibility(lengths, keys, mask, None, Side.kept(keep))
    # A bounded band relates positions of one sequence, so the queries are among the keys.
    if mask != band or keys < q_length:
        raise NotImplementedError(
            f"a padded batch with {q_length} queries, {keys} keys and the mask {band}; want the "
            "queries to be the last keys"
        )
    if band != Mask.causal():
        _refuse_holes(keep, band)
    return Visibility(lengths, keys, mask, Side.kept(keep[:, keys - q_length :]), Side.kept(keep))


def _aligned(band: Mask, kv_length: int, beyond: int) -> tuple[int, Mask]:
    """How many keys can be seen at all, and the band counted from the bottom-right corner of those.

    The band is in positions; the last key stands `beyond` positions after the last query.
    """
    keys = kv_length
    if band.right is not None and band.right < beyond:  # slots of a cache that are still free
        keys = kv_length - beyond + band.right
        beyond = band.right
    left = None if band.left is None else band.left + beyond
    right = None if band.right is None else band.right - beyond
    if keys < 0 or (left is not None and left < 0):
        raise NotImplementedError(
            f"{kv_length} keys end {-beyond} positions before the last query, out of reach of the "
            f"mask {band}"
        )
    return keys, Mask(left, right)


def _kept_keys(attention_mask: Tensor | None, positions: range) -> Tensor | None:
    """(batch, keys) bool; None where every key counts. Positions past the padding mask do not."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise NotImplementedError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; want (batch, positions)"
        )
    keep = attention_mask[:, positions.start : positions.stop].bool()
    if keep.shape[1] < len(positions):
        keep = torch.nn.functional.pad(keep, (0, len(positions) - keep.shape[1]))
    return None if keep.all() else keep


def _refuse_holes(keep: Tensor, band: Mask) -> None:
    """Without its padding a sequence closes up, which would move keys across a window's edge."""
    edges = torch.nn.functional.pad(keep, (1, 1)).long().diff(dim=1).abs().sum(dim=1)
    if (edges > 2).any():
        raise NotImplementedError(
            f"padding lies inside a sequence under the mask {band}; want it left or right of it"
        )


def _read(function: Callable[..., Any]) -> tuple[Mask, Tensor | None]:
    """The band that a mask function is, and the names of packed sequences if it has them."""
    parts = list(_conjuncts(function))
    names = [_parameters(x)["packed_sequence_mask"] for x in parts if _is(x, _PACKED)]
    bands = [_band(x, packed=bool(names)) for x in parts if not _is(x, _PACKED)]
    if len(names) > 1:
        raise NotImplementedError("two packings in one mask; want one")
    return reduce(Mask.__and__, bands, Mask.full()), names[0] if names else None


def _conjuncts(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    if not _is(function, _AND):
        return [function]
    return [x for part in _parameters(function)["mask_functions"] for x in _conjuncts(part)]


def _band(function: Callable[..., Any], packed: bool) -> Mask:
    if function is hf.causal_mask_function:
        return Mask.causal()
    if function is hf.bidirectional_mask_function:
        return Mask.full()
    if _is(function, _WINDOW):  # as many keys, the query's own included
        return Mask(_parameters(function)["sliding_window"] - 1, None)
    if _is(function, _TWO_SIDED_WINDOW):  # at most so far away
        reach = _parameters(function)["sliding_window"]
        return Mask(reach, reach)
    if _is(function, _REMAP) and packed:
        # Within a packed sequence positions count up by one, which no band can tell from indices.
        bands = [_band(x, packed) for x in _conjuncts(_parameters(function)["mask_function"])]
        return reduce(Mask.__and__, bands)
    name = getattr(function, "__qualname__", repr(function)).removesuffix(".<locals>.inner_mask")
    raise NotImplementedError(
        f"the mask function {name} has no band and lengths; want causal, bidirectional or sliding "
        "window attention, padding or packed sequences, or attn_implementation='sdpa' or 'eager'"
    )


def _is(function: Callable[..., Any], example: Callable[..., Any] | None) -> bool:
    """Whether both come out of one factory: functions made by one `def` share its code."""
    return example is not None and getattr(function, "__code__", None) is example.__code__


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """What the factory of a mask function was called with."""
    return dict(inspect.getclosurevars(function).nonlocals)


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def largest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _made_by(factory: str, *arguments: Any) -> Callable[..., Any] | None:
    """An example of a factory's functions; None where transformers is older than the factory."""
    return getattr(hf, factory)(*arguments) if hasattr(hf, factory) else None


_AND = hf.and_masks(hf.causal_mask_function)
_WINDOW = hf.sliding_window_overlay(1)
_TWO_SIDED_WINDOW = hf.sliding_window_bidirectional_overlay(1)
_PACKED = hf.packed_sequence_mask_function(torch.zeros(1, 1))
_REMAP = _made_by("remap_positions_for_packed_sequence", hf.causal_mask_function, torch.zeros(1, 1))
