"""A kernel that compiles in a second, in place of those of the catalog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spec:
    columns: int = 64


@dataclass(frozen=True)
class StandIn:
    """D (64, columns) = A (64, 64) B (columns, 64)^T, by one warpgroup."""

    spec: Spec = Spec()
    arch: str = "sm_90a"
    family: str = "stand_in"
    title: str = "stand_in"

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        import cutlass

        from tests.emulator.probes import wgmma

        tile, dtype = (64, self.spec.columns, 64), cutlass.BFloat16
        return wgmma.Wgmma(tile), tuple(wgmma.arguments(dtype, dtype, tile, True, True))

    def __str__(self) -> str:
        return f"{self.title}_{self.spec.columns}"
