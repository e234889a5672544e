"""Bad input: the exception's type, a message that names argument, fact and wish, and no work done.

On an accelerator the checks of contents are behind TILEWRIGHT_CHECK=1; here they are all on.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright
from tilewright import attention, attention_decode, attention_varlen, explain

ROOT = Path(tilewright.__file__).parent
INT = torch.int32
NAN = float("nan")


def rows(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def ints(*values: Any, dtype: torch.dtype = INT) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def dense(**changes: Any) -> dict[str, Any]:
    return {"q": rows(2, 3, 4, 8), "k": rows(2, 5, 2, 8), "v": rows(2, 5, 2, 8), **changes}


def varlen(**changes: Any) -> dict[str, Any]:
    """Two sequences: 3 and 2 queries, 4 and 3 keys."""
    call = {"q": rows(5, 4, 8), "k": rows(7, 2, 8), "v": rows(7, 2, 8)}
    return {**call, "cu_seqlens_q": ints(0, 3, 5), "cu_seqlens_k": ints(0, 4, 7), **changes}


def decode(**changes: Any) -> dict[str, Any]:
    call = {"q": rows(2, 1, 4, 8), "k_cache": rows(2, 6, 2, 8), "v_cache": rows(2, 6, 2, 8)}
    return {**call, "cache_seqlens": ints(2, 5), **changes}


def paged(**changes: Any) -> dict[str, Any]:
    pages = {"k_cache": rows(4, 3, 2, 8), "v_cache": rows(4, 3, 2, 8)}
    return decode(**{**pages, "block_table": ints([0, 1], [2, 3]), **changes})


def append(**changes: Any) -> dict[str, Any]:
    return decode(**{"k_new": rows(2, 1, 2, 8), "v_new": rows(2, 1, 2, 8), **changes})


HALF = {"dtype": torch.float16}
# What is wrong, the type of the error, and what its message says.
ANY_CALL = [
    ({"q": None}, TypeError, "q is of type NoneType; want a torch.Tensor"),
    ({"q": [[1.0]]}, TypeError, "q is of type list; want a torch.Tensor"),
    ({"q": rows(2, 1, 4, 8).numpy()}, TypeError, "q has the layout ndarray; want a strided"),
    ({"q": rows(2, 1, 4, 8).to_sparse()}, TypeError, "q has the layout torch.sparse_coo; want"),
    ({"window": (-2, 0)}, ValueError, "window's left bound is -2; want 0 or more"),
    ({"window": (0, -7)}, ValueError, "window's right bound is -7; want 0 or more"),
    ({"window": (1.0, 0)}, TypeError, "window's left bound is 1.0; want an integer"),
    ({"window": (True, 0)}, TypeError, "window's left bound is True; want an integer"),
    ({"window": 3}, ValueError, "window is 3; want a pair"),
    ({"window": (1, 2, 3)}, ValueError, "window is (1, 2, 3); want a pair"),
    ({"window": "ab"}, ValueError, "window is 'ab'; want a pair"),
    ({"window": {1, 2}}, ValueError, "window is {1, 2}; want a pair"),
    ({"scale": 10**400}, ValueError, "scale is 1000.*; want a finite number"),
    ({"scale": torch.ones(2)}, TypeError, "scale is tensor([1., 1.]); want a number"),
    ({"scale": float("inf")}, ValueError, "scale is inf; want a finite number"),
    ({"scale": NAN}, ValueError, "scale is nan; want a finite number"),
    ({"scale": "1"}, TypeError, "scale is '1'; want a number"),
    ({"softcap": 0.0}, ValueError, "softcap is 0.0; want a positive finite number"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0; want a positive finite number"),
    ({"softcap": NAN}, ValueError, "softcap is nan; want a positive finite number"),
    ({"softcap": "1"}, TypeError, "softcap is '1'; want a number"),
    ({"sink": rows(2)}, ValueError, "sink has shape (2,); want (4,)"),
    ({"sink": rows(4, dtype=torch.float16)}, TypeError, "sink has dtype float16 and q has float32"),
    ({"sink": rows(4, device="meta")}, ValueError, "q is on cpu and sink is on meta"),
    ({"sink": 1.0}, TypeError, "sink is of type float; want a torch.Tensor"),
    ({"backend": "fast"}, ValueError, "backend is 'fast'; want None or one of"),
    ({"backend": 3}, TypeError, "backend is 3; want a name or None"),
    ({"backend": []}, TypeError, "backend is []; want a name or None"),
    ({"causal": "no"}, TypeError, "causal is 'no'; want True or False"),
    ({"causal": None}, TypeError, "causal is None; want True or False"),
    ({"deterministic": "no"}, TypeError, "deterministic is 'no'; want True or False"),
    (
        {"backend": "cpu_fused", "softcap": 1.0},
        NotImplementedError,
        "backend 'cpu_fused' cannot compute this call: .*softcap.* These can: portable",
    ),
]
DENSE = [
    *ANY_CALL,
    ({"q": rows(3, 4, 8)}, ValueError, "q has shape (3, 4, 8); want 4 dimensions"),
    ({"k": rows(5, 2, 8)}, ValueError, "k has shape (5, 2, 8); want 4 dimensions"),
    ({"v": rows(1, 2, 5, 2, 8)}, ValueError, "v has shape (1, 2, 5, 2, 8); want 4 dimensions"),
    ({"k": rows(2, 5, 2, 8, **HALF)}, TypeError, "q has dtype float32 and k has dtype float16"),
    ({"v": rows(2, 5, 2, 8, **HALF)}, TypeError, "q has dtype float32 and v has dtype float16"),
    ({"q": rows(2, 3, 4, 8, dtype=INT)}, TypeError, "q has dtype int32; want one of float16"),
    ({"q": rows(2, 3, 4, 8).bool()}, TypeError, "q has dtype bool; want one of float16"),
    ({"q": rows(2, 3, 4, 8) + 0j}, TypeError, "q has dtype complex64; want one of float16"),
    ({"k": rows(2, 5, 2, 8, device="meta")}, ValueError, "q is on cpu and k is on meta"),
    ({"v": rows(2, 5, 2, 8, device="meta")}, ValueError, "q is on cpu and v is on meta"),
    ({"v": rows(2, 4, 2, 8)}, ValueError, "k has shape (2, 5, 2, 8) and v has shape (2, 4, 2, 8)"),
    ({"v": rows(2, 5, 1, 8)}, ValueError, "k has shape (2, 5, 2, 8) and v has shape (2, 5, 1, 8)"),
    ({"q": rows(2, 3, 4, 16)}, ValueError, "q has head dim 16 and k has 8; want them equal"),
    ({"q": rows(2, 3, 3, 8)}, ValueError, "q has 3 heads and k has 2; want a multiple"),
    ({"q": rows(2, 3, 1, 8)}, ValueError, "q has 1 heads and k has 2; want a multiple"),
    ({"q": rows(3, 3, 4, 8)}, ValueError, "k has batch 2 and q has 3; want them equal"),
    ({"q": rows(2, 3, 4, 0), "k": rows(2, 5, 2, 0)}, ValueError, "q has shape .*; want a head dim"),
    ({"v": rows(2, 5, 2, 0)}, ValueError, "v has shape (2, 5, 2, 0); want a head dim"),
]
VARLEN = [
    *ANY_CALL,
    ({"q": rows(1, 5, 4, 8)}, ValueError, "q has shape (1, 5, 4, 8); want 3 dimensions"),
    ({"q": rows(5, 3, 8)}, ValueError, "q has 3 heads and k has 2; want a multiple"),
    ({"cu_seqlens_q": [0, 3, 5]}, TypeError, "cu_seqlens_q is of type list; want a torch.Tensor"),
    ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k is of type NoneType; want a torch.Tensor"),
    (
        {"cu_seqlens_q": ints(0, 3, 5, dtype=torch.int64)},
        TypeError,
        "cu_seqlens_q has dtype int64; want int32",
    ),
    (
        {"cu_seqlens_q": ints([0, 5])},
        ValueError,
        "cu_seqlens_q has shape (1, 2); want (batch + 1,)",
    ),
    ({"cu_seqlens_q": ints()}, ValueError, "cu_seqlens_q is empty; want (batch + 1,)"),
    ({"cu_seqlens_k": ints(0, 7)}, ValueError, "cu_seqlens_k has shape (2,); want (3,)"),
    ({"cu_seqlens_q": ints(1, 3, 5)}, ValueError, "cu_seqlens_q starts at 1; want 0"),
    ({"cu_seqlens_k": ints(-1, 4, 7)}, ValueError, "cu_seqlens_k starts at -1; want 0"),
    ({"cu_seqlens_k": ints(0, 7, 4)}, ValueError, "cu_seqlens_k decreases from 7 to 4 at index 2"),
    ({"cu_seqlens_q": ints(0, 3, 6)}, ValueError, "cu_seqlens_q ends at 6, past the 5 rows"),
    ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q is 2 and the longest sequence has 3"),
    ({"max_seqlen_k": 3}, ValueError, "max_seqlen_k is 3 and the longest sequence has 4"),
    ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k is -1; want 0 or more"),
    ({"max_seqlen_q": 3.0}, TypeError, "max_seqlen_q is 3.0; want an integer"),
    ({"seqused_q": ints(1)}, ValueError, "seqused_q has shape (1,); want (2,)"),
    ({"seqused_q": ints(4, 1)}, ValueError, "seqused_q[0] is 4; want 0 to 3"),
    ({"seqused_k": ints(1, -1)}, ValueError, "seqused_k[1] is -1; want 0 to 3"),
    ({"seqused_k": rows(2)}, TypeError, "seqused_k has dtype float32; want int32"),
    (
        {"cu_seqlens_q": ints(0, 3, 5).to("meta")},
        ValueError,
        "q is on cpu and cu_seqlens_q is on meta",
    ),
]
DECODE = [
    *ANY_CALL,
    ({"k_cache": rows(6, 2, 8)}, ValueError, "k_cache has shape (6, 2, 8); want 4 dimensions"),
    (
        {"v_cache": rows(2, 6, 2, 8, **HALF)},
        TypeError,
        "q has dtype float32 and v_cache has dtype float16",
    ),
    ({"k_cache": rows(3, 6, 2, 8), "v_cache": rows(3, 6, 2, 8)}, ValueError, "k_cache has batch 3"),
    ({"q": rows(2, 1, 3, 8)}, ValueError, "q has 3 heads and k_cache has 2; want a multiple"),
    ({"cache_seqlens": ints(2, 7)}, ValueError, "cache_seqlens[1] is 7; want 0 to 6"),
    ({"cache_seqlens": ints(-1, 7)}, ValueError, "cache_seqlens[0] is -1; want 0 to 6"),
    ({"cache_seqlens": ints(2)}, ValueError, "cache_seqlens has shape (1,); want (2,)"),
    ({"cache_seqlens": 2}, TypeError, "cache_seqlens is of type int; want a torch.Tensor"),
    ({"num_splits": 0}, ValueError, "num_splits is 0; want 1 or more"),
    ({"num_splits": 1 << 70}, ValueError, "num_splits is 1180591620717411303424; want less"),
    ({"num_splits": 2.0}, TypeError, "num_splits is 2.0; want an integer"),
    ({"num_splits": True}, TypeError, "num_splits is True; want an integer"),
]
PAGED = [
    ({"cache_seqlens": None}, ValueError, "cache_seqlens is None; want (batch,) lengths"),
    ({"cache_seqlens": ints(2, 7)}, ValueError, "cache_seqlens[1] is 7; want 0 to 6"),
    ({"block_table": ints([0, 1])}, ValueError, "block_table has shape (1, 2); want (2, pages"),
    ({"block_table": ints(0, 1)}, ValueError, "block_table has shape (2,); want (2, pages"),
    ({"block_table": rows(2, 2)}, TypeError, "block_table has dtype float32; want int32"),
    ({"block_table": [[0], [1]]}, TypeError, "block_table is of type list; want a torch.Tensor"),
    (
        {"block_table": ints([0, 1], [2, 4])},
        ValueError,
        "block_table[1, 1] is 4; want a page from 0 to 3",
    ),
    (
        {"block_table": ints([-1, 1], [2, 3])},
        ValueError,
        "block_table[0, 0] is -1; want a page from 0 to 3",
    ),
    (
        {"k_cache": rows(4, 0, 2, 8), "v_cache": rows(4, 0, 2, 8)},
        ValueError,
        "k_cache has a page size of 0; want 1 or more",
    ),
]
APPEND = [
    ({"k_new": None}, ValueError, "k_new is None and v_new is not; want both or neither"),
    ({"v_new": None}, ValueError, "v_new is None and k_new is not; want both or neither"),
    ({"cache_seqlens": None}, ValueError, "cache_seqlens is None; want (batch,) lengths"),
    ({"k_new": rows(2, 1, 4, 8)}, ValueError, "k_new has shape (2, 1, 4, 8); want (2, rows, 2, 8)"),
    ({"v_new": rows(1, 1, 2, 8)}, ValueError, "v_new has shape (1, 1, 2, 8); want (2, rows, 2, 8)"),
    ({"v_new": rows(2, 2, 2, 8)}, ValueError, "k_new has 1 rows and v_new has 2; want equal"),
    (
        {"k_new": rows(2, 1, 2, 8, **HALF)},
        TypeError,
        "k_new has dtype float16 and the cache has float32",
    ),
    ({"k_new": 1.0}, TypeError, "k_new is of type float; want a torch.Tensor"),
    (
        {"v_new": rows(2, 1, 2, 8, device="meta")},
        ValueError,
        "q is on cpu and v_new is on meta; want one device",
    ),
    (
        {"cache_seqlens": ints(0, 6)},
        ValueError,
        "cache_seqlens[1] is 6, and 1 new rows make 7; want 0 to 6",
    ),
    ({"cache_seqlens": ints(-1, 2)}, ValueError, "cache_seqlens[0] is -1"),
    (
        {"k_new": rows(2, 1, 2, 8).requires_grad_()},
        NotImplementedError,
        "k_new requires gradients",
    ),
    (
        {"k_cache": rows(2, 6, 2, 8).requires_grad_()},
        NotImplementedError,
        "k_cache requires gradients",
    ),
    ({"backend": "fast"}, ValueError, "backend is 'fast'"),
    ({"softcap": 0.0}, ValueError, "softcap is 0.0"),
]
PAGED_APPEND = [
    (
        {"block_table": ints([0, 1], [2, 9])},
        ValueError,
        "block_table[1, 1] is 9; want a page from 0 to 3",
    ),
    ({"cache_seqlens": ints(6, 0)}, ValueError, "cache_seqlens[0] is 6, and 1 new rows make 7"),
]


def paged_append(**changes: Any) -> dict[str, Any]:
    return append(**{**paged(), **changes})


TABLES = [
    (attention, dense, DENSE),
    (attention_varlen, varlen, VARLEN),
    (attention_decode, decode, DECODE),
    (attention_decode, paged, PAGED),
    (attention_decode, append, APPEND),
    (attention_decode, paged_append, PAGED_APPEND),
]
CASES = [
    pytest.param(function, make(**change), error, says, id=f"{make.__name__}: {says}")
    for function, make, table in TABLES
    for change, error, says in table
]


def refusal(function: Callable[..., Any], call: dict[str, Any]) -> Exception:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        function(**call)
    return caught.value


def assert_says(error: Exception, says: str) -> None:
    pattern = ".*".join(re.escape(part) for part in says.split(".*"))
    assert re.search(pattern, str(error)), f"the message is: {error}"


@pytest.mark.parametrize(("function", "call", "error", "says"), CASES)
def test_bad_input_is_refused_by_name(
    function: Callable[..., Any], call: dict[str, Any], error: type[Exception], says: str
) -> None:
    refused = refusal(function, call)
    assert type(refused) is error
    assert_says(refused, says)
    innermost = traceback.extract_tb(refused.__traceback__)[-1]
    assert ROOT in Path(innermost.filename).parents, f"raised in {innermost.filename}"


@pytest.mark.parametrize(("function", "call", "error", "says"), CASES)
def test_explain_refuses_what_the_call_refuses(
    function: Callable[..., Any], call: dict[str, Any], error: type[Exception], says: str
) -> None:
    names = {"k_cache": "k", "v_cache": "v"}
    arguments = {names.get(name, name): x for name, x in call.items()}
    if "cache_seqlens" in arguments and arguments["cache_seqlens"] is None:
        arguments.setdefault("block_table")
    refused = refusal(explain, arguments)
    assert type(refused) is error
    assert_says(refused, says)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (attention, dense()),
        (attention_varlen, varlen()),
        (attention_decode, decode()),
        (attention_decode, paged()),
        (attention_decode, append()),
        (attention_decode, paged_append()),
    ],
    ids=["dense", "varlen", "decode", "paged", "append", "paged append"],
)
def test_the_calls_that_the_cases_spoil_are_good(
    function: Callable[..., Any], call: dict[str, Any]
) -> None:
    assert torch.equal(function(**call), torch.zeros_like(call["q"]))


@pytest.mark.parametrize(("table", "make"), [(APPEND, append), (PAGED_APPEND, paged_append)])
def test_a_refused_append_writes_nothing(
    table: list[tuple[dict[str, Any], type[Exception], str]],
    make: Callable[..., dict[str, Any]],
) -> None:
    for change, _, says in table:
        call = make(**{"k_new": rows(2, 1, 2, 8) + 1, "v_new": rows(2, 1, 2, 8) + 1, **change})
        refusal(attention_decode, call)
        for name in ("k_cache", "v_cache"):
            assert not call[name].any(), f"{name} was written, then refused: {says}"


def test_explain_writes_nothing() -> None:
    call = append(k_new=rows(2, 1, 2, 8) + 1, v_new=rows(2, 1, 2, 8) + 1)
    arguments = {{"k_cache": "k", "v_cache": "v"}.get(name, name): x for name, x in call.items()}
    assert explain(**arguments).backend
    assert not call["k_cache"].any() and not call["v_cache"].any()


def test_no_check_is_an_assert() -> None:
    """Which `python -O` would remove. The emulator's state what its own parser made."""
    for file in ROOT.rglob("*.py"):
        if not {"bench", "cli", "emulator"}.isdisjoint(file.parts):
            continue
        assert not re.search(r"^\s*assert\b", file.read_text(), re.MULTILINE), file
