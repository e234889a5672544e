"""The problems that the benchmark times on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.bench.cases import Case
from tilewright.masks import Mask

# The sizes of FlashAttention's papers.
TOKENS = 16384
HIDDEN = 2048  # heads x head dim
DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = (Mask.full(), Mask.causal())
DTYPE = "bfloat16"
BACKWARD = 2.5  # times the forward's operations: five products where that has two
QUICK = (1024, 8192)  # seqlens: a short one and a long one


@dataclass(frozen=True)
class Choice:
    """Which cases to run; what is empty chooses all."""

    names: tuple[str, ...] = ()  # parts of names
    dims: tuple[int, ...] = ()
    masks: tuple[str, ...] = ()  # starts of what a mask is called: full, causal, window
    seqlens: tuple[int, ...] = ()
    longest: int | None = None
    quick: bool = False

    def __contains__(self, case: Case) -> bool:
        return (
            (not self.names or any(part in name(case) for part in self.names))
            and (not self.dims or case.head_dim in self.dims)
            and (not self.masks or str(case.mask).startswith(self.masks))
            and (not self.seqlens or case.seqlen_q in self.seqlens)
            and (self.longest is None or case.seqlen_q <= self.longest)
            and (not self.quick or bool(case.lengths) or case.seqlen_q in QUICK)
        )


def cases(choice: Choice = Choice()) -> list[Case]:
    return [case for case in grid() + others() if case in choice]


def grid() -> list[Case]:
    """Equal numbers of tokens and of operations a token pair: 36 cells."""
    return [
        _dense("grid", seqlen, (HIDDEN // dim, HIDDEN // dim), (dim, dim), mask)
        for dim in DIMS
        for mask in MASKS
        for seqlen in SEQLENS
    ]


def others() -> list[Case]:
    """What models ask for beside the grid."""
    gqa = [
        _dense("gqa", seqlen, (64, 8), (128, 128), mask)
        for mask in MASKS
        for seqlen in (2048, 8192)
    ]
    latent = [
        _dense("latent", seqlen, (16, 16), (192, 128), Mask.causal()) for seqlen in (2048, 8192)
    ]
    window = [_dense("window", seqlen, (64, 8), (64, 64), Mask(1023, 0)) for seqlen in (4096, 8192)]
    varlen = [
        _varlen("short", (16, 16), documents(64, 1024)),
        _varlen("mixed", (16, 16), documents(64, 4096)),
        _varlen("mixed", (64, 8), documents(64, 4096)),
    ]
    return gqa + latent + window + varlen


def documents(shortest: int, longest: int, total: int = TOKENS) -> tuple[int, ...]:
    """Lengths that add up to `total`, as likely between 64 and 128 as between 2k and 4k.

    The same numbers every time. The last document takes what is left, and may be shorter.
    """
    draw = random.Random(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        ratio = longest / shortest
        lengths.append(min(left, round(shortest * ratio ** draw.random())))
    return tuple(lengths)


def is_timed_deterministic(case: Case) -> bool:
    """Whether a backward pass is also timed bound to equal bits: in a few cells."""
    return case.group in ("grid", "gqa") and case.seqlen_q in QUICK


def flops(case: Case, direction: str = "forward") -> float:
    """Operations of a pass as FlashAttention's papers count them.

    4 Sq Sk D H B, or 2 (D + Dv) in place of 4 D; half of it for causal, where the diagonal counts
    as half too; other masks by the pairs that they leave.
    """
    per_pair = 2 * case.heads_q * (case.head_dim + case.dim_v)
    factor = BACKWARD if direction == "backward" else 1.0
    if case.mask not in MASKS:
        return factor * case.flops
    pairs = sum(q * k for q, k in case.sequences())
    return factor * per_pair * pairs / (1 if case.mask == Mask.full() else 2)


def name(case: Case) -> str:
    """Such as "grid d128 causal 8k" or "window 64:8 d64 w1024 4k"; no two are equal."""
    dims = f"d{case.head_dim}" + (f"/{case.dim_v}" if case.dim_v != case.head_dim else "")
    heads = f" {case.heads_q}:{case.heads_k}" if case.heads_q != case.heads_k else ""
    mask = str(case.mask) if case.mask in MASKS else f"w{(case.mask.left or 0) + 1}"
    size = "" if case.lengths else f" {length(case.seqlen_q)}"
    return f"{case.group}{heads} {dims} {mask}{size}"


def length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen)


def _dense(
    group: str, seqlen: int, heads: tuple[int, int], dims: tuple[int, int], mask: Mask
) -> Case:
    batch = max(1, TOKENS // seqlen)
    return Case(group, DTYPE, seqlen, seqlen, *heads, dims[0], mask, batch, (), dims[1])


def _varlen(kind: str, heads: tuple[int, int], lengths: Sequence[int]) -> Case:
    most = max(lengths)
    mask = Mask.causal()
    return Case(
        f"varlen {kind}", DTYPE, most, most, *heads, 128, mask, len(lengths), tuple(lengths)
    )
