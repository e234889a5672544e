"""The rules of attention's edges, through the functions that other libraries' users call."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close

from tilewright import reference
from tilewright.compat import flash_attn
from tilewright.compat.sdpa import scaled_dot_product_attention
from tilewright.masks import Mask
from tilewright.operands import Operands
from tilewright.problem import Scoring

pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")

# Each takes and returns (batch, seqlen, heads, dim); causal is bottom-right aligned.
Dense = Callable[..., Tensor]


def by_flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, **scale: Any) -> Tensor:
    return flash_attn.flash_attn_func(q, k, v, 0.0, scale.get("scale"), causal)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, **scale: Any) -> Tensor:
    bias = causal_lower_right(q.shape[1], k.shape[1]) if causal else None
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, bias, enable_gqa=True, **scale)
    return out.transpose(1, 2)


def by_transformers(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, **scale: Any) -> Tensor:
    from tilewright.integrations.transformers import attention_forward

    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    scaling = scale.get("scale")
    module = torch.nn.Identity()
    out, _ = attention_forward(module, *heads_first, None, scaling=scaling, is_causal=causal)
    return out


NEEDS_TRANSFORMERS = pytest.mark.skipif(not find_spec("transformers"), reason="no transformers")
EVERY_LAYER = pytest.mark.parametrize(
    "attend",
    [by_flash_attn, by_sdpa, pytest.param(by_transformers, marks=NEEDS_TRANSFORMERS)],
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def operands(
    rows: int, keys: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    shapes = [(2, rows, heads[0], 8), (2, keys, heads[1], 8), (2, keys, heads[1], 8)]
    return [normal(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def oracle(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, **scoring: Any) -> Any:
    scoring = {"scale": q.shape[-1] ** -0.5, **scoring}
    return reference.forward(Operands(q, k, v), Scoring(mask or Mask.full(), **scoring))


def oracle_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dout: Tensor) -> Any:
    scoring = Scoring(mask, q.shape[-1] ** -0.5)
    return reference.backward(Operands(q, k, v), scoring, dout, None)[:3]


@EVERY_LAYER
@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (4, 4), (1, 6), (6, 1)])
def test_causal_is_bottom_right_aligned(attend: Dense, lengths: tuple[int, int]) -> None:
    q, k, v = operands(*lengths)
    assert_close(attend(q, k, v, causal=True), oracle(q, k, v, Mask.causal())[0])


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (4, 4)])
def test_causal_of_sdpa_is_top_left_aligned(lengths: tuple[int, int]) -> None:
    q, k, v = (x.transpose(1, 2) for x in operands(*lengths, heads=(2, 2)))
    hidden = torch.ones(lengths, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / 8**0.5).masked_fill(hidden, -math.inf)
    expected = logits.softmax(-1) @ v
    assert_close(scaled_dot_product_attention(q, k, v, is_causal=True), expected)
    bias = causal_upper_left(*lengths)
    assert_close(scaled_dot_product_attention(q, k, v, bias), expected)


@EVERY_LAYER
def test_a_row_that_sees_no_key_is_zero_and_adds_no_gradient(attend: Dense) -> None:
    q, k, v = operands(5, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(q, k, v, causal=True)
    assert (out[:, :3] == 0).all()
    dout = normal(*out.shape, seed=5)
    got = torch.autograd.grad(out, leaves, dout)
    assert (got[0][:, :3] == 0).all()
    q, k, v = (x.detach() for x in leaves)
    assert_close(got, tuple(oracle_gradients(q, k, v, Mask.causal(), dout)))
    changed = dout.clone()
    changed[:, :3] = 1e30
    again = attend(*leaves, causal=True)
    assert all(map(torch.equal, torch.autograd.grad(again, leaves, changed), got))


def test_an_empty_row_has_lse_of_minus_infinity() -> None:
    _, lse, _ = flash_attn.flash_attn_func(*operands(5, 2), causal=True, return_attn_probs=True)
    assert (lse[..., :3] == -math.inf).all()
    assert lse[..., 3:].isfinite().all()


@EVERY_LAYER
@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
def test_zero_lengths(attend: Dense, lengths: tuple[int, int]) -> None:
    leaves = [x.requires_grad_() for x in operands(*lengths)]
    out = attend(*leaves)
    assert out.shape == leaves[0].shape
    assert (out == 0).all()
    for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert grad.shape == leaf.shape
        assert (grad == 0).all()


def test_zero_length_sequences_change_no_bit_of_others() -> None:
    q, k, v = normal(7, 4, 8), normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    plain = flash_attn.flash_attn_varlen_func(q, k, v, int32(0, 3, 7), int32(0, 4, 9), 4, 5)
    ends_q, ends_k = int32(0, 0, 3, 3, 7, 7), int32(0, 0, 4, 4, 9, 9)
    with_empty = flash_attn.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 4, 5)
    assert torch.equal(plain, with_empty)


def test_rows_past_the_last_sequence_never_reach_a_result() -> None:
    q, k, v = normal(8, 4, 8), normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    layout = (int32(0, 2, 5), int32(0, 4, 6), 3, 4)
    expected = flash_attn.flash_attn_varlen_func(q[:5], k[:6], v[:6], *layout)
    q[5:], k[6:], v[6:] = math.nan, math.inf, math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn.flash_attn_varlen_func(*leaves, *layout, return_attn_probs=True)
    assert torch.equal(out[:5], expected)
    assert (out[5:] == 0).all()
    assert (lse[:, 5:] == -math.inf).all()
    for grad, used in zip(torch.autograd.grad(out.sum(), leaves), (5, 6, 6), strict=True):
        assert grad.isfinite().all()
        assert (grad[used:] == 0).all()


@pytest.mark.parametrize("paged", [False, True])
def test_free_slots_of_a_cache_never_reach_a_result(paged: bool) -> None:
    lengths = [8, 3, 0]
    q = normal(3, 2, 4, 8)
    caches = [torch.full((3, 8, 2, 8), math.nan, dtype=torch.float64) for _ in range(2)]
    for cache in caches:
        for b, length in enumerate(lengths):
            cache[b, :length] = normal(length, 2, 8, seed=b)
    layout: dict[str, Any] = {"cache_seqlens": int32(*lengths)}
    storage = caches
    if paged:
        order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
        layout["block_table"] = order.argsort().view(3, 2).to(torch.int32)
        storage = [x.view(6, 4, 2, 8)[order] for x in caches]
    out = flash_attn.flash_attn_with_kvcache(q, *storage, causal=True, **layout)
    for b, length in enumerate(lengths):
        alone = (x[b : b + 1, :length] for x in caches)
        assert_close(out[b : b + 1], oracle(q[b : b + 1], *alone, Mask.causal())[0])


@EVERY_LAYER
def test_nan_in_a_row_spoils_no_other(attend: Dense) -> None:
    q, k, v = operands(4, 4)
    clean = attend(q, k, v, causal=True)
    q[0, 1], k[1, 2] = math.nan, math.nan
    out = attend(q, k, v, causal=True)
    spoilt = torch.zeros(2, 4, dtype=torch.bool)
    spoilt[0, 1] = True
    spoilt[1, 2:] = True
    assert_close(out[~spoilt], clean[~spoilt])
    assert out[spoilt].isnan().all()


@pytest.mark.parametrize(
    ("window", "mask"),
    [
        ((-1, 0), Mask.causal()),
        ((2, -1), Mask(2, None)),
        ((0, 0), Mask(0, 0)),
        ((1, 2), Mask(1, 2)),
        ((99, 99), Mask()),
        ((-1, -1), Mask()),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_windows(window: tuple[int, int], mask: Mask, causal: bool) -> None:
    q, k, v = operands(5, 7)
    mask &= Mask.causal() if causal else Mask.full()
    got = flash_attn.flash_attn_func(
        q, k, v, window_size=window, causal=causal, return_attn_probs=True
    )
    assert_close(got[:2], oracle(q, k, v, mask))


@pytest.mark.parametrize("window", [(-2, 0), (0, -5)])
def test_other_negative_windows_are_refused(window: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="window"):
        flash_attn.flash_attn_func(*operands(3, 3), window_size=window)


@EVERY_LAYER
@pytest.mark.parametrize("scale", [-0.5, 0.0, 2.0])
def test_any_finite_scale(attend: Dense, scale: float) -> None:
    q, k, v = operands(3, 5)
    expected = oracle(q, k, v, Mask.causal(), scale=scale)[0]
    assert_close(attend(q, k, v, causal=True, scale=scale), expected)


@EVERY_LAYER
@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_is_refused(attend: Dense, scale: float) -> None:
    with pytest.raises(ValueError, match="scale is .*want a finite number"):
        attend(*operands(3, 5), scale=scale)


@EVERY_LAYER
def test_very_large_logits(attend: Dense) -> None:
    q, k, v = operands(4, 6)
    k[..., 0], q[..., 0] = 1e3, -1e3
    assert_close(attend(q, k, v), oracle(q, k, v)[0])


def test_two_softcaps_in_one_process() -> None:
    q, k, v = operands(3, 5)
    for softcap in (50.0, 15.0, 0.7):
        got = flash_attn.flash_attn_func(q * 30, k, v, softcap=softcap)
        assert_close(got, oracle(q * 30, k, v, softcap=softcap)[0])


@EVERY_LAYER
def test_dout_without_strides(attend: Dense) -> None:
    leaves = [x.requires_grad_() for x in operands(4, 4)]
    got = torch.autograd.grad(attend(*leaves, causal=True).sum(), leaves)
    ones = torch.ones_like(leaves[0])
    expected = oracle_gradients(*(x.detach() for x in leaves), Mask.causal(), ones)
    assert_close(got, tuple(expected))


@EVERY_LAYER
def test_strides(attend: Dense) -> None:
    q, k, v = operands(5, 5, heads=(2, 2))
    expected = attend(q, k, v)

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def dim_first(x: Tensor) -> Tensor:
        return x.transpose(1, 3).contiguous().transpose(1, 3)

    def offset(x: Tensor) -> Tensor:
        storage = torch.cat((x.new_full((1,), math.nan), x.flatten()))
        return storage[1:].view(x.shape)

    for layout in (heads_first, dim_first, offset):
        assert_close(attend(layout(q), layout(k), layout(v)), expected)
    assert_close(attend(*torch.stack((q, k, v), dim=2).unbind(2)), expected)
    shared = k[:, :, :1].expand(-1, -1, 2, -1)
    assert_close(attend(q, shared, shared), attend(q, k[:, :, :1], k[:, :, :1]))
    assert_close(attend(q, q, q), attend(q, q.clone(), q.clone()))


@EVERY_LAYER
def test_a_dtype_mix_is_rejected(attend: Dense) -> None:
    q, k, v = operands(3, 3)
    with pytest.raises(TypeError, match="q has dtype float64 and v has dtype float32"):
        attend(q, k, v.float())
    with pytest.raises(TypeError, match="dtype int64"):
        attend(q.long(), k.long(), v.long())


@EVERY_LAYER
def test_head_counts_that_do_not_divide_are_rejected(attend: Dense) -> None:
    with pytest.raises(ValueError, match="q has 4 heads and k has 3"):
        attend(*operands(3, 3, heads=(4, 3)))


@EVERY_LAYER
@pytest.mark.parametrize("heads", [(9, 3), (6, 1), (14, 2)])
def test_grouped_heads(attend: Dense, heads: tuple[int, int]) -> None:
    q, k, v = operands(3, 5, heads=heads)
    assert_close(attend(q, k, v), oracle(q, k, v)[0])


@EVERY_LAYER
def test_only_what_is_asked_for_gets_a_gradient(attend: Dense) -> None:
    q, k, v = operands(3, 3)
    k.requires_grad_()
    attend(q, k, v).sum().backward()
    assert q.grad is None
    assert v.grad is None
    assert k.grad is not None


@EVERY_LAYER
def test_a_second_derivative_is_an_error(attend: Dense) -> None:
    q, k, v = (x.requires_grad_() for x in operands(3, 3))
    with pytest.raises(NotImplementedError, match="second derivative"):
        (grad,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        grad.sum().backward()


@EVERY_LAYER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_plain_attention(attend: Dense, dtype: torch.dtype) -> None:
    q, k, v = operands(40, 40, dtype=dtype)
    exact = oracle(q.double(), k.double(), v.double())[0]
    heads_first = (x.transpose(1, 2).repeat_interleave(4 // x.shape[2], 1) for x in (q, k, v))
    qt, kt, vt = heads_first
    plain = ((qt @ kt.mT / 8**0.5).softmax(-1) @ vt).transpose(1, 2)
    band = torch.finfo(dtype).eps * exact.abs().max()
    error = (attend(q, k, v).double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max() + band


def test_append_past_the_end_of_a_cache_writes_nothing() -> None:
    caches = [normal(2, 4, 2, 8, seed=i) for i in range(2)]
    before = [x.clone() for x in caches]
    q, new = normal(2, 1, 4, 8), normal(2, 2, 2, 8, seed=3)
    append = partial(flash_attn.flash_attn_with_kvcache, q, *caches, new, new)
    for layout in (
        {"cache_seqlens": int32(0, 3)},
        {"cache_seqlens": 3},
        {"cache_seqlens": int32(0, 3), "cache_batch_idx": int32(1, 0)},
    ):
        with pytest.raises(ValueError, match="cache_seqlens"):
            append(**layout)
    assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (int32(1, 4), "cu_seqlens_q starts at 1"),
        (int32(0, 3, 2), "cu_seqlens_q decreases"),
        (int32(0, 9), "cu_seqlens_q ends at 9"),
        (torch.tensor([0, 4]), "cu_seqlens_q has dtype int64"),
    ],
)
def test_bad_lengths_are_named(ends: Tensor, message: str) -> None:
    q = normal(4, 2, 8)
    other = torch.linspace(0, 4, len(ends)).to(torch.int32)
    with pytest.raises((ValueError, TypeError), match=message):
        flash_attn.flash_attn_varlen_func(q, q, q, ends, other, 4, 4)


def test_a_sequence_longer_than_announced_is_an_error() -> None:
    q, ends = normal(4, 2, 8), int32(0, 4)
    with pytest.raises(ValueError, match="max_seqlen_k is 3"):
        flash_attn.flash_attn_varlen_func(q, q, q, ends, ends, 4, 3)


def test_split_keys_agree_with_unsplit() -> None:
    q, k, v = operands(2, 30)
    whole = flash_attn.flash_attn_with_kvcache(q, k, v, num_splits=1, causal=True)
    for splits in (2, 5):
        parts = flash_attn.flash_attn_with_kvcache(q, k, v, num_splits=splits, causal=True)
        assert_close(parts, whole)
