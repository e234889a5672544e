"""The oracle's formulas for gradients, against autograd and finite differences of its forward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.problems import random_batch, scoring
from tests.reference.test_forward import LENGTHS, OPTIONS
from tilewright import reference
from tilewright.masks import Mask
from tilewright.operands import Operands
from tilewright.problem import Scoring


class Oracle(torch.autograd.Function):
    """The oracle's two passes joined, so that gradcheck can compare them."""

    @staticmethod
    def forward(ctx: Any, rule: Scoring, *tensors: Any) -> Any:
        ctx.rule = rule
        ctx.save_for_backward(*tensors)
        return reference.forward(Operands(*tensors), rule)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        return None, *reference.backward(Operands(*ctx.saved_tensors), ctx.rule, dout, dlse)


@pytest.mark.parametrize("with_sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_backward_is_the_derivative_of_forward(
    options: dict[str, Any], lengths: tuple[int, int], with_sink: bool
) -> None:
    """GQA, Dv != D and a gradient of lse are in every case, empty rows in those with Sq > Sk."""
    rule = scoring(3, options)
    batch = random_batch([lengths], (4, 2), (3, 2), torch.float64, with_sink, with_dlse=True)
    (x,) = batch.sequences
    tensors = [t[None].clone().requires_grad_() for t in (x.q, x.k, x.v)]
    if batch.sink is not None:
        tensors.append(batch.sink.clone().requires_grad_())
    is_empty = torch.isneginf(reference.forward(Operands(*tensors), rule)[1])
    dlse = x.dlse.T[None].masked_fill(is_empty, 0.0)

    def weighted_sum(*args: Any) -> torch.Tensor:
        out, lse = Oracle.apply(rule, *args)
        # An empty row's lse is -inf whatever the inputs; finite differences cannot say so.
        return (out * x.dout).sum() + (lse.masked_fill(is_empty, 0.0) * dlse).sum()

    assert torch.autograd.gradcheck(weighted_sum, tensors)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_backward_is_autograd_of_forward(options: dict[str, Any]) -> None:
    """Without empty rows, where autograd of -inf - -inf is NaN."""
    rule = scoring(8, options)
    batch = random_batch([(6, 9)], (4, 2), (8, 5), torch.float64, with_sink=True, with_dlse=True)
    (x,) = batch.sequences
    tensors = [t.requires_grad_() for t in (x.q[None], x.k[None], x.v[None], batch.sink)]
    out, lse = reference.forward(Operands(*tensors), rule)
    want = torch.autograd.grad((out, lse), tensors, (x.dout[None], x.dlse.T[None]))
    with torch.no_grad():
        got = reference.backward(Operands(*tensors), rule, x.dout[None], x.dlse.T[None])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_no_gradient_of_lse_is_a_gradient_of_zero() -> None:
    x = random_batch([(3, 4)], dtype=torch.float64, with_dlse=True).sequences[0]
    operands = Operands(x.q[None], x.k[None], x.v[None])
    without = reference.backward(operands, Scoring(), x.dout[None])
    with_zero = reference.backward(operands, Scoring(), x.dout[None], torch.zeros(1, 2, 3))
    with_some = reference.backward(operands, Scoring(), x.dout[None], x.dlse.T[None])
    for a, b in zip(without[:3], with_zero[:3], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(without[0], with_some[0])


def test_empty_rows_send_nothing() -> None:
    x = random_batch([(5, 2)], dtype=torch.float64, with_dlse=True).sequences[0]
    operands = Operands(x.q[None], x.k[None], x.v[None])
    causal = Scoring(Mask.causal())
    dq, dk, dv, _ = reference.backward(operands, causal, x.dout[None], x.dlse.T[None])
    assert not dq[0, :3].any()
    rest = Operands(x.q[None, 3:], x.k[None], x.v[None])
    _, dk_rest, dv_rest, _ = reference.backward(
        rest, causal, x.dout[None, 3:], x.dlse.T[None, :, 3:]
    )
    torch.testing.assert_close(dk, dk_rest)
    torch.testing.assert_close(dv, dv_rest)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("alien", [math.nan, math.inf])
def test_a_spoilt_row_stays_with_those_that_see_it(which: str, alien: float) -> None:
    """Causal, four rows: what row 2 of q and dout, or key 2, can reach."""
    x = random_batch([(4, 4)], dtype=torch.float64).sequences[0]
    getattr(x, which)[2] = alien
    operands = Operands(x.q[None], x.k[None], x.v[None])
    dq, dk, dv, _ = reference.backward(operands, Scoring(Mask.causal()), x.dout[None])
    finite = {
        name: [bool(torch.isfinite(row).all()) for row in grad[0]]
        for name, grad in (("dq", dq), ("dk", dk), ("dv", dv))
    }
    if which in ("q", "dout"):
        assert finite["dq"] == [True, True, False, True]
        assert finite["dk"][3] and finite["dv"][3]
    else:
        assert finite["dq"][:2] == [True, True]
    assert not all(finite["dq"])
