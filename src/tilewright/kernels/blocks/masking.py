"""Which keys a block of queries visits, and the mask of one score tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tilewright.kernels.blocks.arithmetic import select


@dataclass(frozen=True)
class Band:
    """A mask with its bounds: query i stands at key p = i + seqlen_k - seqlen_q and sees the keys
    p - left to p + right, bottom-right aligned. A side that is not bounded is not computed."""

    bounded_left: bool
    bounded_right: bool
    left: Int32
    right: Int32

    def limits(self, row: Int32, seqlen_q: Int32, seqlen_k: Int32) -> tuple[Any, Int32]:
        """The first key that `row` sees, None if no bound, and the one past the last."""
        position = row + seqlen_k - seqlen_q
        first = position - self.left if self.bounded_left else None
        last = seqlen_k
        if self.bounded_right:
            last = cutlass.min(position + self.right + 1, seqlen_k)
        return first, last

    def blocks(
        self, q_first: Int32, q_last: Int32, seqlen_q: Int32, seqlen_k: Int32, tile_kv: int
    ) -> tuple[Int32, Int32]:
        """The first key block that queries q_first to q_last visit, and the one past the last."""
        first, _ = self.limits(q_first, seqlen_q, seqlen_k)
        _, past = self.limits(q_last, seqlen_q, seqlen_k)
        begin = Int32(0) if first is None else cutlass.max(first, 0) // tile_kv
        end = (cutlass.max(past, 0) + tile_kv - 1) // tile_kv
        return begin, end


def mask_scores(
    S: cute.Tensor,
    columns: list[int],
    first: list[Any],
    past: list[Int32],
    value: float = -Float32.inf,
) -> None:
    """S (row, col) becomes `value` where a key is hidden.

    `columns` are the static columns of the thread's elements; `first` and `past` hold each row's
    limits, relative to the thread's own first column.
    """
    for r in range(len(past)):
        for c, column in enumerate(columns):
            is_hidden = column >= past[r]
            if first[r] is not None:
                is_hidden = is_hidden | (column < first[r])
            S[r, c] = select(is_hidden, value, S[r, c])


# Elements whose fate is a bit of one word: a shift by all of a word's 32 bits is undefined.
WORD = 16


def hide_from(S: cute.Tensor, seen: list[Int32]) -> None:
    """S (row, i) becomes -inf from the thread's element `seen[r]` of row r on.

    By bits, which the assembler moves to seven predicates at a time: half the instructions that a
    comparison of each element takes.
    """
    for r, count in enumerate(seen):
        for word in range(0, cute.size(S, mode=[1]), WORD):
            _keep(S, r, word, _low_bits(count - word))


def hide_before(S: cute.Tensor, hidden: list[Int32]) -> None:
    """S (row, i) becomes -inf before the thread's element `hidden[r]` of row r."""
    for r, count in enumerate(hidden):
        for word in range(0, cute.size(S, mode=[1]), WORD):
            _keep(S, r, word, ~_low_bits(count - word))


def _low_bits(n: Int32) -> Int32:
    """A word whose lowest n bits are set; n may be out of its range."""
    return (1 << cutlass.min(cutlass.max(n, 0), WORD)) - 1


def _keep(S: cute.Tensor, r: int, word: int, bits: Int32) -> None:
    for i in range(min(WORD, cute.size(S, mode=[1]) - word)):
        S[r, word + i] = select(bits & (1 << i) != 0, S[r, word + i], -Float32.inf)
