"""The backward's three kernels as `standin.StandIn` loads them: by their formulas, in float64.

Each uses what the one before it wrote, and nothing else: a workspace that is passed wrongly is a
wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.kernels.workspace import rows_of, sums_of
from tests.launch.contract import (
    LENGTHS,
    SCALARS,
    check_counter,
    check_lengths,
    check_rows,
    check_scalars,
    rule_of,
    spans,
)
from tests.layouts import Index
from tilewright.kernels.catalog import Kernel
from tilewright.kernels.sm90.fa3_backward.spec import padded_rows, padded_start
from tilewright.problem import Scoring
from tilewright.reference.forward import masked_logits, one_a_query_head, raw_logits, visible

LENGTHS_Q = ("cu_seqlens_q", "seqused_q")


def check_prepare(kernel: Kernel, given: dict[str, Any]) -> None:
    spec, out = kernel.spec, given["out"]
    check_rows(spec, given, ("out", "dout"))
    check_lengths(spec, given, "q")
    assert out.shape == given["dout"].shape and out.shape[-1] <= spec.head_dim
    for name in ("lse", "dlse"):
        x = given[name]
        assert x.dtype == torch.float32 and not x.is_neg()
        assert x.transpose(-1, -2).shape == out.shape[:-1]
    check_workspace(given, out)
    assert given["used"] in (0, 1) and given["has_dlse"] in (0, 1)


def check_workspace(given: dict[str, Any], rows: Tensor) -> None:
    """The tensors of the workspace that are passed, for the rows of q, out or dq."""
    assert given["spoilt"].dtype == torch.int32 and given["spoilt"].shape == (1,)
    *batch, total, heads, _ = rows.shape
    bounds = given["cu_seqlens_q"]
    padded = padded_rows(total, 0 if bounds is None else len(bounds) - 1)
    for name in ("lse_log2", "delta"):
        if name in given:
            x = given[name]
            assert x.shape == (*batch, heads, padded) and x.is_contiguous()
            assert x.dtype == torch.float32
    sums = given["dq_sum"]
    assert sums.shape[:-3] == (*batch, heads, padded // 64) and sums.shape[-2:] == (128, 4)
    assert sums.dtype == torch.float32 and sums.is_contiguous()


def prepare(kernel: Kernel, given: dict[str, Any]) -> None:
    lse_log2, delta = given["lse_log2"], given["delta"]
    lse_log2.fill_(math.inf)
    delta.zero_()
    given["dq_sum"].zero_()
    given["spoilt"].zero_()
    for rows, at in places(kernel, given, given["out"]):
        lse, dlse = (given[name].transpose(-1, -2)[rows].T for name in ("lse", "dlse"))
        terms = (given["out"][rows].double() * given["dout"][rows].double()).sum(-1).T
        terms = terms - dlse if given["has_dlse"] else terms
        is_empty = lse == -math.inf
        lse_log2[at] = torch.where(is_empty, math.inf, lse * math.log2(math.e))
        delta[at] = torch.where(is_empty, 0.0, terms).float()


def check_main(kernel: Kernel, given: dict[str, Any]) -> None:
    spec, q, k, v = kernel.spec, given["q"], given["k"], given["v"]
    check_rows(spec, given, ("q", "k", "v", "dout", "dk", "dv"))
    check_lengths(spec, given, "qk")
    check_counter(given)
    check_scalars(given)
    assert (given["softcap"] > 0) == spec.has_softcap
    check_workspace(given, q)
    assert spec.head_dim == given["dq_sum"].shape[-3] * 8 >= q.shape[-1]
    assert spec.head_dim_v >= v.shape[-1] == given["dout"].shape[-1]
    assert given["dk"].shape == k.shape and given["dv"].shape == v.shape
    assert given["dk"].is_contiguous() and given["dv"].is_contiguous()
    turns = given["turns"]
    if not spec.deterministic:
        assert turns is None
        return
    *outer, padded = given["delta"].shape
    assert turns.shape == (*outer, padded // spec.tile_q) and turns.dtype == torch.int32
    assert not turns.any()


def main(kernel: Kernel, given: dict[str, Any]) -> None:
    rule = rule_of(kernel.spec, given)
    sums = rows_of(given["dq_sum"])
    dk, dv = (given[name].zero_() for name in ("dk", "dv"))
    if kernel.spec.packed:
        keys = [slice(*span) for span in spans(given, "k")]
    else:
        keys = list(range(len(dk)))
    for (rows, at), key in zip(places(kernel, given, given["q"]), keys, strict=True):
        piece = [given[name][rows][None].double() for name in ("q", "dout")]
        piece += [given[name][key][None].double() for name in ("k", "v")]
        terms = [given[name][at][None].double() for name in ("lse_log2", "delta")]
        dq, dk[key], dv[key] = gradients(rule, piece, terms)
        sums[at][..., : dq.shape[-1]] += dq
    given["dq_sum"].copy_(sums_of(sums))
    given["spoilt"][0] = int(not all(x.isfinite().all() for x in (dk, dv)))


def gradients(rule: Scoring, piece: list[Tensor], terms: list[Tensor]) -> tuple[Tensor, ...]:
    """dS K without the scale, (heads, rows, dim), dk and dv (keys, heads, dim) of one sequence."""
    q, dout, k, v = piece
    lse_log2, delta = (x[..., None] for x in terms)
    heads_k = k.shape[2]
    k, v = (one_a_query_head(x, q.shape[2]) for x in (k, v))
    seen = visible(rule.mask, q.shape[1], k.shape[1], q.device)
    logits = masked_logits(q, k, seen, rule)
    p = torch.exp2(logits * math.log2(math.e) - lse_log2)
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout, v) - delta)
    if rule.softcap is not None:
        ds = ds * (1 - torch.tanh(raw_logits(q, k, rule.scale) / rule.softcap) ** 2)
    dq = torch.einsum("bhij,bjhd->bhid", ds, k)[0]
    dk = torch.einsum("bhij,bihd->bjhd", ds, q)[0] * rule.scale
    dv = torch.einsum("bhij,bihd->bjhd", p, dout)[0]
    return dq, *(x.unflatten(1, (heads_k, -1)).sum(dim=2) for x in (dk, dv))


def check_finish(kernel: Kernel, given: dict[str, Any]) -> None:
    spec, dq = kernel.spec, given["dq"]
    check_rows(spec, given, ("dq", "q", "k", "v", "dout", "dk", "dv"))
    check_lengths(spec, given, "qk")
    check_workspace(given, dq)
    assert dq.is_contiguous() and dq.shape == given["q"].shape
    assert given["dk"].shape == given["k"].shape and given["dv"].shape == given["v"].shape
    assert given["spoilt"].tolist() in ([0], [1]), "the kernels before it have said"
    assert spec.head_dim == given["dq_sum"].shape[-3] * 8 >= dq.shape[-1]
    assert type(given["signed_scale"]) is float
    assert abs(given["signed_scale"]) in (given["scale"], 0.0)
    check_scalars(given)


def finish(kernel: Kernel, given: dict[str, Any]) -> None:
    dq, sums = given["dq"].zero_(), rows_of(given["dq_sum"])
    for rows, at in places(kernel, given, dq):
        scaled = sums[at][..., : dq.shape[-1]] * given["signed_scale"]
        dq[rows] = scaled.transpose(0, 1).to(dq.dtype)


def places(kernel: Kernel, given: dict[str, Any], x: Tensor) -> Iterator[tuple[Any, Index]]:
    """Where each sequence's rows lie in x, and its (heads, rows) in the workspace."""
    if not kernel.spec.packed:
        yield from ((b, (b, slice(None), slice(0, x.shape[1]))) for b in range(len(x)))
        return
    starts = given["cu_seqlens_q"].tolist()
    for i, (start, stop) in enumerate(spans(given, "q")):
        first = padded_start(starts[i], i)
        yield slice(start, stop), (slice(None), slice(first, first + stop - start))


WORKSPACE = ("lse_log2", "delta", "dq_sum")
PREPARE = (
    ("out", "dout", "lse", "dlse", *WORKSPACE, "spoilt", *LENGTHS_Q, "used", "has_dlse"),
    check_prepare,
    prepare,
)
MAIN = (
    (
        *("q", "k", "v", "dout", *WORKSPACE, "dk", "dv", "spoilt"),
        *(*LENGTHS, "counter", "turns", *SCALARS),
    ),
    check_main,
    main,
)
FINISH = (
    (
        *("dq_sum", "dq", "q", "k", "v", "dout", "lse_log2", "delta", "dk", "dv", "spoilt"),
        *(*LENGTHS, "signed_scale", *SCALARS[:-1]),
    ),
    check_finish,
    finish,
)
