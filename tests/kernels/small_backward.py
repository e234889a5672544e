"""The same for the main kernel of a backward pass: problems of a few tiles, and calls with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kernels.small import Small, lengths_of, options_of
from tests.kernels.workspace import Workspace, rows_of, workspace
from tests.layouts import Placement, place
from tests.paths import by_formula
from tests.problems import Batch, scoring
from tests.tolerance import assert_error_within, sizes_of_terms
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec
from tilewright.launch.fa3 import NO_BOUND


def small_problems(spec: BackwardSpec) -> dict[str, Small]:
    """With more tiles of rows than a ring has slots, and, of a cluster, with a second that has keys
    for one CTA only; with heads that share keys, in dims that are no tile's."""
    options = options_of(spec)
    rows, keys = (spec.q_stages + 1) * spec.tile_q, spec.cluster_keys
    dims = spec.head_dim, spec.head_dim_v
    other_dims = dims[0] - 8, dims[1] - 24
    ctas = 2 * spec.cluster
    shared: dict[str, Any] = {"heads": (3, 1), "with_sink": True, "ctas": ctas}
    if not spec.packed:
        return {
            "edges": Small([(rows + 1, keys + 1)], dims, options[0]),
            "heads": Small([(spec.tile_q, 2 * keys - 1)], other_dims, options[1], **shared),
        }
    unused = [(rows + 1, keys + 1), (0, 5), (3, 0), (1, keys)]  # with gaps, and rows past the end
    many = [(1, 3), *[(0, 0)] * 31, (spec.tile_q - 1, keys)]  # more than there are lanes
    return {
        "edges": Small(unused, dims, options[2], "used", ctas=ctas),
        "heads": Small(many, other_dims, options[3], "varlen", **shared),
    }


@dataclass
class Results:
    """What the kernel wrote; dq's sums are in `work`."""

    work: Workspace
    dk: Tensor
    dv: Tensor
    placement: Placement
    call: Any  # what the kernel returned


def attend_backward(kernel: Callable[..., Any], spec: BackwardSpec, small: Small) -> Results:
    """Call a kernel with what prepare makes of the oracle's forward.

    All that it may not read, and all that it is to write and not to add to, is NaN before.
    """
    batch = small.batch(spec, with_dlse=True)
    placement = place(small.layout, batch)
    q, dout = (
        placement.queries.store([getattr(x, n) for x in batch.sequences]) for n in ("q", "dout")
    )
    k, v = (placement.keys.store([getattr(x, n) for x in batch.sequences]) for n in ("k", "v"))
    work = workspace(placement, q.shape[-2], spec.head_dim)
    fill(work, batch, small.options)
    dk, dv = (torch.full_like(x, torch.nan) for x in (k, v))
    rule = scoring(q.shape[-1], small.options)
    left, right = (NO_BOUND if x is None else x for x in (rule.mask.left, rule.mask.right))
    counter, turns = torch.zeros(2, dtype=torch.int32), None
    if spec.deterministic:
        *outer, padded = work.delta.shape
        turns = torch.zeros(*outer, padded // spec.tile_q, dtype=torch.int32)
    call = kernel(
        *(q, k, v, dout, work.lse_log2, work.delta, work.dq_sum, dk, dv, work.spoilt),
        *(*lengths_of(placement), counter, turns),
        *(rule.scale, rule.softcap or 0.0, left, right),
        3 if small.layout == "used" else 0,
        small.ctas,
    )
    assert counter.tolist() == [0, 0]
    return Results(work, dk, dv, placement, call)


def fill(work: Workspace, batch: Batch, options: dict[str, Any]) -> None:
    """As prepare does, from the oracle's lse, and from its out as a forward would round it."""
    work.lse_log2.fill_(math.inf)
    work.delta.zero_()
    work.dq_sum.zero_()
    work.spoilt.zero_()
    exact = by_formula(batch, torch.float64, **options)
    for x, out, lse, at in zip(batch.sequences, exact.out, exact.lse, work.at, strict=True):
        is_empty = lse == -math.inf
        delta = (out.to(batch.dtype).double() * x.dout.double()).sum(-1) - x.dlse
        work.lse_log2[at] = (lse * math.log2(math.e)).masked_fill(is_empty, math.inf).float().T
        work.delta[at] = delta.masked_fill(is_empty, 0.0).float().T


def assert_right(results: Results, spec: BackwardSpec, small: Small) -> None:
    """By the oracle and the rule of accuracy; keys of no sequence have gradients of 0.

    NaN around the sequences spoils nothing that finish would have to look after.
    """
    assert results.work.spoilt.tolist() == [0]
    batch, keys = small.batch(spec, with_dlse=True), results.placement.keys
    scale = scoring(small.dims[0], small.options).scale
    sums = rows_of(results.work.dq_sum)[..., : small.dims[0]] * scale
    got = {
        "dq": [sums[at].transpose(0, 1).to(batch.dtype) for at in results.work.at],
        "dk": keys.parts_of(results.dk),
        "dv": keys.parts_of(results.dv),
    }
    exact, plain = (by_formula(batch, t, **small.options) for t in (torch.float64, batch.dtype))
    sizes, logit = sizes_of_terms(batch, small.options)
    for name, parts in got.items():
        want, reference, size = (getattr(x, name) for x in (exact, plain, sizes))
        assert_error_within(name, parts, want, reference, size, logit)
    assert not keys.outside(results.dk).any() and not keys.outside(results.dv).any()
