"""The short way gives what the long way gives, and only calls that may take it do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from tests.problems import cumulative, random_qkv
from tests.property.strategies import options, views
from tilewright import attention, attention_varlen, calls, lane
from tilewright.calls import Options

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def nothing_prepared() -> None:
    lane._prepared.clear()


@pytest.fixture
def contents_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, so that packed calls on the CPU go the short way too."""
    monkeypatch.setattr(calls, "may_read", lambda tensor: False)


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A result, or what was raised and what it says."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError, NotImplementedError, OverflowError) as error:
        return type(error), str(error)


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)
    elif isinstance(want, tuple) and isinstance(want[0], Tensor):
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    else:
        assert got == want


def the_long_way(q: Any, k: Any, v: Any, return_lse: bool, **given_options: Any) -> Any:
    return calls.run(calls.dense(q, k, v, Options(**given_options)), return_lse)


# Values that are equal and do not mean the same, or are no option at all.
ODD = st.sampled_from([None, True, False, 0, 1, 2, 0.0, 1.0, -1, -0.0, numpy.float32(1.0), "1"])


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a dense call, now and then such as are refused."""
    sizes = {name: st.sampled_from(values) for name, values in SIZES.items()}
    n = {name: draw(size) for name, size in sizes.items()}
    dtype = draw(st.sampled_from(DTYPES))
    q = torch.linspace(-1, 1, n["b"] * n["s"] * n["h"] * n["d"]).to(dtype)
    q = q.view(n["b"], n["s"], n["h"], n["d"])
    k = torch.linspace(1, -2, n["b"] * n["t"] * n["h"] * n["d"]).to(dtype)
    k = k.view(n["b"], n["t"], n["h"], n["d"])
    v = draw(st.sampled_from([k, k[..., :1], k.to(draw(st.sampled_from(DTYPES)))]))
    arguments = {**draw(options()), "return_lse": draw(st.booleans())}
    arguments |= {"q": draw(st.one_of(st.just(q), views(q))), "k": k, "v": v}
    arguments["sink"] = draw(
        st.sampled_from([None, torch.ones(n["h"]), torch.ones(n["h"], dtype=dtype), 1.0])
    )
    arguments["backend"] = draw(st.sampled_from([None, None, "portable", "cpu_fused", "fa3", 1]))
    if draw(st.booleans()):
        name = draw(st.sampled_from(["causal", "scale", "softcap", "deterministic", "window"]))
        arguments[name] = draw(st.one_of(ODD, st.tuples(ODD, ODD), st.lists(ODD, max_size=3)))
    return arguments


SIZES = {"b": (1, 2), "s": (0, 1, 3), "t": (0, 1, 3), "h": (1, 2), "d": (1, 8)}


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(calls_to_make=st.lists(asked(), min_size=2, max_size=3))
def test_calls_in_turns_give_what_each_gives_alone(calls_to_make: list[dict[str, Any]]) -> None:
    for arguments in calls_to_make * 3:
        assert_same(outcome(attention, **arguments), outcome(the_long_way, **arguments))


ARGUMENTS = {
    "causal": [True, False, 1, 0, 1.0, 2],
    "scale": [1.0, 1, True, 0.0, -0.0, False, 0.5, numpy.float64(0.5), torch.tensor(0.5), None],
    "softcap": [1.0, 1, True, 2.0, None],
    "window": [(1, 0), [1, 0], (True, 0), (1, False), (1.0, 0), (1, -1), (-1, 1), "10", (1,), 1],
    "deterministic": [False, True, 1.0, 1, None],
    "backend": [None, "portable", "cpu_fused", "nobody", 1],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_equal_values_of_other_types_are_told_apart(name: str) -> None:
    """Whatever was called before, what is refused is refused."""
    q = random_qkv(1, 3, 3)[0]
    for first in ARGUMENTS[name]:
        lane._prepared.clear()
        outcome(attention, q, q, q, **{name: first})
        for second in ARGUMENTS[name]:
            arguments = {name: second}
            want = outcome(the_long_way, q, q, q, False, **arguments)
            assert_same(outcome(attention, q, q, q, **arguments), want)


def test_what_differs_in_one_operand_is_told_apart() -> None:
    q, k, v = random_qkv(2, 4, 4, (4, 2), 8)
    attention(q, k, v)
    others = [
        (q[:1], k, v),
        (q, k, v[..., :4]),
        (q.bfloat16(), k, v),
        (q, k.to_sparse(), v),
        (q, k.to_sparse_csr(), v),
        (q, k.to_mkldnn(), v),
        (q.to("meta"), k, v),
        (q.to("meta"), k.to("meta"), v.to("meta")),
        (q[0], k, v),
        (q.tolist(), k, v),
        (numpy.ones((2, 4, 4, 8), "float32"), k, v),
        (None, k, v),
        (q, k[:, :, :1], v[:, :, :1]),
    ]
    for other in others:
        got, want = outcome(attention, *other), outcome(the_long_way, *other, False)
        if isinstance(want, Tensor) and want.is_meta:
            assert got.is_meta and got.shape == want.shape
        else:
            assert_same(got, want)


def test_a_scale_that_is_a_tensor_is_read_in_every_call() -> None:
    q, scale = random_qkv(1, 3, 3)[0], torch.tensor(0.5)
    before = attention(q, q, q, scale=scale)
    scale.mul_(4)
    after = attention(q, q, q, scale=scale)
    assert torch.equal(after, attention(q, q, q, scale=2.0)) and not torch.equal(after, before)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_packed_calls_in_turns_give_what_each_gives_alone(
    contents_unread: None, data: st.DataObject
) -> None:
    makers = []
    for _ in range(2):
        lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        rows = sum(lengths) + data.draw(st.integers(0, 2))
        q = random_qkv(1, rows, rows, (2, 2), 8)[0][0]
        bounds = cumulative(lengths)
        extra = data.draw(options())
        if data.draw(st.booleans()):
            extra["seqused_k"] = (bounds[1:] - bounds[:-1]) // 2
        if data.draw(st.booleans()):
            extra["max_seqlen_q"] = data.draw(st.sampled_from([4, 9, True, 4.0]))
        makers.append((q, bounds, extra))
    for q, bounds, extra in makers * 3:
        got = outcome(attention_varlen, q, q, q, bounds, bounds, **extra)
        kept = dict(lane._prepared)
        lane._prepared.clear()
        assert_same(got, outcome(attention_varlen, q, q, q, bounds, bounds, **extra))
        lane._prepared.update(kept)


def test_contents_that_are_checked_are_checked_in_every_call() -> None:
    q = random_qkv(1, 5, 5)[0][0]
    good, bad = cumulative([2, 3]), torch.tensor([0, 4, 2], dtype=torch.int32)
    attention_varlen(q, q, q, good, good)
    with pytest.raises(ValueError, match="cu_seqlens_q decreases"):
        attention_varlen(q, q, q, bad, bad)
    assert not lane._prepared


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Listen(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


seen: list[str] = []


@pytest.mark.parametrize("mode", [Watch, Listen])
def test_modes_see_the_operator(mode: Callable[[], Any]) -> None:
    q = random_qkv(1, 3, 3)[0]
    attention(q, q, q)
    seen.clear()
    with mode():
        attention(q, q, q)
    assert any("tilewright.attend" in name for name in seen)


def test_a_profile_shows_the_operator() -> None:
    q = random_qkv(1, 3, 3)[0]
    attention(q, q, q)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(q, q, q)
    assert any(event.key == "tilewright::attend" for event in profile.key_averages())


def test_a_trace_never_takes_a_result_for_a_constant() -> None:
    """torch.jit.trace cannot hold the operator's list of optional tensors, and has to say so."""
    q = random_qkv(1, 3, 3)[0]
    attention(q, q, q)
    with pytest.raises(RuntimeError, match="unsupported input list type"):
        torch.jit.trace(lambda q: attention(q, q, q), q)


def test_autocast_casts() -> None:
    q = random_qkv(1, 3, 3)[0]
    assert attention(q, q, q).dtype == torch.float32
    with torch.autocast("cpu"):
        assert attention(q, q, q).dtype == torch.bfloat16
    assert attention(q, q, q).dtype == torch.float32


def test_gradients_flow_where_they_are_wanted() -> None:
    q, k, v = random_qkv(1, 3, 3)
    attention(q, k, v)
    for x in (q, k, v):
        leaf = x.clone().requires_grad_()
        operands = [leaf if x is y else y for y in (q, k, v)]
        assert attention(*operands).requires_grad
        with torch.no_grad():
            assert not attention(*operands).requires_grad
            attention(*operands)
    sink = torch.ones(2)
    attention(q, k, v, sink=sink)
    assert attention(q, k, v, sink=sink.requires_grad_()).requires_grad


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_results_are_to_autograd_what_the_long_ways_are(
    heads: int, context: Callable[[], Any]
) -> None:
    """With one head the fused kernel's out is a view."""
    q = random_qkv(1, 3, 3, (heads, heads))[0]
    with context():
        want = the_long_way(q, q, q, True)
        for _ in range(2):
            for a, b in zip(attention(q, q, q, return_lse=True), want, strict=True):
                assert a._is_view() == b._is_view()
                assert a.is_inference() == b.is_inference()
                assert not a.requires_grad


def test_forward_mode_and_transforms_are_refused() -> None:
    q = random_qkv(1, 3, 3)[0]
    attention(q, q, q)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attention(forward_ad.make_dual(q, torch.ones_like(q)), q, q)
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.vmap(lambda x: attention(x[None], x[None], x[None]))(q)


def test_it_is_taken_and_forgets_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call like an earlier one makes no `Call`; what is kept does not grow without end."""
    q = random_qkv(1, 3, 3)[0]
    want = attention(q, q, q)
    made = []
    monkeypatch.setattr(lane.calls, "dense", lambda *args: made.append(args))
    assert torch.equal(attention(q.clone(), q, q), want) and not made
    monkeypatch.undo()
    monkeypatch.setattr(lane, "MOST", 3)
    for rows in range(1, 9):
        attention(*random_qkv(1, rows, rows))
        assert len(lane._prepared) <= 3
