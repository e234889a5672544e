"""Launches FA-3's backward: prepare, the main kernel, finish.

The kernels' scale is positive, as the forward's is: q goes in times the sign of the call's. So dk,
which is a sum of q's rows, comes out with that sign, and dq gets it with the scale, in finish. A
scale of 0 is a q of 0 for dk, and a factor of 0 for dq.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright import jit
from tilewright.kernels import catalog
from tilewright.kernels.sm90.fa3.spec import MMA_ROWS
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec, RowsSpec, padded_rows
from tilewright.launch import device, fa3
from tilewright.launch.readable import for_tma
from tilewright.operands import Gradients, Operands, Saved
from tilewright.problem import AttentionProblem

LOG2_E = math.log2(math.e)
OCTET, FRAGMENT = 8, (128, 4)  # how the sums of dq lie: columns, and floats of a warpgroup's thread


def why_not(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot follow a forward that `fa3.why_not` does not object to."""
    return next(filter(None, map(jit.why_unavailable, kernels(problem))), None)


def kernels(problem: AttentionProblem) -> tuple[catalog.Kernel, catalog.Kernel, catalog.Kernel]:
    """prepare, the main kernel and finish."""
    wanted = BackwardSpec(*fa3.features(problem), deterministic=problem.deterministic)
    spec = catalog.tiled_backward(catalog.smallest(fa3.ARCH, catalog.FA3_BACKWARD, wanted))
    of_dout, of_dq = (
        RowsSpec(spec.dtype, dim, spec.packed) for dim in (spec.head_dim_v, spec.head_dim)
    )
    return (
        catalog.Kernel(catalog.FA3_PREPARE, of_dout, fa3.ARCH),
        catalog.Kernel(catalog.FA3_BACKWARD, spec, fa3.ARCH),
        catalog.Kernel(catalog.FA3_FINISH, of_dq, fa3.ARCH),
    )


class Launches(NamedTuple):
    """The loaded kernels of a problem, and what they are passed in every call."""

    spec: BackwardSpec
    prepare: Callable[..., Any]
    main: Callable[..., Any]
    finish: Callable[..., Any]
    used: int
    scalars: tuple[Any, ...]
    scale: float  # with its sign


class Workspace(NamedTuple):
    """What the kernels hand on: (batch, heads_q, r, ...), packed (heads_q, r, ...)."""

    lse_log2: Tensor  # float32
    delta: Tensor  # float32
    dq_sum: Tensor  # float32, (..., r // 64, octets, 128, 4)
    spoilt: Tensor  # int32, (1,): whether a row of dk or dv has come out as NaN or Inf


@lru_cache(maxsize=4096)
def _launches(problem: AttentionProblem, where: torch.device, used: int) -> Launches:
    prepare, main, finish = kernels(problem)
    return Launches(
        spec=main.spec,
        prepare=jit.load(prepare),
        main=jit.load(main),
        finish=jit.load(finish),
        used=used,
        scalars=fa3.scalars(problem, where, used),
        scale=float(problem.scoring.scale),
    )


def backward(
    problem: AttentionProblem, operands: Operands, saved: Saved, needs: Sequence[bool]
) -> Gradients:
    """Gradients of q, k, v and sink, in their dtypes; `needs` says which are wanted.

    On the tensors' own device, and on the caller's current stream there.
    """
    where = operands.q.device
    if device.current() != where.index:
        with torch.cuda.device(where):
            return backward(problem, operands, saved, needs)
    if problem.batch == 0 or 0 in operands.q.shape or 0 in operands.k.shape:
        return _without_pairs(operands, saved, needs)
    run = _launches(problem, where, fa3.used_lengths(operands))
    readable = fa3.readable(problem, operands)
    dout = for_tma(saved.dout)
    work = _prepare(run, readable, saved, dout)
    dq = dk = dv = dsink = None
    if any(needs[:3]):
        dk, dv = _main(run, readable, dout, work)
        # It also looks after rows of dk and dv that hidden rows have spoilt.
        dq = _finish(run, readable, (dout, dk, dv), work)
    if operands.sink is not None and needs[3]:
        dsink = _backward_of_sink(readable.sink, work).to(operands.sink.dtype)
    return Gradients(
        dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, dsink
    )


def _prepare(run: Launches, operands: Operands, saved: Saved, dout: Tensor) -> Workspace:
    *batch, rows, heads, _ = operands.q.shape
    bounds = operands.cu_seqlens_q
    padded = padded_rows(rows, 0 if bounds is None else len(bounds) - 1)
    fragments = padded // MMA_ROWS, run.spec.head_dim // OCTET, *FRAGMENT
    shapes = (padded,), (padded,), fragments
    work = Workspace(
        *(
            torch.empty(*batch, heads, *shape, dtype=torch.float32, device=dout.device)
            for shape in shapes
        ),
        spoilt=torch.empty(1, dtype=torch.int32, device=dout.device),
    )
    lse, dlse = (None if x is None else _as_float32(x) for x in (saved.lse, saved.dlse))
    bounds_q, _, used_q, _ = fa3.lengths(operands)
    run.prepare(
        for_tma(saved.out),
        dout,
        lse,
        lse if dlse is None else dlse,
        *work,
        bounds_q,
        used_q,
        run.used & 1,
        int(dlse is not None),
    )
    return work


def _main(
    run: Launches, operands: Operands, dout: Tensor, work: Workspace
) -> tuple[Tensor, Tensor]:
    q, k, v = operands[:3]
    dk, dv = (torch.empty(*x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    turns = None
    if run.spec.deterministic:
        *outer, rows = work.delta.shape
        turns = torch.zeros(
            *outer, rows // run.spec.tile_q, dtype=torch.int32, device=work.delta.device
        )
    run.main(
        *(q, k, v, dout, *work[:3], dk, dv, work.spoilt),
        *fa3.lengths(operands),
        device.tile_counter(q.device),
        turns,
        *run.scalars,
    )
    return dk, dv


def _finish(
    run: Launches, operands: Operands, grads: tuple[Tensor, Tensor, Tensor], work: Workspace
) -> Tensor:
    """dq; `grads` are dout, dk and dv."""
    (q, k, v), (dout, dk, dv) = operands[:3], grads
    dq = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
    *scalars, _ = run.scalars  # the CTAs are one a tile
    run.finish(
        *(work.dq_sum, dq, q, k, v, dout, work.lse_log2, work.delta, dk, dv, work.spoilt),
        *fa3.lengths(operands),
        run.scale,
        *scalars,
    )
    return dq


def _backward_of_sink(sink: Any, work: Workspace) -> Tensor:
    """(heads_q,) in float32. The sink has the weight exp(sink - lse) and the value 0.

    So dS = weight * (0 - delta). Where there is no row, lse is +inf and delta 0.
    """
    weight = torch.exp2(sink[:, None] * LOG2_E - work.lse_log2)
    by_row = weight * work.delta
    return -by_row.sum(dim=-1) if by_row.ndim == 2 else -by_row.sum(dim=(0, 2))


def _without_pairs(operands: Operands, saved: Saved, needs: Sequence[bool]) -> Gradients:
    """The same where no row sees a key: all that reaches a gradient is lse's, from the sink."""
    dq, dk, dv = (
        torch.zeros(x.shape, dtype=x.dtype, device=x.device) if need else None
        for x, need in zip(operands[:3], needs[:3], strict=True)
    )
    sink = operands.sink
    if sink is None or not needs[3]:
        return Gradients(dq, dk, dv)
    if saved.dlse is None:
        return Gradients(dq, dk, dv, torch.zeros_like(sink))
    # Also rows of no sequence are empty, whose dlse may be anything.
    is_empty = saved.lse == -math.inf
    heads_last = torch.where(is_empty, 0.0, saved.dlse).transpose(-1, -2)
    return Gradients(dq, dk, dv, heads_last.flatten(0, -2).sum(dim=0).to(sink.dtype))


def _as_float32(x: Tensor) -> Tensor:
    """Values that have no bit which negates them; their strides may be any."""
    return x.to(torch.float32).resolve_neg()
