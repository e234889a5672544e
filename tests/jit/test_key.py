"""The key of a compiled kernel holds all that could change its code, and nothing of the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.jit.stand_in import Spec, StandIn
from tilewright.jit import key, target
from tilewright.kernels import catalog


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the kernels' own; the digest is made anew after every change."""
    (tmp_path / "kernel.py").write_text("one")
    monkeypatch.setattr("tilewright.kernels.__path__", [str(tmp_path)])
    monkeypatch.setattr(key, "sources_digest", key.sources_digest.__wrapped__)
    return tmp_path


def stem(kernel: StandIn | None = None) -> str:
    return key.key_of(kernel or StandIn()).stem


def test_equal_kernels_have_equal_keys():
    assert key.key_of(StandIn(Spec(64))) == key.key_of(StandIn(Spec(64)))


@pytest.mark.parametrize(
    "other", [StandIn(Spec(128)), StandIn(arch="sm_100a"), StandIn(family="another")], ids=repr
)
def test_another_spec_arch_or_family_is_another_key(other: StandIn):
    # Also where the name, which tells less than the spec, is the same.
    other = replace(other, title="stand_in_64_not")
    assert stem(other).split("-")[1] != stem().split("-")[1]


@pytest.mark.parametrize("name", ["kernel.py", "blocks/another.py"])
def test_another_source_is_another_key(sources: Path, name: str):
    before = stem()
    (sources / name).parent.mkdir(exist_ok=True)
    (sources / name).write_text("two")
    assert stem() != before


def test_code_that_moves_between_sources_is_another_key(sources: Path):
    (sources / "second.py").write_text("two")
    before = stem()
    (sources / "kernel.py").write_text("onetwo")
    (sources / "second.py").write_text("")
    assert stem() != before


def test_a_compilers_version_is_part_of_the_toolchain_and_not_of_the_name(
    monkeypatch: pytest.MonkeyPatch,
):
    here = key.key_of(StandIn())
    other = key.toolchain() | {key.DSL: "4.9.0"}
    monkeypatch.setattr(key, "toolchain", lambda: other)
    there = key.key_of(StandIn())
    assert (there.stem, there.identity) == (here.stem, here.identity)
    assert there.toolchain[key.DSL] == "4.9.0" and there != here


def test_no_two_kernels_of_the_catalog_share_a_key():
    kernels = [kernel for arch in target.ARCHS.values() for kernel in catalog.kernels(arch)]
    assert kernels
    assert len({key.key_of(kernel).stem for kernel in kernels}) == len(kernels)


def test_architectures_are_found_by_compute_capability():
    assert target.arch_of((9, 0)) == "sm_90a"
    assert target.arch_of((10, 0)) == "sm_100a"
    assert target.arch_of((8, 0)) is None
