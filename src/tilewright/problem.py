"""What a call asks for, as a frozen value, and the checks that make it a legal question.

Nothing here imports torch: tensors are read through ``shape``, ``dtype`` and ``device`` only, so
the model, the dispatcher and the tests can talk about problems without holding one.
Every argument is validated here and nowhere else; everything below may rely on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tilewright.masks import Mask

FLOATING = ("float16", "bfloat16", "float32", "float64")
INTEGER = ("int32", "int64")
LIMIT = 1 << 62  # of integers that reach an operator, whose integers have 64 bits


@dataclass(frozen=True)
class Scoring:
    """How a query and a key make a logit: ``softcap(scale * q.k)``, where `mask` lets it."""

    mask: Mask = Mask()
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call without its tensors: the key for dispatch, tuning and compilation.

    ``layout`` is "dense" (batch, seqlen, heads, dim), "varlen" (packed rows and cumulative lengths)
    or "paged" (keys in pages behind a block table). ``seqlen_q`` and ``seqlen_k`` are the longest
    of the batch; ``ragged`` says that sequences may be shorter than that.
    """

    layout: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    device: str
    scoring: Scoring
    ragged: bool = False
    has_sink: bool = False
    deterministic: bool = False
    num_splits: int | None = None

    def __post_init__(self) -> None:
        # A problem is looked up several times a call; hashing it each time would show.
        object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))

    def __hash__(self) -> int:
        return vars(self)["_hash"]

    def with_lengths(self, batch: int, seqlen_q: int, seqlen_k: int) -> AttentionProblem:
        """The dense problem of `batch` sequences of this call that share their lengths."""
        return replace(
            self, layout="dense", batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, ragged=False
        )

    def __str__(self) -> str:
        heads = (
            f"{self.heads_q}" if self.heads_q == self.heads_k else f"{self.heads_q}/{self.heads_k}"
        )
        dims = (
            f"{self.head_dim}"
            if self.head_dim == self.head_dim_v
            else f"{self.head_dim}/{self.head_dim_v}"
        )
        return (
            f"{self.layout} {self.dtype} {self.scoring.mask} batch={self.batch} "
            f"seqlen={self.seqlen_q}x{self.seqlen_k} heads={heads} dim={dims} on {self.device}"
        )


def dtype_name(tensor: Any) -> str:
    """ "bfloat16" for ``torch.bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def default_scale(head_dim: int) -> float:
    """The scale of "Attention Is All You Need", section 3.2.1."""
    return 1.0 / math.sqrt(head_dim)


def check_qkv(q: Any, k: Any, v: Any, ranks: tuple[int, int], names: tuple[str, str]) -> None:
    """Check shapes, dtypes and devices that q, k and v must share.

    `ranks` are those of q and of k and v; `names` are what the caller calls k and v.
    """
    k_name, v_name = names
    for name, tensor, rank in (("q", q, ranks[0]), (k_name, k, ranks[1]), (v_name, v, ranks[1])):
        _check_tensor(name, tensor)
        if tensor.ndim != rank:
            raise ValueError(f"{name} has shape {_shape(tensor)}; want {rank} dimensions")
    if dtype_name(q) not in FLOATING:
        raise TypeError(f"q has dtype {dtype_name(q)}; want one of {', '.join(FLOATING)}")
    for name, tensor in ((k_name, k), (v_name, v)):
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"q has dtype {dtype_name(q)} and {name} has dtype {dtype_name(tensor)}; "
                "want the same dtype, nothing is cast in silence"
            )
        check_device(name, tensor, q)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{k_name} has shape {_shape(k)} and {v_name} has shape {_shape(v)}; "
            "want them equal but for the last dimension"
        )
    for name, tensor in (("q", q), (v_name, v)):
        if tensor.shape[-1] == 0:
            raise ValueError(f"{name} has shape {_shape(tensor)}; want a head dim of 1 or more")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q has head dim {q.shape[-1]} and {k_name} has {k.shape[-1]}; want them equal"
        )
    check_head_ratio(q.shape[-2], k.shape[-2], k_name)


def check_head_ratio(heads_q: int, heads_k: int, k_name: str) -> None:
    if heads_k == 0 and heads_q == 0:
        return
    if heads_k == 0 or heads_q % heads_k:
        raise ValueError(f"q has {heads_q} heads and {k_name} has {heads_k}; want a multiple")


def check_device(name: str, tensor: Any, q: Any) -> None:
    if tensor.device != q.device:
        raise ValueError(f"q is on {q.device} and {name} is on {tensor.device}; want one device")


def check_same_batch(name: str, tensor: Any, batch: int) -> None:
    if tensor.shape[0] != batch:
        raise ValueError(f"{name} has batch {tensor.shape[0]} and q has {batch}; want them equal")


def check_scoring(
    causal: bool, window: Sequence[int | None] | None, scale: float | None, softcap: float | None
) -> Mask:
    """Check the options that shape a logit and return the mask they make together."""
    if scale is not None and not _is_finite("scale", scale):
        raise ValueError(f"scale is {scale}; want a finite number, or None for 1/sqrt(head dim)")
    if softcap is not None and not (_is_finite("softcap", softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap}; want a positive finite number, or None for no cap")
    check_flag("causal", causal)
    mask = Mask.causal() if causal else Mask.full()
    if window is None:
        return mask
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise ValueError(f"window is {window!r}; want a pair (left, right)")
    for side, bound in zip(("left", "right"), window, strict=True):
        if bound is None:
            continue
        if not _is_integer(bound):
            raise TypeError(f"window's {side} bound is {bound!r}; want an integer or None")
        if bound < -1:
            raise ValueError(
                f"window's {side} bound is {bound}; want 0 or more, or -1 or None for no bound"
            )
    # A bound beyond every length is no bound.
    return mask & Mask.window(*(-1 if x is None or x >= LIMIT else x for x in window))


def check_sink(sink: Any, q: Any) -> None:
    """`sink` holds one logit a query head, in q's dtype or in float32."""
    if sink is None:
        return
    _check_tensor("sink", sink)
    if tuple(sink.shape) != (q.shape[-2],):
        raise ValueError(
            f"sink has shape {_shape(sink)}; want ({q.shape[-2]},), one logit a query head"
        )
    if dtype_name(sink) not in (dtype_name(q), "float32"):
        raise TypeError(
            f"sink has dtype {dtype_name(sink)} and q has {dtype_name(q)}; want q's or float32"
        )
    check_device("sink", sink, q)


def check_lengths_tensor(name: str, tensor: Any, size: int | None, q: Any) -> None:
    """A one-dimensional int32 tensor on q's device, of `size` elements where that is given."""
    _check_tensor(name, tensor)
    if dtype_name(tensor) != "int32":
        raise TypeError(f"{name} has dtype {dtype_name(tensor)}; want int32")
    if tensor.ndim != 1 or (size is not None and tensor.shape[0] != size):
        wanted = "(batch + 1,)" if size is None else f"({size},)"
        raise ValueError(f"{name} has shape {_shape(tensor)}; want {wanted}")
    if size is None and tensor.shape[0] == 0:
        raise ValueError(f"{name} is empty; want (batch + 1,) elements that start with 0")
    check_device(name, tensor, q)


def check_block_table(block_table: Any, batch: int, q: Any) -> None:
    _check_tensor("block_table", block_table)
    if dtype_name(block_table) != "int32":
        raise TypeError(f"block_table has dtype {dtype_name(block_table)}; want int32")
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table has shape {_shape(block_table)}; want ({batch}, pages a sequence)"
        )
    check_device("block_table", block_table, q)


def check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"k_cache has a page size of {page_size}; want 1 or more")


def check_new_rows(k_new: Any, v_new: Any, k_cache: Any, v_cache: Any, q: Any) -> None:
    """New rows for a cache: (batch, rows, heads_k, dim), in the cache's dtype."""
    for name, new, cache in (("k_new", k_new, k_cache), ("v_new", v_new, v_cache)):
        _check_tensor(name, new)
        if new.ndim != 4 or new.shape[0] != q.shape[0] or new.shape[2:] != cache.shape[2:]:
            heads, dim = cache.shape[2:]
            raise ValueError(
                f"{name} has shape {_shape(new)}; want ({q.shape[0]}, rows, {heads}, {dim})"
            )
        if new.dtype != cache.dtype:
            raise TypeError(
                f"{name} has dtype {dtype_name(new)} and the cache has {dtype_name(cache)}; "
                "want the same dtype"
            )
        check_device(name, new, q)
    if k_new.shape[1] != v_new.shape[1]:
        raise ValueError(
            f"k_new has {k_new.shape[1]} rows and v_new has {v_new.shape[1]}; want equal"
        )


def check_count(name: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if not _is_integer(value):
        raise TypeError(f"{name} is {value!r}; want an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; want {least} or more")
    if value >= LIMIT:
        raise ValueError(f"{name} is {value}; want less than 2**62")


def check_flag(name: str, value: Any) -> None:
    """Text such as "no" is true in Python, so only what is a truth value is taken for one."""
    if not isinstance(value, (bool, int)) and type(value).__name__ != "bool":
        raise TypeError(f"{name} is {value!r}; want True or False")


def check_backend(backend: Any) -> None:
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend is {backend!r}; want a name or None")


def check_cumulative(name: str, values: Sequence[int], total: int) -> None:
    """Cumulative lengths start at 0, never decrease, and stay inside the `total` packed rows."""
    if values[0] != 0:
        raise ValueError(f"{name} starts at {values[0]}; want 0")
    for index, (a, b) in enumerate(pairwise(values)):
        if b < a:
            raise ValueError(
                f"{name} decreases from {a} to {b} at index {index + 1}; want it to grow"
            )
    if values[-1] > total:
        raise ValueError(f"{name} ends at {values[-1]}, past the {total} rows there are")


def check_used(name: str, used: Sequence[int], room: Sequence[int]) -> None:
    """Each used length is between 0 and the room its sequence has."""
    for index, (length, most) in enumerate(zip(used, room, strict=True)):
        if not 0 <= length <= most:
            raise ValueError(f"{name}[{index}] is {length}; want 0 to {most}")


def check_pages(tables: Sequence[Sequence[int]], used: Sequence[int], pages: int) -> None:
    """Each page that a sequence uses exists."""
    for sequence, (table, count) in enumerate(zip(tables, used, strict=True)):
        for index, page in enumerate(table[:count]):
            if not 0 <= page < pages:
                raise ValueError(
                    f"block_table[{sequence}, {index}] is {page}; want a page from 0 to {pages - 1}"
                )


def check_room(name: str, lengths: Sequence[int], count: int, capacity: int) -> None:
    """A cache has room for `count` more rows of each sequence."""
    for index, length in enumerate(lengths):
        if not 0 <= length <= capacity - count:
            raise ValueError(
                f"{name}[{index}] is {length}, and {count} new rows make {length + count}; "
                f"want 0 to {capacity}, which is all that the cache holds"
            )


def check_longest(name: str, lengths: Sequence[int], most: int) -> None:
    longest = max(lengths, default=0)
    if longest > most:
        raise ValueError(
            f"{name} is {most} and the longest sequence has {longest}; want at least that"
        )


def _check_tensor(name: str, tensor: Any) -> None:
    if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype") and hasattr(tensor, "device")):
        raise TypeError(f"{name} is of type {type(tensor).__name__}; want a torch.Tensor")
    # A NumPy array has all of these, but no layout.
    layout = str(getattr(tensor, "layout", type(tensor).__name__))
    if layout != "torch.strided":
        raise TypeError(f"{name} has the layout {layout}; want a strided torch.Tensor")


def _is_integer(value: Any) -> bool:
    # torch.compile traces a symbolic integer through isinstance, but not through hasattr.
    return not isinstance(value, bool) and (isinstance(value, int) or hasattr(value, "__index__"))


def _is_finite(name: str, value: float) -> bool:
    is_number = isinstance(value, (int, float)) or hasattr(value, "__float__")
    if isinstance(value, bool) or not is_number:
        raise TypeError(f"{name} is {value!r}; want a number")
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several elements
        raise TypeError(f"{name} is {value!r}; want a number") from error


def _shape(tensor: Any) -> str:
    return str(tuple(tensor.shape))
