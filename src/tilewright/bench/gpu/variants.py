"""Contenders from compiled kernels, launched as the dispatcher would launch its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright import calls
from tilewright.bench.cases import Case
from tilewright.bench.gpu.contenders import Attend, Operands, Way
from tilewright.kernels.sm90.fa3_backward.spec import BackwardSpec
from tilewright.launch import device, fa3, fa3_backward
from tilewright.operands import Saved
from tilewright.torch_ops import Call, attend


def forward(function: Callable[..., Any]) -> Way:
    """A contender from a compiled forward kernel. It has no gradients."""

    def make(case: Case, operands: Operands) -> Attend:
        where = operands.q.device
        mask, bounds = case.mask, [operands.bounds] * 4
        left, right = (fa3.NO_BOUND if side is None else side for side in (mask.left, mask.right))
        rest = (case.head_dim**-0.5, 0.0, left, right, 0, device.processors(where))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            *batch, rows, heads, _ = q.shape
            out = torch.empty(*batch, rows, heads, v.shape[-1], dtype=q.dtype, device=where)
            lse = torch.empty(*batch, heads, rows, dtype=torch.float32, device=where)
            sink, counter = device.no_sink(where, heads), device.tile_counter(where)
            function(q, k, v, out, lse, sink, *bounds, counter, *rest)
            return out

        return attend

    return make


def backward(function: Callable[..., Any], spec: BackwardSpec) -> Way:
    """A contender whose gradients come from a main kernel that was compiled from `spec`.

    All else is the dispatcher's: the forward, and what prepares and finishes the backward pass.
    """

    def make(case: Case, operands: Operands) -> Attend:
        call = _call(case, operands)
        gradients = fa3_backward.with_main(function, spec, call.plan()[0], call.operands)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _Attend.apply(q, k, v, call, gradients)

        return attend

    return make


def _call(case: Case, operands: Operands) -> Call:
    options = calls.Options(window=(case.mask.left, case.mask.right))
    if not case.lengths:
        return calls.dense(*operands.inputs, options)
    assert operands.bounds is not None
    layout = (operands.bounds, operands.bounds, None, None)
    return calls.varlen(*operands.inputs, layout, (case.seqlen_q, case.seqlen_k), options)


class _Attend(torch.autograd.Function):
    """`attend` with other gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, gradients: Callable[..., Any]
    ) -> Tensor:
        out, lse = attend(*call._replace(q=q, k=k, v=v))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest, ctx.gradients = call.operands[3:], gradients
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        needs = (*ctx.needs_input_grad[:3], False)
        grads = ctx.gradients((*inputs, *ctx.rest), Saved(out, lse, dout, None), needs)
        return grads.q, grads.k, grads.v, None, None
