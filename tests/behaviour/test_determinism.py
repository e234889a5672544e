"""Rules on bits: repeated calls, and sequences that share a batch."""

from __future__ import annotations

import pytest
import torch

from tests.layouts import LAYOUTS
from tests.paths import Path
from tests.problems import Batch, random_batch, random_qkv
from tilewright import attention


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["mha", "gqa"])
@pytest.mark.parametrize("backend", [None, "cpu_fused", "portable"])
def test_a_deterministic_backward_gives_equal_bits_in_30_runs(
    all_threads: None, backend: str | None, heads: tuple[int, int]
) -> None:
    """Several tiles, and more lanes than threads."""
    leaves = [x.requires_grad_() for x in random_qkv(2, 300, 600, heads, 16)]
    dout = torch.randn(2, 300, heads[0], 16, generator=torch.Generator().manual_seed(0))
    runs = []
    for _ in range(30):
        out = attention(*leaves, causal=True, deterministic=True, backend=backend)
        runs.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["mha", "gqa"])
def test_a_deterministic_backward_gives_equal_bits_on_a_gpu(heads: tuple[int, int]) -> None:
    leaves = [x.cuda().requires_grad_() for x in random_qkv(2, 1024, 1024, heads, 128)]
    dout = torch.randn(2, 1024, heads[0], 128, device="cuda")
    runs = []
    for _ in range(30):
        out = attention(*leaves, causal=True, deterministic=True)
        runs.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_gives_equal_bits(path: Path, layout: str) -> None:
    batch = random_batch([(33, 70), (33, 40)], (4, 2))
    first = path.run(batch, layout, causal=True)
    second = path.run(batch, layout, causal=True)
    for a, b in zip(first.out + first.lse, second.out + second.lse, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_sequence_do_not_depend_on_the_rest_of_its_batch(
    path: Path, layout: str, causal: bool, dtype: torch.dtype
) -> None:
    """Companions of its own length and of another, before and after it."""
    batch = random_batch([(20, 70), (20, 33), (20, 70), (20, 70)], (4, 2), dtype=dtype)
    together = path.run(batch, layout, causal=causal)
    for b, sequence in enumerate(batch.sequences):
        alone = path.run(Batch((sequence,)), layout, causal=causal)
        for (name, x), (_, y) in zip(together.named()[:5], alone.named()[:5], strict=True):
            assert torch.equal(x[b], y[0]), f"{name} of sequence {b}"


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64])
@pytest.mark.parametrize("keys", [70, 600])
def test_bits_do_not_depend_on_the_batch_size(path: Path, count: int, keys: int) -> None:
    if path.name == "oracle":
        pytest.skip("the oracle promises numbers, not bits")
    if path.device == "cuda":
        # docs/portable.md says so; kernels of our own will have to pass.
        pytest.skip("on a GPU the portable path's products are cuBLAS's, chosen by batch size")
    q, k, v = (x.to(path.device) for x in random_qkv(64, 5, keys, (4, 2)))
    whole = attention(q, k, v, causal=True, backend=path.backend)
    part = attention(q[:count], k[:count], v[:count], causal=True, backend=path.backend)
    assert torch.equal(part, whole[:count])
