"""One batch of equal sequences: empty cases, the choice of engine, the sink."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.operands import Gradients, Operands, Saved
from tilewright.portable import fused, tiled_backward, tiled_forward
from tilewright.portable.merge import join_sink
from tilewright.problem import AttentionProblem


def forward(problem: AttentionProblem, operands: Operands, fuse: bool) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, heads_q, dim_v) in q's dtype and lse (batch, heads_q, seqlen_q).

    With `fuse` PyTorch's fused CPU kernel does what it can; the tiles do the rest.
    """
    out, lse = _forward(problem, operands, fuse)
    if operands.sink is not None:
        out, lse = join_sink(out, lse, operands.sink)
    return out.to(operands.q.dtype), lse


def backward(
    problem: AttentionProblem,
    operands: Operands,
    saved: Saved,
    needs: Sequence[bool],
    fuse: bool,
) -> Gradients:
    """Gradients of q, k, v and sink; `needs` says which are wanted."""
    grads = _backward(problem, operands, saved, needs, fuse)
    if operands.sink is None or not needs[3]:
        return grads
    return grads._replace(sink=_backward_of_sink(operands.sink, saved))


def _forward(problem: AttentionProblem, operands: Operands, fuse: bool) -> tuple[Tensor, Tensor]:
    """Without the sink."""
    q, k, v = operands.q, operands.k, operands.v
    if _is_empty(operands):
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        return out, q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=lse_dtype)
    splits = problem.num_splits or 1
    if fuse and splits == 1 and fused.why_not(problem) is None:
        result = fused.forward(problem, q, k, v)
        if result is not None:
            return result
    return tiled_forward.forward(q, k, v, problem.scoring, splits)


def _backward(
    problem: AttentionProblem,
    operands: Operands,
    saved: Saved,
    needs: Sequence[bool],
    fuse: bool,
) -> Gradients:
    """Without the sink's own gradient; its weight is in the saved lse."""
    q, k, v = operands.q, operands.k, operands.v
    if _is_empty(operands) or not any(needs[:3]):
        pairs = zip((q, k, v), needs[:3], strict=True)
        return Gradients(*(torch.zeros_like(x) if need else None for x, need in pairs))
    if fuse and saved.dlse is None and fused.why_not(problem) is None:
        grads = fused.backward(problem, q, k, v, saved)
        if grads is not None:
            return grads
    return tiled_backward.backward(operands, problem.scoring, saved, needs)


def _is_empty(operands: Operands) -> bool:
    """No queries, or queries that have no key to see."""
    return 0 in operands.q.shape or 0 in operands.k.shape


def _backward_of_sink(sink: Tensor, saved: Saved) -> Tensor:
    """The sink has the weight exp(sink - lse) and the value 0, so dS = weight * (0 - delta)."""
    delta = tiled_backward.delta(saved, saved.lse.dtype)
    weight = torch.exp(sink.to(saved.lse.dtype)[None, :, None] - saved.lse)
    # With a sink of -inf a row may still be empty, and its weight is 0.
    weight = weight.masked_fill(saved.lse == -math.inf, 0.0)
    return -(weight * delta).sum(dim=(0, 2)).to(sink.dtype)
