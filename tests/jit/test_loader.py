"""Where a kernel comes from, in which order, and what is said if it comes from nowhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jit.stand_in import Spec, StandIn
from tilewright import jit
from tilewright.jit import link, loader
from tilewright.jit.cache import Entry, Folder, Product
from tilewright.jit.key import DSL, FFI, key_of

KERNEL, OTHER = StandIn(), StandIn(Spec(128))
Loaded = list[tuple[str, bytes]]


def product(library: bytes) -> Product:
    return Product({".so": library}, {})


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with all that compiles, an empty cache, no bundle, and nothing loaded yet."""
    here = {DSL: "4.8.1", FFI: "0.1.15", "host": "Linux"}
    for module in (loader, "tilewright.jit.key"):
        monkeypatch.setattr(
            f"{module if isinstance(module, str) else module.__name__}.toolchain", lambda: here
        )
    monkeypatch.setattr(link, "linker", lambda: "/usr/bin/cc")
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setenv(loader.CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(loader.BUNDLES, raising=False)
    loader._why.cache_clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """What was compiled, by a compiler that makes a library of the kernel's name."""
    done: list[StandIn] = []

    def produce(kernel: StandIn, occasion: str | None = None) -> Product:
        done.append(kernel)
        return product(f"compiled {kernel}".encode())

    monkeypatch.setattr(loader, "produce", produce)
    return done


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """What was loaded, by a loader whose functions return the library's bytes."""
    done: Loaded = []

    def function(entry: Entry) -> Callable[[], bytes]:
        done.append((entry.name, entry.library.read_bytes()))
        return entry.library.read_bytes

    monkeypatch.setattr(loader, "_function", function)
    return done


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    here = loader.toolchain() | {package: None}
    monkeypatch.setattr(loader, "toolchain", lambda: here)
    monkeypatch.setattr("tilewright.jit.key.toolchain", lambda: here)


def bundle(path: Path, monkeypatch: pytest.MonkeyPatch, *kernels: StandIn) -> None:
    for kernel in kernels:
        Folder(path).make(key_of(kernel), lambda: product(b"bundled"))
    monkeypatch.setenv(loader.BUNDLES, str(path))


def test_a_kernel_is_compiled_once_and_loaded_once_a_process(
    compilations: list[StandIn], loaded: Loaded
):
    assert jit.load(KERNEL)() == b"compiled stand_in_64"
    assert jit.load(StandIn()) is jit.load(KERNEL)
    assert jit.load(OTHER)() == b"compiled stand_in_128"
    assert compilations == [KERNEL, OTHER] and len(loaded) == 2


def test_another_process_takes_it_from_the_disk(
    compilations: list[StandIn], loaded: Loaded, monkeypatch: pytest.MonkeyPatch
):
    jit.load(KERNEL)
    monkeypatch.setattr(loader, "_loaded", {})  # as in a new process
    assert jit.load(KERNEL)() == b"compiled stand_in_64"
    assert len(compilations) == 1 and len(loaded) == 2


def test_another_toolchain_does_not(
    compilations: list[StandIn], loaded: Loaded, monkeypatch: pytest.MonkeyPatch
):
    jit.load(KERNEL)
    monkeypatch.setattr(loader, "_loaded", {})
    here = loader.toolchain() | {DSL: "4.9.0"}
    for module in ("tilewright.jit.loader", "tilewright.jit.key"):
        monkeypatch.setattr(f"{module}.toolchain", lambda: here)
    jit.load(KERNEL)
    assert len(compilations) == 2


def test_a_bundle_comes_before_the_cache(
    compilations: list[StandIn], loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loader.entry_of(KERNEL)
    bundle(tmp_path / "bundle", monkeypatch, KERNEL)
    assert jit.load(KERNEL)() == b"bundled"


def test_bundles_are_a_path_list_and_the_first_counts(
    compilations: list[StandIn], loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bundle(tmp_path / "first", monkeypatch, KERNEL)
    Folder(tmp_path / "second").make(key_of(KERNEL), lambda: product(b"second"))
    Folder(tmp_path / "second").make(key_of(OTHER), lambda: product(b"second"))
    monkeypatch.setenv(loader.BUNDLES, f"{tmp_path / 'first'}::{tmp_path / 'second'}")
    assert [jit.load(KERNEL)(), jit.load(OTHER)()] == [b"bundled", b"second"]
    assert not compilations


def test_a_bundle_is_enough(
    compilations: list[StandIn], loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bundle(tmp_path / "bundle", monkeypatch, KERNEL)
    without(monkeypatch, DSL)
    monkeypatch.setattr(link, "linker", lambda: None)
    assert jit.why_unavailable(KERNEL) is None
    assert jit.load(KERNEL)() == b"bundled"


def test_a_damaged_bundle_is_warned_of_and_compiled_around(
    compilations: list[StandIn],
    loaded: Loaded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    bundle(tmp_path / "bundle", monkeypatch, KERNEL)
    (library,) = (tmp_path / "bundle").glob("*.so")
    library.write_bytes(b"bumbled")
    assert jit.load(KERNEL)() == b"compiled stand_in_64"
    assert "is damaged" in caplog.text


def test_without_dsl_and_bundle_the_reason_says_what_would_work(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
):
    without(monkeypatch, DSL)
    reason = jit.why_unavailable(KERNEL)
    assert reason and {"tilewright[cuda],", "TILEWRIGHT_BUNDLE"} <= set(reason.split())
    with pytest.raises(RuntimeError) as raised:
        jit.load(KERNEL)
    assert str(raised.value) == f"no stand_in_64: {reason}"


def test_a_bundle_of_other_kernels_is_named(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bundle(tmp_path / "bundle", monkeypatch, OTHER)
    without(monkeypatch, DSL)
    assert str(tmp_path / "bundle") in (jit.why_unavailable(KERNEL) or "")
    assert jit.why_unavailable(OTHER) is None


def test_a_bundle_that_is_named_later_counts(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without(monkeypatch, DSL)
    assert jit.why_unavailable(KERNEL)
    bundle(tmp_path / "bundle", monkeypatch, KERNEL)
    assert jit.why_unavailable(KERNEL) is None


def test_without_a_c_compiler_nothing_compiles(loaded: Loaded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "linker", lambda: None)
    assert "no C compiler" in (jit.why_unavailable(KERNEL) or "")
    with pytest.raises(RuntimeError, match="no C compiler"):
        jit.load(KERNEL)


def test_without_tvm_ffi_nothing_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bundle(tmp_path / "bundle", monkeypatch, KERNEL)
    without(monkeypatch, FFI)
    assert "apache-tvm-ffi is not installed" in (jit.why_unavailable(KERNEL) or "")
    with pytest.raises(RuntimeError, match="apache-tvm-ffi is not installed"):
        jit.load(KERNEL)


def test_with_all_there_nothing_is_in_the_way(compilations: list[StandIn]):
    assert jit.why_unavailable(KERNEL) is None
    assert not compilations


def test_a_first_call_tells_that_it_compiles(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(kernel: StandIn) -> None:
        raise ImportError

    monkeypatch.setattr("tilewright.jit.compile.compile", fail)
    with pytest.raises(ImportError):
        jit.load(KERNEL)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("tilewright", logging.WARNING)
    assert "compiling stand_in_64 for sm_90a" in record.getMessage()
    assert replace(KERNEL) not in loader._loaded
