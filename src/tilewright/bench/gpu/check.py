"""What a case's result is, in float32, and how far a contender's is from it.

A wrong result has no time. The reference is plain: all logits of some heads at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilewright.bench.cases import Case
from tilewright.bench.gpu.contenders import Operands
from tilewright.masks import Mask

# bfloat16 is half a unit, 2^-9, off at the most. That happens to the weights and to the output,
# and over a row of random values either error has at the most that norm, relative to the row's:
# 2^-8 together, and as much again for what an exp2 of less than float32 adds. A row that misses 128
# of 16k keys is off by 2^-3.5. Gradients go through twice as many roundings.
ROW_BOUND = 2.0**-7
GRADIENT_BOUND = 2.0**-6

LOGITS = 1 << 28  # at once; 1 GiB


def expected(case: Case, operands: Operands, direction: str) -> tuple[Tensor, ...]:
    """float32: (out,), or (dq, dk, dv), in the operands' layout."""
    is_backward = direction == "backward"
    results = operands.inputs if is_backward else (operands.dout,)
    filled = tuple(torch.full_like(x, torch.nan, dtype=torch.float32) for x in results)
    inputs = (*operands.inputs, operands.dout)
    for (seqlen_q, seqlen_k), parts in _sequences(case, [*inputs, *filled]):
        hidden = _hidden(case.mask, seqlen_q, seqlen_k, operands.q.device)
        group = case.heads_q // case.heads_k
        at_once = max(1, LOGITS // (group * seqlen_q * seqlen_k))
        for first in range(0, case.heads_k, at_once):
            of_k = slice(first, first + at_once)
            of_q = slice(group * first, group * (first + at_once))
            parts_of = (of_q, of_k, of_k, of_q)
            q, k, v, dout = (x[:, part] for x, part in zip(parts[:4], parts_of, strict=True))
            found = _gradients(q, k, v, dout, hidden) if is_backward else (_out(q, k, v, hidden),)
            for target, part, value in zip(parts[4:], parts_of, found, strict=False):
                target[:, part] = value
    return filled


def error(found: Sequence[Tensor], wanted: Sequence[Tensor], direction: str) -> float:
    """The largest relative error of a row of out, or of one head's gradient; NaN if one is NaN."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"a result has shape {tuple(a.shape)}, want {tuple(b.shape)}")
        dims = (-1,) if direction == "forward" else tuple({-1, -3})
        norms = (a.float() - b).norm(dim=dims) / b.norm(dim=dims)
        worst = max(float(norms.max()), worst) if not norms.isnan().any() else torch.nan
        if worst != worst:
            return worst
    return worst


def bound(direction: str) -> float:
    return ROW_BOUND if direction == "forward" else GRADIENT_BOUND


def _sequences(
    case: Case, tensors: Sequence[Tensor]
) -> Iterator[tuple[tuple[int, int], list[Tensor]]]:
    """Each sequence's lengths, and its rows of every tensor."""
    first = 0
    for index, lengths in enumerate(case.sequences()):
        if case.lengths:
            yield lengths, [x[first : first + lengths[0]] for x in tensors]
            first += lengths[0]
        else:
            yield lengths, [x[index] for x in tensors]


def _hidden(mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor | None:
    if mask == Mask.full():
        return None
    i = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=device)
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if mask.right is not None:
        hidden |= j > i + mask.right
    if mask.left is not None:
        hidden |= j < i - mask.left
    return hidden


def _out(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Of (rows, heads, dim)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    return (logits.softmax(dim=-1) @ v).transpose(0, 1)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, hidden: Tensor | None
) -> tuple[Tensor, ...]:
    leaves = q, k, v = tuple(x.float().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        out = _out(q, k, v, hidden)
    return torch.autograd.grad(out, leaves, dout.float())
