"""The problems that the benchmark times."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilewright.masks import Mask

# As FlashAttention's papers do, a batch holds the same number of tokens at every length; fewer of
# them and fewer heads than there, so that two cores finish the grid in minutes.
TOKENS = 4096
HIDDEN = 512  # heads x head dim


@dataclass(frozen=True)
class Case:
    """One attention problem with its name in the table.

    `lengths` holds the sequences' lengths of a varlen batch; then `batch` is their number and the
    seqlens are the longest.
    """

    group: str
    dtype: str
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    mask: Mask = Mask()
    batch: int = 1
    lengths: tuple[int, ...] = ()
    head_dim_v: int = 0  # 0: head_dim

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward pass: two products over the visible pairs."""
        pairs = sum(self.visible_pairs(*lengths) for lengths in self.sequences())
        return 2 * pairs * self.heads_q * (self.head_dim + self.dim_v)

    def sequences(self) -> list[tuple[int, int]]:
        if self.lengths:
            return [(length, length) for length in self.lengths]
        return [(self.seqlen_q, self.seqlen_k)] * self.batch

    def visible_pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        rows = (
            self.mask.keys_seen_by(range(i, i + 1), seqlen_q, seqlen_k) for i in range(seqlen_q)
        )
        return sum(map(len, rows))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"mask": str(self.mask)}


def dense_cases() -> list[Case]:
    """The grid that PyTorch's fused kernel can express whole."""
    return [
        _self_attention("dense", dtype, seqlen, dim, mask)
        for dtype in ("float32", "bfloat16")
        for dim in (64, 128)
        for mask in (Mask.full(), Mask.causal())
        for seqlen in (512, 1024, 2048, 4096, 8192)
    ]


def other_cases() -> list[Case]:
    """What PyTorch has to express by a mask over every pair, or by padding."""
    cases = []
    for dtype in ("float32", "bfloat16"):
        for mask in (Mask.full(), Mask.causal()):
            cases.append(Case("gqa 8:1", dtype, 2048, 2048, 8, 1, 64, mask))
        for left in (128, 1024):
            cases.append(_self_attention("window", dtype, 4096, 64, Mask(left, 0)))
        cases.append(Case("bottom-right", dtype, 1024, 4096, 8, 8, 64, Mask.causal()))
        cases.append(Case("bottom-right", dtype, 128, 8192, 8, 8, 64, Mask.causal()))
        cases += [_varlen(dtype, mask) for mask in (Mask.full(), Mask.causal())]
    return cases


def _self_attention(group: str, dtype: str, seqlen: int, dim: int, mask: Mask) -> Case:
    heads = HIDDEN // dim
    batch = max(1, TOKENS // seqlen)
    return Case(group, dtype, seqlen, seqlen, heads, heads, dim, mask, batch)


def _varlen(dtype: str, mask: Mask) -> Case:
    """One long document among short ones, as a batch of real text has them."""
    lengths = (2048, 700, 311, 150, 97, 64, 33, 12)
    longest = max(lengths)
    return Case("varlen", dtype, longest, longest, 8, 8, 64, mask, len(lengths), lengths)
