"""How far a result may be from the exact one. Nothing here is tuned.

A result may be wrong, against the oracle in float64, by twice the error of plain attention in the
same dtype on the same inputs, plus a rounding band. The band is what first-order rounding analysis
allows: each sum of products may lose one unit of its dtype's precision on the sum of its terms'
sizes, and each weight exp(s - lse) loses as many units of the arithmetic's precision as its logit
is large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tests.paths import Results, by_formula, exact_device
from tests.problems import Batch, OneSequence, scoring
from tilewright.portable.fused import arithmetic_dtype
from tilewright.reference.forward import (
    log_denominator,
    masked_logits,
    one_a_query_head,
    probabilities,
    visible,
)


def assert_accurate(got: Results, batch: Batch, **options: Any) -> None:
    """Hold every result and gradient of a call to the rule of accuracy."""
    exact = by_formula(batch, torch.float64, **options)
    plain = by_formula(batch, batch.dtype, **options)
    arithmetic = arithmetic_dtype(batch.dtype)
    if arithmetic != batch.dtype:  # lse comes in the arithmetic's dtype, and is judged in that
        plain.lse = by_formula(batch, arithmetic, **options).lse
    sizes, largest_logit = sizes_of_terms(batch, options)
    if batch.dtype == torch.float64:
        plain = _plain_in_float64(exact, batch, options)
    for name, tensors in got.named():
        want, reference, size = (getattr(x, name) for x in (exact, plain, sizes))
        if not tensors:
            assert not want, f"{name} is missing"
            continue
        assert_error_within(name, tensors, want, reference, size, largest_logit)


def assert_forward_accurate(
    out: Iterable[Tensor],
    lse: Iterable[Tensor],
    batch: Batch,
    arithmetic: torch.dtype | None = None,
    **options: Any,
) -> None:
    """The rule for out (rows, heads, dim) and lse (heads, rows) of each sequence, on the CPU.

    lse is judged in the arithmetic's dtype, which is that of this CPU's path if none is given.
    """
    if batch.dtype == torch.float64:  # where plain attention would be the oracle itself
        batch = batch.to(torch.float32)
        out, lse = ([x.float() for x in parts] for parts in (out, lse))
    arithmetic = arithmetic or arithmetic_dtype(batch.dtype)
    exact, plain, plain_lse = (
        by_formula(batch, dtype, with_gradients=False, **options)
        for dtype in (torch.float64, batch.dtype, arithmetic)
    )
    sizes, logit = sizes_of_terms(batch, options)
    assert_error_within("out", list(out), exact.out, plain.out, sizes.out, logit)
    assert_error_within("lse", [x.T for x in lse], exact.lse, plain_lse.lse, sizes.lse, logit)


def assert_error_within(
    name: str,
    got: list[Tensor],
    exact: list[Tensor],
    plain: list[Tensor],
    sizes: list[Tensor],
    largest_logit: float,
) -> None:
    """The rule for one result: shaped as `exact`, -inf where that is, and close where finite."""
    for index, (a, b) in enumerate(zip(got, exact, strict=True)):
        assert a.shape == b.shape, f"{name}[{index}] has shape {a.shape}, want {b.shape}"
        is_empty = b == -math.inf
        assert torch.equal(a == -math.inf, is_empty), f"{name}[{index}]: other rows are empty"
        assert torch.isfinite(a[torch.isfinite(b)]).all(), f"{name}[{index}] is not finite"
    dtype = got[0].dtype
    arithmetic = torch.promote_types(dtype, torch.float32)
    units = torch.finfo(dtype).eps + torch.finfo(arithmetic).eps * largest_logit
    plain_error, band = largest_error(plain, exact), units * max_of(sizes)
    allowed = 2.0 * plain_error + band
    if dtype == torch.float64:  # `exact` is as far from the truth as plain attention is
        allowed += plain_error + band
    error = largest_error(got, exact)
    assert error <= allowed, f"{name} is off by {error:.3e}, allowed are {allowed:.3e}"


def _plain_in_float64(exact: Results, batch: Batch, options: dict[str, Any]) -> Results:
    """`exact`, off by plain attention's error in float32, scaled down to float64.

    In float64 plain attention is the oracle, and its own error is of the size to be judged. Errors
    are proportional to eps in the first order.
    """
    rounded = batch.to(torch.float32)
    plain, baseline = (by_formula(rounded, t, **options) for t in (torch.float32, torch.float64))
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    names = ("out", "lse", "dq", "dk", "dv", "dsink")
    lists = {
        name: [
            e + ratio * torch.nan_to_num(p.double() - b, 0.0)
            for e, p, b in zip(*(getattr(x, name) for x in (exact, plain, baseline)), strict=True)
        ]
        for name in names
    }
    return Results(**lists, outside=[])


def rounding(x: Tensor) -> Tensor:
    """By how much, at the most, each element was changed when it was rounded to its dtype."""
    return x.double().abs() * (0.5 * torch.finfo(x.dtype).eps)


def largest_error(got: list[Tensor], exact: list[Tensor]) -> float:
    """Over all entries whose exact value is finite."""
    errors = [
        torch.where(torch.isfinite(b), (a.double() - b.double()).abs(), 0.0)
        for a, b in zip(got, exact, strict=True)
    ]
    return max_of(errors)


def max_of(tensors: list[Tensor]) -> float:
    return max((x.max().item() for x in tensors if x.numel()), default=0.0)


def sizes_of_terms(batch: Batch, options: dict[str, Any]) -> tuple[Results, float]:
    """The sum of the absolute terms of each sum that makes a result, and the largest logit's."""
    batch = batch.to(exact_device(batch)).to(torch.float64)
    parts = [_sizes(x, batch.sink, options) for x in batch.sequences]
    keys = ("out", "lse", "dq", "dk", "dv", "dsink")
    results = Results(**{name: [part[name] for part in parts] for name in keys}, outside=[])
    return results, max_of([part["logit"] for part in parts])


def _sizes(x: OneSequence, sink: Tensor | None, options: dict[str, Any]) -> dict[str, Tensor]:
    """As in the oracle's backward, with the absolute value of each term."""
    q, k, v, dout = (t[None] for t in (x.q, x.k, x.v, x.dout))
    rule = scoring(q.shape[-1], options)
    k, v = (one_a_query_head(t, q.shape[2]) for t in (k, v))
    seen = visible(rule.mask, q.shape[1], k.shape[1], q.device)
    logits = masked_logits(q, k, seen, rule)
    lse = log_denominator(logits, sink)
    p = probabilities(logits, lse)
    q, k, v, dout = (
        torch.nan_to_num(t, 0.0, 0.0, 0.0).abs().transpose(1, 2) for t in (q, k, v, dout)
    )
    row_term = (dout * (p @ v)).sum(-1) + (0.0 if x.dlse is None else x.dlse.T[None].abs())
    ds = abs(rule.scale) * p * (dout @ v.transpose(-1, -2) + row_term[..., None])
    size_of_logits = abs(rule.scale) * q @ k.transpose(-1, -2)
    largest = size_of_logits.amax(-1) if k.shape[2] else torch.zeros_like(lse)
    if rule.softcap is not None:
        # The cap is rounded too, and of a logit's error at most 1 / cosh^2(x / c) remains.
        largest = largest.clamp(max=1.5 * rule.softcap)
    weight_of_sink = torch.zeros(()) if sink is None else torch.exp(sink[None, :, None] - lse)
    return {
        "out": p @ v,
        "lse": largest + 1.0,
        "dq": ds @ k,
        "dk": _over_group(ds.transpose(-1, -2) @ q, x),
        "dv": _over_group(p.transpose(-1, -2) @ dout, x),
        "dsink": (weight_of_sink * row_term).sum((0, 2)),
        "logit": largest if sink is None else torch.maximum(largest, sink.abs()[None, :, None]),
    }


def _over_group(size: Tensor, x: OneSequence) -> Tensor:
    """Query heads that share a key-value head add up."""
    group = x.q.shape[1] // x.k.shape[1]
    return size.unflatten(1, (-1, group)).sum(dim=2)
