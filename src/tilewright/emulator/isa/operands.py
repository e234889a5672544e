"""Matrix operands as float32: element types, shared-memory tiles, products."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..errors import Place, Unsupported
from ..layouts import Descriptor, operand_index
from ..memory import Shared
from .types import TYPES

SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}


@cache
def _table(name: str) -> np.ndarray:
    """The float32 value of every 8-bit code."""
    return np.arange(256, dtype=np.uint8).view(TYPES[name]).astype(np.float32)


def to_float32(raw: np.ndarray, name: str) -> np.ndarray:
    """Unsigned codes of a PTX element type as float32; tf32 ignores the low 13 bits."""
    if name == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "f16":
        return raw.view(np.float16).astype(np.float32)
    if name == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    if name in ("e4m3", "e5m2"):
        return _table(name)[raw]
    raise Unsupported(f"matrix element type .{name}")


def read_tile(
    shared: Shared,
    descriptor: Descriptor,
    rows: int,
    depth: int,
    name: str,
    mn_major: bool,
    rank: int,
    check: bool,
    watch: Any = None,
) -> np.ndarray:
    """An operand [row, k] in float32 from the shared memory of CTA `rank`.

    `watch` is called with the byte addresses of the units read, for race detection.
    """
    size = SIZES[name]
    index = operand_index(descriptor, rows, depth, size, mn_major)
    low, high = int(index.min()) * size, int(index.max()) * size
    origin = rank << 24
    shared.check_range(origin | low, 1)
    shared.check_range(origin | high, size)
    if rank:
        index = index + origin // size
    if watch:
        watch(index * size)
    if check:
        shared.need_written(index, size)
    return to_float32(shared.views[size][index], name)


def element_types(names: list[str], place: Place | None) -> tuple[str, str]:
    for name in names:
        if name not in SIZES:
            raise Unsupported(f"matrix element type .{name}", place)
    return names[0], names[1]
