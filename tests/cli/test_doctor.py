"""The doctor: what it says of a machine and of typical problems."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from tilewright.cli import app
from tilewright.cli.doctor.problems import CASES, DTYPES, explain_all
from tilewright.dispatch import BACKENDS

MOST_BYTES = 1 << 20


@pytest.fixture(scope="module")
def found() -> dict:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_case_has_a_path_in_every_dtype(found: dict):
    asked = [(path["case"], path["dtype"]) for path in found["paths"]]
    assert len(set(asked)) == len(asked) == len(CASES) * len(DTYPES)


def test_every_other_backend_has_a_reason(found: dict):
    for path in found["paths"]:
        assert {path["backend"], *path["rejected"]} == set(BACKENDS)
        assert all(path["rejected"].values())


def test_the_cases_are_what_their_names_say():
    problems = {v.case: v.explanation.problem for v in explain_all("cpu") if v.dtype == "float32"}
    assert str(problems["Training, causal"].scoring.mask) == "causal"
    grouped = problems["Grouped heads, 4 to 1"]
    assert grouped.heads_q == 4 * grouped.heads_k
    assert problems["Sliding window of 128"].scoring.mask.left == 127
    assert problems["Softcap"].scoring.softcap
    assert problems["Sink"].has_sink
    assert problems["Packed, unequal lengths"].layout == "varlen"
    assert problems["Decode, paged cache"].layout == "paged"
    assert problems["Decode, paged cache"].seqlen_q == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_allocates_next_to_nothing(case):
    arguments = case.arguments(torch.empty(0))
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    assert 0 < max(x.numel() * x.element_size() for x in tensors) <= MOST_BYTES


def test_the_machine_is_this_one(found: dict):
    told = found["machine"]
    assert told["packages"]["torch"] == torch.__version__
    assert told["threads"] == torch.get_num_threads()
    assert told["cores"] >= 1
    assert told["cpu"]
    assert len(told["gpus"]) == torch.cuda.device_count()


def test_it_shows_what_the_json_says(found: dict):
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for path in found["paths"]:
        assert path["case"] in result.stdout
    for name in BACKENDS:
        assert name in result.stdout
