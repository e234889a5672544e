"""What is built from this tree: the package with its types, one version, and no tests."""

from __future__ import annotations

import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import tilewright

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # The backend itself, in this environment: an isolated build would download it.
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: ZipFile):
    source = ROOT / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name for name in packed if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in packed} == {"tilewright"}
    parts = {part for name in packed for part in Path(name).parts}
    assert not any(part == "tests" or part.startswith("test_") for part in parts)


def test_the_wheel_exports_type_hints(wheel: ZipFile):
    assert "tilewright/py.typed" in wheel.namelist()


def test_the_wheel_carries_the_licence(wheel: ZipFile, metadata: Message):
    assert metadata["License-Expression"] == "Apache-2.0"
    (name,) = (name for name in wheel.namelist() if name.endswith("/licenses/LICENSE"))
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_version_is_written_once(metadata: Message):
    assert "version" not in PROJECT
    assert metadata["Version"] == tilewright.__version__


def test_the_command_is_declared(wheel: ZipFile):
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    assert "tilewright = tilewright.cli:app" in wheel.read(name).decode()


def test_the_extras_are_declared(metadata: Message):
    assert set(metadata.get_all("Provides-Extra", [])) == {"cuda", "peers", "hf", "bench", "dev"}
