"""Traced: a kernel compiles for an architecture without a GPU, and what comes of it loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jit.stand_in import Spec, StandIn
from tilewright.jit import bundle, link
from tilewright.jit.cache import Entry, Folder

pytest.importorskip("cutlass", reason="the compiler is the DSL's")
from tilewright.jit.compile import Compiled, Resources, _read, compile  # noqa: E402

ARCH = "CUTE_DSL_ARCH"


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile(StandIn())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of two kernels, made by two processes."""
    path = tmp_path_factory.mktemp("bundle")
    kernels = [StandIn(Spec(64)), StandIn(Spec(128))]
    outcomes = dict(bundle.build(kernels, path, jobs=2))
    assert all(isinstance(outcomes[kernel], Entry) for kernel in kernels)
    return path


def test_resources_are_ptxas_own(compiled: Compiled):
    resources = compiled.resources
    # 64 x 64 sums in float32 are 32 registers of each of 128 threads, in which the rest comes.
    assert 32 < resources.registers < 128 and resources.registers % 2 == 0
    assert (resources.spill_bytes, resources.stack) == (0, 0)
    # A and B are 8 KiB each; a barrier comes before them.
    assert 16384 < resources.smem <= 16384 + 2048


SPILLED = """
  - Reason:      'kernel `k` uses 168 registers, 8 bytes stack, 4 bytes spill stores, and 12 bytes
spill loads. Spilled values are placed in local memory and can add memory traffic and latency.'
  - Remark:      'Shared memory allocated: 230400 bytes'
ptxas info    : Function properties for k
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 8 bytes cumulative stack size
"""


def test_spills_are_read_from_what_ptxas_says():
    found = _read(SPILLED)
    assert found == Resources(registers=168, spill_stores=4, spill_loads=12, stack=8, smem=230400)
    assert found.spill_bytes == 16


@pytest.mark.parametrize("remarks", ["", SPILLED * 2])
def test_resources_of_no_kernel_or_of_several_are_refused(remarks: str):
    with pytest.raises(RuntimeError, match="want the resources of one kernel"):
        _read(remarks)


def test_ptx_is_for_the_arch_and_the_kernel_has_the_name_that_it_was_given(compiled: Compiled):
    ptx = compiled.ptx.decode()
    assert ".target sm_90a" in ptx
    assert ".entry stand_in_64" in ptx and "cutlass" not in ptx


def test_a_second_compilation_in_one_process_is_the_same(compiled: Compiled):
    again = compile(StandIn())
    assert (again.ptx, again.resources) == (compiled.ptx, compiled.resources)


@pytest.mark.parametrize("arch", [None, "sm_100a"])
def test_the_dsl_is_left_at_the_arch_that_it_had(arch: str | None, monkeypatch: pytest.MonkeyPatch):
    from cutlass.cutlass_dsl import CuTeDSL

    environment = CuTeDSL._get_dsl().envar
    monkeypatch.setattr(environment, "_arch", arch)
    monkeypatch.delenv(ARCH, raising=False)
    assert ".target sm_90a" in compile(StandIn()).ptx.decode()
    assert environment._arch == arch and ARCH not in os.environ


@pytest.mark.parametrize("title", ["two words", "cutlass_kernel"])
def test_a_name_that_would_not_do_is_refused(title: str):
    with pytest.raises(ValueError, match=title):
        compile(StandIn(title=title))


def test_an_object_exports_the_kernels_function_and_nothing_else(
    compiled: Compiled, tmp_path: Path
):
    library = tmp_path / "kernel.so"
    library.write_bytes(link.link(compiled.object))
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["__tvm_ffi_stand_in_64"]


def test_linking_without_a_c_compiler_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="C compiler: CC, gcc"):
        link.link(b"")


def test_what_the_linker_says_is_passed_on():
    with pytest.raises(RuntimeError, match="could not link a kernel:\n.*kernel.o"):
        link.link(b"no object")


def test_a_built_bundle_is_not_built_again(built: Path):
    before = {path: path.stat().st_mtime_ns for path in built.glob("*.*")}
    dict(bundle.build([StandIn(Spec(64)), StandIn(Spec(128))], built, jobs=1))
    assert {path: path.stat().st_mtime_ns for path in built.glob("*.*")} == before
    assert len(list(Folder(built).entries())) == 2


def test_a_kernel_that_does_not_compile_does_not_stop_the_others(tmp_path: Path):
    bad, good = StandIn(title="two words"), StandIn()
    outcomes = dict(bundle.build([bad, good], tmp_path, jobs=1))
    assert isinstance(outcomes[bad], ValueError)
    assert isinstance(outcomes[good], Entry)


def test_a_bundle_loads_without_the_dsl(built: Path, tmp_path: Path):
    code = """
import sys
sys.modules["cutlass"] = None  # its import fails, as where it is not installed
import torch
from tests.jit.stand_in import Spec, StandIn
from tilewright import jit
from tilewright.jit import loader

here = loader.toolchain()
here |= {name: None for name in here if "cutlass" in name}
loaded = [jit.load(StandIn(Spec(columns))) for columns in (64, 128)]
for function in loaded:
    try:
        function(*torch.zeros(3, 64, 64).bfloat16())
    except ValueError as error:
        print(error)
maps = open("/proc/self/maps").read().split()
print(*sorted({path for path in maps if path.endswith("libcute_dsl_runtime.so")}))
"""
    environment = os.environ | {
        "TILEWRIGHT_BUNDLE": str(built),
        "TILEWRIGHT_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    # Each library's own function was called, and refused tensors of a CPU.
    first, second, runtime = ended.stdout.splitlines()
    assert "b: Tensor([64, 64]" in first and "b: Tensor([128, 64]" in second
    assert "device_type=cuda" in first
    assert runtime == str(built / "libcute_dsl_runtime.so")
    assert not list(tmp_path.iterdir())
