"""The tensors of a call, as one argument."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """Tensors that an attention call reads. A field that the call does not use is None.

    Rows are (batch, seqlen, heads, dim); with `cu_seqlens_*` (total, heads, dim); with
    `block_table` the keys are (pages, page size, heads, dim). `seqused_*` count the rows of each
    sequence that are part of the problem.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None  # (heads_q,)
    cu_seqlens_q: Tensor | None = None  # (batch + 1,) int32
    cu_seqlens_k: Tensor | None = None  # (batch + 1,) int32
    seqused_q: Tensor | None = None  # (batch,) int32
    seqused_k: Tensor | None = None  # (batch,) int32
    block_table: Tensor | None = None  # (batch, pages a sequence) int32


class Saved(NamedTuple):
    """What the backward pass takes from the forward one, and what flows back into it."""

    out: Tensor  # like q, with the head dim of v
    lse: Tensor  # (batch, heads_q, seqlen_q), varlen (heads_q, total_q)
    dout: Tensor  # like out
    dlse: Tensor | None  # like lse; None stands for zeros


class Gradients(NamedTuple):
    """Gradients of the operands; None where nobody asked."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    sink: Tensor | None = None
