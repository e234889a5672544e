"""Launches FA-3's backward: prepare, the main kernel, finish.

The kernels' scale is positive, as the forward's is: q goes in times the sign of the call's. So dk,
which is a sum of q's rows, comes out with that sign, and dq gets it with the scale, in finish. A
scale of 0 is a q of 0 for dk, and a factor of 0 for dq.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright import jit
from tilewright.kernels import catalog
from tilewright.kernels.sm90.fa3.spec import MMA_ROWS
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec, RowsSpec, padded_rows
from tilewright.launch import device, fa3
from tilewright.launch.device import Allocate, allocator
from tilewright.launch.readable import ALIGNMENT, for_tma, is_aligned
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
    smallest = catalog.smallest(fa3.ARCH, catalog.FA3_BACKWARD, wanted)
    return _kernels_around(catalog.tiled_backward(smallest))


def _kernels_around(
    spec: BackwardSpec,
) -> tuple[catalog.Kernel, catalog.Kernel, catalog.Kernel]:
    """A main kernel of `spec`, and what comes before and after it."""
    of_dout, of_dq = (
        RowsSpec(spec.dtype, dim, spec.packed) for dim in (spec.head_dim_v, spec.head_dim)
    )
    return (
        catalog.Kernel(catalog.FA3_PREPARE, of_dout, fa3.ARCH),
        catalog.Kernel(catalog.FA3_BACKWARD, spec, fa3.ARCH),
        catalog.Kernel(catalog.FA3_FINISH, of_dq, fa3.ARCH),
    )


class Launches(NamedTuple):
    """The loaded kernels of a problem, and what each call of them has in common."""

    prepare: Callable[..., Any]
    main: Callable[..., Any]
    finish: Callable[..., Any]
    used: int
    scalars: tuple[Any, ...]  # of main
    scalars_of_finish: tuple[Any, ...]
    workspace: tuple[Allocate, Allocate, Allocate, Allocate]
    turns: tuple[int, ...] | None  # the shape, if there are any
    gradients: tuple[Allocate, Allocate, Allocate]  # of q, k and v


class Workspace(NamedTuple):
    """What the kernels hand on: (batch, heads_q, r, ...), packed (heads_q, r, ...)."""

    lse_log2: Tensor  # float32
    delta: Tensor  # float32
    dq_sum: Tensor  # float32, (..., r // 64, octets, 128, 4)
    spoilt: Tensor  # int32, (1,): whether a row of dk or dv has come out as NaN or Inf


@lru_cache(maxsize=4096)
def _launches(
    problem: AttentionProblem, where: torch.device, used: int, rows: tuple[int, int]
) -> Launches:
    """`rows` are those of q and k: of a sequence, or of all packed ones."""
    _, main, _ = kernels(problem)
    return _launches_around(partial(jit.load, main), main.spec, problem, where, used, rows)


def _launches_around(
    load_main: Callable[[], Callable[..., Any]],
    spec: BackwardSpec,
    problem: AttentionProblem,
    where: torch.device,
    used: int,
    rows: tuple[int, int],
) -> Launches:
    """With a main kernel that is compiled from `spec`."""
    prepare, _, finish = _kernels_around(spec)
    is_packed = problem.layout == "varlen"
    batch = () if is_packed else (problem.batch,)
    outer = (*batch, problem.heads_q)
    padded = padded_rows(rows[0], problem.batch if is_packed else 0)
    a_row = allocator((*outer, padded), torch.float32, where)
    sums = (*outer, padded // MMA_ROWS, spec.head_dim // OCTET, *FRAGMENT)

    def gradient(rows: int, heads: int, dim: int) -> Allocate:
        return allocator((*batch, rows, heads, dim), getattr(torch, problem.dtype), where)

    scalars = fa3.scalars(problem, where, used)
    return Launches(
        prepare=jit.load(prepare),
        main=load_main(),
        finish=jit.load(finish),
        used=used,
        scalars=scalars,
        # The scale has its sign there, and the CTAs are one a tile.
        scalars_of_finish=(float(problem.scoring.scale), *scalars[:-1]),
        workspace=(
            *(a_row, a_row, allocator(sums, torch.float32, where)),
            allocator((1,), torch.int32, where),
        ),
        gradients=(
            gradient(rows[0], problem.heads_q, problem.head_dim),
            gradient(rows[1], problem.heads_k, problem.head_dim),
            gradient(rows[1], problem.heads_k, problem.head_dim_v),
        ),
        turns=(*outer, padded // spec.tile_q) if spec.deterministic else None,
    )


def backward(
    problem: AttentionProblem, operands: Operands, saved: Saved, needs: Sequence[bool]
) -> Gradients:
    """Gradients of q, k, v and sink, in their dtypes; `needs` says which are wanted.

    On the tensors' own device, and on the caller's current stream there.
    """
    q, where = operands.q, operands.q.device
    if device.current() != where.index:
        with torch.cuda.device(where):
            return backward(problem, operands, saved, needs)
    if problem.batch == 0 or 0 in q.shape or 0 in operands.k.shape:
        return _without_pairs(operands, saved, needs)
    run = _launches(problem, where, fa3.used_lengths(operands), _rows(operands))
    out, lse, dout, dlse = saved
    grads = _launch(
        run,
        fa3.readable(problem, operands),
        Saved(
            for_tma(out),
            _as_float32(lse),
            for_tma(dout),
            None if dlse is None else _as_float32(dlse),
        ),
        needs,
    )
    if grads.sink is None or operands.sink is None:
        return grads
    return grads._replace(sink=grads.sink.to(operands.sink.dtype))


def prepare(
    problem: AttentionProblem, like: Operands
) -> Callable[[Sequence[Any], Saved, Sequence[bool]], Gradients]:
    """`backward` for operands with the shapes, strides, dtypes and device of `like`.

    What those decide is decided here; `fa3.prepare` says what it takes. A hook on saved tensors may
    have put other strides in their place, and what flows back has any: both are looked at.
    """
    where, shape = like.q.device, (*like.q.shape[:-1], like.v.shape[-1])
    is_empty = problem.batch == 0 or 0 in like.q.shape or 0 in like.k.shape
    if is_empty or problem.scoring.scale <= 0 or not fa3.has_readable_strides(like):
        return lambda operands, saved, needs: backward(problem, Operands(*operands), saved, needs)
    launches = _launches(problem, where, fa3.used_lengths(like), _rows(like))
    of_out = torch.empty(*shape, device="meta").stride()
    strides = (*(x.stride() for x in like[:3]), of_out)

    def run(operands: Sequence[Any], saved: Saved, needs: Sequence[bool]) -> Gradients:
        q, k, v = operands[:3]
        out, lse, dout, dlse = saved
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        if (
            device.current() != where.index
            or (q.stride(), k.stride(), v.stride(), out.stride()) != strides
            or addresses % ALIGNMENT
        ):
            return backward(problem, Operands(*operands), saved, needs)
        if dout.stride() != of_out or not is_aligned(dout) or dout.is_neg():
            dout = for_tma(dout)
        if dlse is not None:
            dlse = _as_float32(dlse)
        return _launch(launches, operands, Saved(out, lse, dout, dlse), needs)

    return run


def with_main(
    main: Callable[..., Any], spec: BackwardSpec, problem: AttentionProblem, like: Operands
) -> Callable[[Sequence[Any], Saved, Sequence[bool]], Gradients]:
    """`backward` with `main`, compiled from `spec`, for its main kernel, so that one can be tuned.

    For operands with the shapes, dtypes and device of `like`, which is the current device. They,
    out and dout are contiguous, and the scale is positive: nothing is copied to make it so.
    Raises RuntimeError if prepare or finish can be neither found nor compiled.
    """
    where, used = like.q.device, fa3.used_lengths(like)
    launches = _launches_around(lambda: main, spec, problem, where, used, _rows(like))
    return partial(_launch, launches)


def _launch(
    run: Launches, operands: Sequence[Any], saved: Saved, needs: Sequence[bool]
) -> Gradients:
    """All of it can be read as it lies; the gradient of sink is float32, as sink is."""
    lengths = fa3.lengths(operands)
    work = _prepare(run, saved, lengths)
    dq = dk = dv = dsink = None
    if any(needs[:3]):
        dk, dv = _main(run, operands, saved.dout, work, lengths)
        # It also looks after rows of dk and dv that hidden rows have spoilt.
        dq = _finish(run, operands, (saved.dout, dk, dv), work, lengths)
    if needs[3] and operands[3] is not None:
        dsink = _backward_of_sink(operands[3], work)
    return Gradients(
        dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, dsink
    )


def _prepare(run: Launches, saved: Saved, lengths: tuple[Any, ...]) -> Workspace:
    out, lse, dout, dlse = saved
    work = Workspace(*[new() for new in run.workspace])
    bounds_q, _, used_q, _ = lengths
    run.prepare(
        *(out, dout, lse, lse if dlse is None else dlse, *work),
        *(bounds_q, used_q, run.used & 1, int(dlse is not None)),
    )
    return work


def _main(
    run: Launches,
    operands: Sequence[Any],
    dout: Tensor,
    work: Workspace,
    lengths: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    q, k, v = operands[:3]
    where = q.device
    _, new_dk, new_dv = run.gradients
    dk, dv = new_dk(), new_dv()
    turns = None
    if run.turns is not None:
        turns = torch.zeros(*run.turns, dtype=torch.int32, device=where)
    lse_log2, delta, dq_sum, spoilt = work
    run.main(
        *(q, k, v, dout, lse_log2, delta, dq_sum, dk, dv, spoilt),
        *(*lengths, device.tile_counter(where), turns, *run.scalars),
    )
    return dk, dv


def _finish(
    run: Launches,
    operands: Sequence[Any],
    grads: tuple[Tensor, Tensor, Tensor],
    work: Workspace,
    lengths: tuple[Any, ...],
) -> Tensor:
    """dq; `grads` are dout, dk and dv."""
    (q, k, v), (dout, dk, dv) = operands[:3], grads
    lse_log2, delta, dq_sum, spoilt = work
    new_dq, _, _ = run.gradients
    dq = new_dq()
    run.finish(
        *(dq_sum, dq, q, k, v, dout, lse_log2, delta, dk, dv, spoilt),
        *(*lengths, *run.scalars_of_finish),
    )
    return dq


def _rows(operands: Operands) -> tuple[int, int]:
    """Of q and k: a sequence's, or those of all packed ones."""
    return operands.q.shape[-3], operands.k.shape[-3]


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
