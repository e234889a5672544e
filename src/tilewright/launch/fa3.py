"""Launches the FA-3 forward kernel: what it can compute, and how operands reach it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewright import jit
from tilewright.kernels import catalog
from tilewright.kernels.sm90.fa3.spec import ForwardSpec
from tilewright.launch import device
from tilewright.launch.device import allocator
from tilewright.launch.readable import ALIGNMENT, MULTIPLE, for_tma, in_a_row, legal_strides
from tilewright.masks import Mask
from tilewright.operands import Operands
from tilewright.problem import AttentionProblem

CAPABILITY, ARCH = (9, 0), "sm_90a"
DTYPES = ("float16", "bfloat16")
LARGEST_DIM = 256
# Positions are int32, and a bound on either side must not carry them out of it.
LONGEST = NO_BOUND = 1 << 30
# The kernel's arithmetic is float32, which scale and 1 / softcap must fit. Its tanh is exact to a
# few 1e-7 of 1, which a cap multiplies: beyond 256 lse would be less exact than float32 makes it.
LARGEST_SCALE, SOFTCAPS = 2.0**100, (2.0**-100, 2.0**8)


def why_not(problem: AttentionProblem) -> str | None:
    """Why the kernel cannot compute a problem on its device, None if it can."""
    return _why_not_there(problem) or _why_not_so(problem) or jit.why_unavailable(kernel(problem))


def _why_not_there(problem: AttentionProblem) -> str | None:
    wanted = "FA-3 runs on CUDA devices of compute capability 9.0"
    if not problem.device.startswith("cuda"):
        return f"{wanted}; {problem.device} is none"
    seen = device.capability(problem.device)
    if seen is None:
        return f"{wanted}; PyTorch sees no GPU"
    if seen != CAPABILITY:
        return f"{wanted}; {problem.device} has {seen[0]}.{seen[1]}"
    return None


def _why_not_so(problem: AttentionProblem) -> str | None:
    if problem.dtype not in DTYPES:
        return f"FA-3 computes {' and '.join(DTYPES)}, not {problem.dtype}"
    if problem.layout == "paged" or (problem.layout == "dense" and problem.ragged):
        return "FA-3 has no KV cache: want a dense call without lengths, or a varlen call"
    if problem.num_splits not in (None, 1):
        return f"FA-3 does not split the keys, as num_splits={problem.num_splits} asks for"
    for name, dim in (("dim", problem.head_dim), ("dim_v", problem.head_dim_v)):
        if dim % MULTIPLE or dim > LARGEST_DIM:
            return f"FA-3 takes head dims in steps of {MULTIPLE} up to {LARGEST_DIM}; {name}={dim}"
    if max(problem.seqlen_q, problem.seqlen_k) > LONGEST:
        return f"FA-3 counts rows up to 2**30, not {problem.seqlen_q} and {problem.seqlen_k}"
    scale, softcap = problem.scoring.scale, problem.scoring.softcap
    if abs(scale) > LARGEST_SCALE:
        return f"FA-3 multiplies in float32, which scale={scale} would overflow"
    if softcap is not None and not SOFTCAPS[0] <= softcap <= SOFTCAPS[1]:
        return f"FA-3 takes a softcap from 2**-100 to 256, not {softcap}"
    return None


def kernel(problem: AttentionProblem) -> catalog.Kernel:
    """The kernel for a problem that `_why_not_so` does not object to."""
    smallest = catalog.smallest(ARCH, catalog.FA3_FORWARD, ForwardSpec(*features(problem)))
    spec = catalog.tiled(smallest, problem.seqlen_q)
    return catalog.Kernel(catalog.FA3_FORWARD, spec, ARCH)


def features(problem: AttentionProblem) -> tuple[Any, ...]:
    """What a kernel has to compute: the first fields of a forward's spec, and of a backward's."""
    mask = _mask(problem)
    return (
        *(problem.dtype, problem.head_dim, problem.head_dim_v),
        *(mask.left is not None, mask.right is not None),
        *(problem.scoring.softcap is not None, problem.layout == "varlen"),
    )


def _mask(problem: AttentionProblem) -> Mask:
    # The longest of packed sequences is what the caller says it is, and a bound that was dropped
    # for a wrong one would be a wrong result.
    if problem.layout == "varlen":
        return problem.scoring.mask
    return problem.scoring.mask.simplified(problem.seqlen_q, problem.seqlen_k)


# Takes operands as the kernel does, in the order of `Operands`, out and lse.
Launch = Callable[[Sequence[Any], Tensor, Tensor], None]


@lru_cache(maxsize=4096)
def _launch(problem: AttentionProblem, where: torch.device, used: int) -> Launch:
    """On `where`, when it is the current device. `used` as `used_lengths` has it."""
    run, rest = jit.load(kernel(problem)), scalars(problem, where, used)

    def launch(operands: Sequence[Any], out: Tensor, lse: Tensor) -> None:
        q, k, v, sink = operands[:4]
        # TVM FFI takes the stream from PyTorch: the current one of the device that q is on.
        run(
            q,
            k,
            v,
            out,
            lse,
            device.no_sink(where, out.shape[-2]) if sink is None else sink,
            *lengths(operands),
            device.tile_counter(where),
            *rest,
        )

    return launch


def scalars(problem: AttentionProblem, where: torch.device, used: int) -> tuple[Any, ...]:
    """scale, softcap, the mask's bounds, `used` and the CTAs, as forward and backward take them."""
    mask, scoring = _mask(problem), problem.scoring
    left, right = (NO_BOUND if x is None else min(x, NO_BOUND) for x in (mask.left, mask.right))
    scale, softcap = abs(float(scoring.scale)) or 1.0, float(scoring.softcap or 0.0)
    return scale, softcap, left, right, used, device.processors(where)


def lengths(operands: Sequence[Any]) -> tuple[Any, ...]:
    """cu_seqlens and seqused as the kernels take them, None for dense calls.

    `used_lengths` tells that a seqused is not there; some tensor has to stand in for it.
    """
    bounds_q, bounds_k, used_q, used_k = operands[4:8]
    return (
        bounds_q,
        bounds_k,
        bounds_q if used_q is None else used_q,
        bounds_k if used_k is None else used_k,
    )


def used_lengths(operands: Operands) -> int:
    """Bit 0 for a seqused_q, bit 1 for a seqused_k."""
    return (operands.seqused_q is not None) + 2 * (operands.seqused_k is not None)


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """out, like q with v's head dim, and lse, (batch, heads_q, seqlen_q) or (heads_q, total_q).

    On the tensors' own device, and on the caller's current stream there.
    """
    q = operands.q
    of_out, of_lse = _shapes(operands)
    if device.current() != q.device.index:
        with torch.cuda.device(q.device):
            return forward(problem, operands)
    out = torch.empty(*of_out, dtype=q.dtype, device=q.device)
    lse = torch.empty(*of_lse, dtype=torch.float32, device=q.device)
    if 0 in of_out:
        return out, lse
    if problem.batch == 0 or 0 in operands.k.shape:
        return _without_keys(problem, operands, out, lse)
    _launch(problem, q.device, used_lengths(operands))(readable(problem, operands), out, lse)
    return out, lse


def prepare(
    problem: AttentionProblem, like: Operands
) -> Callable[[Sequence[Any]], tuple[Tensor, Tensor]]:
    """`forward` for operands with the shapes, strides, dtypes and device of `like`.

    What those decide is decided here. It takes operands in the order of `Operands`, none of them
    with PyTorch's negative bit.
    """
    where = like.q.device
    shapes = _shapes(like)
    is_empty = problem.batch == 0 or 0 in shapes[0] or 0 in like.k.shape
    if is_empty or problem.scoring.scale <= 0 or not has_readable_strides(like):
        return lambda operands: forward(problem, Operands(*operands))
    launch = _launch(problem, where, used_lengths(like))
    dtypes = like.q.dtype, torch.float32
    new_out, new_lse = (allocator(*x, where) for x in zip(shapes, dtypes, strict=True))

    def run(operands: Sequence[Any]) -> tuple[Tensor, Tensor]:
        q, k, v = operands[:3]
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
        if addresses % ALIGNMENT or device.current() != where.index:
            return forward(problem, Operands(*operands))
        out, lse = new_out(), new_lse()
        launch(operands, out, lse)
        return out, lse

    return run


def _shapes(operands: Operands) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those of out and lse."""
    *batch, rows, heads, _ = operands.q.shape
    return (*batch, rows, heads, operands.v.shape[-1]), (*batch, heads, rows)


def _without_keys(
    problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of no sequence, or of sequences without keys: TMA has no tensors of size 0."""
    sink = operands.sink
    if problem.batch == 0 or sink is None:
        return out.zero_(), lse.fill_(-math.inf)
    if problem.layout == "dense":
        return out.zero_(), lse.copy_(sink[:, None])
    # Which rows have the sink for an lse, and which belong to no sequence, the kernel knows.
    k, v = (x.new_zeros(1, *x.shape[1:]) for x in (operands.k, operands.v))
    with_keys = operands._replace(k=k, v=v)
    _launch(problem, out.device, used_lengths(operands))(readable(problem, with_keys), out, lse)
    return out, lse


def readable(problem: AttentionProblem, operands: Operands) -> Operands:
    """The operands as the kernels take them, forward and backward: q times the sign of scale."""
    q, k, v, sink, *rest = operands
    scale = problem.scoring.scale
    if scale <= 0:
        # The kernel takes the maximum of a row before it scales, and a hidden key for -inf, so its
        # scale is positive. The sign goes into q, and so does a scale of 0.
        q = -q if scale < 0 else q * 0
    return Operands(
        for_tma(q),
        for_tma(k),
        for_tma(v),
        None if sink is None else in_a_row(sink.to(torch.float32)),
        *(None if x is None else in_a_row(x) for x in rest),
    )


def has_readable_strides(operands: Operands) -> bool:
    """Whether `readable` changes nothing about the memory of operands that are aligned."""
    q, k, v, sink, *rest = operands
    return (
        all(legal_strides(x.shape, x.stride()) == x.stride() for x in (q, k, v))
        and (sink is None or sink.dtype == torch.float32)
        and all(x is None or x.stride() == (1,) for x in (sink, *rest))
    )
