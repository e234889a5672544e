"""The same values where a kernel can read them; what it cannot read is copied, once.

TMA wants rows that are contiguous, 16-byte aligned, and 16 bytes or multiples of that apart.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of TMA
MULTIPLE = 8  # elements of the dtypes that FA-3 takes in that


def is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT == 0


def for_tma(x: Tensor) -> Tensor:
    legal = legal_strides(x.shape, x.stride())
    if legal is None or not is_aligned(x) or x.is_neg():
        return _copy(x)
    return x if legal == x.stride() else x.as_strided(x.shape, legal)


def in_a_row(x: Tensor) -> Tensor:
    return _copy(x) if x.stride() != (1,) or x.is_neg() else x


def _copy(x: Tensor) -> Tensor:
    # Tensor.contiguous returns the tensor itself if only its address, or the stride of a
    # dimension of size 1, is illegal. A copy of what is negated lazily has the values themselves.
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=4096)
def legal_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides that reach the same elements and that TMA takes; None if there are none.

    A dimension of size 1 is never stepped along, yet its stride must be legal.
    """
    *outer, last = strides
    sizes = shape[:-1]
    legal = [
        MULTIPLE if size == 1 and not _is_legal(x) else x
        for size, x in zip(sizes, outer, strict=True)
    ]
    return (*legal, 1) if last == 1 and all(map(_is_legal, legal)) else None


def _is_legal(stride: int) -> bool:
    return stride > 0 and stride % MULTIPLE == 0
