"""The online softmax of a score tile, whichever matrix multiply made it.

A thread holds `rows` rows of the tile, each of them shared with the lanes beside it. A row's
maximum and sum are kept in the scale of log2, because exp2 is what the hardware computes.
Source: FlashAttention-2, arXiv 2307.08691, section 3.1; conditional rescaling: FlashAttention-4,
arXiv 2603.05451, section 3.2.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32

from tilewright.kernels.blocks.arithmetic import (
    exp2,
    fma,
    fmax,
    reciprocal,
    select,
)
from tilewright.kernels.blocks.carried import Unchanged
from tilewright.kernels.blocks.exp2 import exp2_by_polynomial

CHAINS = 4  # of dependent operations that a reduction is cut into, to hide their latency


class Softmax(Unchanged):
    """Maximum and sum of a thread's rows. Plain straight-line code: traced where it is called."""

    def __init__(self, rows: int, lanes: int, scale_log2: Float32, threshold: float, emulated: int):
        self.rows, self.lanes, self.scale_log2 = rows, lanes, scale_log2
        self.threshold, self.emulated = threshold, emulated
        self.maximum = cute.make_rmem_tensor(rows, Float32)  # scaled, in log2
        self.sum = cute.make_rmem_tensor(rows, Float32)  # of this thread's elements only

    def reset(self) -> None:
        self.maximum.fill(-Float32.inf)
        self.sum.fill(0.0)

    def step(self, S: cute.Tensor, factor: cute.Tensor) -> None:
        """S (row, col) becomes P; `factor` (row) is what O and the sum shrink by."""
        for r in range(self.rows):
            self._shift(S, factor, r)
        for r in range(self.rows):
            self._exponentiate(S, r)
            self.sum[r] = fma(self.sum[r], factor[r], self._row_sum(S, r))

    def step_ahead(self, S: cute.Tensor) -> Boolean:
        """S (row, col) becomes P by the maxima so far, while the tile's own are being taken.

        Whether one of this thread's elements exceeds its row's maximum by more than the threshold:
        then P is of no use, and the caller has to put the sums back and take a `step`.
        """
        exceeds = Boolean(False)
        for r in range(self.rows):
            scores = [S[r, c] for c in range(cute.size(S, mode=[1]))]
            largest = _reduce(fmax, scores)
            # A row that has seen no key has exceeded -inf, unless it still sees none (then NaN).
            excess = fma(largest, self.scale_log2, -self.maximum[r])
            exceeds = exceeds | (excess > self.threshold)
            self._exponentiate(S, r)
            self.sum[r] = self.sum[r] + self._row_sum(S, r)
        return exceeds

    def _shift(self, S: cute.Tensor, factor: cute.Tensor, r: int) -> None:
        """Take the row's new maximum, and with it the factor of what came before."""
        columns = cute.size(S, mode=[1])
        largest = _reduce(fmax, [S[r, c] for c in range(columns)])
        for lane in _butterfly(self.lanes):
            largest = fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=lane))
        before = self.maximum[r]
        now = fmax(before, largest * self.scale_log2)
        if self.threshold > 0.0:
            # O and the sum share their reference, so any reference is exact that keeps exp2 finite.
            now = select(now - before <= self.threshold, before, now)
        self.maximum[r] = now
        # A row that has seen no key yet has no maximum; 0 instead keeps exp2(-inf - m) at 0.
        factor[r] = exp2(before - _finite(now))

    def _exponentiate(self, S: cute.Tensor, r: int) -> None:
        reference = -_finite(self.maximum[r])
        for c in range(cute.size(S, mode=[1])):
            x = fma(S[r, c], self.scale_log2, reference)
            by_polynomial = c % 16 < self.emulated
            S[r, c] = exp2_by_polynomial(x) if by_polynomial else exp2(x)

    def _row_sum(self, P: cute.Tensor, r: int) -> Float32:
        return _reduce(lambda a, b: a + b, [P[r, c] for c in range(cute.size(P, mode=[1]))])

    def finish(self, sink_log2: Float32, factor: cute.Tensor, lse: cute.Tensor) -> None:
        """What is left to multiply O's rows by, and their natural log-sum-exp.

        `sink_log2` is one more logit of each row, -inf for none.
        """
        for r in range(self.rows):
            total = self.sum[r]
            for lane in _butterfly(self.lanes):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=lane)
            before = self.maximum[r]
            reference = fmax(before, sink_log2)
            shrink = exp2(before - _finite(reference))
            total = total * shrink + exp2(sink_log2 - _finite(reference))
            is_empty = total == 0.0
            factor[r] = select(is_empty, 0.0, shrink * reciprocal(total))
            natural = (reference + cute.math.log2(total)) * math.log(2.0)
            lse[r] = select(is_empty, -Float32.inf, natural)


def _finite(maximum: Float32) -> Float32:
    return select(maximum == -Float32.inf, 0.0, maximum)


def _butterfly(lanes: int) -> list[int]:
    return [1 << i for i in range(lanes.bit_length() - 1)]


def _reduce(combine: Any, values: list[Any]) -> Any:
    chains = values[:CHAINS]
    for i, value in enumerate(values[CHAINS:]):
        chains[i % CHAINS] = combine(chains[i % CHAINS], value)
    while len(chains) > 1:
        chains = [combine(*pair) for pair in zip(chains[::2], chains[1::2], strict=True)]
    return chains[0]
