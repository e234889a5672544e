"""The FA-3 kernel on a GPU of compute capability 9.0: accuracy, streams, graphs, compilation.

tests/behaviour holds it to the rules of the contract, on the path "fa3-cuda". Kernels that neither
TILEWRIGHT_BUNDLE nor the cache has are compiled first, seconds each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launch.gpu import BF16, graphed, on_hopper, qkv
from tests.problems import cumulative, random_batch
from tests.tolerance import assert_forward_accurate
from tilewright import attention, attention_varlen, explain

pytestmark = on_hopper


def fa3(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, backend="fa3", **options)


OPTIONS = [
    {},
    {"causal": True},
    {"window": (40, 7)},
    {"window": (60, None)},
    {"window": (None, 30), "softcap": 4.0},
    {"causal": True, "scale": -0.3},
]


def test_it_is_the_default() -> None:
    explanation = explain(*qkv(1, 8, 8))
    assert explanation.backend == "fa3", explanation


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "dims",
    [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (72, 40), (8, 248)],
    ids=str,
)
def test_every_element_is_written_and_accurate(
    poisoned: list[int], dtype: torch.dtype, options: dict[str, Any], dims: tuple[int, int]
) -> None:
    for lengths in ((257, 321), (130, 70)):
        batch = random_batch([lengths] * 2, (6, 2), dims, dtype, with_sink=True)
        q, k, v = (torch.stack([getattr(x, n) for x in batch.sequences]).cuda() for n in "qkv")
        sink = batch.sink.cuda()
        out, lse = fa3(q, k, v, sink=sink, return_lse=True, **options)
        assert_forward_accurate(out.cpu(), lse.cpu(), batch, torch.float32, **options)
    assert len(poisoned) >= 4


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_rows_equal_those_of_each_sequence_alone(
    poisoned: list[int], options: dict[str, Any], dim: int
) -> None:
    rows, keys = [129, 0, 1, 300, 64, 5], [200, 17, 0, 300, 1, 700]
    q, k, v = (x[0] for x in qkv(1, sum(rows) + 3, sum(keys) + 5, dim=dim))
    bounds = [cumulative(lengths).cuda() for lengths in (rows, keys)]
    q[sum(rows) :], k[sum(keys) :], v[sum(keys) :] = torch.nan, torch.nan, torch.nan
    packed = {"backend": "fa3", "return_lse": True, **options}
    out, lse = attention_varlen(q, k, v, *bounds, **packed)
    assert not out[sum(rows) :].any() and torch.isneginf(lse[:, sum(rows) :]).all()
    starts = [x.tolist() for x in bounds]
    for b, (n, m) in enumerate(zip(rows, keys, strict=True)):
        row, key = slice(starts[0][b], starts[0][b] + n), slice(starts[1][b], starts[1][b] + m)
        alone = attention_varlen(
            q[row], k[key], v[key], cumulative([n]).cuda(), cumulative([m]).cuda(), **packed
        )
        assert torch.equal(out[row], alone[0]) and torch.equal(lse[:, row], alone[1])
        dense = fa3(q[row][None], k[key][None], v[key][None], return_lse=True, **options)
        torch.testing.assert_close(out[row], dense[0][0], rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse[:, row], dense[1][0], rtol=1e-4, atol=1e-4)


def test_50_runs_give_the_same_bits() -> None:
    q, k, v = qkv(3, 1111, 1500, (8, 2))
    bounds = [cumulative([700, 0, 411]).cuda(), cumulative([900, 3, 597]).cuda()]
    want = None
    for _ in range(50):
        got = [
            *fa3(q, k, v, causal=True, return_lse=True),
            *fa3(q, k, v, return_lse=True),
            *attention_varlen(q[0], k[0], v[0], *bounds, causal=True, return_lse=True),
        ]
        want = want or got
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_gradients_are_those_of_the_portable_backward() -> None:
    leaves = [x.requires_grad_() for x in qkv(2, 200, 300)]
    dout = torch.randn(2, 200, 4, 128, device="cuda").to(BF16)
    grads = [
        torch.autograd.grad(attention(*leaves, causal=True, backend=name), leaves, dout)
        for name in ("fa3", "portable")
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())


def test_a_graph_is_captured_and_replayed_with_other_values() -> None:
    q, k, v = qkv(2, 333, 444)
    bounds = [cumulative([100, 200]).cuda(), cumulative([150, 250]).cuda()]

    def both() -> list[Tensor]:
        dense = fa3(q, k, v, causal=True, return_lse=True)
        packed = attention_varlen(q[0], k[0], v[0], *bounds, causal=True, return_lse=True)
        return [*dense, *packed]

    graph, results = graphed(both)
    for seed in range(3):
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        for x, lengths in zip(bounds, ([33, 300 - seed], [444, 0]), strict=True):
            x.copy_(cumulative(lengths))
        for x in results:
            x.fill_(torch.nan)
        for _ in range(3):  # what counts tiles must be zero again each time
            graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, both(), strict=True))


def test_the_first_call_of_all_may_be_captured() -> None:
    """With head counts that no call had before, so that nothing small is at hand."""
    q, k, v = qkv(1, 77, 99, (23, 23), 64)
    fa3(*(x[:, :, :1] for x in (q, k, v)))  # loads the kernel, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa3(q, k, v)
    want = fa3(q, k, v)
    graph.replay()
    assert torch.equal(out, want)


def test_torch_compile_takes_it_whole() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = fa3(q * 1.5, k, v, causal=True, return_lse=True)
        return out + 1.0, lse

    fast = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (128, 200, 65):
        operands = qkv(2, rows, rows)
        for a, b in zip(fast(*operands), function(*operands), strict=True):
            torch.testing.assert_close(a, b)


def test_it_runs_on_the_current_stream() -> None:
    """What it reads is written on that stream, after a long wait."""
    q, k, v = qkv(1, 500, 500)
    want = fa3(q, k, v)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(2):
        with torch.cuda.stream(stream):
            late.zero_()
            torch.cuda._sleep(100_000_000)
            late.copy_(q)
            got = fa3(late, k, v)
        stream.synchronize()
        assert torch.equal(got, want)


def test_streams_do_not_disturb_each_other() -> None:
    """Launches that overlap, each with fewer tiles than the GPU has processors."""
    operands = [qkv(1, 700 + 64 * i, 4096, (2, 2)) for i in range(8)]
    want = [fa3(*x, causal=True) for x in operands]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in operands]
    got: list[list[Tensor]] = []
    for _ in range(30):
        got.append([])
        for x, stream in zip(operands, streams, strict=True):
            with torch.cuda.stream(stream):
                got[-1].append(fa3(*x, causal=True))
    torch.cuda.synchronize()
    for outs in got:
        assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_the_tensors_device_need_not_be_the_current_one() -> None:
    operands = qkv(1, 300, 300)
    want = fa3(*operands)
    far = [x.to("cuda:1") for x in operands]
    for _ in range(3):
        got = fa3(*far)
        assert got.device == far[0].device and torch.cuda.current_device() == 0
        assert torch.equal(got.to("cuda:0"), want)
    with torch.cuda.device(1):
        assert torch.equal(fa3(*far).to("cuda:0"), want)


def test_65536_batches_and_80000_sequences() -> None:
    q, k, v = qkv(65_536, 4, 4, (8, 8), 64)
    some = [0, 30_000, 65_535]
    assert torch.equal(fa3(q, k, v)[some], fa3(*(x[some] for x in (q, k, v))))
    q, k, v = qkv(80_000, 16, 16, (1, 1), 64)
    bounds = cumulative([16] * 80_000).cuda()
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out = attention_varlen(*packed, bounds, bounds, causal=True, backend="fa3")
    some = [0, 40_000, 79_999]
    alone = fa3(*(x[some] for x in (q, k, v)), causal=True)
    torch.testing.assert_close(out.view_as(q)[some], alone, rtol=0.02, atol=0.02)


def test_offsets_beyond_2_to_the_31_are_right() -> None:
    """Rows of one head of a (batch, seqlen, heads, dim) storage of 2^32 elements, 8 GiB."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    storage = torch.empty(4, 8192, 1024, 128, dtype=BF16, device="cuda")
    x = storage[:, :, 1022:]
    x.copy_(torch.randn(x.shape, device="cuda"))
    assert storage.stride(0) * 3 + storage.stride(1) * 8191 > 1 << 31
    near = x.contiguous()
    assert torch.equal(fa3(x, x, x, causal=True), fa3(near, near, near, causal=True))
