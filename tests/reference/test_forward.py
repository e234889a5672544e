"""The oracle's forward pass against the definition of attention, one element at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.problems import random_batch, scoring
from tilewright import reference
from tilewright.masks import Mask
from tilewright.operands import Operands
from tilewright.problem import Scoring

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "left only": {"window": (1, None)},
    "right only": {"window": (None, 2)},
    "window and causal": {"causal": True, "window": (2, 3)},
    "negative scale": {"scale": -0.7},
    "scale 0": {"scale": 0.0, "causal": True},
    "softcap": {"softcap": 0.8},
    "softcap and causal": {"softcap": 1.5, "causal": True, "scale": 2.0},
}
LENGTHS = [(3, 3), (2, 5), (5, 2), (1, 4), (4, 1)]


def attend_one_element_at_a_time(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The definition in Python's floats; q (rows, heads, dim), k and v (keys, heads_k, dim)."""
    rows, heads, dim = q.shape
    out, lse = torch.zeros(rows, heads, v.shape[2], dtype=q.dtype), torch.zeros(rows, heads)
    left, right = options.get("window") or (None, None)
    scale = options.get("scale", 1 / math.sqrt(dim))
    for i in range(rows):
        p = i + k.shape[0] - rows
        visible = [
            j
            for j in range(k.shape[0])
            if (left is None or j >= p - left)
            and (right is None or j <= p + right)
            and not (options.get("causal") and j > p)
        ]
        for h in range(heads):
            g = h // (heads // k.shape[1])
            weights = {}
            for j in visible:
                s = scale * sum((a * b).item() for a, b in zip(q[i, h], k[j, g], strict=True))
                cap = options.get("softcap")
                weights[j] = math.exp(s if cap is None else cap * math.tanh(s / cap))
            total = sum(weights.values()) + (0.0 if sink is None else math.exp(sink[h].item()))
            lse[i, h] = math.log(total) if total else -math.inf
            for j, weight in weights.items():
                out[i, h] += weight / total * v[j, g]
    return out, lse


@pytest.mark.parametrize("with_sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_is_the_definition(
    options: dict[str, Any], lengths: tuple[int, int], with_sink: bool
) -> None:
    batch = random_batch([lengths, lengths], (4, 2), (3, 2), torch.float64, with_sink)
    q, k, v = (torch.stack([getattr(x, n) for x in batch.sequences]) for n in "qkv")
    out, lse = reference.forward(Operands(q, k, v, batch.sink), scoring(3, options))
    for b, x in enumerate(batch.sequences):
        want, want_lse = attend_one_element_at_a_time(x.q, x.k, x.v, batch.sink, options)
        torch.testing.assert_close(out[b], want)
        torch.testing.assert_close(lse[b].T.float(), want_lse)


def test_shapes_and_dtypes_follow_the_inputs() -> None:
    q, k, v = torch.ones(2, 3, 6, 4), torch.ones(2, 5, 2, 4), torch.ones(2, 5, 2, 7)
    out, lse = reference.forward(Operands(q, k, v), Scoring())
    assert (out.shape, out.dtype) == ((2, 3, 6, 7), torch.float32)
    assert (lse.shape, lse.dtype) == ((2, 6, 3), torch.float32)


@pytest.mark.parametrize(
    "shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)], ids=["no batch", "no q", "no k", "none"]
)
def test_empty_dimensions_give_empty_rows(shape: tuple[int, int, int]) -> None:
    batch, rows, keys = shape
    q, k = torch.ones(batch, rows, 2, 4), torch.ones(batch, keys, 2, 4)
    out, lse = reference.forward(Operands(q, k, k), Scoring())
    assert torch.equal(out, torch.zeros(batch, rows, 2, 4))
    assert torch.equal(lse, torch.full((batch, 2, rows), -math.inf if keys == 0 else lse.sum()))
    grads = reference.backward(Operands(q, k, k), Scoring(), torch.ones_like(out))
    assert all(not grad.any() for grad in grads[:3])


@pytest.mark.parametrize("alien", [math.nan, math.inf, -math.inf])
def test_a_spoilt_value_reaches_the_rows_that_see_it_and_no_other(alien: float) -> None:
    x = random_batch([(4, 4)], dtype=torch.float64).sequences[0]
    x.v[2, 0, 0] = alien
    operands = Operands(x.q[None], x.k[None], x.v[None])
    out, lse = reference.forward(operands, Scoring(Mask.causal()))
    spoilt = ~torch.isfinite(out[0])
    want = torch.zeros_like(spoilt)
    want[2:, 0, 0] = True
    assert torch.equal(spoilt, want)
    assert torch.isfinite(lse).all()
    if math.isinf(alien):
        assert torch.equal(out[0, 2:, 0, 0], torch.full((2,), alien, dtype=out.dtype))


@pytest.mark.parametrize("alien", [math.nan, math.inf])
def test_a_spoilt_key_reaches_the_rows_that_see_it_and_no_other(alien: float) -> None:
    x = random_batch([(4, 4)], dtype=torch.float64).sequences[0]
    x.k[3] = alien
    operands = Operands(x.q[None], x.k[None], x.v[None])
    out, lse = reference.forward(operands, Scoring(Mask.causal()))
    assert torch.isfinite(out[0, :3]).all() and torch.isfinite(lse[0, :, :3]).all()
    assert torch.isnan(out[0, 3]).any()
    dq, dk, dv, _ = reference.backward(operands, Scoring(Mask.causal()), x.dout[None])
    assert torch.isfinite(dq[0, :3]).all()
    assert torch.isnan(dq[0, 3]).any()
