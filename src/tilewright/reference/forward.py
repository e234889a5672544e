"""Forward attention by the formula ``softmax(scale Q K^T) V``, with every option."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewright.masks import Mask
from tilewright.operands import Operands
from tilewright.problem import Scoring


def forward(operands: Operands, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attention in the dtype of its inputs.

    q is (batch, seqlen_q, heads_q, dim), k (batch, seqlen_k, heads_k, dim), v the same with its
    own dim, sink (heads_q,). Returns out (batch, seqlen_q, heads_q, dim_v) and lse
    (batch, heads_q, seqlen_q), the natural logarithm of the softmax's denominator.
    """
    q, sink = operands.q, operands.sink
    k, v = (one_a_query_head(x, q.shape[2]) for x in (operands.k, operands.v))
    seen = visible(scoring.mask, q.shape[1], k.shape[1], q.device)
    logits = masked_logits(q, k, seen, scoring)
    lse = log_denominator(logits, sink)
    out = contract(probabilities(logits, lse), seen, v.transpose(1, 2))
    return out.transpose(1, 2), lse


def one_a_query_head(x: Tensor, heads_q: int) -> Tensor:
    """Repeat each key-value head for the query heads that share it."""
    return x.repeat_interleave(heads_q // x.shape[2], dim=2) if x.shape[2] else x


def visible(mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """(seqlen_q, seqlen_k) bool: whether query i sees key j."""
    position = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if mask.left is not None:
        seen &= key >= position - mask.left
    if mask.right is not None:
        seen &= key <= position + mask.right
    return seen


def raw_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale Q K^T, (batch, heads, seqlen_q, seqlen_k)."""
    return torch.einsum("bihd,bjhd->bhij", q, k) * scale


def masked_logits(q: Tensor, k: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    logits = raw_logits(q, k, scoring.scale)
    if scoring.softcap is not None:
        logits = scoring.softcap * torch.tanh(logits / scoring.softcap)
    # `where` and not an addition: what a key holds must not matter to a query that does not see it.
    return torch.where(seen, logits, -math.inf)


def log_denominator(logits: Tensor, sink: Tensor | None) -> Tensor:
    """log sum exp over the keys and the sink; -inf where there is neither."""
    if sink is not None:
        column = sink.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], -math.inf)
    largest = logits.amax(dim=-1)
    shift = torch.where(largest == -math.inf, 0.0, largest)
    return shift + torch.log(torch.exp(logits - shift[..., None]).sum(dim=-1))


def probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logit - lse); 0 where a key is hidden, also in a row whose lse is -inf or NaN."""
    return torch.where(logits == -math.inf, 0.0, torch.exp(logits - lse[..., None]))


def contract(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """sum over j of weights[i, j] values[j], over the pairs that `seen` holds only.

    A weight is 0 where a pair is not seen, but 0 * NaN is NaN. So rows of `values` that are not
    finite are left out of the product and added one by one to the rows that see them.
    """
    finite = torch.isfinite(values)
    total = weights @ torch.where(finite, values, 0.0)
    spoilt_rows = (~finite).flatten(0, 1).any(dim=-1).any(dim=0).nonzero().flatten().tolist()
    for j in spoilt_rows:
        alien = torch.where(finite[:, :, j], 0.0, values[:, :, j])[:, :, None, :]
        touched = seen[:, j, None] & ~finite[:, :, None, j]
        total = total + torch.where(touched, weights[..., j, None] * alien, 0.0)
    return total
