"""Global and shared memory: storage, bounds, alignment, and what has been written.

Shared memory of a cluster is one array: the address `rank << 24 | offset` is an index into it.
Untouched pages cost nothing. A global address names its tensor (see host.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.emulator.errors import OutOfBounds, Uninitialised
from tilewright.emulator.host import REGION_BITS, DeviceTensor

if TYPE_CHECKING:
    pass

_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
OFFSET_MASK = 0xFFFFFF
SHARED_WINDOW = 1 << 56  # generic address of shared memory: this plus the shared address


class Shared:
    """The shared memory of one cluster of `ranks` CTAs with `size` bytes each from `base`."""

    def __init__(self, ranks: int, base: int, size: int):
        self.base, self.size, self.ranks = base, size, ranks
        self.data = np.zeros(ranks << 24, np.uint8)
        self.written = np.zeros(ranks << 24, np.uint8)
        self.views = {unit: self.data.view(dtype) for unit, dtype in _UNITS.items()}
        self.marks = {unit: self.written.view(dtype) for unit, dtype in _UNITS.items()}
        self.all_written = {unit: int.from_bytes(b"\1" * unit, "little") for unit in _UNITS}

    def reset(self) -> None:
        """Forget what the previous CTAs left."""
        for rank in range(self.ranks):
            start = (rank << 24) + self.base
            self.written[start : start + self.size] = 0

    def check(self, addresses: np.ndarray, size: int) -> None:
        """Raises OutOfBounds unless all `size`-byte accesses are aligned and inside."""
        if self.ranks == 1:
            low, high = int(addresses.min()), int(addresses.max())
        else:
            offsets = addresses & np.uint32(OFFSET_MASK)
            low, high = int(offsets.min()), int(offsets.max())
            if int(addresses.max()) >> 24 >= self.ranks:
                raise OutOfBounds(
                    f"shared address {int(addresses.max()):#x}: the cluster has {self.ranks} CTAs"
                )
        if low < self.base or high + size > self.base + self.size:
            raise OutOfBounds(
                f"{size} bytes at shared {low:#x}..{high:#x}: the CTA has "
                f"{self.base:#x}..{self.base + self.size:#x}"
            )
        if size > 1 and (addresses & addresses.dtype.type(size - 1)).any():
            raise OutOfBounds(f"a {size}-byte access at a shared address that is no multiple of it")

    def check_range(self, address: int, count: int) -> None:
        """Bounds of `count` contiguous bytes."""
        offset = address & OFFSET_MASK
        inside = self.base <= offset and offset + count <= self.base + self.size
        if not inside or address >> 24 >= self.ranks:
            raise OutOfBounds(
                f"{count} bytes at shared {address >> 24}:{offset:#x}: the CTA has "
                f"{self.base:#x}..{self.base + self.size:#x}"
            )

    def need_written(self, index: np.ndarray, unit: int) -> None:
        """Raises Uninitialised unless every `unit`-byte element of `index` has been written."""
        marks = self.marks[unit][index]
        if not (marks == self.all_written[unit]).all():
            bad = index.reshape(-1)[np.flatnonzero(marks.reshape(-1) != self.all_written[unit])[0]]
            address = int(bad) * unit
            raise Uninitialised(
                f"shared {address >> 24}:{address & OFFSET_MASK:#x} is read, nothing has written it"
            )

    def mark(self, index: Any, unit: int) -> None:
        self.marks[unit][index] = self.all_written[unit]


class Global:
    """The tensors of a launch. Accesses are split by tensor, which lanes rarely mix."""

    def __init__(self, tensors: list[DeviceTensor]):
        self.tensors = {t.address >> REGION_BITS: t for t in tensors}
        self.views: dict[tuple[int, int], np.ndarray] = {}

    def tensor(self, address: int) -> DeviceTensor:
        try:
            return self.tensors[address >> REGION_BITS]
        except KeyError:
            raise OutOfBounds(f"global address {address:#x} belongs to no tensor") from None

    def view(self, tensor: DeviceTensor, unit: int) -> np.ndarray:
        """The tensor's storage in `unit`-byte elements."""
        key = (tensor.address, unit)
        if key not in self.views:
            whole = len(tensor.bytes) // unit * unit
            self.views[key] = tensor.bytes[:whole].view(_UNITS[unit])
        return self.views[key]

    def parts(self, addresses: np.ndarray, size: int) -> list[tuple[Any, DeviceTensor, np.ndarray]]:
        """(lanes, tensor, byte offsets) for each tensor touched, after bounds and alignment."""
        low, high = int(addresses.min()), int(addresses.max())
        if low >> REGION_BITS == high >> REGION_BITS:
            return [(slice(None), *self._offsets(addresses, size))]
        regions = addresses >> np.uint64(REGION_BITS)
        parts = []
        for region in np.unique(regions):
            chosen = np.flatnonzero(regions == region)
            parts.append((chosen, *self._offsets(addresses[chosen], size)))
        return parts

    def _offsets(self, addresses: np.ndarray, size: int) -> tuple[DeviceTensor, np.ndarray]:
        low, high = int(addresses.min()), int(addresses.max())
        tensor = self.tensor(low)
        if high + size > tensor.address + len(tensor.bytes):
            raise OutOfBounds(
                f"{size} bytes at offset {high - tensor.address} of {tensor.name}, "
                f"shape {tensor.shape}, {len(tensor.bytes)} bytes"
            )
        offsets = addresses - np.uint64(tensor.address)
        if size > 1 and (offsets & np.uint64(size - 1)).any():
            raise OutOfBounds(f"a {size}-byte access of {tensor.name} that is not aligned to it")
        return tensor, offsets.astype(np.int64)
