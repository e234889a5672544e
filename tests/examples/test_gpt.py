"""The training example: both attentions give the same losses, and those fall."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples import gpt
from examples.gpt import OURS, THEIRS, Attend, Size

SIZE = Size(layers=2, heads=2, context=96, batch=4, head_dim=16)
STEPS = 24


def losses(attend: Attend) -> Tensor:
    steps = gpt.train({OURS: attend}, STEPS, SIZE, peak=5e-3)
    return torch.tensor([step.loss[OURS] for step in steps], dtype=torch.float64)


def by_pytorchs_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return gpt.theirs(q, k, v)


@cache
def wanted_and_allowed() -> tuple[Tensor, float]:
    """The losses with PyTorch's attention, and how far others may be from them at the most.

    Training carries roundings on and makes them larger, by how much nobody can say beforehand. So
    the measure is what two of PyTorch's own kernels make of theirs in the same steps: twice that,
    and the roundings of the two losses that are compared.
    """
    wanted, other = losses(gpt.theirs), losses(by_pytorchs_formula)
    band = torch.finfo(torch.float32).eps * wanted.max()
    return wanted, float(2.0 * (wanted - other).abs().max() + band)


def too_warm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return gpt.ours(1.001 * q, k, v)


@pytest.mark.parametrize("backend", [None, "portable"])
def test_losses_agree_and_fall(backend: str | None) -> None:
    wanted, allowed = wanted_and_allowed()
    found = losses(partial(gpt.ours, backend=backend))
    assert (found - wanted).abs().max() <= allowed
    assert found[-4:].mean() < found[0] - 1.0


def test_logits_that_are_off_by_a_thousandth_show_in_the_losses() -> None:
    wanted, allowed = wanted_and_allowed()
    assert (losses(too_warm) - wanted).abs().max() > 10.0 * allowed


def test_positions_turn_and_keep_their_length() -> None:
    """q k of rotated rows depends on how far apart they are, not on where."""
    angles = torch.arange(9)[:, None, None] * torch.tensor([1.0, 0.1])
    q, k = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    q, k = (gpt.rotated(x.expand(1, 9, 1, 4), angles)[0, :, 0] for x in (q, k))
    torch.testing.assert_close(q.norm(dim=1), q[0].norm().expand(9))
    products = q @ k.T
    torch.testing.assert_close(products[2, 0], products[8, 6])
    assert not torch.isclose(products[2, 0], products[0, 0])


def test_a_run_leaves_its_losses_and_a_picture_that_can_be_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(gpt.SIZES, "cpu", SIZE)
    command = ["--out", str(tmp_path)]
    gpt.main([*command, "--steps", "3", "--device", "cpu", "--backend", "portable"])
    told, *steps = [json.loads(x) for x in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert told["backend"] == "portable" and told["context"] == 96
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(step["loss"].keys() == step["ms"].keys() == {OURS, THEIRS} for step in steps)
    picture = tmp_path / "losses.png"
    picture.unlink()
    gpt.main([*command, "--plot-only"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("ms a step") == 4


def test_losses_are_kept_where_there_is_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpt.SIZES, "cpu", SIZE)
    monkeypatch.setattr(gpt.importlib.util, "find_spec", lambda name: None)
    gpt.main(["--out", str(tmp_path), "--steps", "1", "--device", "cpu"])
    assert [path.name for path in tmp_path.iterdir()] == ["losses.jsonl"]
    assert "--plot-only" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--batch", "0"], ["--plot-only"], ["--device", "toaster"]]
)
def test_what_cannot_be_done_is_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refusal:
        gpt.main(["--out", str(tmp_path), *arguments])
    assert refusal.value.code == 2
