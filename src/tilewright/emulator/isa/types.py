"""PTX type names as numpy types, and register views of packed types."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tilewright.emulator.errors import Place, Unsupported
from tilewright.emulator.parse import Operand
from tilewright.emulator.registers import Lanes

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES: dict[str, np.dtype] = {
    **{f"u{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"b{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"f{n}": np.dtype(f"f{n // 8}") for n in (16, 32, 64)},
    "b128": np.dtype("V16"),
    "bf16": BF16,
    "pred": np.dtype(np.bool_),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "tf32": np.dtype(np.float32),
}


def type_of(name: str, place: Place | None = None) -> np.dtype:
    if name not in TYPES:
        raise Unsupported(f"type .{name}", place)
    return TYPES[name]


def packed(lanes: Lanes, operand: Operand, word: np.dtype | type, element: np.dtype) -> np.ndarray:
    """The elements that `word`-sized registers pack, of all lanes in order, lowest first."""
    values = lanes.read(operand, word)
    if len(values) != lanes.count:
        values = np.repeat(values, lanes.count)
    return values.view(element)


def packed_destination(
    lanes: Lanes, operand: Operand, word: np.dtype | type, element: np.dtype
) -> np.ndarray:
    return lanes.write(operand, word).view(element)
