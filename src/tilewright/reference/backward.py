"""Gradients of attention by explicit formulas.

With P = exp(S - lse) and D = rowsum(dO * O):
dV = P^T dO,  dP = dO V^T,  dS = P * (dP - D + dlse),  dQ = scale dS K,  dK = scale dS^T Q.
Source: FlashAttention (arXiv 2205.14135), appendix B.4; the terms of lse, softcap and sink follow
by the chain rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.operands import Operands
from tilewright.problem import Scoring
from tilewright.reference.forward import (
    contract,
    log_denominator,
    masked_logits,
    one_a_query_head,
    probabilities,
    raw_logits,
    visible,
)


def backward(
    operands: Operands, scoring: Scoring, dout: Tensor, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink of ``sum(out * dout) + sum(lse * dlse)``; shapes as in `forward`."""
    q, k, v, sink = operands.q, operands.k, operands.v, operands.sink
    heads_q, heads_k = q.shape[2], k.shape[2]
    k_all, v_all = (one_a_query_head(x, heads_q) for x in (k, v))
    seen = visible(scoring.mask, q.shape[1], k.shape[1], q.device)
    logits = masked_logits(q, k_all, seen, scoring)
    lse = log_denominator(logits, sink)
    p = probabilities(logits, lse)
    values, grads = v_all.transpose(1, 2), dout.transpose(1, 2)
    out = contract(p, seen, values)

    row_term = (grads * out).sum(dim=-1)
    if dlse is not None:
        row_term = row_term - dlse
    dp = grads @ values.transpose(-1, -2)
    ds = torch.where(seen, p * (dp - row_term[..., None]), 0.0)
    if scoring.softcap is not None:
        capped = torch.tanh(raw_logits(q, k_all, scoring.scale) / scoring.softcap)
        ds = torch.where(seen, ds * (1 - capped**2), 0.0)
    ds = ds * scoring.scale

    dq = contract(ds, seen, k_all.transpose(1, 2))
    dk = contract(ds.transpose(-1, -2), seen.T, q.transpose(1, 2))
    dv = contract(p.transpose(-1, -2), seen.T, grads)
    dsink = None
    if sink is not None:
        column = sink.to(lse.dtype)[None, :, None, None].expand(*lse.shape, 1)
        dsink = -(probabilities(column, lse)[..., 0] * row_term).sum(dim=(0, 2)).to(sink.dtype)
    return (
        dq.transpose(1, 2),
        _sum_of_group(dk.transpose(1, 2), heads_k),
        _sum_of_group(dv.transpose(1, 2), heads_k),
        dsink,
    )


def _sum_of_group(grad: Tensor, heads_k: int) -> Tensor:
    """Add up what the query heads that share a key-value head send back to it."""
    if grad.shape[2] == heads_k:
        return grad
    return grad.unflatten(2, (heads_k, -1)).sum(dim=3)
