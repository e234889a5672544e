"""The build command: what it makes, what it prints of it, and what it says of wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.jit.stand_in import Spec, StandIn
from tilewright.cli import app
from tilewright.kernels import catalog


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog that compiles in seconds, the last of which does not compile at all."""
    able = {"sm_90a": [StandIn(), StandIn(Spec(128)), StandIn(title="not_a-name")]}
    monkeypatch.setattr(catalog, "kernels", lambda arch: able.get(arch, []))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["build", *map(str, arguments)], env={"COLUMNS": "80"})


def build(out: Path, match: str) -> Result:
    pytest.importorskip("cutlass", reason="the compiler is the DSL's")
    return run("--arch", "sm_90a", "--out", out, "--match", match, "--jobs", 1)


def test_what_is_built_is_shown_and_listed(tmp_path: Path):
    built = build(tmp_path, "stand_in_64")
    assert built.exit_code == 0, built.output
    (row,) = (line.split() for line in built.stdout.splitlines() if "stand_in_64" in line)
    registers, spilled = map(int, row[1:3])
    assert registers > 32 and spilled == 0
    assert "1 kernels" in built.stdout and "nvidia-cutlass-dsl" in built.stdout
    assert "━" not in built.stdout
    assert max(map(len, built.stdout.splitlines()[:-1])) <= 80
    assert run("--list", tmp_path).stdout == built.stdout
    assert {path.suffix for path in tmp_path.glob("[a-z]*.*")} == {".json", ".so"}


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path):
    built = build(tmp_path, "not_a")
    assert built.exit_code == 1
    assert "not_a-name_64: ValueError: " in built.stderr and "1 of 1" in built.stderr


def test_a_damaged_entry_is_listed_as_such(tmp_path: Path):
    (tmp_path / "kernel.json").write_text("{")
    listed = run("--list", tmp_path)
    assert listed.exit_code == 1
    assert "kernel.json: JSONDecodeError" in listed.stderr and "0 kernels" in listed.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "want --arch and --out, or --list"),
        (["--arch", "sm_90a"], "want --arch and --out, or --list"),
        (["--arch", "sm_70", "--out", "x"], "there are kernels for sm_90a"),
        (["--arch", "sm_90a", "--out", "x", "--match", "fa9"], "no kernel for sm_90a"),
        (["--list", "lost"], "no such folder"),
        (["--arch", "sm_90a", "--out", "x", "--jobs", "0"], "--jobs"),
    ],
    ids=str,
)
def test_wrong_input_is_a_usage_error(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    words = " ".join(result.stderr.replace("│", " ").split())
    assert said in words
    assert not list(tmp_path.iterdir())
