"""Autocast: operands are cast as PyTorch's own attention casts them, the arithmetic is not."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.problems import cumulative, random_qkv
from tilewright import attention, attention_decode, attention_varlen

LOW = [torch.bfloat16, torch.float16]
BACKENDS = [None, "cpu_fused", "portable"]


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize(
    "given", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_the_dtype_of_out_is_that_of_pytorchs_attention(
    device: str, given: torch.dtype, low: torch.dtype
) -> None:
    q, k, v = (x.to(device) for x in random_qkv(1, 4, 6, dtype=given))
    with torch.autocast(device, dtype=low):
        want = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        out, lse = attention(q, k, v, return_lse=True)
    assert out.dtype == want.dtype
    assert lse.dtype == torch.promote_types(out.dtype, torch.float32)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_equal_the_explicit_cast(backend: str | None, low: torch.dtype) -> None:
    """To the bit, so autocast does not reach into the arithmetic; gradients are float32."""
    leaves = [x.requires_grad_() for x in random_qkv(2, 70, 90, (4, 2))]
    dout = torch.randn(2, 70, 4, 16, generator=torch.Generator().manual_seed(0)).to(low)
    with torch.autocast("cpu", dtype=low):
        out, lse = attention(*leaves, causal=True, return_lse=True, backend=backend)
        # The backward pass runs inside the region too, which PyTorch advises against.
        got = torch.autograd.grad(out, leaves, dout)
    cast = [x.detach().to(low).requires_grad_() for x in leaves]
    want, want_lse = attention(*cast, causal=True, return_lse=True, backend=backend)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    for a, b in zip(got, torch.autograd.grad(want, cast, dout), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_is_left_alone(backend: str | None) -> None:
    q, k, v = random_qkv(2, 70, 90, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, causal=True, backend=backend)
    assert torch.equal(out, attention(q, k, v, causal=True, backend=backend))


def test_operands_of_two_dtypes_meet_in_autocasts() -> None:
    q, k, v = random_qkv(1, 4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q.bfloat16(), k, v).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="q has dtype bfloat16 and k has dtype float32"):
        attention(q.bfloat16(), k, v)


def test_varlen_is_cast_too() -> None:
    q, k, v = (x[0] for x in random_qkv(1, 5, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention_varlen(q, k, v, cumulative([2, 3]), cumulative([3, 2]))
    assert out.dtype == torch.bfloat16


def test_queries_and_new_rows_are_cast_to_a_low_cache() -> None:
    """The cache itself is written in place, so it keeps its dtype."""
    q, k, v = random_qkv(2, 1, 8)
    k, v = k.bfloat16(), v.bfloat16()
    new = random_qkv(2, 1, 1)[1]
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention_decode(q, k, v, cache_seqlens=lengths, k_new=new, v_new=new)
    assert out.dtype == torch.bfloat16
    assert torch.equal(k[0, 3], new[0, 0].bfloat16()) and torch.equal(v[1, 7], new[1, 0].bfloat16())


def test_autocast_within_torch_compile() -> None:
    torch._dynamo.reset()
    q, k, v = random_qkv(1, 6, 6)
    fast = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = fast(q, k, v), attention(q, k, v)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    torch._dynamo.reset()
