"""torch.compile with fullgraph and dynamic shapes: no graph break, and eager's numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.problems import cumulative, random_qkv
from tilewright import attention, attention_decode, attention_varlen

LENGTHS = (128, 200, 65)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def assert_compiles(
    function: Callable[..., Any], calls: list[tuple[list[Tensor], list[Tensor]]], backend: str
) -> None:
    """Each call is (differentiable tensors, other tensors); results and gradients as in eager."""
    fast = compiled(function, backend)
    for floats, others in calls:
        got, want = (
            forward_and_backward(f, [x.clone().requires_grad_() for x in floats], others)
            for f in (fast, function)
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def forward_and_backward(
    function: Callable[..., Any], leaves: list[Tensor], others: list[Tensor]
) -> list[Tensor]:
    out, lse = function(*leaves, *others)
    loss = out.float().square().sum() + lse.sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """With work around it that the compiler sees too."""
    out, lse = attention(q * 1.5, k, v, causal=True, return_lse=True)
    return out + 1.0, lse


def with_options(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
    return attention(q, k, v, window=(33, 2), softcap=5.0, scale=0.3, sink=sink, return_lse=True)


def varlen(q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor) -> Any:
    return attention_varlen(q, k, v, bounds_q, bounds_k, causal=True, return_lse=True)


def varlen_with_longest(q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor) -> Any:
    longest = {"max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0]}
    return attention_varlen(q, k, v, bounds_q, bounds_k, **longest, return_lse=True)


def decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
    return attention_decode(q, k, v, cache_seqlens=lengths, causal=True, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense(dtype: torch.dtype) -> None:
    calls = [(list(random_qkv(2, n, n, (9, 3), dtype=dtype)), []) for n in (*LENGTHS, 5)]
    assert_compiles(dense, calls, "aot_eager")


def test_dense_with_every_option() -> None:
    calls = [([*random_qkv(1, n, n), torch.linspace(-1, 1, 2)], []) for n in LENGTHS]
    assert_compiles(with_options, calls, "aot_eager")


@pytest.mark.parametrize("function", [varlen, varlen_with_longest])
def test_varlen(function: Callable[..., Any]) -> None:
    calls = []
    for n in LENGTHS:
        floats = [x[0] for x in random_qkv(1, n, n + 9, (4, 2))]
        calls.append((floats, [cumulative([7, 0, n - 20]), cumulative([9, 3, n - 20])]))
    assert_compiles(function, calls, "aot_eager")


def test_decode() -> None:
    calls = []
    for batch, capacity in ((2, 128), (3, 200), (4, 64)):
        lengths = torch.arange(1, batch + 1, dtype=torch.int32) * 9
        calls.append((list(random_qkv(batch, 2, capacity, (4, 2))), [lengths]))
    assert_compiles(decode, calls, "aot_eager")


@pytest.mark.parametrize("paged", [False, True], ids=["cache", "paged"])
def test_decode_appends_in_place(paged: bool) -> None:
    """The cache that the caller holds is written, step after step."""

    def step(q: Tensor, k: Tensor, v: Tensor, new: Tensor, lengths: Tensor, table: Any) -> Any:
        keys = {"cache_seqlens": lengths, "block_table": table}
        return attention_decode(q, k, v, k_new=new, v_new=new + 1, causal=True, **keys)

    fast = compiled(step)
    for rows in (1, 3, 2):
        q, k, v = random_qkv(3, rows, 40, (4, 2))
        new = random_qkv(3, 1, rows)[1]
        table = torch.tensor([[2], [0], [1]], dtype=torch.int32) if paged else None
        lengths = torch.tensor([5, 0, 37], dtype=torch.int32)
        eager_cache, compiled_cache = (k.clone(), v.clone()), (k.clone(), v.clone())
        want = step(q, *eager_cache, new, lengths, table)
        got = fast(q, *compiled_cache, new, lengths, table)
        torch.testing.assert_close(got, want)
        assert not torch.equal(compiled_cache[0], k)
        for a, b in zip(compiled_cache, eager_cache, strict=True):
            assert torch.equal(a, b)


def test_a_bad_shape_is_named_while_tracing() -> None:
    q, k, _ = random_qkv(1, 3, 3)
    with pytest.raises(Exception, match="q has head dim 16 and k has 8"):
        compiled(lambda q, k: attention(q, k, k))(q, k[..., :8])


def test_bad_lengths_are_named_when_the_compiled_call_runs() -> None:
    q = random_qkv(1, 5, 5)[0][0]
    good, bad = cumulative([2, 3]), torch.tensor([0, 4, 2], dtype=torch.int32)
    fast = compiled(lambda q, bounds: attention_varlen(q, q, q, bounds, bounds))
    fast(q, good)
    with pytest.raises(ValueError, match="cu_seqlens_q decreases from 4 to 2"):
        fast(q, bad)


def test_a_compiled_append_past_the_end_writes_nothing() -> None:
    q, k, v = random_qkv(2, 1, 8)
    new = random_qkv(2, 1, 1)[1]
    fast = compiled(lambda lengths: attention_decode(q, k, v, cache_seqlens=lengths, **rows))
    rows = {"k_new": new, "v_new": new}
    fast(torch.tensor([2, 7], dtype=torch.int32))
    before = k.clone(), v.clone()
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 8, and 1 new rows make 9"):
        fast(torch.tensor([2, 8], dtype=torch.int32))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_default_compiler() -> None:
    calls = [(list(random_qkv(2, n, n, (4, 2))), []) for n in LENGTHS[:2]]
    assert_compiles(dense, calls, "inductor")


@pytest.mark.gpu
def test_the_default_compiler_on_a_gpu() -> None:
    calls = [([x.cuda() for x in random_qkv(2, n, n, (4, 2), 64)], []) for n in LENGTHS]
    assert_compiles(dense, calls, "inductor")


def test_fake_tensors_have_the_results_shapes() -> None:
    """Lengths that are fake cannot be looked at, and nobody tries."""
    with torch._subclasses.FakeTensorMode():
        q, k = torch.randn(9, 4, 16, requires_grad=True), torch.randn(12, 2, 16)
        bounds = torch.zeros(3, dtype=torch.int32)
        out, lse = attention_varlen(q, k, k, bounds, bounds, return_lse=True)
        (dq,) = torch.autograd.grad(out.sum(), q)
        cache = torch.zeros(2, 8, 2, 16)
        lengths = torch.zeros(2, dtype=torch.int32)
        new = torch.randn(2, 1, 2, 16)
        step = attention_decode(
            torch.randn(2, 1, 4, 16), cache, cache, cache_seqlens=lengths, k_new=new, v_new=new
        )
    assert (out.shape, lse.shape, dq.shape) == ((9, 4, 16), (4, 9), (9, 4, 16))
    assert step.shape == (2, 1, 4, 16)
