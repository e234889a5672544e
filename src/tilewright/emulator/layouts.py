"""Where matrix operands lie in shared memory: swizzles and the descriptors of wgmma and tcgen05.

PTX ISA 9.7.15.5.1 (wgmma shared-memory layout), 9.7.16.4 (tcgen05 shared-memory descriptor),
5.5.7 (swizzle modes). Index arrays are cached: a kernel uses few distinct layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilewright.emulator.errors import Unsupported

_PERIOD = 1024  # the longest swizzle repeats after this many bytes
_WGMMA_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}
_TCGEN05_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """Byte addresses after a swizzle of `span` bytes (0: none): bits 7-9 into bits 4-6."""
    if not span:
        return addresses
    return addresses ^ ((addresses >> 7 & (span // 16 - 1)) << 4)


@dataclass(frozen=True)
class Descriptor:
    """A matrix in shared memory: `start`, `leading`, `stride`, swizzle `span` in bytes."""

    start: int
    leading: int
    stride: int
    span: int


def wgmma_descriptor(bits: int) -> Descriptor:
    """Decode the 64-bit matrix descriptor of wgmma; unknown fields raise."""
    if bits >> 49 & 7:
        raise Unsupported(f"wgmma descriptor {bits:#x}: base offset {bits >> 49 & 7}")
    return _descriptor(bits, _WGMMA_SPANS[bits >> 62 & 3])


def tcgen05_descriptor(bits: int) -> Descriptor:
    """Decode the 64-bit matrix descriptor of tcgen05; unknown fields raise."""
    mode = bits >> 61 & 7
    if bits >> 49 & 7 or bits >> 52 & 1 or mode not in _TCGEN05_SPANS:
        raise Unsupported(
            f"tcgen05 descriptor {bits:#x}: base offset, absolute leading dimension "
            f"or swizzle mode {mode}"
        )
    if bits >> 46 & 7 != 1:
        raise Unsupported(f"tcgen05 descriptor {bits:#x}: version {bits >> 46 & 7}, wanted 1")
    return _descriptor(bits, _TCGEN05_SPANS[mode])


def _descriptor(bits: int, span: int) -> Descriptor:
    field = 0x3FFF
    return Descriptor(
        (bits & field) << 4, (bits >> 16 & field) << 4, (bits >> 32 & field) << 4, span
    )


def operand_index(d: Descriptor, rows: int, depth: int, size: int, mn_major: bool) -> np.ndarray:
    """Element indices [row, k] of an operand of `rows` x `depth` elements of `size` bytes.

    `mn_major`: neighbours along the row dimension are adjacent, not those along k.
    """
    base = d.start // _PERIOD * _PERIOD
    relative = Descriptor(d.start - base, d.leading, d.stride, d.span)
    return _relative_index(relative, rows, depth, size, mn_major) + base // size


@lru_cache(maxsize=4096)
def _relative_index(d: Descriptor, rows: int, depth: int, size: int, mn_major: bool) -> np.ndarray:
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if mn_major:
        if not d.span:
            raise Unsupported("MN-major operand without a swizzle")
        width = d.span // size
        offset = row // width * d.leading + k // 8 * d.stride + k % 8 * d.span + row % width * size
    elif d.span:
        offset = row // 8 * d.stride + row % 8 * d.span + k * size
    else:
        # Core matrices of 8 rows x 16 bytes, `leading` bytes apart along k.
        offset = row // 8 * d.stride + k * size // 16 * d.leading + row % 8 * 16 + k * size % 16
    return (swizzled(d.start + offset, d.span) // size).astype(np.int64)
