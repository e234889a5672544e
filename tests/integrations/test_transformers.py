"""Randomly initialised models of real architectures agree with their eager attention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("transformers")

import transformers

from tilewright.integrations import transformers as integration
from tilewright.integrations.transformers import register

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    # Weights that make attention far from uniform, so that a wrong mask shows.
    "initializer_range": 0.5,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
LENGTH = 11
PADDED = [(0, 0), (4, 0), (0, 5), (2, 3)]  # positions left and right of each sequence

Pair = tuple[Any, Any]


def pair(name: str, config: Any) -> Pair:
    """The same model with eager attention and with tilewright's."""
    register()
    models = []
    for implementation in ("eager", "tilewright"):
        own = copy.deepcopy(config)
        torch.manual_seed(0)
        model = getattr(transformers, name)._from_config(own, attn_implementation=implementation)
        assert model.config._attn_implementation == implementation
        models.append(model.eval())
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


def bert(**changes: Any) -> Pair:
    config = transformers.BertConfig(**SIZES, **changes)
    return pair("BertModel", config)


def modernbert(**changes: Any) -> Pair:
    settings = {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0}
    settings |= {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.ModernBertConfig(**SIZES, **settings, **changes)
    return pair("ModernBertModel", config)


def llama(**changes: Any) -> Pair:
    return pair("LlamaForCausalLM", transformers.LlamaConfig(**DECODER, **changes))


def mistral(**changes: Any) -> Pair:
    config = transformers.MistralConfig(**DECODER, **{"sliding_window": 4, **changes})
    return pair("MistralForCausalLM", config)


def gemma2(**changes: Any) -> Pair:
    settings = {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}
    config = transformers.Gemma2Config(**DECODER, **settings, **changes)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    return pair("Gemma2ForCausalLM", config)


def gpt_oss(**changes: Any) -> Pair:
    sizes = {**DECODER, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["sliding_attention", "full_attention"],
        **changes,
    )
    return pair("GptOssForCausalLM", config)


DECODERS = [llama, mistral, gemma2, gpt_oss]


def padding(pads: list[tuple[int, int]] = PADDED, length: int = LENGTH) -> Tensor:
    position = torch.arange(length)
    rows = [(position >= left) & (position < length - right) for left, right in pads]
    return torch.stack(rows).long()


def tokens(batch: int = len(PADDED), length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=generator)


def run(model: Any, *ids: Tensor, **inputs: Any) -> Tensor:
    return model(*ids, **inputs)[0]


def gradients(model: Any, weights: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """Of a loss that padded positions have no part in."""
    model.zero_grad()
    (run(model, **inputs) * weights).sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("make", [bert, modernbert, *DECODERS])
@pytest.mark.parametrize("padded", [False, True])
def test_model_agrees_with_eager(make: Callable[..., Pair], padded: bool) -> None:
    eager, ours = make()
    mask = padding() if padded else torch.ones(len(PADDED), LENGTH, dtype=torch.long)
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    real = mask.bool()
    expected = run(eager, **inputs)
    assert_close(run(ours, **inputs)[real], expected[real], atol=1e-4, rtol=1e-4)
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(expected.shape, generator=generator) * mask[..., None]
    wanted = gradients(eager, weights, **inputs)
    got = gradients(ours, weights, **inputs)
    assert wanted.keys() == got.keys()
    # Gradients that cancel, such as those of a key's bias, are noise of the size of the others'.
    size = max(grad.abs().max().item() for grad in wanted.values())
    for name, grad in wanted.items():
        assert_close(got[name], grad, atol=1e-6 * size, rtol=1e-3, msg=name)
    assert any("sinks" in name for name in got) == (make is gpt_oss)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (mistral, {"sliding_window": 5}),
        (gemma2, {"attn_logit_softcapping": 2.5}),
        (gemma2, {"sliding_window": 5}),
        (gpt_oss, {"sliding_window": 5}),
        (llama, {"is_causal": False}),
    ],
)
def test_agreement_is_no_accident(make: Callable[..., Pair], change: dict[str, Any]) -> None:
    """Another window, softcap or direction gives results far outside the tolerance."""
    eager, ours = make()
    for name, value in change.items():
        setattr(ours.config, name, value)
        for module in ours.modules():
            if name == "attn_logit_softcapping" and hasattr(module, name):
                module.attn_logit_softcapping = value
    difference = run(ours, input_ids=tokens()) - run(eager, input_ids=tokens())
    assert difference.abs().max() > 0.01


@pytest.mark.parametrize("make", DECODERS)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_gives_the_tokens_of_eager(make: Callable[..., Pair], cache: str | None) -> None:
    eager, ours = make()
    mask = padding([(0, 0), (3, 0), (6, 0)], length=7)
    arguments = {
        "input_ids": tokens(3, 7),
        "attention_mask": mask,
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": None,
        "cache_implementation": cache,
    }
    assert torch.equal(ours.generate(**arguments), eager.generate(**arguments))


def test_cached_steps_give_the_rows_of_one_pass() -> None:
    _, ours = mistral()
    ids, mask = tokens(2), padding([(0, 0), (3, 0)])
    whole = run(ours, input_ids=ids, attention_mask=mask)
    cache, rows = transformers.DynamicCache(config=ours.config), []
    takes = inspect.signature(ours.forward).parameters
    name = "cache" if "cache" in takes else "past_key_values"  # the older name
    for start, stop in ((0, 5), (5, 6), (6, LENGTH)):
        inputs = {"attention_mask": mask[:, :stop], name: cache}
        rows.append(run(ours, ids[:, start:stop], **inputs))
    real = mask.bool()
    assert_close(torch.cat(rows, dim=1)[real], whole[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "both"])
@pytest.mark.parametrize("make", [llama, mistral])
def test_packed_sequences_do_not_see_each_other(make: Callable[..., Pair], how: str) -> None:
    _, ours = make()
    lengths = (5, 1, 5)
    ids = tokens(1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    cu_seq_lens = torch.tensor([0, 5, 6, 11], dtype=torch.int32)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if how != "position_ids":
        inputs |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
        inputs |= {"max_length_q": 5, "max_length_k": 5}
    if how == "cu_seq_lens":
        inputs["attention_mask"] = torch.ones_like(ids)  # then transformers looks for no packing
    alone = [run(ours, input_ids=x) for x in ids.split(lengths, dim=1)]
    assert_close(run(ours, **inputs), torch.cat(alone, dim=1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [bert, modernbert, *DECODERS])
def test_padded_queries_are_left_out(make: Callable[..., Pair]) -> None:
    """Every layer's attention returns 0 for them, and reads nothing there."""
    _, ours = make()
    keep, results = padding(), []

    def recorded(module: Any, *operands: Any, **options: Any) -> Any:
        out, weights = integration.attention_forward(module, *operands, **options)
        results.append(out.detach())
        return out, weights

    transformers.AttentionInterface.register("tilewright", recorded)
    try:
        run(ours, input_ids=tokens(), attention_mask=keep)
    finally:
        register()
    assert len(results) == 2
    for out in results:
        is_zero = (out == 0).flatten(2).all(dim=-1)
        assert torch.equal(is_zero, ~keep.bool())


class TestCrossAttention:
    """The padding of an encoder's states hides keys, and never a decoder's queries."""

    def make(self) -> Pair:
        config = transformers.BertConfig(
            **SIZES, is_decoder=True, add_cross_attention=True, use_cache=False
        )
        return pair("BertModel", config)

    @pytest.mark.parametrize("keys", [7, LENGTH])
    def test_agrees_with_eager(self, keys: int) -> None:
        eager, ours = self.make()
        states = torch.randn(2, keys, 32, generator=torch.Generator().manual_seed(3))
        inputs = {
            "input_ids": tokens(2),
            "attention_mask": torch.ones(2, LENGTH, dtype=torch.long),
            "encoder_hidden_states": states,
            "encoder_attention_mask": padding([(0, 0), (0, 4)], length=keys),
        }
        assert_close(run(ours, **inputs), run(eager, **inputs), atol=1e-4, rtol=1e-4)

    def test_encoder_decoder(self) -> None:
        config = transformers.BartConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            init_std=0.5,
        )
        eager, ours = pair("BartModel", config)
        inputs = {
            "input_ids": tokens(),
            "attention_mask": padding(),
            "decoder_input_ids": tokens(),
        }
        assert_close(run(ours, **inputs), run(eager, **inputs), atol=1e-4, rtol=1e-4)


class Recorder(torch.nn.Module):
    """A self-attention module as far as the interface looks at one."""

    is_causal = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class TestAttentionForward:
    """The interface function itself."""

    def operands(self, keys: int = 6) -> list[Tensor]:
        shapes = [(2, 4, 6, 8), (2, 2, keys, 8), (2, 2, keys, 8)]
        return [torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in shapes]

    def test_padding_gives_zero_and_reads_no_padding(self) -> None:
        q, k, v = self.operands()
        keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], dtype=torch.bool)
        seen = integration.visibility(
            2,
            6,
            6,
            mask_function=transformers.masking_utils.bidirectional_mask_function,
            attention_mask=keep,
        )
        clean, _ = integration.attention_forward(Recorder(), q, k, v, seen)
        for x in (q, k, v):
            x.masked_fill_(~keep[:, None, :, None], torch.nan)
        out, weights = integration.attention_forward(Recorder(), q, k, v, seen)
        assert weights is None
        assert out.shape == (2, 6, 4, 8)
        assert torch.equal(out, clean)
        assert (out[~keep] == 0).all()
        assert (out[keep] != 0).any(dim=-1).all()

    def test_causality_comes_from_the_call_and_then_from_the_module(self) -> None:
        q, k, v = self.operands()
        full, _ = integration.attention_forward(Recorder(), q, k, v, None)
        causal, _ = integration.attention_forward(Recorder(), q, k, v, None, is_causal=True)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        for got, is_causal in ((full, False), (causal, True)):
            expected = sdpa(q, k, v, is_causal=is_causal, enable_gqa=True).transpose(1, 2)
            assert_close(got, expected)

    def test_window_without_a_mask(self) -> None:
        q, k, v = self.operands()
        options = {"is_causal": True, "sliding_window": 2}
        got, _ = integration.attention_forward(Recorder(), q, k, v, None, **options)
        keep = torch.ones(6, 6, dtype=torch.bool).tril().triu(-1)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        assert_close(got, sdpa(q, k, v, attn_mask=keep, enable_gqa=True).transpose(1, 2))
        with pytest.raises(NotImplementedError, match="sliding_window is 2"):
            integration.attention_forward(Recorder(), q, k, v, None, sliding_window=2)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"dropout": 0.1}, "dropout is 0.1"),
            ({"attention_mask": torch.zeros(2, 1, 6, 6)}, r"attention_mask is a Tensor of shape"),
            ({"position_bias": torch.zeros(1, 4, 6, 6)}, "position_bias is given: a bias"),
            ({"output_attentions": True}, "output_attentions"),
            ({"block_table": torch.zeros(2, 1)}, "block_table"),
        ],
    )
    def test_unsupported_is_refused(self, arguments: dict[str, Any], named: str) -> None:
        arguments = {"attention_mask": None, **arguments}
        with pytest.raises(NotImplementedError, match=named):
            integration.attention_forward(Recorder(), *self.operands(), **arguments)

    def test_mask_of_other_sizes_is_refused(self) -> None:
        seen = integration.visibility(2, 6, 7)
        with pytest.raises(NotImplementedError, match="6 queries and 7 keys"):
            integration.attention_forward(Recorder(), *self.operands(), seen)

    def test_two_descriptions_of_padding_are_refused(self) -> None:
        keep = torch.ones(2, 6, dtype=torch.bool).tril()
        seen = integration.visibility(2, 6, 6, attention_mask=keep)
        ends = torch.tensor([0, 12], dtype=torch.int32)
        with pytest.raises(NotImplementedError, match="cu_seq_lens_q and a mask with padding"):
            integration.attention_forward(
                Recorder(), *self.operands(), seen, cu_seq_lens_q=ends, max_length_q=12
            )


def test_model_with_an_attention_of_its_own_is_told_so() -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    _, ours = pair("BloomModel", config)
    with pytest.raises(NotImplementedError, match="attn_implementation='sdpa' or 'eager'"):
        run(ours, input_ids=tokens())


def test_position_bias_is_refused() -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
    )
    _, ours = pair("T5EncoderModel", config)
    with pytest.raises(NotImplementedError, match="position_bias|its attention mask"):
        run(ours, input_ids=tokens())


def test_training_with_attention_dropout_is_refused() -> None:
    _, ours = llama(attention_dropout=0.1)
    run(ours, input_ids=tokens())
    with pytest.raises(NotImplementedError, match="attention dropout of 0"):
        run(ours.train(), input_ids=tokens())


def test_dense_mask_of_the_user_is_refused() -> None:
    _, ours = llama()
    square = torch.zeros(len(PADDED), 1, LENGTH, LENGTH)
    with pytest.raises(NotImplementedError, match="attention_mask is a Tensor"):
        run(ours, input_ids=tokens(), attention_mask=square)


def test_existing_model_can_change_its_attention() -> None:
    eager, _ = llama()
    before = run(eager, input_ids=tokens())
    eager.set_attn_implementation("tilewright")
    assert eager.config._attn_implementation == "tilewright"
    assert_close(run(eager, input_ids=tokens()), before, atol=1e-4, rtol=1e-4)
