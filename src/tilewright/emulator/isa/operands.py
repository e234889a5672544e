"""Matrix operands as float32: element types, shared-memory tiles, products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from tilewright.emulator.errors import Unsupported
from tilewright.emulator.isa.types import TYPES
from tilewright.emulator.layouts import Descriptor, operand_index
from tilewright.emulator.memory import Shared

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


def halves_to_words(products: np.ndarray, addend: np.ndarray | None) -> np.ndarray:
    """Products [register, thread, 2] plus packed fp16 pairs, rounded once, as packed pairs.

    The hardware adds in at least fp16; how it rounds in between is not documented.
    """
    if addend is not None:
        pairs = np.ascontiguousarray(addend)[..., None].view(np.float16)
        products = products + pairs.astype(np.float32)
    return np.ascontiguousarray(products.astype(np.float16)).view(np.uint32)[..., 0]


@dataclass(frozen=True)
class Tile:
    """`rows` x `depth` elements of a PTX type that a descriptor places in shared memory."""

    descriptor: Descriptor
    rows: int
    depth: int
    type: str
    mn_major: bool


def read_tile(
    shared: Shared, tile: Tile, rank: int, check: bool, watch: Callable[[np.ndarray], None] | None
) -> np.ndarray:
    """The tile [row, k] in float32 from the shared memory of CTA `rank`.

    `watch` is called with the byte addresses of the elements read, for race detection.
    """
    size, origin = SIZES[tile.type], rank << 24
    index = operand_index(tile.descriptor, tile.rows, tile.depth, size, tile.mn_major)
    shared.check_range(origin | int(index.min()) * size, 1)
    shared.check_range(origin | int(index.max()) * size, size)
    if rank:
        index = index + origin // size
    if watch:
        watch(index * size)
    if check:
        shared.need_written(index, size)
    return to_float32(shared.views[size][index], tile.type)
