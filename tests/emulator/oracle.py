"""Attention in float64 and in the input's own type, forward and backward, written out."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Attention(NamedTuple):
    """out, dq, dk, dv (S, D) and lse (S,) of one head."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    causal: bool,
) -> Attention:
    """In the type of the inputs: every intermediate is rounded to it. q, k, v, dout (S, D)."""
    scale = q.shape[-1] ** -0.5
    s = q @ k.T * scale
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    lse = s.double().logsumexp(1)
    p = (s.double() - lse[:, None]).exp().to(s.dtype)  # (q, k)
    out = p @ v
    delta = (out * dout).sum(1, keepdim=True)
    ds = p * (dout @ v.T - delta) * scale
    return Attention(out, lse, ds @ k, ds.T @ q, p.T @ dout)


def assert_as_exact_as_type(actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """The error is within twice that of the same-type computation, plus one rounding."""
    error = (actual.double() - exact).abs().max()
    allowed = 2 * (plain.double() - exact).abs().max()
    allowed += exact.abs().max() * torch.finfo(plain.dtype).eps
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"
