"""What each architecture has: limits that a launch is checked against.

Source: CUDA C++ programming guide, table of technical specifications per compute capability.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """`shared_bytes` a CTA may ask for, 32-bit `registers` and `multiprocessors` of one GPU."""

    arch: str
    shared_bytes: int
    multiprocessors: int
    registers: int = 65536
    max_threads: int = 1024
    tensor_memory_columns: int = 0


CHIPS = {
    "sm_80": Chip("sm_80", 163 * 1024, 108),
    "sm_90": Chip("sm_90", 227 * 1024, 132),
    "sm_90a": Chip("sm_90a", 227 * 1024, 132),
    "sm_100a": Chip("sm_100a", 227 * 1024, 148, tensor_memory_columns=512),
}


def chip_for(arch: str) -> Chip:
    """The chip of `arch`; raises ValueError for an architecture the emulator does not know."""
    if arch not in CHIPS:
        raise ValueError(f"arch {arch!r}: the emulator knows {', '.join(CHIPS)}")
    return CHIPS[arch]
