"""`torch.library.opcheck`: schemas, fake implementations, autograd registration, AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.problems import cumulative, random_qkv
from tilewright import calls
from tilewright.calls import Options
from tilewright.torch_ops import append_kv

DTYPES = [torch.float32, torch.bfloat16]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window and softcap": {"window": (2, 1), "softcap": 3.0, "scale": 0.4},
    "portable": {"backend": "portable", "deterministic": True},
}


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attend() -> Any:
    return torch.ops.tilewright.attend.default


def check(call: calls.Call) -> None:
    torch.library.opcheck(attend(), tuple(call))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_sink", [False, True], ids=["no sink", "sink"])
def test_attend_dense(options: dict[str, Any], dtype: torch.dtype, with_sink: bool) -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 5, 7, (4, 2), dtype=dtype))
    sink = torch.ones(4, dtype=dtype, requires_grad=True) if with_sink else None
    check(calls.dense(q, k, v, Options(**options, sink=sink)))


def test_attend_dense_of_strided_operands_and_another_dim_of_values() -> None:
    q, k, v = random_qkv(2, 5, 7, (4, 2))
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    leaves = [x.requires_grad_() for x in (*views, v[..., ::2])]
    check(calls.dense(*leaves, Options(causal=True)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_varlen(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = (x[0].requires_grad_() for x in random_qkv(1, 9, 12, (4, 2), dtype=dtype))
    layout = (cumulative([4, 0, 3]), cumulative([5, 2, 4]), ints(3, 0, 3), None)
    check(calls.varlen(q, k, v, layout, (None, 5), Options(**options)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("paged", [False, True], ids=["cache", "paged"])
def test_attend_cache(options: dict[str, Any], paged: bool) -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 2, 6, (4, 2)))
    table = ints([1], [0]) if paged else None
    splits = 2 if options == OPTIONS["portable"] else None
    check(calls.decode(q, k, v, (ints(6, 3), table), splits, Options(**options)))


@pytest.mark.parametrize("needs", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("flows", ["dout", "dlse", "both"])
def test_attend_backward(needs: tuple[int, ...], flows: str) -> None:
    """Its own derivative is an error, so its autograd is in test_derivatives.py."""
    q, k, v = random_qkv(2, 5, 7, (4, 2))
    call = calls.dense(q, k, v, Options(causal=True, sink=torch.zeros(4)))
    out, lse = attend()(*call)
    dout = None if flows == "dlse" else torch.ones_like(out)
    dlse = None if flows == "dout" else torch.ones_like(lse)
    torch.library.opcheck(
        torch.ops.tilewright.attend_backward.default,
        (dout, dlse, out, lse, [bool(x) for x in needs], *call),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("paged", [False, True], ids=["cache", "paged"])
def test_append_kv(paged: bool) -> None:
    _, k, v = random_qkv(2, 2, 6)
    _, k_new, v_new = random_qkv(2, 2, 2)
    table = ints([1], [0]) if paged else None
    arguments = (k, v, k_new, v_new, ints(4, 1), table)
    torch.library.opcheck(torch.ops.tilewright.append_kv.default, arguments)
    before = k.clone()
    append_kv(*arguments)
    assert not torch.equal(k, before)
