"""A kernel that keeps the compiled one's contract on the CPU, computed by the oracle.

It refuses what the compiled kernel could not read, and writes every element of out and lse, so that
what a launch passes is judged by the results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewright import reference
from tilewright.kernels.catalog import Kernel
from tilewright.masks import Mask
from tilewright.operands import Operands
from tilewright.problem import Scoring

PROCESSORS = 132
NAMES = (
    *("q", "k", "v", "out", "lse", "sink"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
    *("counter", "scale", "softcap", "left", "right", "used", "ctas"),
)


@dataclass
class StandIn:
    """What is to be loaded for a kernel; keeps the arguments of each call."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    def load(self, kernel: Kernel) -> Any:
        def run(*arguments: Any) -> None:
            given = dict(zip(NAMES, arguments, strict=True))
            self.calls.append(given)
            self.kernels.append(kernel)
            check(kernel, given)
            compute(kernel, given)

        return run


def check(kernel: Kernel, given: dict[str, Any]) -> None:
    spec, rank = kernel.spec, 3 if kernel.spec.packed else 4
    dtype = getattr(torch, spec.dtype)
    for name in ("q", "k", "v", "out"):
        x = given[name]
        assert x.dtype == dtype and x.ndim == rank and 0 not in x.shape, name
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not x.is_neg(), name
        assert all(s > 0 and s % 8 == 0 for s in x.stride()[:-1]), (name, x.shape, x.stride())
    q, v = given["q"], given["v"]
    assert q.shape[-1] <= spec.head_dim and v.shape[-1] <= spec.head_dim_v
    assert given["lse"].dtype == torch.float32 and given["lse"].is_contiguous()
    assert given["sink"].dtype == torch.float32 and given["sink"].stride() == (1,)
    assert given["sink"].shape == (q.shape[-2],)
    lengths = [given[name] for name in NAMES[6:10]]
    if spec.packed:
        assert all(x.dtype == torch.int32 and x.stride() == (1,) for x in lengths)
    else:
        assert lengths == [None] * 4 and given["used"] == 0
    assert given["counter"].dtype == torch.int32 and given["counter"].tolist() == [0, 0]
    assert type(given["scale"]) is float and type(given["softcap"]) is float
    assert given["scale"] > 0
    assert (given["softcap"] > 0) == spec.has_softcap
    assert 0 <= given["left"] <= 1 << 30 and 0 <= given["right"] <= 1 << 30
    assert given["ctas"] == PROCESSORS


def compute(kernel: Kernel, given: dict[str, Any]) -> None:
    spec = kernel.spec
    mask = Mask(
        given["left"] if spec.bounded_left else None,
        given["right"] if spec.bounded_right else None,
    )
    rule = Scoring(mask, given["scale"], given["softcap"] if spec.has_softcap else None)
    operands = Operands(*(given[name].double() for name in ("q", "k", "v", "sink")))
    if spec.packed:
        rows, keys = (_rows(given, side) for side in "qk")
        out, lse = reference.forward_varlen(operands, (rows, keys), rule)
    else:
        out, lse = reference.forward(operands, rule)
    given["out"].copy_(out)
    given["lse"].copy_(lse)


def _rows(given: dict[str, Any], side: str) -> list[tuple[int, int]]:
    starts = given[f"cu_seqlens_{side}"].tolist()
    bit = {"q": 1, "k": 2}[side]
    if not given["used"] & bit:
        return list(zip(starts, starts[1:], strict=False))
    used = given[f"seqused_{side}"].tolist()
    return [(start, start + length) for start, length in zip(starts, used, strict=False)]


def poisoned_empty(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.empty` with NaN for garbage."""
    x = torch.Tensor.new_empty(torch.ones((), dtype=kwargs.get("dtype")), args)
    return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(-1)
