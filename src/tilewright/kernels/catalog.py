"""Every kernel there is to compile: a family's name, its spec, and what to trace it with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import Any

from tilewright.kernels.sm90.fa3.spec import DTYPES, ForwardSpec

FA3_FORWARD = "fa3_forward"

# How each pair of head dims is tiled, for masks with no bound, and with one.
_FULL: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"tile_q": 192, "tile_kv": 128},
    (96, 96): {"tile_q": 128, "tile_kv": 128},
    (128, 128): {"tile_q": 128, "tile_kv": 128},
    (192, 128): {"tile_q": 128, "tile_kv": 112},
    (192, 192): {"tile_q": 128, "tile_kv": 112},
    (256, 256): {"tile_q": 128, "tile_kv": 80},
}
_BOUNDED = _FULL


@dataclass(frozen=True)
class Kernel:
    """One thing to compile."""

    family: str
    spec: ForwardSpec
    arch: str

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The function to compile and the fake operands to compile it with. Loads the DSL."""
        module = import_module("tilewright.kernels.sm90.fa3.kernel")
        return module.Forward(self.spec), module.fake_operands(self.spec)

    def __str__(self) -> str:
        return f"{self.family}_{self.spec}"


def tiled(spec: ForwardSpec) -> ForwardSpec:
    """`spec` with the tiles and mechanisms that were measured to be the fastest for it."""
    table = _BOUNDED if spec.bounded_left or spec.bounded_right else _FULL
    return replace(spec, **table[spec.head_dim, spec.head_dim_v])


def kernels(arch: str) -> list[Kernel]:
    """Everything that the dispatcher may ask for on `arch`."""
    if arch != "sm_90a":
        return []
    return [
        Kernel(FA3_FORWARD, tiled(ForwardSpec(dtype, *dims, *mask, has_softcap, packed)), arch)
        for dims, dtype, packed, (mask, has_softcap) in product(
            _FULL, DTYPES, (False, True), _SCORINGS
        )
    ]


# Masks by their bounded sides. A softcap is rare: its kernel takes both bounds, whatever they are.
_SCORINGS = [
    ((False, False), False),
    ((False, True), False),
    ((True, True), False),
    ((True, True), True),
]
