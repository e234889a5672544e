"""What one small call costs the host, stage by stage: python -m tests.launch.host_cost

On a GPU that FA-3 runs on, with the kernels. Elsewhere on CPU tensors, with a compiled function
that does nothing in a kernel's place and without what the CUDA driver and allocator take; there
SDPA's times are those of its CPU kernels and no measure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.problems import cumulative, random_qkv
from tilewright import attention, attention_varlen, calls, jit, lane
from tilewright.calls import Options
from tilewright.launch import device, fa3

CALLS, ROUNDS = 200, 30


def microseconds(function: Callable[[], Any]) -> float:
    """The median over rounds of a call's mean; the device's queue is empty before each round."""
    rounds = []
    for _ in range(ROUNDS + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(rounds[1:])


@contextmanager
def without_a_gpu() -> Any:
    """The CPU passes for one."""
    import tvm_ffi

    does_nothing = tvm_ffi.get_global_func("testing.nop")
    with ExitStack() as stack:
        for owner, name, value in (
            (jit, "load", lambda kernel: does_nothing),
            (jit, "why_unavailable", lambda kernel: None),
            (fa3, "_why_not_there", lambda problem: None),
            (device, "processors", lambda where: 132),
            (device, "stream", lambda where: 0),
            # which always says no, and takes as long as to ask CUDA for it
            (device, "is_capturing", torch._C._are_functorch_transforms_active),
            (device, "current", lambda: None),
            (torch.cuda, "current_stream", mock.MagicMock()),
            (calls, "may_read", lambda tensor: False),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def stages(where: str) -> dict[str, Callable[[], Any]]:
    q, k, v = (x.to(where) for x in random_qkv(1, 16, 16, (2, 2), 64, torch.bfloat16))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    packed, bounds = [x[0] for x in (q, k, v)], cumulative([7, 9]).to(where)
    options = (True, None, None, None, None, False, "fa3")
    operands = (q, k, v, None, None, None, None, None, None)
    attention(q, k, v, causal=True, backend="fa3")
    key = lane._key(operands[:4], (), options)
    prepared = lane._prepared[key].forward
    call = calls.dense(q, k, v, Options(*options))
    problem, _ = call.plan()
    launch = fa3._launch(problem, q.device, 0)
    out, lse = prepared(operands)
    new_out, new_lse = (device.allocator(x.shape, x.dtype, q.device) for x in (out, lse))
    return {
        "SDPA": lambda: scaled_dot_product_attention(*heads_first, is_causal=True),
        "attention": lambda: attention(q, k, v, causal=True, backend="fa3"),
        "attention_varlen": lambda: attention_varlen(
            *packed, bounds, bounds, causal=True, backend="fa3"
        ),
        "  the key": lambda: lane._key(operands[:4], (), options),
        "  a prepared call": lambda: prepared(operands),
        "    memory for out and lse": lambda: (new_out(), new_lse()),
        "    the launch": lambda: launch(operands, out, lse),
        "      the tile counter": lambda: device.tile_counter(q.device),
        "the operator": lambda: calls.run(calls.dense(q, k, v, Options(*options)), False),
    }


def passes(where: str, attend: Callable[..., Tensor]) -> dict[str, Callable[[], Any]]:
    """`attend` of (batch, seqlen, heads, dim) without and with gradients, forward and backward."""
    q, k, v = (x.to(where) for x in random_qkv(1, 16, 16, (2, 2), 64, torch.bfloat16))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attend(*leaves)
    out = attend(*leaves)  # of a call like an earlier one
    dout = torch.ones_like(out)

    def without_gradients() -> None:
        with torch.no_grad():
            attend(q, k, v)

    return {
        "forward without gradients": without_gradients,
        "forward with gradients": lambda: attend(*leaves),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True, backend="fa3")


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def main() -> None:
    has_gpu = torch.cuda.is_available()
    where = "cuda" if has_gpu else "cpu"
    torch.set_num_threads(1)
    with nullcontext() if has_gpu else without_a_gpu():
        for casts in (False, True):
            with torch.autocast(where, torch.bfloat16, enabled=casts):
                print(f"{'under autocast' if casts else '':28} tilewright      SDPA")
                beside = passes(where, theirs)
                for name, function in passes(where, ours).items():
                    both = microseconds(function), microseconds(beside[name])
                    print(f"{name:28} {both[0]:7.1f} us {both[1]:6.1f} us")
        with torch.no_grad():
            for name, function in stages(where).items():
                print(f"{name:28} {microseconds(function):7.1f} us")


if __name__ == "__main__":
    main()
