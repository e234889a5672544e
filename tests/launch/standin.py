"""Kernels that keep the compiled ones' contract on the CPU; the forward's, computed by the oracle.

It refuses what the compiled kernel could not read, and writes every element of out and lse, so that
what a launch passes is judged by the results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.launch import standin_backward
from tests.launch.contract import (
    LENGTHS,
    SCALARS,
    check_counter,
    check_lengths,
    check_rows,
    check_scalars,
    rule_of,
    spans,
)
from tilewright import reference
from tilewright.kernels import catalog
from tilewright.kernels.catalog import Kernel
from tilewright.operands import Operands

NAMES = (
    *("q", "k", "v", "out", "lse", "sink"),
    *LENGTHS,
    *("counter", *SCALARS),
)


@dataclass
class StandIn:
    """What is to be loaded for a kernel; keeps the arguments of each call."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    def load(self, kernel: Kernel) -> Any:
        names, check_it, compute_it = CONTRACTS[kernel.family]

        def run(*arguments: Any) -> None:
            given = dict(zip(names, arguments, strict=True))
            self.calls.append(given)
            self.kernels.append(kernel)
            check_it(kernel, given)
            compute_it(kernel, given)

        return run

    def calls_of(self, family: str) -> list[dict[str, Any]]:
        pairs = zip(self.kernels, self.calls, strict=True)
        return [given for kernel, given in pairs if kernel.family == family]


def check(kernel: Kernel, given: dict[str, Any]) -> None:
    spec = kernel.spec
    check_rows(spec, given, ("q", "k", "v", "out"))
    q, v = given["q"], given["v"]
    assert q.shape[-1] <= spec.head_dim and v.shape[-1] <= spec.head_dim_v
    assert given["lse"].dtype == torch.float32 and given["lse"].is_contiguous()
    assert given["sink"].dtype == torch.float32 and given["sink"].stride() == (1,)
    assert given["sink"].shape == (q.shape[-2],)
    check_lengths(spec, given, "qk")
    check_counter(given)
    check_scalars(given)
    assert (given["softcap"] > 0) == spec.has_softcap


def compute(kernel: Kernel, given: dict[str, Any]) -> None:
    rule = rule_of(kernel.spec, given)
    operands = Operands(*(given[name].double() for name in ("q", "k", "v", "sink")))
    if kernel.spec.packed:
        rows, keys = (spans(given, side) for side in "qk")
        out, lse = reference.forward_varlen(operands, (rows, keys), rule)
    else:
        out, lse = reference.forward(operands, rule)
    given["out"].copy_(out)
    given["lse"].copy_(lse)


def poison(x: Tensor) -> Tensor:
    """Memory that was not written yet, with NaN for garbage."""
    return x.fill_(torch.nan if x.is_floating_point() else -1)


def poisoned_empty(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.empty` so."""
    return poison(torch.Tensor.new_empty(torch.ones((), dtype=kwargs.get("dtype")), args))


CONTRACTS = {
    catalog.FA3_FORWARD: (NAMES, check, compute),
    catalog.FA3_PREPARE: standin_backward.PREPARE,
    catalog.FA3_BACKWARD: standin_backward.MAIN,
    catalog.FA3_FINISH: standin_backward.FINISH,
}
