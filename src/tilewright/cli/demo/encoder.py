"""A sentence encoder in plain PyTorch: BERT's layers, then the mean over a text's tokens.

Rows may lie in a padded batch, (texts, longest), or packed one text after the other, (tokens,):
every layer treats each row by itself, and only attention and the mean ask where a text ends.

It is written out here because it then runs without transformers, too, and because the packed rows
stay visible. Parameters are named as in transformers' BertModel, so that real weights go in as they
are. It does not judge itself: where transformers is installed, it must agree with BertModel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright import attention_varlen

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v and out: (*rows, heads, dim)


@dataclass(frozen=True)
class Size:
    """all-MiniLM-L6-v2's size."""

    vocabulary: int = 30522
    positions: int = 512
    hidden: int = 384
    layers: int = 6
    heads: int = 12
    intermediate: int = 1536


@dataclass(frozen=True)
class Encoder:
    """Devlin et al., arXiv 1810.04805, with the norms after the sums, as there."""

    weights: Mapping[str, Tensor]
    layers: int
    heads: int
    eps: float = 1e-12

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Token ids and their positions, (*rows), to hidden states (*rows, hidden)."""
        x = self._embed("word", ids) + self._embed("position", positions)
        x = x + self._embed("token_type", torch.zeros_like(ids))
        x = self._norm("embeddings.LayerNorm", x)
        for layer in range(self.layers):
            x = self._layer(f"encoder.layer.{layer}", x, attend)
        return x

    def _layer(self, name: str, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            self._linear(f"{name}.attention.self.{part}", x).unflatten(-1, (self.heads, -1))
            for part in ("query", "key", "value")
        )
        mixed = self._linear(f"{name}.attention.output.dense", attend(q, k, v).flatten(-2))
        x = self._norm(f"{name}.attention.output.LayerNorm", x + mixed)
        inner = F.gelu(self._linear(f"{name}.intermediate.dense", x))
        return self._norm(
            f"{name}.output.LayerNorm", x + self._linear(f"{name}.output.dense", inner)
        )

    def _embed(self, name: str, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weights[f"embeddings.{name}_embeddings.weight"])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


@dataclass(frozen=True)
class Padded:
    """Texts as the rows of a rectangle, each filled up to the longest."""

    ids: Tensor  # (texts, longest)
    mask: Tensor  # (texts, longest), true at a token

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], device: torch.device) -> Padded:
        rows = [torch.tensor(text, device=device) for text in texts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(text) for text in texts], device=device)
        return cls(ids, torch.arange(ids.shape[1], device=device) < lengths[:, None])

    def encode(self, encoder: Encoder) -> Tensor:
        positions = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        return encoder(self.ids, positions, self.attend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        mask = self.mask[:, None, None]
        return F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)

    def pool(self, hidden: Tensor) -> Tensor:
        """Mean over a text's tokens, scaled to length 1: (texts, hidden)."""
        sums = (hidden * self.mask[..., None]).sum(1)
        return F.normalize(sums / self.mask.sum(1, keepdim=True), dim=-1)


@dataclass(frozen=True)
class Packed:
    """Texts one after the other, without padding."""

    ids: Tensor  # (tokens,)
    positions: Tensor  # (tokens,), from 0 in each text
    owners: Tensor  # (tokens,), the text of each token
    cu_seqlens: Tensor  # (texts + 1,) int32, where each text begins, and the end
    longest: int

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], device: torch.device) -> Packed:
        lengths = torch.tensor([len(text) for text in texts])
        ends = lengths.cumsum(0)
        tokens = torch.tensor([token for text in texts for token in text])
        owners = torch.repeat_interleave(lengths)
        positions = torch.arange(len(tokens)) - (ends - lengths)[owners]
        cu_seqlens = F.pad(ends, (1, 0)).int()
        tensors = (x.to(device) for x in (tokens, positions, owners, cu_seqlens))
        return cls(*tensors, longest=int(lengths.max()))

    def encode(self, encoder: Encoder) -> Tensor:
        return encoder(self.ids, self.positions, self.attend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ends, longest = self.cu_seqlens, self.longest
        out = attention_varlen(q, k, v, ends, ends, max_seqlen_q=longest, max_seqlen_k=longest)
        return cast(Tensor, out)  # a pair only with return_lse

    def pool(self, hidden: Tensor) -> Tensor:
        """Mean over a text's tokens, scaled to length 1: (texts, hidden)."""
        sums = hidden.new_zeros(len(self.cu_seqlens) - 1, hidden.shape[-1])
        sums.index_add_(0, self.owners, hidden)
        return F.normalize(sums / self.cu_seqlens.diff()[:, None], dim=-1)


def random_weights(size: Size) -> dict[str, Tensor]:
    """Weights as BERT starts its training with; the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * 0.02

    def linear(name: str, rows: int, columns: int) -> None:
        matrix(name, rows, columns)
        weights[f"{name}.bias"] = torch.zeros(rows)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = torch.ones(size.hidden)
        weights[f"{name}.bias"] = torch.zeros(size.hidden)

    tables = {"word": size.vocabulary, "position": size.positions, "token_type": 2}
    for name, rows in tables.items():
        matrix(f"embeddings.{name}_embeddings", rows, size.hidden)
    norm("embeddings.LayerNorm")
    for layer in range(size.layers):
        name = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{name}.attention.{part}", size.hidden, size.hidden)
        linear(f"{name}.intermediate.dense", size.intermediate, size.hidden)
        linear(f"{name}.output.dense", size.hidden, size.intermediate)
        norm(f"{name}.attention.output.LayerNorm")
        norm(f"{name}.output.LayerNorm")
    return weights
