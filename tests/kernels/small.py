"""Problems of a few tiles, each for one spec, and calls of its kernel with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.layouts import Placement, place
from tests.problems import Batch, random_batch, scoring
from tests.tolerance import assert_forward_accurate
from tilewright.kernels.sm90.fa3.spec import ForwardSpec
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec
from tilewright.launch.fa3 import NO_BOUND


@dataclass(frozen=True)
class Small:
    """`options` are those of the public functions; `ctas` are fewer than there are tiles."""

    lengths: list[tuple[int, int]]
    dims: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    layout: str = "dense"
    heads: tuple[int, int] = (1, 1)
    with_sink: bool = False
    ctas: int = 1

    def batch(self, spec: ForwardSpec | BackwardSpec, with_dlse: bool = False) -> Batch:
        dtype = getattr(torch, spec.dtype)
        return random_batch(self.lengths, self.heads, self.dims, dtype, self.with_sink, with_dlse)


# Of two problems for a mask's dense kernel, and two for its packed one. A bounded kernel also has
# to take no bound, a bound of 0, and bounds that are wider than the sequences.
_FULL = [{}, {"scale": 0.3}] * 2
_RIGHT = [{"causal": True}, {"window": (None, 5)}] * 2
_WINDOW = [{"window": x} for x in ((131, 2), (0, 0), (9, None), (10_000, 10_000))]
_SOFTCAP = [{"softcap": 3.0 + i} | x for i, x in enumerate([*_RIGHT[:1], {}, *_WINDOW[:2]])]


def options_of(spec: ForwardSpec | BackwardSpec) -> list[dict[str, Any]]:
    """Four that the kernel takes, the first two for a dense one."""
    if spec.has_softcap:
        return _SOFTCAP
    return _WINDOW if spec.bounded_left else _RIGHT if spec.bounded_right else _FULL


def small_problems(spec: ForwardSpec) -> dict[str, Small]:
    """At the edges of the spec's tiles; with heads that share keys, in dims that are no tile's."""
    options = options_of(spec)
    rows, keys, dims = spec.tile_q, spec.tile_kv, (spec.head_dim, spec.head_dim_v)
    other_dims = dims[0] - 8, dims[1] - 24
    shared: dict[str, Any] = {"heads": (3, 1), "with_sink": True, "ctas": 2}
    if not spec.packed:
        return {
            "edges": Small([(rows + 1, 2 * keys + 1)], dims, options[0]),
            "heads": Small([(rows, keys - 1)], other_dims, options[1], **shared),
        }
    unused = [(rows + 1, keys + 1), (0, 5), (3, 0), (1, keys)]  # with gaps, and rows past the end
    many = [(1, 3), *[(0, 0)] * 31, (rows - 1, keys)]  # of which the scheduler sees 32 at a time
    return {
        "edges": Small(unused, dims, options[2], "used", ctas=2),
        "heads": Small(many, other_dims, options[3], "varlen", **shared),
    }


def growing(spec: ForwardSpec, scale: float = 3.0) -> Small:
    """One in which the maxima of rows grow from key block to key block, by far; dense.

    A left bound cuts the first block, whose maxima are the last to be seen.
    """
    dims = spec.head_dim, spec.head_dim_v
    lengths = [(spec.tile_q + 1, 3 * spec.tile_kv + 1)]
    left = 2 * spec.tile_kv if spec.bounded_left else None
    window = (left, 0 if spec.bounded_right else None)
    return Small(lengths, dims, {"window": window, "scale": scale})


@dataclass
class Results:
    """Whole tensors, (rows, heads, dim) and (rows, heads) behind a dense one's batch."""

    out: Tensor
    lse: Tensor
    placement: Placement
    call: Any  # what the kernel returned


def attend(kernel: Callable[..., Any], spec: ForwardSpec, small: Small) -> Results:
    """Call a kernel. All that it may not read, and all that it is to write, is NaN before."""
    batch = small.batch(spec)
    placement = place(small.layout, batch)
    q = placement.queries.store([x.q for x in batch.sequences])
    k, v = (placement.keys.store([getattr(x, n) for x in batch.sequences]) for n in "kv")
    out = q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan)
    sink = torch.full((q.shape[-2],), -torch.inf) if batch.sink is None else batch.sink.float()
    rule = scoring(q.shape[-1], small.options)
    left, right = (NO_BOUND if x is None else x for x in (rule.mask.left, rule.mask.right))
    counter = torch.zeros(2, dtype=torch.int32)
    call = kernel(
        *(q, k, v, out, lse, sink, *lengths_of(placement), counter),
        *(rule.scale, rule.softcap or 0.0, left, right),
        3 if small.layout == "used" else 0,
        small.ctas,
    )
    assert counter.tolist() == [0, 0]
    return Results(out, lse.transpose(-1, -2), placement, call)


def lengths_of(placement: Placement) -> list[Tensor | None]:
    """cu_seqlens and seqused, as kernels take them."""
    given = placement.arguments
    bounds = [given.get(f"cu_seqlens_{side}") for side in "qk"]
    return bounds + [given.get(f"seqused_{x}", b) for x, b in zip("qk", bounds, strict=True)]


def assert_right(results: Results, spec: ForwardSpec, small: Small) -> None:
    """By the oracle and the rule of accuracy; rows of no sequence have out 0 and lse -inf."""
    queries = results.placement.queries
    out, lse = queries.parts_of(results.out), queries.parts_of(results.lse)
    batch = small.batch(spec)
    assert_forward_accurate(out, [x.T for x in lse], batch, torch.float32, **small.options)
    assert not queries.outside(results.out).any()
    assert torch.isneginf(queries.outside(results.lse[..., None])).all()
