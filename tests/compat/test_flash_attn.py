"""flash-attn's functions: its signatures, and tilewright's results behind them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tilewright import attention, attention_decode, attention_varlen
from tilewright.compat import flash_attn

# As flash_attn 2.8.3 declares them.
OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LAYOUT = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "flash_attn_func": (["q", "k", "v"], OPTIONS),
    "flash_attn_qkvpacked_func": (["qkv"], OPTIONS),
    "flash_attn_kvpacked_func": (["q", "kv"], OPTIONS),
    "flash_attn_varlen_func": (["q", "k", "v", *LAYOUT], {**OPTIONS, "block_table": None}),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], OPTIONS),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *LAYOUT], OPTIONS),
    "flash_attn_with_kvcache": (
        ["q", "k_cache", "v_cache"],
        {
            **dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens")),
            **dict.fromkeys(("cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale")),
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
}

# flash-attn's options, and the same in tilewright's words.
SAME_OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, -1)}, {"window": (3, None)}),
    ({"causal": True, "window_size": (4, 2)}, {"causal": True, "window": (4, 2)}),
    ({"softmax_scale": -0.7, "softcap": 2.0}, {"scale": -0.7, "softcap": 2.0}),
    ({"softcap": 0.0}, {"softcap": None}),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_each_option_changes_the_result() -> None:
    """Otherwise a test that compares with it could not fail."""
    q, k, v = normal(1, 5, 2, 8), normal(1, 7, 2, 8, seed=1), normal(1, 7, 2, 8, seed=2)
    results = [attention(q, k, v, **ours) for _, ours in SAME_OPTIONS[:-1]]
    for i, a in enumerate(results):
        assert all(not torch.allclose(a, b) for b in results[:i])


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_flash_attn(name: str) -> None:
    required, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == [*required, *defaults]
    for parameter in parameters.values():
        assert parameter.kind == parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default == defaults.get(parameter.name, parameter.empty)


@pytest.mark.parametrize(("theirs", "ours"), SAME_OPTIONS)
def test_dense_call_is_attention(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    q, k, v = normal(2, 5, 4, 8), normal(2, 7, 2, 8, seed=1), normal(2, 7, 2, 8, seed=2)
    out, lse, probs = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    expected = attention(q, k, v, return_lse=True, **ours)
    assert_close((out, lse), expected)
    assert probs is None
    assert_close(flash_attn.flash_attn_func(q, k, v, **theirs), expected[0])
    kv = torch.stack((k, v), dim=2)
    assert_close(flash_attn.flash_attn_kvpacked_func(q, kv, **theirs), expected[0])


@pytest.mark.parametrize(("theirs", "ours"), SAME_OPTIONS)
def test_varlen_call_is_attention_varlen(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    q, k, v = normal(6, 4, 8), normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    layout = int32(0, 1, 1, 6), int32(0, 4, 5, 9)
    out, lse, probs = flash_attn.flash_attn_varlen_func(
        q, k, v, *layout, 5, 4, return_attn_probs=True, **theirs
    )
    assert_close((out, lse), attention_varlen(q, k, v, *layout, return_lse=True, **ours))
    assert lse.shape == (4, 6)
    assert probs is None
    kv = torch.stack((k, v), dim=1)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *layout, 5, 4, **theirs)
    assert_close(packed, out)


def test_packed_qkv_gets_the_gradients_of_its_parts() -> None:
    qkv = normal(2, 6, 3, 2, 8).requires_grad_()
    flash_attn.flash_attn_qkvpacked_func(qkv, causal=True).square().sum().backward()
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    attention(q, k, v, causal=True).square().sum().backward()
    assert_close(qkv.grad, torch.stack((q.grad, k.grad, v.grad), dim=2))


def test_packed_varlen_qkv_takes_its_options_by_position() -> None:
    qkv, layout = normal(7, 3, 2, 8), int32(0, 3, 7)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, layout, 4, 0.0, 0.5, True, (2, 0))
    q, k, v = qkv.unbind(1)
    options = {"scale": 0.5, "causal": True, "window": (2, 0)}
    assert_close(out, attention_varlen(q, k, v, layout, layout, **options))


def test_lse_is_differentiable() -> None:
    q, k, v = (normal(1, 4, 2, 8, seed=i).requires_grad_() for i in range(3))
    _, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    lse.sum().backward()
    logits = torch.einsum("bihd,bjhd->bhij", q.detach(), k.detach()) / 8**0.5
    expected = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), k.detach()) / 8**0.5
    assert_close(q.grad, expected)


class TestCache:
    """`flash_attn_with_kvcache`."""

    def caches(self, batch: int = 3, capacity: int = 10) -> tuple[Tensor, Tensor]:
        return normal(batch, capacity, 2, 8, seed=1), normal(batch, capacity, 2, 8, seed=2)

    @pytest.mark.parametrize(("theirs", "ours"), SAME_OPTIONS)
    def test_is_attention_decode(self, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        q, caches, lengths = normal(3, 2, 4, 8), self.caches(), int32(10, 4, 0)
        got = flash_attn.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lengths, return_softmax_lse=True, **theirs
        )
        expected = attention_decode(q, *caches, cache_seqlens=lengths, return_lse=True, **ours)
        assert_close(got, expected)

    def test_one_length_serves_all_sequences(self) -> None:
        q, caches = normal(3, 1, 4, 8), self.caches()
        got = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=6, num_splits=3)
        assert_close(got, attention(q, *(x[:, :6] for x in caches)))

    def test_new_rows_are_appended_and_seen(self) -> None:
        q, caches, lengths = normal(3, 2, 4, 8), self.caches(), int32(8, 3, 0)
        k, v = normal(3, 2, 2, 8, seed=3), normal(3, 2, 2, 8, seed=4)
        got = flash_attn.flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=lengths, causal=True
        )
        for b, length in enumerate(lengths.tolist()):
            assert_close(caches[0][b, length : length + 2], k[b])
            assert_close(caches[1][b, length : length + 2], v[b])
            alone = (x[b : b + 1, : length + 2] for x in caches)
            assert_close(got[b : b + 1], attention(q[b : b + 1], *alone, causal=True))

    def test_cache_batch_idx_names_the_cache_row_of_each_sequence(self) -> None:
        q, caches = normal(2, 1, 4, 8), self.caches()
        before = caches[0].clone()
        k, v = normal(2, 1, 2, 8, seed=3), normal(2, 1, 2, 8, seed=4)
        rows, lengths = int32(2, 0), int32(5, 9)
        got = flash_attn.flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=lengths, cache_batch_idx=rows
        )
        assert_close(caches[0][2, 5], k[0, 0])
        assert_close(caches[0][0, 9], k[1, 0])
        assert torch.equal(caches[0][1], before[1])
        chosen = [x[rows.long()] for x in caches]
        assert_close(got, attention_decode(q, *chosen, cache_seqlens=lengths + 1))

    def test_cache_batch_idx_without_lengths_means_the_whole_capacity(self) -> None:
        q, caches, rows = normal(2, 1, 4, 8), self.caches(), int32(1, 1)
        got = flash_attn.flash_attn_with_kvcache(q, *caches, cache_batch_idx=rows)
        assert_close(got, attention(q, *(x[rows.long()] for x in caches)))

    def test_pages(self) -> None:
        q, pages = normal(2, 1, 4, 8), self.caches(batch=5, capacity=4)
        table, lengths = int32(3, 0, 4, 1).view(2, 2), int32(7, 2)
        got = flash_attn.flash_attn_with_kvcache(
            q, *pages, cache_seqlens=lengths, block_table=table
        )
        flat = [x[table.long()].flatten(1, 2) for x in pages]
        assert_close(got, attention_decode(q, *flat, cache_seqlens=lengths))


class TestUnsupported:
    """What has no counterpart raises before any work, and the message says what it was."""

    q, qkv, cache = normal(1, 4, 2, 8), normal(1, 4, 3, 2, 8), normal(1, 6, 2, 8)

    @pytest.mark.parametrize(
        ("name", "value"), [("dropout_p", 0.1), ("alibi_slopes", torch.ones(2))]
    )
    def test_option(self, name: str, value: Any) -> None:
        q, cu = self.q, int32(0, 4)
        with pytest.raises(NotImplementedError, match=name):
            flash_attn.flash_attn_func(q, q, q, **{name: value})
        with pytest.raises(NotImplementedError, match=name):
            flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, **{name: value})
        with pytest.raises(NotImplementedError, match=name):
            flash_attn.flash_attn_qkvpacked_func(self.qkv, **{name: value})

    def test_pages_of_packed_queries(self) -> None:
        q, cu = self.q[0], int32(0, 4)
        with pytest.raises(NotImplementedError, match="block_table"):
            flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, block_table=int32(0)[None])

    @pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin", "cache_leftpad", "alibi_slopes"])
    def test_cache_option(self, name: str) -> None:
        with pytest.raises(NotImplementedError, match=name):
            flash_attn.flash_attn_with_kvcache(
                self.q, self.cache, self.cache, **{name: torch.ones(1)}
            )

    def test_two_ways_to_name_cache_rows(self) -> None:
        with pytest.raises(NotImplementedError, match="cache_batch_idx and block_table"):
            flash_attn.flash_attn_with_kvcache(
                self.q,
                self.cache,
                self.cache,
                cache_seqlens=3,
                cache_batch_idx=int32(0),
                block_table=int32(0)[None],
            )

    def test_wrong_packing(self) -> None:
        with pytest.raises(ValueError, match=r"qkv has shape \(1, 4, 2, 8\)"):
            flash_attn.flash_attn_qkvpacked_func(self.q)
        with pytest.raises(ValueError, match=r"kv has shape .*want \(batch, seqlen, 2"):
            flash_attn.flash_attn_kvpacked_func(self.q, self.qkv)
        with pytest.raises(TypeError, match="qkv is of type list"):
            flash_attn.flash_attn_qkvpacked_func([1.0])
