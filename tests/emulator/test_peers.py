"""flash-attn-4's kernels, which nobody here wrote, agree with float64 on the emulator."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the peer's Python code needs torch")
pytest.importorskip("flash_attn.cute", reason="the peer, flash-attn-4, is not installed")

import torch

from tests.emulator import oracle, peers
from tilewright.emulator import Options

DIM = 128


def _inputs(length: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, length, 1, DIM, dtype=torch.bfloat16) for _ in range(4)]


def _expected(
    tensors: list[torch.Tensor], causal: bool
) -> tuple[oracle.Attention, oracle.Attention]:
    heads = [t[0, :, 0] for t in tensors]
    exact = oracle.attention(*(t.double() for t in heads), causal)
    return oracle.attention(*heads, causal), exact


FORWARD = [
    ("sm_80", 256, True),
    ("sm_90a", 256, False),
    ("sm_90a", 256, True),
    ("sm_100a", 256, True),
    ("sm_100a", 512, False),
]


@pytest.mark.parametrize(("arch", "length", "causal"), FORWARD)
def test_forward_agrees_with_float64(arch: str, length: int, causal: bool) -> None:
    q, k, v, dout = _inputs(length)
    plain, exact = _expected([q, k, v, dout], causal)
    with peers.flash_attention(arch, Options(races=True)) as peer:
        out, lse = peer.forward(q, k, v, causal)
    assert not peer.reports
    oracle.assert_as_exact_as_type(out[0, :, 0], plain.out, exact.out)
    assert (lse[0, 0].double() - exact.lse).abs().max() < 2e-5  # exp2 by a polynomial on sm_100a


def test_work_stealing_gives_all_tiles_to_the_first_cta() -> None:
    q, k, v, dout = _inputs(512)
    plain, exact = _expected([q, k, v, dout], causal=True)
    with peers.flash_attention("sm_100a", Options(races=True), steals_work=True) as peer:
        out, _ = peer.forward(q, k, v, causal=True)
    oracle.assert_as_exact_as_type(out[0, :, 0], plain.out, exact.out)
    assert list(peer.results[0].launches[0].ctas) == [(0, 0, 0)] and not peer.reports


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_backward_agrees_with_float64(arch: str, causal: bool) -> None:
    q, k, v, dout = _inputs(256)
    plain, exact = _expected([q, k, v, dout], causal)
    out = exact.out.to(torch.bfloat16)[None, :, None]
    with peers.flash_attention(arch, Options(races=True)) as peer:
        grads = peer.backward(q, k, v, out, dout, exact.lse.float()[None, None], causal=causal)
    for grad, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        oracle.assert_as_exact_as_type(grad[0, :, 0], getattr(plain, name), getattr(exact, name))
    # The sm_100a kernel ends without a wait for its TMA stores of dK and dV, nor for the arrivals
    # that free dS and K, which follow the last one that it waits for.
    endings = ("no wait_group covers it", "may end before an arrival")
    unwaited = [r for r in peer.reports if any(e in r for e in endings)]
    assert peer.reports == unwaited and bool(unwaited) == (arch == "sm_100a")


@pytest.mark.parametrize(
    "options",
    [Options(schedule="late"), Options(schedule="random", seed=7), Options(failing_peeks=True)],
    ids=str,
)
def test_schedules_do_not_change_the_result(options: Options) -> None:
    q, k, v, _ = _inputs(256)
    results = []
    for chosen in (Options(), options):
        with peers.flash_attention("sm_90a", chosen) as peer:
            results.append(peer.forward(q, k, v, causal=True))
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)


def test_sequences_of_different_length_use_ragged_tensor_maps() -> None:
    """Packed q, k, v with lengths 100, 0 and 200: each sequence attends within itself only."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, 1, DIM, dtype=torch.bfloat16) for _ in range(3))
    bounds = torch.tensor([0, 100, 100, 300], dtype=torch.int32)
    with peers.flash_attention("sm_90a", Options(races=True)) as peer:
        out = peer.forward(q, k, v, causal=True, bounds=bounds)[0]
    for first, last in ((0, 100), (100, 300)):
        heads = [t[first:last, 0] for t in (q, k, v, q)]
        exact = oracle.attention(*(t.double() for t in heads), causal=True)
        plain = oracle.attention(*heads, causal=True)
        oracle.assert_as_exact_as_type(out[first:last, 0], plain.out, exact.out)
    assert not peer.reports


def test_fp8_forward_agrees_with_float64() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, 1, DIM).to(torch.float8_e4m3fn) for _ in range(3))
    with peers.flash_attention("sm_100a", Options(races=True)) as peer:
        out = peer.forward(q, k, v, causal=False)[0]
    heads = [t[0, :, 0].double() for t in (q, k, v, q)]
    exact = oracle.attention(*heads, causal=False)
    # P is rounded to e4m3, which has 3 bits behind the leading one.
    assert (out[0, :, 0].double() - exact.out).abs().max() < exact.out.abs().max() * 2**-3
    assert not peer.reports
