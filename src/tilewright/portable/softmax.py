"""The online softmax, explained once.

Softmax of a row needs the row's maximum m and its sum l = sum exp(s - m) before the first weight
can be used. A tiled kernel sees the row a block at a time. It keeps the m and l of what it has
seen, and when a block raises the maximum from m to m', everything summed so far was measured
against the wrong m. One factor mends all of it, since exp(s - m') = exp(s - m) * exp(m - m'):

    l' = l * exp(m - m') + sum exp(s_block - m')
    O' = O * exp(m - m') + exp(s_block - m') V_block

O stays unnormalised until the last block: out = O / l. The backward pass needs of all this only
lse = m + log l, because exp(s - lse) is the weight itself.

Sources: Milakov and Gimelshein, arXiv 1805.02867 (m and l); FlashAttention-2, arXiv 2307.08691,
section 3.1 (one division at the end, lse as the only statistic kept).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class OnlineSoftmax:
    """Running statistics of rows whose logits arrive block by block."""

    def __init__(self, rows: torch.Size, like: Tensor) -> None:
        """`rows` is the shape of one logit column, keys last: (..., rows, 1)."""
        self.max = like.new_full(rows, -math.inf)  # m
        self.sum = like.new_zeros(rows)  # l

    def add_block(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a block (..., rows, keys), overwriting it.

        Returns P = exp(logits - m'), unnormalised, and the factor exp(m - m') that brings what was
        accumulated before to the new maximum.
        """
        new_max = torch.maximum(self.max, logits.amax(dim=-1, keepdim=True))
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN. With 0 in its
        # place each exp(-inf - 0) is the 0 that it should be.
        base = new_max.masked_fill(new_max == -math.inf, 0.0)
        p = logits.sub_(base).exp_()
        factor = torch.exp(self.max - base)
        self.sum = self.sum * factor + p.sum(dim=-1, keepdim=True)
        self.max = new_max
        return p, factor

    def lse(self) -> Tensor:
        """m + log l; -inf for a row that saw nothing."""
        return self.max + torch.log(self.sum)

    def normalise(self, unnormalised: Tensor) -> Tensor:
        """O / l; 0 for a row that saw nothing, where it would be 0 / 0."""
        return unnormalised / self.sum.masked_fill(self.sum == 0.0, 1.0)
