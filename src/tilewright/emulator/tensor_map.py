"""TMA tensor maps: decoding the 128-byte object, and copying its boxes.

PTX ISA 5.5 (tensors, tiled mode). The encoding is not documented; the field positions were found by
varying one argument at a time, and a field that was never seen set raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tilewright.emulator.errors import OutOfBounds, Unsupported
from tilewright.emulator.layouts import swizzled
from tilewright.emulator.memory import Global, Shared

_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2}
_FLOATS = {6: "float16", 7: "float32", 9: "float64", 10: "bfloat16"}
_INTEGERS = {0: "u1", 1: "u2", 2: "u4", 3: "i4", 4: "u8", 5: "i8"}
_SPANS = {0: 0, 1: 32, 2: 64, 3: 128}
# Bits of word 2 with a known meaning: rank 4-6, type 7-10, swizzle 13-14, tf32 16. Bits 0-3 are the
# version, 15 and 17 up were constant.
_INTERLEAVE = 3 << 11
_ADDRESS_SPACE = 1 << 57


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one instruction copies.

    `shape`, `strides` (bytes) and `box` list the fastest dimension first. `kind` is the element
    type's number, `span` the swizzle in bytes.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    kind: int
    span: int

    @property
    def size(self) -> int:
        return _ELEMENT_BYTES[self.kind]

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.size

    def window(self, memory: Global, low: tuple[int, ...], extent: tuple[int, ...]) -> np.ndarray:
        """The elements from coordinates `low` on, [slowest .. fastest], unsigned.

        A map's base may lie far outside its tensor where large coordinates lead back into it
        (ragged tensors), so only what is accessed has to belong to a tensor.
        """
        offset = sum(c * s for c, s in zip(low, self.strides, strict=True))
        address = (self.address + offset) % _ADDRESS_SPACE
        tensor = memory.tensor(address)
        start = address - tensor.address
        span = sum((n - 1) * s for n, s in zip(extent, self.strides, strict=True)) + self.size
        if start + span > len(tensor.bytes):
            raise OutOfBounds(
                f"a box at {low} of a tensor map of shape {self.shape} and byte strides "
                f"{self.strides} ends {start + span - len(tensor.bytes)} bytes behind {tensor.name}"
            )
        flat = tensor.bytes[start : start + span].view(f"u{self.size}")
        return np.lib.stride_tricks.as_strided(flat, extent[::-1], self.strides[::-1])

    def reduction_type(self) -> str:
        """The numpy type in which a reduction adds."""
        return _FLOATS.get(self.kind) or _INTEGERS[self.kind]


def decode(raw: bytes) -> TensorMap:
    """Decode a tensor map; raises Unsupported for fields with an unknown value."""
    words = [int(w) for w in np.frombuffer(raw, "<u4", 16)]
    rank, kind = (words[2] >> 4 & 7) + 1, words[2] >> 7 & 15
    if kind not in _ELEMENT_BYTES or words[2] & _INTERLEAVE or rank > 5:
        raise Unsupported(
            f"tensor map word 2 = {words[2]:#x}: rank {rank}, type {kind}, interleave "
            f"{words[2] >> 11 & 3}"
        )
    high = [words[7] >> 4 * i & 15 for i in range(4)]
    strides = [(words[3 + i] | high[i] << 32) << 4 for i in range(rank - 1)]
    shape = [words[8 + i] + 1 for i in range(rank)]
    box = [words[13] >> 24, *(words[14] >> 8 * i & 255 for i in range(4))]
    return TensorMap(
        words[0] | words[1] << 32,
        tuple(shape),
        (_ELEMENT_BYTES[kind], *strides),
        tuple(b + 1 for b in box[:rank]),
        kind,
        _SPANS[words[2] >> 13 & 3],
    )


def _overlap(map_: TensorMap, start: tuple[int, ...]) -> tuple[Any, Any, tuple[slice, ...]]:
    """The part of the box at `start` in the tensor: first coordinate, extent, slices of the box."""
    low = tuple(max(c, 0) for c in start)
    ends = zip(start, map_.box, map_.shape, low, strict=True)
    extent = tuple(max(min(c + b, n) - first, 0) for c, b, n, first in ends)
    corners = zip(start, low, extent, strict=True)
    in_box = [slice(first - c, first - c + n) for c, first, n in corners]
    return low, extent, tuple(reversed(in_box))


def chunk_index(map_: TensorMap, shared_address: int) -> np.ndarray:
    """The 16-byte units of shared memory that a box occupies, in box order."""
    inner = map_.box[0] * map_.size
    if inner % 16 or shared_address % 16 or (map_.span and inner > map_.span):
        raise OutOfBounds(
            f"a box of {inner} bytes a row, swizzle {map_.span}, at shared "
            f"{shared_address:#x}: rows are whole 16 bytes within the swizzle"
        )
    addresses = shared_address + np.arange(0, map_.box_bytes, 16)
    return swizzled(addresses, map_.span) >> 4


def load_box(map_: TensorMap, memory: Global, start: tuple[int, ...]) -> np.ndarray:
    """The box at coordinates `start` (fastest first) as bytes; zeros outside the tensor."""
    box = np.zeros(map_.box[::-1], f"u{map_.size}")
    low, extent, in_box = _overlap(map_, start)
    if all(extent):
        box[in_box] = map_.window(memory, low, extent)
    return box.reshape(-1).view(np.uint8)


def store_box(
    map_: TensorMap, memory: Global, start: tuple[int, ...], data: np.ndarray, reduction: str | None
) -> None:
    """Writes the box's bytes into the tensor, or combines them: add, min, max, and, or, xor."""
    low, extent, in_box = _overlap(map_, start)
    if not all(extent):
        return
    target = map_.window(memory, low, extent)
    part = data.view(target.dtype).reshape(map_.box[::-1])[in_box]
    if reduction is None:
        target[...] = part
        return
    kind = _named_type(map_.reduction_type())
    target[...] = REDUCTIONS[reduction](target.view(kind), part.view(kind)).view(target.dtype)


def _named_type(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def read_chunks(shared: Shared, index: np.ndarray) -> np.ndarray:
    """The bytes of 16-byte units of shared memory."""
    return shared.data.view(np.uint64).reshape(-1, 2)[index].reshape(-1).view(np.uint8)


def write_chunks(shared: Shared, index: np.ndarray, data: np.ndarray) -> None:
    shared.data.view(np.uint64).reshape(-1, 2)[index] = data.view(np.uint64).reshape(-1, 2)
    shared.written.view(np.uint64).reshape(-1, 2)[index] = shared.all_written[8]
