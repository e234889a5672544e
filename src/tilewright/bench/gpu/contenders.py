"""The ways to compute a case on a GPU, all from the same (batch, seqlen, heads, dim) memory.

Each takes a case and its operands and returns the computation, or raises Refused. What a library
itself refuses shows when the computation runs for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import tilewright
from tilewright.bench.cases import Case
from tilewright.masks import Mask

OURS = "tilewright"
DETERMINISTIC = "deterministic"  # ours, bound to equal bits; no peer of anyone's


class Refused(Exception):
    """A library has no way to say the case."""


@dataclass(frozen=True)
class Operands:
    """q, k, v and dout of a case, dense or packed; bounds are a packed batch's cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bounds: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw(case: Case, device: str = "cuda") -> Operands:
    """Random normal operands, the same ones every time.

    One set: a launch of 16k tokens reads each of them many times, so that it matters little what of
    them the launch before has left in L2.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    rows = (sum(case.lengths),) if case.lengths else (case.batch, case.seqlen_q)

    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(*rows, heads, dim, device=device, dtype=dtype, generator=generator)

    q, k = normal(case.heads_q, case.head_dim), normal(case.heads_k, case.head_dim)
    v, dout = normal(case.heads_k, case.dim_v), normal(case.heads_q, case.dim_v)
    bounds = None
    if case.lengths:
        bounds = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=device)
    return Operands(q, k, v, dout, bounds)


def ours(case: Case, operands: Operands) -> Attend:
    return partial(_our_function(case), **_our_options(case, operands))


def ours_deterministic(case: Case, operands: Operands) -> Attend:
    return partial(_our_function(case), **_our_options(case, operands), deterministic=True)


def our_path(case: Case, operands: Operands, direction: str) -> str:
    """The path that ours takes, so that a portable one is not taken for a kernel."""
    options = _our_options(case, operands)
    positional = [options.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k") if name in options]
    told = tilewright.explain(*operands.inputs, *positional, **options)
    return told.backend if direction == "forward" else told.backward


def _our_function(case: Case) -> Callable[..., Any]:
    return tilewright.attention_varlen if case.lengths else tilewright.attention


def _our_options(case: Case, operands: Operands) -> dict[str, Any]:
    options: dict[str, Any] = {"window": (case.mask.left, case.mask.right)}
    if case.lengths:
        options |= {"cu_seqlens_q": operands.bounds, "cu_seqlens_k": operands.bounds}
        options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    return options


def sdpa_cudnn(case: Case, operands: Operands) -> Attend:
    return _sdpa(SDPBackend.CUDNN_ATTENTION, case, operands)


def sdpa_flash(case: Case, operands: Operands) -> Attend:
    if case.lengths or _is_window(case):
        return _aten_flash(case, operands)
    return _sdpa(SDPBackend.FLASH_ATTENTION, case, operands)


def _sdpa(backend: SDPBackend, case: Case, operands: Operands) -> Attend:
    """With its own causal flag, which is ours where there are as many keys as queries."""
    if _is_window(case):
        raise Refused("SDPA has no window, and a mask over all pairs would be another computation")
    is_causal, is_grouped = case.mask == Mask.causal(), case.heads_q != case.heads_k

    def attend(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                *heads_first(inputs), is_causal=is_causal, enable_gqa=is_grouped
            )
        return out.transpose(1, 2)

    def attend_packed(*inputs: Tensor) -> Tensor:
        jagged = (
            torch.nested.nested_tensor_from_jagged(
                x, operands.bounds, min_seqlen=min(case.lengths), max_seqlen=case.seqlen_q
            )
            for x in inputs
        )
        return attend(*jagged).values()

    return attend_packed if case.lengths else attend


def _aten_flash(case: Case, operands: Operands) -> Attend:
    """FA-2 below SDPA, whose options reach neither its windows nor its packed layout."""
    left = {} if case.mask.left is None else {"window_size_left": case.mask.left}
    right = {} if case.mask.left is None else {"window_size_right": case.mask.right}
    is_causal = case.mask == Mask.causal()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bounds, longest = operands.bounds, (case.seqlen_q, case.seqlen_k)
        return torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, *longest, 0.0, is_causal, False, **left, **right
        )[0]

    return attend


def flex(case: Case, operands: Operands) -> Attend:
    """FlexAttention, compiled for this shape alone; a packed batch is one long sequence to it."""
    device = operands.q.device
    tokens = sum(case.lengths) or case.seqlen_q
    left, right, document = case.mask.left, case.mask.right, None
    if case.lengths:
        numbers = torch.arange(len(case.lengths), device=device)
        document = torch.repeat_interleave(numbers, torch.tensor(case.lengths, device=device))

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j
        if left is not None:
            seen = seen & (i - j <= left)
        if document is not None:
            seen = seen & (document[i] == document[j])
        return seen

    if right not in (None, 0):
        raise Refused(f"{case.mask}: written here for masks that end at the diagonal")
    mask = None
    if case.mask != Mask.full():
        mask = create_block_mask(sees, None, None, tokens, tokens, device=str(device))
    # A graph that several backward passes go through keeps its buffers.
    functorch_config.donated_buffer = False
    torch.compiler.reset()  # else the ninth shape would run uncompiled
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    options = {"block_mask": mask, "enable_gqa": case.heads_q != case.heads_k}

    def attend(*inputs: Tensor) -> Tensor:
        batched = (x[None] if case.lengths else x for x in inputs)
        out = compiled(*heads_first(batched), **options).transpose(1, 2)
        return out[0] if case.lengths else out

    return attend


def flash_attn_4(case: Case, operands: Operands) -> Attend:
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise Refused(f"flash-attn-4 cannot be imported: {error}") from error
    options: dict[str, Any] = {"causal": case.mask == Mask.causal()}
    if _is_window(case):
        options["window_size"] = (case.mask.left, case.mask.right)
    function: Callable[..., Any] = flash_attn_func
    if case.lengths:
        function = flash_attn_varlen_func
        options |= {"cu_seqlens_q": operands.bounds, "cu_seqlens_k": operands.bounds}
        options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}

    def attend(*inputs: Tensor) -> Tensor:
        result = function(*inputs, **options)
        return result[0] if isinstance(result, tuple) else result

    return attend


def heads_first(tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v in (batch, seqlen, heads, dim), as SDPA and FlexAttention index them."""
    q, k, v = (x.transpose(1, 2) for x in tensors)
    return q, k, v


def _is_window(case: Case) -> bool:
    return case.mask not in (Mask.full(), Mask.causal())


Way = Callable[[Case, Operands], Attend]
CONTENDERS: dict[str, Way] = {
    OURS: ours,
    "cudnn": sdpa_cudnn,
    "fa2": sdpa_flash,
    "flex": flex,
    "fa4": flash_attn_4,
}
