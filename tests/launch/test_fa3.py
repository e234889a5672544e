"""How calls reach the FA-3 kernel: a stand-in judges what it is passed, the oracle the results."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.launch.standin import StandIn
from tests.paths import Path
from tests.problems import cumulative, random_batch, random_qkv
from tests.property.strategies import views
from tests.tolerance import assert_accurate
from tilewright import attention, attention_varlen, calls, explain
from tilewright.kernels import catalog
from tilewright.kernels.sm90.fa3.spec import ForwardSpec
from tilewright.launch import device, fa3

FA3 = Path("fa3")
BF16 = torch.bfloat16


def qkv(rows: int = 5, keys: int = 7, heads: tuple[int, int] = (4, 2), dim: int = 16) -> Any:
    return random_qkv(2, rows, keys, heads, dim, BF16)


OPTIONS = [
    {},
    {"causal": True},
    {"window": (3, 2)},
    {"window": (2, None)},
    {"window": (None, 4), "scale": -0.5},
    {"causal": True, "window": (1 << 40, 1 << 50)},
    {"softcap": 2.0},
    {"softcap": 3.0, "causal": True, "scale": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["dense", "varlen", "used"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_results_are_the_oracles(
    hopper: StandIn, options: dict[str, Any], layout: str, with_sink: bool, dtype: torch.dtype
) -> None:
    lengths = [(5, 9), (2, 4), (7, 3), (5, 9)]
    batch = random_batch(lengths, (4, 2), (16, 24), dtype, with_sink, with_dlse=True)
    got = FA3.run(batch, layout, **options)
    assert hopper.calls
    for rows in got.outside:
        assert not rows.any()
    assert_accurate(got, batch, **options)


@pytest.mark.parametrize("layout", ["dense", "varlen", "used"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("lengths", [(0, 4), (3, 0), (0, 0)], ids=str)
def test_sequences_without_rows_or_keys(
    hopper: StandIn, layout: str, with_sink: bool, lengths: tuple[int, int]
) -> None:
    batch = random_batch([lengths, lengths], (4, 2), (16, 8), BF16, with_sink, with_dlse=True)
    assert_accurate(FA3.run(batch, layout, causal=True), batch, causal=True)
    if layout == "dense":
        assert not hopper.calls


def test_packed_rows_without_sequences_or_keys(hopper: StandIn) -> None:
    q, k, v = (x[0] for x in qkv())
    sink = torch.ones(4)
    none = cumulative([])
    out, lse = attention_varlen(q, k, v, none, none, sink=sink, return_lse=True, backend="fa3")
    assert not out.any() and torch.isneginf(lse).all() and not hopper.calls
    bounds = cumulative([2, 1]), cumulative([0, 0])
    out, lse = attention_varlen(q, k[:0], v[:0], *bounds, sink=sink, return_lse=True, backend="fa3")
    assert not out.any() and torch.isneginf(lse[:, 3:]).all()
    assert torch.equal(lse[:, :3], torch.ones(4, 3))


def test_no_heads_and_no_batch_launch_nothing(hopper: StandIn) -> None:
    q = torch.ones(2, 3, 0, 16, dtype=BF16)
    assert attention(q, q, q, backend="fa3").shape == q.shape
    q = torch.ones(0, 3, 2, 16, dtype=BF16)
    out, lse = attention(q, q, q, backend="fa3", return_lse=True)
    assert out.shape == q.shape and lse.shape == (0, 2, 3)
    assert not hopper.calls


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), batch=st.integers(1, 2), rows=st.integers(1, 3), heads=st.integers(1, 2))
def test_operands_may_lie_anywhere(
    hopper: StandIn, data: st.DataObject, batch: int, rows: int, heads: int
) -> None:
    operands = random_qkv(batch, rows, rows, (heads, heads), 16, BF16)
    want = attention(*operands, backend="fa3", return_lse=True)
    moved = [data.draw(views(x)) for x in operands]
    for _ in range(2):  # the long way, and the short one
        got = attention(*moved, backend="fa3", return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_the_kernel_can_read_is_not_copied(hopper: StandIn) -> None:
    rows = torch.randn(2, 9, 3, 4, 16).to(BF16)
    q, k, v = rows.unbind(2)
    heads_first = torch.randn(2, 4, 9, 16).to(BF16).transpose(1, 2)
    for given_q in (q, heads_first, q[:, 1:], q[:1]):
        for _ in range(2):
            attention(given_q, k[: len(given_q)], v[: len(given_q)], backend="fa3")
            assert hopper.calls[-1]["q"].data_ptr() == given_q.data_ptr()
            assert hopper.calls[-1]["k"].data_ptr() == k.data_ptr()


def test_the_stride_of_a_single_entry_does_not_matter(hopper: StandIn) -> None:
    q = torch.randn(1, 9, 1, 16).to(BF16)
    odd = q.as_strided(q.shape, (3, 16, 0, 1))
    for _ in range(2):
        attention(odd, q, q, backend="fa3")
        assert hopper.calls[-1]["q"].data_ptr() == q.data_ptr()


def test_addresses_are_looked_at_in_every_call(hopper: StandIn) -> None:
    """Same shapes and strides, first aligned and then not."""
    memory = torch.randn(5 * 2 * 16 + 1).to(BF16)
    aligned, shifted = (memory[i : i + 160].view(1, 5, 2, 16) for i in (0, 1))
    for x in (aligned, aligned, shifted, aligned):
        got = attention(x, x, x, backend="fa3")
        torch.testing.assert_close(got, attention(x, x, x, backend="portable"))
        assert (hopper.calls[-1]["q"].data_ptr() == x.data_ptr()) == (x is aligned)


def test_a_lazily_negated_operand_is_negated(hopper: StandIn) -> None:
    q, k, v = qkv()
    sink = torch.linspace(-1, 1, 4)
    negated = [torch._neg_view(x) for x in (q, k, v, sink)]
    assert negated[0].is_neg()
    want = attention(-q, -k, -v, sink=-sink, backend="fa3")
    for _ in range(2):
        got = attention(*negated[:3], sink=negated[3], backend="fa3")
        assert torch.equal(got, want)


def test_sinks_and_lengths_may_lie_anywhere(
    hopper: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "may_read", lambda tensor: False)  # as on a GPU
    q, k, v = (x[0] for x in qkv(9, 9, (4, 4)))
    bounds, used = cumulative([4, 3]), torch.tensor([2, 3], dtype=torch.int32)
    sink = torch.linspace(-1, 1, 4)

    def run(bounds: Tensor, used: Tensor, sink: Tensor) -> Tensor:
        return attention_varlen(
            q, k, v, bounds, bounds, seqused_q=used, seqused_k=used, sink=sink, backend="fa3"
        )

    want = run(bounds, used, sink)
    spread = [x.repeat_interleave(2)[::2] for x in (bounds, used, sink)]
    half = sink.to(BF16)
    want_half = run(bounds, used, half.float())
    for _ in range(2):  # the long way, and the short one
        assert torch.equal(run(*spread), want)
        assert torch.equal(run(bounds, used, half), want_half)


def test_flags_tell_which_lengths_count(hopper: StandIn) -> None:
    q = qkv(9, 9, (4, 4))[0][0]
    bounds, used = cumulative([4, 3]), torch.tensor([2, 3], dtype=torch.int32)
    for flag, given_used in enumerate(({}, {"seqused_q": used}, {"seqused_k": used})):
        attention_varlen(q, q, q, bounds, bounds, backend="fa3", **given_used)
        assert hopper.calls[-1]["used"] == flag


@pytest.mark.parametrize(
    ("options", "bounded", "passed"),
    [
        ({}, (False, False), None),
        ({"causal": True}, (False, True), (None, 0)),
        ({"window": (1, 2)}, (True, True), (1, 2)),
        ({"window": (1, None)}, (True, True), (1, 1 << 30)),
        ({"window": (None, 2)}, (False, True), (None, 2)),
        ({"window": (1 << 45, 1)}, (False, True), (None, 1)),
        ({"window": (6, 8)}, (False, False), None),  # beyond every key
        ({"softcap": 1.0}, (True, True), (1 << 30, 1 << 30)),
    ],
    ids=str,
)
def test_the_mask_chooses_the_kernel_and_its_bounds(
    hopper: StandIn,
    options: dict[str, Any],
    bounded: tuple[bool, bool],
    passed: tuple[int | None, int] | None,
) -> None:
    attention(*qkv(), backend="fa3", **options)
    spec = hopper.kernels[-1].spec
    assert (spec.bounded_left, spec.bounded_right) == bounded
    if passed is not None:
        assert hopper.calls[-1]["right"] == passed[1]
        assert passed[0] in (None, hopper.calls[-1]["left"])


def test_packed_bounds_are_never_dropped(hopper: StandIn) -> None:
    """For the longest sequence is only what the caller says it is; large ones are clamped."""
    q, bounds = qkv(9, 9, (4, 4))[0][0], cumulative([4, 5])
    for wide in (9, 1 << 40):
        attention_varlen(
            q, q, q, bounds, bounds, window=(wide, wide), max_seqlen_q=5, backend="fa3"
        )
        assert hopper.kernels[-1].spec.bounded_left and hopper.kernels[-1].spec.bounded_right
        assert hopper.calls[-1]["left"] == hopper.calls[-1]["right"] == min(wide, 1 << 30)


def test_every_pair_of_head_dims_has_the_smallest_kernel_of_the_catalog() -> None:
    kernels = catalog.kernels("sm_90a")
    known = [x.spec.features for x in kernels if x.family == catalog.FA3_FORWARD]
    for dim in range(8, 257, 8):
        for dim_v in range(8, 257, 8):
            for packed in (False, True):
                wanted = ForwardSpec("bfloat16", dim, dim_v, False, True, packed=packed)
                found = catalog.smallest("sm_90a", catalog.FA3_FORWARD, wanted)
                assert found in known
                fitting = [
                    (spec.head_dim, spec.head_dim_v)
                    for spec in known
                    if spec.head_dim >= dim and spec.head_dim_v >= dim_v
                ]
                assert (found.head_dim, found.head_dim_v) == min(fitting)
                assert found.bounded_right and not found.bounded_left


def test_the_kernel_that_is_launched_is_one_of_the_catalog(hopper: StandIn) -> None:
    for options in ({}, {"causal": True}, {"window": (3, 1)}, {"softcap": 3.0}):
        attention(*qkv(), backend="fa3", **options)
        assert hopper.kernels[-1] in catalog.kernels("sm_90a")


def test_the_scale_and_the_cap_are_passed_on(hopper: StandIn) -> None:
    attention(*qkv(), backend="fa3")
    assert hopper.calls[-1]["scale"] == 0.25 and hopper.calls[-1]["softcap"] == 0.0
    attention(*qkv(), scale=2, softcap=3, backend="fa3")
    assert hopper.calls[-1]["scale"] == 2.0 and hopper.calls[-1]["softcap"] == 3.0


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [0.0, -0.0, 0, -1.5])
def test_a_scale_without_a_sign_or_with_a_minus(
    hopper: StandIn, scale: float, softcap: float | None
) -> None:
    """The kernel's is positive. A scale of 0 makes 0 even of a key of 1e30."""
    q, k, v = qkv(7, 7)
    k[:, -1] = 1e30
    options = {"scale": scale, "softcap": softcap, "causal": True, "return_lse": True}
    want = attention(q, k, v, backend="portable", **options)
    for _ in range(2):
        got = attention(q, k, v, backend="fa3", **options)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


REFUSED = [
    ({"dtype": torch.float32}, {}, "float16 and bfloat16, not float32"),
    ({"dim": 20}, {}, "steps of 8 up to 256; dim=20"),
    ({"dim": 264}, {}, "steps of 8 up to 256; dim=264"),
    ({}, {"cache_seqlens": torch.tensor([3, 4], dtype=torch.int32)}, "KV cache"),
    ({}, {"num_splits": 2}, "num_splits=2"),
    ({}, {"scale": 1e38}, "scale=1e"),
    ({}, {"softcap": 1e-38}, "softcap from 2**-100 to 256, not 1e-38"),
    ({}, {"softcap": 257.0}, "softcap from 2**-100 to 256, not 257.0"),
]


@pytest.mark.parametrize(("made", "options", "reason"), REFUSED, ids=str)
def test_what_it_cannot_compute_has_a_reason(
    hopper: StandIn, made: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    q = torch.zeros(2, 5, 2, made.get("dim", 16), dtype=made.get("dtype", BF16))
    assert reason in explain(q, q, q, **options).rejected["fa3"]
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        explain(q, q, q, backend="fa3", **options)


def test_decoding_without_lengths_is_dense(hopper: StandIn) -> None:
    assert explain(*qkv(), num_splits=1).backend == "fa3"


def test_it_comes_first(hopper: StandIn) -> None:
    assert explain(*qkv()).backend == "fa3"


def test_what_cannot_be_loaded_is_refused(hopper: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3.jit, "why_unavailable", lambda kernel: f"nobody built {kernel.family}")
    assert explain(*qkv()).rejected["fa3"] == "nobody built fa3_forward"
    with pytest.raises(NotImplementedError, match="'fa3' cannot.*nobody built fa3_forward"):
        attention(*qkv(), backend="fa3")


@pytest.mark.parametrize(
    ("capability", "seen"), [((8, 0), "cuda:1 has 8.0"), (None, "PyTorch sees no GPU")]
)
def test_the_tensors_own_device_is_asked(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, seen: str
) -> None:
    asked = []
    monkeypatch.setattr(device, "capability", lambda name: (asked.append(name), capability)[1])
    problem = replace(explain(*qkv()).problem, device="cuda:1")
    assert seen in (fa3._why_not_there(problem) or "")
    assert asked == ["cuda:1"]
    monkeypatch.setattr(device, "capability", lambda name: (9, 0))
    assert fa3._why_not_there(problem) is None


def test_the_cpu_is_no_hopper() -> None:
    assert "compute capability 9.0; cpu is none" in explain(*qkv()).rejected["fa3"]


def test_launches_of_one_stream_share_a_counter_and_others_do_not(
    hopper: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = []
    for stream in (1, 2, 1, 2):
        monkeypatch.setattr(device, "stream", lambda where, stream=stream: stream)
        attention(*qkv(), backend="fa3")
        counters.append(hopper.calls[-1]["counter"].data_ptr())
    assert counters[0] == counters[2] != counters[1] == counters[3]


def test_launches_that_are_captured_share_nothing(
    hopper: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_capturing", lambda: True)
    monkeypatch.setattr(device, "stream", lambda where: 1)  # not the default one
    for _ in range(2):
        attention(*qkv(), backend="fa3")
    first, second = hopper.calls
    for name in ("counter", "sink"):  # what a graph fills is of no use outside of it
        assert first[name].data_ptr() != second[name].data_ptr()
    assert not device._counters and not device._no_sinks
    monkeypatch.setattr(device, "is_capturing", lambda: False)
    attention(*qkv(), backend="fa3")
    assert hopper.calls[-1]["counter"].data_ptr() != first["counter"].data_ptr()
    assert (hopper.calls[-1]["sink"] == -math.inf).all()


def test_another_current_device_is_left_for_the_launch(
    hopper: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, current = [], [3]

    class Guard:
        def __init__(self, where: torch.device) -> None:
            entered.append(where)

        def __enter__(self) -> None:
            assert not hopper.calls
            current[0] = entered[-1].index

        def __exit__(self, *_: Any) -> None:
            assert len(hopper.calls) == 1

    monkeypatch.setattr(device, "current", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    attention(*qkv(), backend="fa3")
    assert entered == [torch.device("cpu")]
