"""The architectures that there are kernels for."""

from __future__ import annotations

# By compute capability. The "a" opens what one architecture has alone: wgmma, setmaxnreg, tcgen05.
ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a"}


def arch_of(capability: tuple[int, int]) -> str | None:
    """What to compile for on a device of this compute capability; None if it has no kernels."""
    return ARCHS.get(capability)
