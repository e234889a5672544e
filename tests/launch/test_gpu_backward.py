"""FA-3's backward on a GPU of compute capability 9.0, as test_gpu.py has the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launch.gpu import BF16, graphed, on_hopper, qkv
from tests.paths import Path
from tests.problems import cumulative, random_batch
from tests.tolerance import assert_accurate
from tilewright import attention, attention_varlen, explain

pytestmark = on_hopper
FA3 = Path("fa3", "cuda")
OPTIONS = [
    {},
    {"causal": True, "deterministic": True},
    {"window": (40, 7)},
    {"window": (60, None), "deterministic": True},
    {"window": (None, 30), "softcap": 4.0},
    {"causal": True, "scale": -0.3},
    {"scale": 0.0},
]


def leaves_of(*arguments: Any, **options: Any) -> list[Tensor]:
    return [x.requires_grad_() for x in qkv(*arguments, **options)]


def gradients(leaves: list[Tensor], seed: int = 0, **options: Any) -> list[Tensor]:
    """Of a loss on out and lse, dense."""
    out, lse = attention(*leaves, backend="fa3", return_lse=True, **options)
    return list(torch.autograd.grad([out, lse], leaves, into(out, lse, seed)))


def into(out: Tensor, lse: Tensor, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=rng).to(x.dtype).cuda() for x in (out, lse)]


def test_its_own_backward_follows_a_forward() -> None:
    explanation = explain(*qkv(1, 8, 8))
    assert explanation.backend == explanation.backward == "fa3", explanation


# float16 differs by its type alone, which is the same for every mask.
TYPED = [(BF16, options) for options in OPTIONS] + [(torch.float16, x) for x in OPTIONS[:2]]


@pytest.mark.parametrize(("dtype", "options"), TYPED, ids=str)
@pytest.mark.parametrize(
    "dims",
    [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (72, 40), (8, 248)],
    ids=str,
)
def test_every_element_is_written_and_accurate(
    poisoned: list[int], dtype: torch.dtype, options: dict[str, Any], dims: tuple[int, int]
) -> None:
    """With heads that share keys, a sink, and gradients of it and from lse.

    Plain attention, the measure, runs on the CPU: no more rows than tiles have edges for.
    """
    for lengths in ((257, 129), (130, 70)):
        batch = random_batch([lengths] * 2, (3, 1), dims, dtype, with_sink=True, with_dlse=True)
        assert_accurate(FA3.run(batch, "dense", **options), batch, **options)
    # out and lse, the workspace's four, dq, dk and dv; twice
    assert len(poisoned) >= 18


@pytest.mark.parametrize("layout", ["varlen", "used"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_sequences_some_without_rows_or_keys(
    poisoned: list[int], layout: str, options: dict[str, Any], dim: int
) -> None:
    lengths = [(129, 200), (0, 17), (1, 0), (260, 260), (0, 0), (64, 1), (5, 400)]
    batch = random_batch(lengths, (2, 1), (dim, dim), BF16, with_sink=True, with_dlse=True)
    got = FA3.run(batch, layout, **options)
    assert_accurate(got, batch, **options)
    for rows in got.outside:
        assert not rows.any()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_50_deterministic_runs_give_the_same_bits(dim: int, options: dict[str, Any]) -> None:
    """Of more tiles than there are processors, many of which add to the same rows."""
    leaves = leaves_of(2, 1111, 2300, (16, 8), dim)
    packed = [x.detach()[0].requires_grad_() for x in leaves]
    bounds = [cumulative([700, 0, 411]).cuda(), cumulative([900, 3, 1397]).cuda()]
    options = {"deterministic": True, "backend": "fa3", **options}
    dense = attention(*leaves, return_lse=True, **options)
    varlen = attention_varlen(*packed, *bounds, return_lse=True, **options)
    into_dense, into_varlen = into(*dense), into(*varlen)

    def run() -> list[Tensor]:
        return [
            *torch.autograd.grad(dense, leaves, into_dense, retain_graph=True),
            *torch.autograd.grad(varlen, packed, into_varlen, retain_graph=True),
        ]

    want = run()
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_of_forward_and_backward_is_replayed_with_other_values(
    deterministic: bool,
) -> None:
    leaves = leaves_of(2, 333, 444)
    packed = [x.detach()[0].clone().requires_grad_() for x in leaves]
    bounds = [cumulative([100, 200]).cuda(), cumulative([150, 250]).cuda()]
    options = {"causal": True, "deterministic": deterministic, "backend": "fa3"}

    def both() -> list[Tensor]:
        dense = attention(*leaves, **options)
        varlen = attention_varlen(*packed, *bounds, **options)
        grads = torch.autograd.grad([dense.square().sum() + varlen.square().sum()], leaves + packed)
        return list(grads)

    graph, results = graphed(both)
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for x in leaves + packed:
                x.copy_(torch.randn(x.shape, generator=rng))
        for x, lengths in zip(bounds, ([33, 300 - seed], [444, 0]), strict=True):
            x.copy_(cumulative(lengths))
        for x in results:
            x.fill_(torch.nan)
        for _ in range(3):  # what counts tiles, and turns, must be zero again each time
            graph.replay()
        for a, b in zip(results, both(), strict=True):
            if deterministic:
                assert torch.equal(a, b)
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())


def test_torch_compile_takes_it_whole() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = attention(q * 1.5, k, v, causal=True, return_lse=True, backend="fa3")
        return out + 1.0, lse

    fast = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (128, 200, 65):
        leaves = leaves_of(2, rows, rows)
        grads = []
        for run in (fast, function):
            results = run(*leaves)
            grads.append(torch.autograd.grad(results, leaves, into(*results)))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())


def test_it_runs_on_the_current_stream() -> None:
    """What it reads is written on that stream, after a long wait."""
    leaves = leaves_of(1, 500, 500)
    out = attention(*leaves, deterministic=True, backend="fa3")
    dout = into(out, out)[0]
    want = torch.autograd.grad(out, leaves, dout)
    late = torch.zeros_like(dout)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(2):
        with torch.cuda.stream(stream):
            late.zero_()
            out = attention(*leaves, deterministic=True, backend="fa3")
            torch.cuda._sleep(100_000_000)
            late.copy_(dout)
            got = torch.autograd.grad(out, leaves, late)
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_streams_do_not_disturb_each_other() -> None:
    """Launches that overlap, whose tiles wait for each other's turns."""
    calls = [leaves_of(1, 700 + 64 * i, 1500, (2, 2)) for i in range(4)]
    into_calls = [torch.randn_like(leaves[0]) for leaves in calls]

    def run(i: int) -> tuple[Tensor, ...]:
        out = attention(*calls[i], causal=True, deterministic=True, backend="fa3")
        return torch.autograd.grad(out, calls[i], into_calls[i])

    want = [run(i) for i in range(4)]
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in calls], []
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append((i, run(i)))
    torch.cuda.synchronize()
    for i, grads in got:
        assert all(torch.equal(a, b) for a, b in zip(grads, want[i], strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_the_tensors_device_need_not_be_the_current_one() -> None:
    leaves = leaves_of(1, 300, 300)
    want = gradients(leaves, deterministic=True)
    far = [x.detach().to("cuda:1").requires_grad_() for x in leaves]
    out, lse = attention(*far, deterministic=True, return_lse=True, backend="fa3")
    got = torch.autograd.grad([out, lse], far, [x.to("cuda:1") for x in into(out, lse)])
    assert torch.cuda.current_device() == 0
    for a, b in zip(got, want, strict=True):
        assert a.device == out.device and torch.equal(a.to("cuda:0"), b)


def test_65536_batches_and_80000_sequences() -> None:
    """Of four rows, each of which has 128 in the workspace."""
    leaves = on_gpu((65_536, 4, 1, 64))
    some = [0, 30_000, 65_535]
    few = [x.detach()[some].requires_grad_() for x in leaves]
    grads = [
        torch.autograd.grad(attention(*x, backend="fa3").square().sum(), x) for x in (leaves, few)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a[some], b, rtol=0.02, atol=0.02)
    leaves = on_gpu((80_000, 4, 1, 64))
    bounds = cumulative([4] * 80_000).cuda()
    out = attention_varlen(
        *(x.flatten(0, 1) for x in leaves), bounds, bounds, causal=True, backend="fa3"
    )
    some = [0, 40_000, 79_999]
    few = [x.detach()[some].requires_grad_() for x in leaves]
    alone = attention(*few, causal=True, backend="fa3")
    got, want = (torch.autograd.grad(o.square().sum(), x) for o, x in ((out, leaves), (alone, few)))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[some], b, rtol=0.02, atol=0.02)


def on_gpu(shape: tuple[int, ...]) -> list[Tensor]:
    """Three leaves, made there: on a CPU so many numbers take seconds."""
    rng = torch.Generator("cuda").manual_seed(0)
    made = (torch.randn(shape, generator=rng, dtype=BF16, device="cuda") for _ in range(3))
    return [x.requires_grad_() for x in made]


def test_offsets_of_sums_beyond_2_to_the_31_are_right() -> None:
    """2^20 rows of 17 heads: sums of dq of 8.5 GiB."""
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of GPU memory")
    rows = 1 << 20
    q = torch.randn(1, rows, 17, 128, dtype=BF16, device="cuda").requires_grad_()
    k, v = (torch.randn(1, 40, 1, 128, dtype=BF16, device="cuda") for _ in range(2))
    out = attention(q, k, v, backend="fa3")
    dout = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, q, dout)
    last = slice(rows - 200, rows)
    few = q.detach()[:, last].requires_grad_()
    (want,) = torch.autograd.grad(attention(few, k, v, backend="fa3"), few, dout[:, last])
    torch.testing.assert_close(got[:, last], want, rtol=0.02, atol=0.02)
