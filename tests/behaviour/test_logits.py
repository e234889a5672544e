"""Rules on logits: scale, size, softcap, sink, and the lse that they make."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.layouts import LAYOUTS
from tests.paths import Path
from tests.problems import Batch, random_batch, random_qkv
from tests.tolerance import assert_accurate
from tilewright import attention

LENGTHS = [(4, 6), (4, 4), (4, 3)]
MASKS = [{}, {"causal": True}, {"window": (1, 1)}]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("scale", [-0.5, 0.0, 1.0, 3, -1e-3])
def test_the_scale_is_any_finite_number(
    tiled_path: Path, layout: str, mask: dict[str, Any], scale: float
) -> None:
    batch = random_batch(LENGTHS, with_dlse=True)
    options = {**mask, "scale": scale}
    assert_accurate(tiled_path.run(batch, layout, **options), batch, **options)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 2.5])
def test_the_fused_kernel_takes_any_scale_without_a_mask(scale: float) -> None:
    batch = random_batch(LENGTHS)
    assert_accurate(Path("cpu_fused").run(batch, scale=scale), batch, scale=scale)


def test_scale_0_is_the_mean_over_visible_keys(tiled_path: Path) -> None:
    batch = random_batch([(3, 5)])
    (x,) = batch.sequences
    x.k[4] = 1e30  # visible to the last row only, and 0 times this is still 0
    got = tiled_path.run(batch, scale=0.0, causal=True)
    for i in range(3):
        torch.testing.assert_close(got.out[0][i].to(x.v.dtype), x.v[: i + 3].mean(dim=0))
        torch.testing.assert_close(got.lse[0][i].float(), torch.full((2,), math.log(i + 3)))
    assert not got.dk[0].any()


def with_common_logit(size: float, dtype: torch.dtype = torch.float32) -> Batch:
    """Every logit is near `size`: q and k share a large component."""
    batch = random_batch([(40, 70)], dtype=dtype)
    (x,) = batch.sequences
    x.q[..., 0] = math.copysign(math.sqrt(abs(size) * 4.0), size)
    x.k[..., 0] = math.sqrt(abs(size) * 4.0)
    return batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("size", [-1e5, 1e5, -120.0, 120.0])
def test_softmax_is_shift_invariant(
    path: Path, size: float, causal: bool, dtype: torch.dtype
) -> None:
    batch = with_common_logit(size, dtype)
    got = path.run(batch, causal=causal)
    assert abs(got.lse[0][-1, 0].item() / size - 1) < 0.2
    assert_accurate(got, batch, causal=causal)


@pytest.mark.parametrize("size", [-1e5, 1e5])
def test_no_finite_number_stands_in_for_minus_infinity(tiled_path: Path, size: float) -> None:
    """A stand-in such as -1e4 would outweigh visible logits of -1e5 at hidden keys."""
    batch = with_common_logit(size)
    got = tiled_path.run(batch, window=(3, 0))
    (x,) = batch.sequences
    hidden = torch.ones(40, 70, dtype=torch.bool).triu(31) | ~torch.ones(40, 70).bool().triu(27)
    assert hidden.sum(1).eq(66).all()
    for i in range(40):
        keys = ~hidden[i]
        low, high = x.v[keys].amin(dim=0), x.v[keys].amax(dim=0)
        assert ((got.out[0][i] >= low - 1e-6) & (got.out[0][i] <= high + 1e-6)).all()
    assert_accurate(got, batch, window=(3, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_key_with_a_far_larger_logit_is_accurate(path: Path, dtype: torch.dtype) -> None:
    batch = random_batch([(70, 90)], dtype=dtype)
    batch.sequences[0].k[0] *= 20
    assert_accurate(path.run(batch, causal=True), batch, causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_common_mean_of_keys_and_values_is_accurate(path: Path, dtype: torch.dtype) -> None:
    batch = random_batch([(70, 90)], dtype=dtype)
    batch.sequences[0].k.add_(30.0)
    batch.sequences[0].v.add_(30.0)
    assert_accurate(path.run(batch), batch)


def test_equal_keys_give_the_mean(path: Path) -> None:
    batch = random_batch([(5, 70)])
    (x,) = batch.sequences
    x.k[:] = x.k[0].clone()
    got = path.run(batch)
    want = x.v.mean(dim=0).expand_as(got.out[0])
    torch.testing.assert_close(got.out[0].to(x.v.dtype), want)
    assert_accurate(got, batch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("scale", [None, -2.0, 0.0])
def test_softcap_comes_after_the_scale_and_before_the_mask(
    tiled_path: Path, layout: str, mask: dict[str, Any], scale: float | None
) -> None:
    batch = random_batch(LENGTHS, (4, 2), with_sink=True, with_dlse=True)
    options = {**mask, "scale": scale, "softcap": 0.7}
    assert_accurate(tiled_path.run(batch, layout, **options), batch, **options)


def test_two_softcaps_in_one_process_give_two_right_answers(tiled_path: Path) -> None:
    batch = random_batch([(65, 129)], dims=(64, 64))
    for softcap in (50.0, 15.0, 50.0):
        options = {"softcap": softcap, "scale": 2.0}
        assert_accurate(tiled_path.run(batch, **options), batch, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saturated_softcap_has_finite_gradients(tiled_path: Path, layout: str) -> None:
    batch = random_batch([(4, 6)])
    options = {"softcap": 0.1, "scale": 1e4, "causal": True}
    assert_accurate(tiled_path.run(batch, layout, **options), batch, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_sink_joins_the_denominator_only(path: Path, layout: str, causal: bool) -> None:
    batch = random_batch(LENGTHS, (4, 2), with_sink=True)
    assert_accurate(path.run(batch, layout, causal=causal), batch, causal=causal)


def test_a_sink_of_minus_infinity_is_no_sink(path: Path) -> None:
    batch = random_batch([(5, 3)], with_sink=True, with_dlse=True)
    without = path.run(Batch(batch.sequences), causal=True)
    got = path.run(Batch(batch.sequences, torch.full((2,), -math.inf)), causal=True)
    for (name, a), (_, b) in zip(got.named()[:5], without.named()[:5], strict=True):
        torch.testing.assert_close(a[0], b[0], msg=name)
    assert torch.equal(got.dsink[0], torch.zeros(2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lse_is_differentiable(path: Path, layout: str, causal: bool) -> None:
    batch = random_batch(LENGTHS, (4, 2), (16, 8), with_dlse=True)
    assert_accurate(path.run(batch, layout, causal=causal), batch, causal=causal)


@pytest.mark.parametrize("rows", [16, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_loss_on_lse_alone_has_the_right_gradients(device: str, rows: int) -> None:
    """(4, 2048, 16, 64) elsewhere gave no gradient at all; one batch and head of it shows that."""
    q, k, v = (x.to(device).requires_grad_() for x in random_qkv(1, rows, rows, (1, 1), 64))
    _, lse = attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.mean(), (q, k, v), materialize_grads=True)
    q, k = (x[0, :, 0].detach().double() for x in (q, k))
    p = torch.softmax(q @ k.T / 8.0, dim=-1) / rows / 8.0
    torch.testing.assert_close(dq[0, :, 0].double(), p @ k, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(dk[0, :, 0].double(), p.T @ q, rtol=1e-4, atol=1e-9)
    assert not dv.any()


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_lse_is_float32_or_wider_and_out_has_the_inputs_dtype(
    path: Path, dtype: torch.dtype, want: torch.dtype
) -> None:
    if path.name == "oracle":
        pytest.skip("the oracle runs in float64")
    got = path.run(random_batch([(4, 5)], dtype=dtype, with_sink=True))
    assert got.lse[0].dtype == want
    assert {x.dtype for x in (got.out[0], got.dq[0], got.dk[0], got.dv[0])} == {dtype}
