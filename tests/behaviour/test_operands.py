"""Rules on operands: strides, head dims, head counts, dtypes, devices.

What is rejected is in tests/test_bad_input.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.layouts import LAYOUTS
from tests.paths import Path
from tests.problems import Batch, OneSequence, random_batch, random_qkv
from tests.tolerance import assert_accurate, max_of, rounding, sizes_of_terms
from tilewright import attention, attention_decode, attention_varlen, explain

Operands = tuple[Tensor, Tensor, Tensor]


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """(batch, heads, seqlen, dim) in memory."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))


def slices_of_one_buffer(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """A fused projection: (batch, seqlen, 3, heads, dim)."""
    return torch.stack([q, k, v], dim=2).unbind(2)


def padded_rows(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """The head dim is cut out of longer rows."""
    return tuple(torch.nn.functional.pad(x, (0, 1), value=torch.nan)[..., :-1] for x in (q, k, v))


def one_element_off(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """Aligned to nothing."""

    def shifted(x: Tensor) -> Tensor:
        memory = torch.cat([x.new_full((1,), torch.nan), x.flatten()])
        return memory.as_strided(x.shape, x.contiguous().stride(), 1)

    return shifted(q), shifted(k), shifted(v)


def dim_not_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    return tuple(x.mT.contiguous().mT for x in (q, k, v))


def every_other_row(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    return tuple(x.repeat_interleave(2, dim=1)[:, ::2] for x in (q, k, v))


def unlike_each_other(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    return heads_first(q, k, v)[0], dim_not_contiguous(q, k, v)[1], padded_rows(q, k, v)[2]


VIEWS = [
    heads_first,
    slices_of_one_buffer,
    padded_rows,
    one_element_off,
    dim_not_contiguous,
    every_other_row,
    unlike_each_other,
]


def forward_and_backward(path: Path, q: Tensor, k: Tensor, v: Tensor, packed: bool) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if packed:
        rows = [x.shape[1] for x in (q, k)]
        bounds = [torch.arange(0, q.shape[0] + 1).int().to(q.device) * n for n in rows]
        packed_rows = (x.flatten(0, 1) for x in (q, k, v))
        out = attention_varlen(*packed_rows, *bounds, causal=True, backend=path.backend)
        out = out.unflatten(0, q.shape[:2])
    else:
        out = attention(q, k, v, causal=True, backend=path.backend)
    return [out, *torch.autograd.grad(out, (q, k, v), slope(out))]


def slope(out: Tensor) -> Tensor:
    """The gradient that flows into out."""
    return torch.linspace(-1.0, 1.0, out.numel(), device=out.device).view_as(out).to(out.dtype)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operands_may_have_any_strides(
    path: Path, view: Callable[..., Operands], packed: bool, dtype: torch.dtype
) -> None:
    """Called with contiguous operands, with views of the same shape, and with the first again."""
    if path.name == "oracle":
        pytest.skip("the oracle takes what PyTorch's matmul takes")
    path.skip_what_it_refuses(dtype, "varlen" if packed else "dense", 16)
    operands = [x.to(path.device) for x in random_qkv(2, 65, 65, dtype=dtype)]
    want = forward_and_backward(path, *operands, packed)
    views = view(*operands)
    assert all(torch.equal(a, b) for a, b in zip(views, operands, strict=True))
    for given in (views, operands):
        for a, b in zip(forward_and_backward(path, *given, packed), want, strict=True):
            torch.testing.assert_close(a, b)


def test_one_tensor_may_be_q_k_and_v(path: Path) -> None:
    if path.name == "oracle":
        pytest.skip("the oracle takes what PyTorch's matmul takes")
    x = random_qkv(2, 9, 9)[0].to(path.device).requires_grad_()
    dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(path.device)
    (got,) = torch.autograd.grad(attention(x, x, x, backend=path.backend), x, dout)
    three = [x.detach().clone().requires_grad_() for _ in range(3)]
    want = torch.autograd.grad(attention(*three, backend=path.backend), three, dout)
    torch.testing.assert_close(got, sum(want))


@pytest.mark.parametrize("dims", [(64, 64), (64, 32)], ids=str)
def test_expanded_heads_equal_repeated_ones_and_gqa(path: Path, dims: tuple[int, int]) -> None:
    """q (1, 65, 4, 64), k and v (1, 129, 1, 64) expanded to 4 heads."""
    if path.name == "oracle":
        pytest.skip("the oracle repeats heads itself")
    q, k, v = (x.to(path.device) for x in random_qkv(1, 65, 129, (4, 1), 64))
    v = v[..., : dims[1]]
    many = [x.expand(-1, -1, 4, -1) for x in (k, v)]
    expanded = forward_and_backward(path, q, *many, False)
    repeated = forward_and_backward(path, q, *(x.contiguous() for x in many), False)
    grouped = forward_and_backward(path, q, k, v, False)
    for a, b in zip(expanded, repeated, strict=True):
        torch.testing.assert_close(a, b)
    if q.dtype == torch.float32:
        for b, c in zip(repeated, grouped, strict=True):
            torch.testing.assert_close(b.sum(2, keepdim=True) if b.shape != c.shape else b, c)
        return
    x = OneSequence(*(t[0].cpu() for t in (q, k, v, slope(grouped[0]))))
    sizes, largest_logit = sizes_of_terms(Batch((x,)), {"causal": True})
    for name, b, c in zip(("out", "dq", "dk", "dv"), repeated, grouped, strict=True):
        # Every head's gradient is rounded to q's dtype, and so is the one of the group. A head's
        # numbers are the same in both calls, so what is rounded on the way is rounded alike, and
        # what else they may lose is the band of tests/tolerance.py in float32.
        arithmetic = torch.finfo(torch.float32).eps * (1.0 + largest_logit)
        allowed = rounding(c) + 2.0 * arithmetic * max_of(getattr(sizes, name))
        whole, off = b.double(), rounding(b)
        if b.shape != c.shape:
            whole, off = (t.sum(2, keepdim=True) for t in (whole, off))
        excess = ((whole - c.double()).abs() - off - allowed).max().item()
        assert excess <= 0.0, f"{name} differs by {excess:.1e} more than roundings can"


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_a_cache_may_have_any_strides_and_is_appended_to_in_place(device: str, layout: str) -> None:
    """The cache is a transposed view, so a copy would be appended to and lost."""
    q, k, v = (x.to(device) for x in random_qkv(2, 2, 8))
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    lengths = torch.tensor([3, 5], dtype=torch.int32, device=device)
    paged = {"block_table": torch.tensor([[1], [0]], dtype=torch.int32, device=device)}
    keys = {"cache_seqlens": lengths, **(paged if layout == "paged" else {})}
    k_new, v_new = (x.to(device) for x in random_qkv(2, 2, 2)[1:])
    want_k, want_v = k.clone(), v.clone()
    for b, length in enumerate((3, 5)):
        home = 1 - b if layout == "paged" else b
        want_k[home, length : length + 2], want_v[home, length : length + 2] = k_new[b], v_new[b]
    out = attention_decode(q, k, v, k_new=k_new, v_new=v_new, causal=True, **keys)
    assert torch.equal(k, want_k) and torch.equal(v, want_v)
    keys["cache_seqlens"] = lengths + 2
    torch.testing.assert_close(out, attention_decode(q, want_k, want_v, causal=True, **keys))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(1, 1), (7, 7), (8, 24), (40, 16), (33, 257)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_head_dim_and_another_for_values(
    path: Path, layout: str, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    batch = random_batch([(5, 5), (5, 9)], (2, 1), dims, dtype)
    assert_accurate(path.run(batch, layout, causal=True), batch, causal=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(9, 3), (6, 1), (14, 2), (96, 8), (5, 5)], ids=str)
def test_query_heads_may_be_any_multiple_of_key_heads(
    path: Path, layout: str, heads: tuple[int, int]
) -> None:
    batch = random_batch([(5, 5), (5, 9)], heads, (8, 8), with_sink=True)
    assert_accurate(path.run(batch, layout, causal=True), batch, causal=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_every_floating_dtype_is_computed_and_none_is_cast(
    path: Path, layout: str, dtype: torch.dtype
) -> None:
    batch = random_batch([(9, 9), (9, 20)], (4, 2), dtype=dtype)
    assert_accurate(path.run(batch, layout, causal=True), batch, causal=True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_tensors_on_a_device_that_is_not_the_current_one() -> None:
    """out is where the operands are, and the current device stays."""
    operands = [x.to("cuda:1").requires_grad_() for x in random_qkv(1, 5, 7)]
    with torch.cuda.device(0):
        out = attention(*operands, causal=True)
        grads = torch.autograd.grad(out.sum(), operands)
        assert torch.cuda.current_device() == 0
    assert {x.device for x in (out, *grads)} == {torch.device("cuda:1")}
    on_cpu = [x.detach().cpu() for x in operands]
    torch.testing.assert_close(out.cpu(), attention(*on_cpu, causal=True), rtol=1e-4, atol=1e-5)


def test_meta_tensors_have_the_results_shapes() -> None:
    """As good as another device: nothing there may be read, and nothing may move to the CPU."""
    q, k, v = (x.to("meta").requires_grad_() for x in random_qkv(2, 5, 7, (4, 2)))
    out, lse = attention(q, k, v[..., :8], return_lse=True, causal=True)
    assert (out.shape, lse.shape) == ((2, 5, 4, 8), (2, 4, 5))
    assert out.device.type == lse.device.type == "meta"
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_shapes_beyond_2_to_the_31_elements_are_understood() -> None:
    """By everything before the computation: 2^33 elements of q that nobody allocates."""
    q = torch.empty(1 << 20, 64, 2, 64, device="meta", dtype=torch.bfloat16)
    out, lse = attention(q, q, q, return_lse=True)
    assert out.shape == q.shape and lse.shape == (1 << 20, 2, 64)
    assert explain(q, q, q).problem.batch == 1 << 20


@pytest.mark.parametrize("backend", [None, "cpu_fused", "portable"])
def test_offsets_beyond_2_to_the_31_are_right(backend: str | None) -> None:
    """A stride of 2^30 elements puts the rows 2^33 bytes apart; only the pages touched are real."""
    rows, stride = 4, 1 << 30
    memory = torch.empty(((rows - 1) * stride + 64,), dtype=torch.bfloat16)
    q = memory.as_strided((1, rows, 1, 64), (rows * stride, stride, 64, 1))
    q.copy_(random_qkv(1, rows, rows, (1, 1), 64)[0])
    got = forward_and_backward(Path(backend or "default"), q, q, q, False)
    near = q.contiguous()
    want = forward_and_backward(Path(backend or "default"), near, near, near, False)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
