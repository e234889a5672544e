"""Which keys a query may see, as a value.

One frozen value is read by the oracle, the portable path, the kernels and the model. Each of them
turns it into its own masking code, so that no two of them can share a mistake.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mask:
    """A band around the diagonal that ends in the bottom-right corner.

    Query i stands at key position ``p = i + seqlen_k - seqlen_q``, so the last query stands at the
    last key and a decode step (one query) stands at the end of its cache. It sees key j iff
    ``p - left <= j <= p + right``, both ends included. ``None`` leaves a side unbounded.
    """

    left: int | None = None
    right: int | None = None

    @classmethod
    def full(cls) -> Mask:
        return cls(None, None)

    @classmethod
    def causal(cls) -> Mask:
        return cls(None, 0)

    @classmethod
    def window(cls, left: int | None, right: int | None) -> Mask:
        """A sliding window; -1 means unbounded, as None does."""
        return cls(None if left == -1 else left, None if right == -1 else right)

    def __and__(self, other: Mask) -> Mask:
        return Mask(_tighter(self.left, other.left), _tighter(self.right, other.right))

    def __str__(self) -> str:
        if self == Mask.full():
            return "full"
        if self == Mask.causal():
            return "causal"
        left, right = ("inf" if bound is None else bound for bound in (self.left, self.right))
        return f"window({left}, {right})"

    def simplified(self, seqlen_q: int, seqlen_k: int) -> Mask:
        """The same mask for these lengths, without the bounds that exclude nothing."""
        shift = seqlen_k - seqlen_q
        # The last query stands furthest right, the first one furthest left.
        left = self.left if self.left is not None and self.left < seqlen_k - 1 else None
        right = self.right if self.right is not None and self.right + shift < seqlen_k - 1 else None
        return Mask(left, right)

    def keys_seen_by(self, rows: range, seqlen_q: int, seqlen_k: int) -> range:
        """Keys that at least one query of the non-empty, contiguous `rows` sees."""
        shift = seqlen_k - seqlen_q
        first = 0 if self.left is None else rows[0] + shift - self.left
        last = seqlen_k - 1 if self.right is None else rows[-1] + shift + self.right
        return range(max(first, 0), max(min(last, seqlen_k - 1) + 1, max(first, 0)))

    def hides_nothing(self, rows: range, keys: range, seqlen_q: int, seqlen_k: int) -> bool:
        """Whether every query of `rows` sees every key of `keys`: the tile needs no mask."""
        shift = seqlen_k - seqlen_q
        left_is_open = self.left is None or rows[-1] + shift - self.left <= keys[0]
        right_is_open = self.right is None or keys[-1] <= rows[0] + shift + self.right
        return left_is_open and right_is_open


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
