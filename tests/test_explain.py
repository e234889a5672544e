"""`explain` names the backend that a call takes, and a reason for each other one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewright import attention, attention_decode, attention_varlen, explain
from tilewright.dispatch import BACKENDS, Explanation

Q = torch.randn(2, 3, 4, 8)
K = torch.randn(2, 10, 2, 8)
LENGTHS = torch.tensor([4, 7], dtype=torch.int32)
BOUNDS = torch.tensor([0, 1, 3], dtype=torch.int32)
NEW = torch.randn(2, 3, 2, 8)


def assert_complete(explanation: Explanation) -> None:
    assert {explanation.backend, *explanation.rejected} == set(BACKENDS)
    assert all(explanation.rejected.values())
    for name in BACKENDS:
        assert name in str(explanation)
    assert explanation.backward in BACKENDS
    assert explanation.backward not in explanation.backward_rejected
    assert json.loads(json.dumps(explanation.to_dict()))["backend"] == explanation.backend


@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [
        ({}, "cpu_fused", "comes first"),
        ({"causal": True}, "cpu_fused", "comes first"),
        ({"window": (2, 0)}, "portable", "left"),
        ({"softcap": 5.0}, "portable", "softcap"),
        ({"causal": True, "scale": -1.0}, "portable", "scale=-1.0"),
        ({"backend": "portable"}, "portable", "another backend was asked for"),
        ({}, "cpu_fused", "FA-3 runs on CUDA devices of compute capability 9.0; cpu is none"),
    ],
    ids=str,
)
def test_the_choice_and_its_reason(options: dict[str, Any], backend: str, reason: str) -> None:
    explanation = explain(Q, K, K, **options)
    assert_complete(explanation)
    assert explanation.backend == backend
    assert any(reason in why for why in explanation.rejected.values())


def test_a_backward_of_another_backend_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "backward" not in str(explain(Q, K, K))
    able = replace(BACKENDS["cpu_fused"], why_not_backward=lambda problem: "nobody wrote it")
    monkeypatch.setitem(BACKENDS, "cpu_fused", able)
    explanation = explain(Q, K, K)
    assert_complete(explanation)
    assert (explanation.backend, explanation.backward) == ("cpu_fused", "portable")
    assert explanation.backward_rejected["cpu_fused"] == "nobody wrote it"
    assert "its backward is that of portable" in str(explanation)
    assert "not that of cpu_fused: nobody wrote it" in str(explanation)


def test_it_takes_what_the_three_functions_take() -> None:
    packed = (Q[0], K[0, :3], K[0, :3], BOUNDS, BOUNDS)
    attention_varlen(*packed, max_seqlen_q=2)
    assert explain(*packed, max_seqlen_q=2).problem.layout == "varlen"
    attention_decode(Q, K, K, cache_seqlens=LENGTHS)
    assert explain(Q, K, K, cache_seqlens=LENGTHS).problem.ragged
    attention_decode(Q, K, K, num_splits=2)
    assert explain(Q, K, K, num_splits=2).problem.num_splits == 2
    attention(Q, K, K, return_lse=True)
    assert explain(Q, K, K, return_lse=True).problem.layout == "dense"


def test_it_writes_nothing() -> None:
    cache = K.clone()
    assert_complete(explain(Q, cache, cache, cache_seqlens=LENGTHS, k_new=NEW, v_new=NEW))
    assert torch.equal(cache, K)


def test_it_refuses_what_the_call_refuses() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        explain(Q, K, K, colour=1)
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        explain(Q[0], K[0], K[0], BOUNDS)
    with pytest.raises(ValueError, match="cache_seqlens is None"):
        explain(Q, K, K, k_new=NEW, v_new=NEW)
    with pytest.raises(NotImplementedError, match=r"cpu_fused.*softcap.*portable"):
        explain(Q, K, K, softcap=1.0, backend="cpu_fused")
