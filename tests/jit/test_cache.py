"""A folder of compiled kernels: what is taken from it, what is not, and who compiles."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jit.stand_in import Spec, StandIn
from tilewright.jit.cache import Entry, Folder, Product, Rejected
from tilewright.jit.key import DSL, FFI, Key, key_of

KEY = key_of(StandIn())
LIBRARY = b"a library"


def produce(library: bytes = LIBRARY) -> Product:
    return Product({".so": library, ".ptx": b"text"}, {"registers": 168, "seconds": 1.5})


def refuse() -> Product:
    raise AssertionError("it was in the folder")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "cache")


def rewrite(entry: Entry, **changes: object) -> None:
    path = entry.library.parent / f"{KEY.stem}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_was_made_is_found(folder: Folder):
    made = folder.make(KEY, produce)
    assert made.library.read_bytes() == LIBRARY
    assert made.facts == {"registers": 168, "seconds": 1.5}
    assert (made.name, made.identity) == (KEY.name, KEY.identity)
    assert folder.find(KEY) == made == folder.make(KEY, refuse)


def test_another_key_is_not_found(folder: Folder):
    folder.make(KEY, produce)
    assert folder.find(key_of(StandIn(Spec(128)))) is None


def test_an_empty_folder_holds_nothing_and_is_not_created_by_a_look(folder: Folder):
    assert folder.find(KEY) is None
    assert list(folder.entries()) == []
    assert not folder.path.exists()


def test_the_runtime_comes_with_the_libraries(folder: Folder, tmp_path: Path):
    runtime = tmp_path / "libruntime.so"
    runtime.write_bytes(b"runtime")
    entry = folder.make(KEY, lambda: replace(produce(), runtime=runtime))
    shared = folder.path / runtime.name
    assert entry.library.parent == shared.parent and shared.read_bytes() == b"runtime"
    shared.write_bytes(b"another")
    assert folder.find(KEY) is None
    folder.make(KEY, lambda: replace(produce(), runtime=runtime))
    assert shared.read_bytes() == b"runtime"


def test_only_the_parts_that_are_wanted_are_kept(folder: Folder):
    assert set(folder.make(KEY, produce).files) == {".so"}
    with_text = replace(folder, parts=(".so", ".ptx"))
    assert with_text.find(KEY) is None
    assert with_text.make(KEY, produce).files[".ptx"].read_bytes() == b"text"
    assert folder.find(KEY) == with_text.find(KEY)


@pytest.mark.parametrize("damage", [b"", LIBRARY[:-1], b"b library"])
def test_a_damaged_library_is_rebuilt_with_a_warning(
    folder: Folder, damage: bytes, caplog: pytest.LogCaptureFixture
):
    folder.make(KEY, produce).library.write_bytes(damage)
    assert folder.make(KEY, produce).library.read_bytes() == LIBRARY
    assert "is damaged" in caplog.text and caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"format": 1}', '{"format": 99}'])
def test_a_damaged_description_is_rebuilt_with_a_warning(
    folder: Folder, text: str, caplog: pytest.LogCaptureFixture
):
    folder.make(KEY, produce)
    (folder.path / f"{KEY.stem}.json").write_text(text)
    assert folder.make(KEY, lambda: produce(b"new")).library.read_bytes() == b"new"
    assert "is not used" in caplog.text


def test_a_missing_library_is_rebuilt(folder: Folder):
    folder.make(KEY, produce).library.unlink()
    assert folder.make(KEY, produce).library.read_bytes() == LIBRARY


def test_a_description_names_no_file_elsewhere(folder: Folder, tmp_path: Path):
    entry = folder.make(KEY, produce)
    elsewhere = entry.library.rename(tmp_path / entry.library.name)
    path = folder.path / f"{KEY.stem}.json"
    path.write_text(path.read_text().replace(elsewhere.name, str(elsewhere)))
    assert folder.find(KEY) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": KEY.identity | {"arch": "sm_100a"}},
        {"identity": KEY.identity | {"sources": "0" * 16}},
        {"name": "another"},
        {"toolchain": KEY.toolchain | {DSL: "4.0.0"}},
    ],
    ids=["arch", "sources", "name", "toolchain"],
)
def test_a_foreign_entry_is_rebuilt_with_a_warning(
    folder: Folder, changes: dict, caplog: pytest.LogCaptureFixture
):
    rewrite(folder.make(KEY, produce), **changes)
    assert folder.make(KEY, lambda: produce(b"new")).library.read_bytes() == b"new"
    assert "is not used" in caplog.text


@pytest.mark.parametrize(
    ("there", "is_taken"),
    [
        ({DSL: None}, True),
        ({DSL: "5.0.0"}, True),
        ({"host": "Linux of another processor"}, False),
        ({FFI: "9.0.0"}, False),
    ],
    ids=str,
)
def test_a_bundle_may_come_from_any_compiler_that_this_host_can_load(
    folder: Folder, there: dict, is_taken: bool
):
    key = Key(KEY.name, KEY.identity, KEY.toolchain | {FFI: "0.1.15"})
    folder.make(key, produce)
    other = replace(key, toolchain=key.toolchain | there)
    assert (replace(folder, strict=False).find(other) is not None) == is_taken
    assert folder.find(other) is None


def test_entries_tells_what_is_wrong_with_the_rest(folder: Folder):
    folder.make(KEY, produce)
    (folder.path / "a.json").write_text("{")
    bad, good = folder.entries()
    assert isinstance(bad, Rejected) and str(bad).startswith("a.json: ")
    assert isinstance(good, Entry) and good.name == KEY.name


def test_a_compilation_that_fails_leaves_nothing_behind(folder: Folder):
    with pytest.raises(ZeroDivisionError):
        folder.make(KEY, lambda: produce(bytes(1 // 0)))
    assert [path.name for path in folder.path.iterdir()] == [".locks"]
    assert folder.make(KEY, produce).library.read_bytes() == LIBRARY


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=f"cannot keep {KEY.name} in .*file"):
        Folder(tmp_path / "file" / "cache").make(KEY, produce)


def compile_slowly(path: Path, start: float) -> None:
    """In a process of its own: counts its compilation by a file."""

    def produce_slowly() -> Product:
        (path / f"compiled-{os.getpid()}").touch()
        time.sleep(0.5)
        return produce(os.urandom(1 << 20))

    time.sleep(max(0.0, start - time.time()))
    made = Folder(path / "cache").make(KEY, produce_slowly)
    (path / f"got-{os.getpid()}").write_text(made.library.name)


def test_of_several_processes_one_compiles_and_all_get_its_library(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    start = time.time() + 0.2
    processes = [context.Process(target=compile_slowly, args=(tmp_path, start)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(list(tmp_path.glob("compiled-*"))) == 1
    (name,) = {path.read_text() for path in tmp_path.glob("got-*")}
    assert len(list(tmp_path.glob("got-*"))) == 4 and (tmp_path / "cache" / name).exists()


def replace_repeatedly(path: Path, stop: float) -> None:
    folder = Folder(path)
    while time.time() < stop:
        folder._write(KEY, produce(os.urandom(1 << 16)))


def test_a_reader_never_sees_half_an_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = Folder(tmp_path)
    folder.make(KEY, produce)
    context, stop = multiprocessing.get_context("fork"), time.time() + 1.0
    writers = [context.Process(target=replace_repeatedly, args=(tmp_path, stop)) for _ in range(2)]
    for writer in writers:
        writer.start()
    looks = 0
    while time.time() < stop:
        assert folder.find(KEY) is not None
        looks += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert looks > 10 and not caplog.records
