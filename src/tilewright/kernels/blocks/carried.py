"""Objects of the trace that a loop of the kernel passes through unchanged."""

from __future__ import annotations

from typing import Any


class Unchanged:
    """Its members keep what they refer to: registers change in place, so no loop carries them."""

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        return self
