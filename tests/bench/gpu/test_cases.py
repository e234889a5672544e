"""The GPU's grid is the papers', operations are counted as theirs, and a choice chooses."""

from __future__ import annotations

import pytest

from tilewright.bench.gpu.cases import (
    TOKENS,
    Choice,
    cases,
    documents,
    flops,
    grid,
    is_timed_deterministic,
    name,
    others,
)
from tilewright.masks import Mask


def test_every_cell_of_the_grid_has_the_same_tokens_and_hidden_size() -> None:
    assert len(grid()) == 3 * 2 * 6
    for case in grid():
        assert case.batch * case.seqlen_q == case.batch * case.seqlen_k == TOKENS
        assert case.heads_q * case.head_dim == case.heads_k * case.dim_v == 2048


def test_names_are_distinct() -> None:
    assert len({name(case) for case in cases()}) == len(cases()) == len(grid()) + len(others())


def test_the_other_cases_are_those_promised() -> None:
    found = {name(case) for case in others()}
    assert {"gqa 64:8 d128 causal 8k", "latent d192/128 causal 2k"} <= found
    assert {"window 64:8 d64 w1024 8k", "varlen mixed 64:8 d128 causal"} <= found


@pytest.mark.parametrize(
    "part, operations",
    [
        ("grid d128 full 8k", 4 * 8192**2 * 128 * 16 * 2),
        ("grid d64 causal 512", 4 * 512**2 * 64 * 32 * 32 // 2),
        ("latent d192/128 causal 2k", 2 * (192 + 128) * 2048**2 * 16 * 8 // 2),
        ("window 64:8 d64 w1024 4k", 4 * 64 * 64 * 4 * (1024 * 4096 - 1024 * 1023 // 2)),
    ],
)
def test_operations_are_counted_as_the_papers_do(part: str, operations: int) -> None:
    (case,) = cases(Choice(names=(part,)))
    assert flops(case) == operations
    assert flops(case, "backward") == 2.5 * operations


def test_documents_fill_the_tokens_and_are_the_same_every_time() -> None:
    lengths = documents(64, 4096)
    assert lengths == documents(64, 4096)
    assert sum(lengths) == TOKENS
    assert all(64 <= length <= 4096 for length in lengths[:-1])
    assert max(lengths) > 1024 and min(lengths) < 256
    for case in cases(Choice(names=("varlen",))):
        assert sum(case.lengths) == TOKENS and case.seqlen_q == max(case.lengths)
        pairs = sum(length**2 for length in case.lengths) / 2
        assert flops(case) == 4 * pairs * 128 * case.heads_q


def test_a_few_cells_are_timed_deterministic_of_each_head_dim_and_mask() -> None:
    chosen = [case for case in cases() if is_timed_deterministic(case)]
    assert 12 <= len(chosen) <= 16
    assert {(case.head_dim, case.mask) for case in chosen} == {
        (case.head_dim, case.mask) for case in grid()
    }


def test_a_choice_takes_the_cases_that_pass_all_of_it() -> None:
    chosen = cases(Choice(dims=(64, 256), masks=("causal",), seqlens=(512,)))
    assert [name(case) for case in chosen] == ["grid d64 causal 512", "grid d256 causal 512"]
    assert {case.mask for case in cases(Choice(names=("window",)))} == {Mask(1023, 0)}
    assert all(case.seqlen_q <= 1024 for case in cases(Choice(longest=1024)))
    assert 12 < len(cases(Choice(quick=True))) < 30
    assert cases(Choice(names=("nothing",))) == []
