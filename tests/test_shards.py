"""Shards together are the whole run, and each test is in one of them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shards import Shard

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [0, 1, 7, 24])
def test_each_item_is_taken_once(items: int, count: int) -> None:
    every = list(range(items))
    taken: list[int] = []
    for number in range(1, count + 1):
        mine, others = Shard(number, count).split(every)
        assert sorted(mine + others) == every
        assert abs(len(mine) - items / count) < 1
        taken += mine
    assert sorted(taken) == every


@pytest.mark.parametrize("text", ["0/8", "9/8", "1", "1/0", "-1/2", "a/b", "1/2/3", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="want I/N"):
        Shard.parse(text)
    assert Shard.parse("2/8") == Shard(2, 8)


@pytest.mark.slow
def test_the_option_shares_out_what_was_selected() -> None:
    def collected(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--co", "-q", "-p", "no:cacheprovider"]
        chosen = ["tests/tools/test_budget.py", "-k", "exception or nesting"]
        run = subprocess.run(
            [*command, *chosen, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return [line for line in run.stdout.splitlines() if "::" in line]

    whole = collected()
    halves = [collected("--shard", f"{number}/2") for number in (1, 2)]
    assert len(whole) > 3
    assert halves == [whole[::2], whole[1::2]]
