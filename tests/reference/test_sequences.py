"""The oracle for packed and paged batches: each sequence is a dense call of its own."""

from __future__ import annotations

import math

import pytest
import torch

from tests.layouts import LAYOUTS
from tests.paths import Path, by_formula
from tests.problems import random_batch
from tilewright import reference
from tilewright.operands import Operands
from tilewright.problem import Scoring

LENGTHS = [(3, 3), (3, 0), (3, 7), (3, 2), (3, 9)]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1)}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_sequence_is_a_dense_call(layout: str, options: dict[str, bool]) -> None:
    batch = random_batch(LENGTHS, (4, 2), (5, 3), torch.float64, with_sink=True, with_dlse=True)
    got = Path("oracle").run(batch, layout, **options)
    want = by_formula(batch, torch.float64, **options)
    for (_, a), (_, b) in zip(got.named(), want.named(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_no_sequence_are_zero(layout: str) -> None:
    batch = random_batch(LENGTHS, dtype=torch.float64)
    for tensor in Path("oracle").run(batch, layout).outside:
        assert not tensor.any()


def test_lse_of_rows_in_no_sequence_is_minus_infinity() -> None:
    q = torch.randn(5, 1, 2)
    _, lse = reference.forward_varlen(Operands(q, q, q), ([(1, 3)], [(0, 5)]), Scoring())
    assert torch.isneginf(lse[0]).tolist() == [True, False, False, True, True]


def test_a_shared_page_adds_up_what_both_sequences_send() -> None:
    x = random_batch([(2, 4)], dtype=torch.float64).sequences[0]
    pages = Operands(torch.stack([x.q, x.q]), x.k[None], x.v[None])
    dout = torch.stack([x.dout, x.dout])
    shared = reference.backward_paged(pages, [[0], [0]], [4, 4], Scoring(), dout)
    alone = reference.backward_paged(
        Operands(x.q[None], x.k[None], x.v[None]), [[0]], [4], Scoring(), x.dout[None]
    )
    torch.testing.assert_close(shared[1], 2 * alone[1])
    torch.testing.assert_close(shared[2], 2 * alone[2])
    torch.testing.assert_close(shared[0][1:], alone[0])


def test_key_j_is_in_page_j_over_size() -> None:
    """Values name their place; a scale of 0 makes out their mean."""
    pages = torch.arange(6.0).view(3, 2, 1, 1)  # page p, slot s holds 2 p + s
    q = torch.zeros(2, 1, 1, 1)
    out, lse = reference.forward_paged(
        Operands(q, pages, pages), [[2, 0], [1, 2]], [3, 2], Scoring(scale=0.0)
    )
    torch.testing.assert_close(out.flatten(), torch.tensor([(4 + 5 + 0) / 3, (2 + 3) / 2]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(3), math.log(2)]))
