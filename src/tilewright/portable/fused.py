"""PyTorch's own fused CPU attention, for the problems that it can express.

It knows no mask, or a causal one aligned to the top left. Any mask without a left bound is a
rectangle of keys that every query sees, followed by a top-left causal part, so two calls merged
through their lse make it. What the kernel gets wrong at the edges is kept away from it by `why_not`
or found by looking at a row that would show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.operands import Gradients, Saved
from tilewright.portable.merge import merge
from tilewright.problem import AttentionProblem

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@lru_cache(maxsize=4096)
def why_not(problem: AttentionProblem) -> str | None:
    """Why this path cannot compute a problem, None if it can."""
    scoring = problem.scoring
    mask = scoring.mask.simplified(problem.seqlen_q, problem.seqlen_k)
    if not problem.device.startswith("cpu"):
        return f"PyTorch's fused CPU kernel cannot run on {problem.device}"
    if scoring.softcap is not None:
        return "PyTorch's fused CPU kernel has no softcap"
    if mask.left is not None:
        return f"PyTorch's fused CPU kernel has no bound on the left, as {mask} asks for"
    if mask.right is not None and scoring.scale <= 0:
        return f"PyTorch's fused CPU kernel multiplies -inf at hidden keys by scale={scoring.scale}"
    return None


@dataclass(frozen=True)
class Piece:
    """What one call computes: the query rows from `row` on, over a range of keys."""

    row: int
    first_key: int
    past_key: int
    is_causal: bool  # aligned to the top left of the piece


@lru_cache(maxsize=4096)
def pieces(problem: AttentionProblem) -> tuple[Piece, ...]:
    """Cut a mask without a left bound into what the kernel can express, same rows in each piece."""
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    mask = problem.scoring.mask.simplified(seqlen_q, seqlen_k)
    if mask.right is None:
        return (Piece(0, 0, seqlen_k, False),)
    # Row i sees key j iff j <= i + offset. Rows before -offset see nothing, so either there are
    # such rows or there are keys that every row sees, never both.
    offset = seqlen_k - seqlen_q + mask.right
    first_row, seen_by_all = max(0, -offset), max(0, offset)
    rectangle = (Piece(first_row, 0, seen_by_all, False),) if seen_by_all else ()
    return (*rectangle, Piece(first_row, seen_by_all, seqlen_k, True))


def forward(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor] | None:
    """(batch, seqlen, heads, dim) operands to (out, lse), or None if a hidden value leaked.

    The kernel multiplies the weight 0 of a hidden key with that key's value, and 0 * NaN is NaN.
    The last row sees every key of its piece, so a value that is not finite shows there.
    """
    dim_v, scale = v.shape[-1], problem.scoring.scale
    q, k, v = _for_kernel(q, k, v)
    parts = []
    for piece in pieces(problem):
        out, lse = _forward(*_cut(piece, q, k, v), 0.0, piece.is_causal, scale=scale)
        if piece.is_causal and _is_spoilt(out[:, :, -1]):
            return None
        out = out.transpose(1, 2)
        parts.append((out if out.shape[-1] == dim_v else out[..., :dim_v], lse))
    out, lse = reduce(merge, parts)
    if out.shape[1] < problem.seqlen_q:
        out = _with_empty_rows(out, 1, problem.seqlen_q, 0.0)
        lse = _with_empty_rows(lse, 2, problem.seqlen_q, -math.inf)
    return out, lse


def backward(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, saved: Saved
) -> Gradients | None:
    """Gradients of q, k and v, or None if a hidden value leaked. `saved` must hold no dlse.

    Each piece recomputes its weights against the lse of the whole row and takes rowsum(dO * O) of
    the whole output, so the pieces' gradients add up.
    """
    heads_first = _for_kernel(q, k, v)
    dim, dtype = heads_first[0].shape[-1], heads_first[0].dtype
    out, dout = (_padded(x, dim, dtype) for x in (saved.out, saved.dout))
    parts = []
    for piece in pieces(problem):
        rows = slice(piece.row, None)
        part = _backward(
            dout.transpose(1, 2)[:, :, rows],
            *_cut(piece, *heads_first),
            out.transpose(1, 2)[:, :, rows],
            saved.lse[:, :, rows],
            0.0,
            piece.is_causal,
            scale=problem.scoring.scale,
        )
        # The last row sees every key of the piece, and the first key is seen by every row.
        witnesses = part[0][:, :, -1], part[1][:, :, 0], part[2][:, :, 0]
        if piece.is_causal and any(map(_is_spoilt, witnesses)):
            return None
        parts.append([x.transpose(1, 2) for x in part])
    dq, dk, dv = zip(*parts, strict=True)
    whole_dq = _with_empty_rows(reduce(torch.add, dq), 1, q.shape[1], 0.0)
    return Gradients(
        q=whole_dq[..., : q.shape[-1]].to(q.dtype),
        k=_concatenated(dk)[..., : k.shape[-1]].to(k.dtype),
        v=_concatenated(dv)[..., : v.shape[-1]].to(v.dtype),
    )


def _for_kernel(*operands: Tensor) -> list[Tensor]:
    """(batch, heads, seqlen, dim) of one head dim, in the kernel's dtype."""
    dim = max([x.shape[-1] for x in operands])
    dtype = arithmetic_dtype(operands[0].dtype)
    return [_padded(x, dim, dtype).transpose(1, 2) for x in operands]


def _padded(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Zeros after the head dim change neither a score nor the columns that are kept."""
    x = x.to(dtype)
    if x.shape[-1] < dim:
        return pad(x, (0, dim - x.shape[-1]))
    # The kernel takes the last stride to be 1 without looking.
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache
def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the kernel is given: float32 in place of the half precisions, unless the CPU has AMX.

    Without AMX float32 is faster, and more exact; with it three times slower (docs/portable.md).
    """
    if dtype.itemsize > 2 or torch.cpu._is_amx_tile_supported():
        return dtype
    return torch.float32


def _cut(piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if piece.past_key - piece.first_key == k.shape[2] and piece.row == 0:
        return q, k, v
    keys = slice(piece.first_key, piece.past_key)
    return q[:, :, piece.row :], k[:, :, keys], v[:, :, keys]


def _is_spoilt(x: Tensor) -> bool:
    return not math.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).item())


def _with_empty_rows(x: Tensor, dim: int, rows: int, value: float) -> Tensor:
    """Put the rows that see no key before those that do."""
    missing = rows - x.shape[dim]
    if missing == 0:
        return x
    shape = [*x.shape[:dim], missing, *x.shape[dim + 1 :]]
    return torch.cat([x.new_full(shape, value), x], dim)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """The pieces' keys in a row; a single piece as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
