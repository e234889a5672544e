"""The backends, best first: the first that can compute a problem takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tilewright import portable
from tilewright.launch import fa3, fa3_backward
from tilewright.operands import Gradients, Operands, Saved
from tilewright.portable import fused
from tilewright.problem import AttentionProblem

Forward = Callable[[AttentionProblem, Operands], tuple[Tensor, Tensor]]
Prepared = Callable[[Sequence[Any]], tuple[Tensor, Tensor]]  # takes the fields of `Operands`
Prepare = Callable[[AttentionProblem, Operands], Prepared]
Backward = Callable[[AttentionProblem, Operands, Saved, Sequence[bool]], Gradients]
PreparedBackward = Callable[[Sequence[Any], Saved, Sequence[bool]], Gradients]  # likewise
PrepareBackward = Callable[[AttentionProblem, Operands], PreparedBackward]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, forward and backward.

    Any backend's backward may follow any backend's forward: out and lse are all that they share.
    """

    name: str
    summary: str
    why_not: Callable[[AttentionProblem], str | None]
    forward: Forward
    backward: Backward
    # (problem, like) -> `forward` of that problem for operands with the shapes, strides, dtypes and
    # device of `like`, where such a one is faster.
    prepare: Prepare | None = None
    prepare_backward: PrepareBackward | None = None  # likewise, of `backward`
    # Why its backward cannot follow a forward that it can compute; another backend's does then.
    why_not_backward: Callable[[AttentionProblem], str | None] = lambda problem: None


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            name="fa3",
            summary="FA-3's kernels for Hopper",
            why_not=fa3.why_not,
            forward=fa3.forward,
            backward=fa3_backward.backward,
            prepare=fa3.prepare,
            prepare_backward=fa3_backward.prepare,
            why_not_backward=fa3_backward.why_not,
        ),
        Backend(
            name="cpu_fused",
            summary="PyTorch's fused CPU attention, cut and merged to the mask",
            why_not=fused.why_not,
            forward=partial(portable.forward, fuse=True),
            backward=partial(portable.backward, fuse=True),
        ),
        Backend(
            name="portable",
            summary="tiled exact attention in plain PyTorch",
            why_not=lambda problem: None,
            forward=partial(portable.forward, fuse=False),
            backward=partial(portable.backward, fuse=False),
        ),
    )
}


def choose(problem: AttentionProblem, name: str | None = None) -> Backend:
    """The named backend, or the first that can compute the problem.

    Raises ValueError for an unknown name and NotImplementedError if the named one cannot.
    """
    if name is None:
        return next(b for b in BACKENDS.values() if b.why_not(problem) is None)
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; want None or one of {', '.join(BACKENDS)}")
    reason = BACKENDS[name].why_not(problem)
    if reason is not None:
        able = [b.name for b in BACKENDS.values() if b.why_not(problem) is None]
        raise NotImplementedError(
            f"backend {name!r} cannot compute this call: {reason}. These can: {', '.join(able)}"
        )
    return BACKENDS[name]


def choose_backward(problem: AttentionProblem, forward: Backend) -> tuple[Backend, dict[str, str]]:
    """The backend whose backward follows `forward`, and why each that comes before it does not.

    `forward`, which computes the problem, comes first, and then the others, best first.
    """
    rejected = {}
    for backend in (forward, *BACKENDS.values()):
        reason = backend.why_not(problem) or backend.why_not_backward(problem)
        if reason is None:
            return backend, rejected
        rejected[backend.name] = reason
    raise AssertionError(f"no backward for {problem}, where portable takes every problem")
