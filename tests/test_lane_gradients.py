"""Gradients that go the short way are the operator's, which is asked wherever it has to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

from tests.problems import cumulative, random_qkv
from tests.test_lane import Watch, assert_same, seen, the_long_way
from tilewright import attention, attention_varlen, calls, lane

BACKENDS = ["portable", "cpu_fused"]


@pytest.fixture(autouse=True)
def nothing_prepared() -> None:
    lane._prepared.clear()


def leaves(dtype: torch.dtype = torch.float32, needs: Sequence[bool] = (True,) * 3) -> list[Tensor]:
    qkv = random_qkv(2, 4, 6, (4, 2), 8, dtype)
    return [x.requires_grad_(need) for x, need in zip(qkv, needs, strict=True)]


def is_the_short_ways(out: Tensor) -> bool:
    return isinstance(out.grad_fn, lane._Attention._backward_cls)


def the_short_way(*operands: Tensor, **options: Any) -> Any:
    """`attention`, after a call like it."""
    attention(*operands, **options)
    result = attention(*operands, **options)
    out = result[0] if isinstance(result, tuple) else result
    assert is_the_short_ways(out), out.grad_fn
    return result


def gradients(result: Any, wanted: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of the results with respect to the leaves, for slopes that are all different."""
    results = result if isinstance(result, tuple) else (result,)
    into = [torch.linspace(-1, 2, x.numel()).view(x.shape).to(x.dtype) for x in results]
    return torch.autograd.grad(results, wanted, into)


NEEDS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_operators(
    backend: str, needs: tuple[bool, ...], return_lse: bool
) -> None:
    operands = leaves(needs=needs)
    sink = torch.linspace(-1, 1, 4).requires_grad_(needs[0])
    options = {"backend": backend, "causal": True, "sink": sink}
    wanted = [x for x in (*operands, sink) if x.requires_grad]
    want = the_long_way(*operands, return_lse, **options)
    for _ in range(3):  # the backward is prepared in the first
        got = the_short_way(*operands, return_lse=return_lse, **options)
        assert_same(gradients(got, wanted), gradients(want, wanted))
        want = the_long_way(*operands, return_lse, **options)


@pytest.mark.parametrize("of", [0, 1], ids=["out", "lse"])
def test_a_loss_may_use_one_result_only(of: int) -> None:
    operands = leaves()
    got = the_short_way(*operands, return_lse=True)[of]
    want = the_long_way(*operands, True)[of]
    assert_same(gradients(got, operands), gradients(want, operands))


def test_packed_calls_go_back_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "may_read", lambda tensor: False)
    operands = [x[0].detach().requires_grad_() for x in leaves()]
    bounds = cumulative([1, 3]), cumulative([2, 4])
    first, second = (attention_varlen(*operands, *bounds) for _ in range(2))
    assert is_the_short_ways(second)
    assert_same(gradients(second, operands), gradients(first, operands))


def test_calls_with_and_without_a_graph_are_told_apart() -> None:
    operands = leaves()
    for _ in range(2):
        with torch.no_grad():
            assert not attention(*operands).requires_grad
        assert attention(*operands).requires_grad
        assert not attention(*(x.detach() for x in operands)).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_an_error(backend: str) -> None:
    operands = leaves()
    out = the_short_way(*operands, backend=backend)
    (dq,) = torch.autograd.grad(out.square().sum(), operands[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; want"):
        dq.sum().backward()


def test_what_was_saved_may_not_change() -> None:
    operands = leaves()
    out = the_short_way(*operands)
    with torch.no_grad():
        operands[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_modes_see_the_operators_backward() -> None:
    operands = leaves()
    want = gradients(the_short_way(*operands), operands)
    out = the_short_way(*operands)
    seen.clear()
    with Watch():
        got = gradients(out, operands)
    assert any("tilewright.attend_backward" in name for name in seen)
    assert_same(got, want)


def test_a_profile_shows_the_operators_backward() -> None:
    operands = leaves()
    out = the_short_way(*operands)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(out, operands)
    assert any(event.key == "tilewright::attend_backward" for event in profile.key_averages())


def test_batched_slopes_are_refused_by_the_operator() -> None:
    operands = leaves()
    out = the_short_way(*operands)
    slopes = torch.ones(3, *out.shape)
    with pytest.raises(RuntimeError, match="tilewright::attend_backward"):
        torch.autograd.grad(out, operands, slopes, is_grads_batched=True)


def test_compiled_autograd_sees_the_operator() -> None:
    operands = leaves()
    out = the_short_way(*operands)
    want = gradients(the_short_way(*operands), operands)
    names = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with compiled_autograd._enable(torch.compile(backend=look)):
        got = gradients(out, operands)
    assert_same(got, want)
    assert any("tilewright.attend_backward" in name for name in names)


def test_a_tensor_that_has_outlived_a_transform_goes_the_long_way() -> None:
    operands, kept = leaves(), []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(operands[0])
    want = gradients(the_short_way(*operands), operands)
    got = attention(kept[0], *operands[1:])
    assert not is_the_short_ways(got)
    assert_same(gradients(got, operands), want)


def test_hooks_on_saved_tensors_are_called() -> None:
    operands = leaves()
    want = gradients(the_short_way(*operands), operands)
    packed = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(*operands)
    assert is_the_short_ways(out) and len(packed) == 5
    assert_same(gradients(out, operands), want)


CASTS = [(torch.float32, None), (torch.bfloat16, None), (torch.float16, torch.float16)]


@pytest.mark.parametrize(("dtype", "of_sink"), [*CASTS, (torch.float64, torch.float64)], ids=str)
def test_autocast_casts_and_gradients_come_back(
    dtype: torch.dtype, of_sink: torch.dtype | None
) -> None:
    """In the leaves' dtypes; likewise what it does not cast, or what the operator has to cast."""
    operands = leaves(dtype)
    sink = None if of_sink is None else torch.ones(4, dtype=of_sink, requires_grad=True)
    wanted = [*operands, *([] if sink is None else [sink])]
    with torch.autocast("cpu"):
        want = the_long_way(*operands, False, sink=sink)
        results = [attention(*operands, sink=sink) for _ in range(3)]
    expected = gradients(want, wanted)
    for got in results:
        assert got.dtype == want.dtype and torch.equal(got, want)
        assert_same(gradients(got, wanted), expected)


def test_under_autocast_a_call_like_an_earlier_one_goes_the_short_way() -> None:
    """And shares what is prepared with calls that were cast by hand."""
    operands = leaves()
    attention(*(x.bfloat16() for x in operands))
    with torch.autocast("cpu"):
        out = attention(*operands)
        assert is_the_short_ways(out) and len(lane._prepared) == 1
        under = gradients(out, operands)  # though arithmetic in it has its dtypes for a reason
        out = attention(*operands)
        assert torch.is_autocast_enabled("cpu")
    assert_same(gradients(out, operands), under)
