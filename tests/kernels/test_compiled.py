"""Traced: every kernel compiles, within its resources, to the instructions that it is made for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels import sass
from tilewright.jit.cache import Entry
from tilewright.kernels import catalog
from tilewright.kernels.catalog import Kernel
from tilewright.kernels.sm90.fa3.spec import REGISTERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KERNELS = catalog.kernels("sm_90a")
SPILLS = {
    entry["kernel"]: entry
    for entry in tomllib.loads(
        Path(__file__).with_name("resources.toml").read_text(encoding="utf-8")
    ).get("spill", [])
}
# Multiplies of a warpgroup, loads by TMA, setmaxnreg; additions to dQ in memory, and both sides of
# a programmatic dependent launch. Not: local memory.
WANTED = {"HGMMA", "UTMALDG", "USETMAXREG"}
WANTED_BACKWARD = WANTED | {"REDG", "ACQBULK", "PREEXIT"}
UNWANTED = {"LDL", "STL"}

EntryOf = Callable[[Kernel], Entry]

pytestmark = pytest.mark.slow
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=str)
# Those that multiply, with roles for their warps; what goes before and after them only streams.
every_multiplying_kernel = pytest.mark.parametrize(
    "kernel",
    [x for x in KERNELS if x.family in (catalog.FA3_FORWARD, catalog.FA3_BACKWARD)],
    ids=str,
)


@every_kernel
def test_no_kernel_spills_more_than_it_is_known_to(kernel: Kernel, entry_of: EntryOf):
    facts = entry_of(kernel).facts
    spilled = facts["spill_stores"] + facts["spill_loads"]
    known = SPILLS.get(str(kernel), {"bytes": 0})["bytes"]
    assert spilled <= known, f"{kernel} spills {spilled} bytes, {known} are known"
    assert spilled == known, f"{kernel} spills {spilled} bytes now: lower resources.toml's {known}"
    assert known or not facts["stack"]


def test_every_known_spill_has_a_reason_and_a_kernel():
    assert SPILLS.keys() <= set(map(str, KERNELS))
    assert all(entry["reason"].strip() and entry["bytes"] > 0 for entry in SPILLS.values())


@every_multiplying_kernel
def test_registers_and_shared_memory_are_the_specs(kernel: Kernel, entry_of: EntryOf):
    facts, spec = entry_of(kernel).facts, kernel.spec
    # What a launch allots is a multiple of 8; setmaxnreg hands the same registers out anew. An
    # instruction can name 255 of 256.
    allotted = -(-facts["registers"] // 8) * 8
    assert allotted == REGISTERS // spec.threads // 8 * 8
    loads, computes = spec.registers
    assert loads + spec.warpgroups * computes <= allotted * (spec.warpgroups + 1)
    assert facts["smem"] == spec.smem_bytes


@every_multiplying_kernel
def test_the_instructions_that_matter_are_there(kernel: Kernel, entry_of: EntryOf):
    program = sass.disassembler()
    if program is None:
        pytest.skip("no nvdisasm; triton's wheel has one")
    found = sass.instructions(entry_of(kernel).files[".cubin"], program)
    families = {name.split(".")[0] for name in found}
    is_backward = kernel.family == catalog.FA3_BACKWARD
    assert families >= (WANTED_BACKWARD if is_backward else WANTED)
    if str(kernel) not in SPILLS:
        assert not families & UNWANTED
    dtype = {"float16": "F16", "bfloat16": "BF16"}[kernel.spec.dtype]
    multiplies = [name for name in found if name.startswith("HGMMA")]
    assert {".F32" in name for name in multiplies} == {True}
    assert {name.endswith(".BF16") for name in multiplies} == {dtype == "BF16"}
    # Where it cannot follow accumulators over branches, the assembler waits for each multiply.
    waits = sum(found[name] for name in found if name.startswith("WARPGROUP.DEPBAR"))
    # A group has four of them at the least: head dim 64, or 64 keys or queries, in steps of 16.
    assert 4 * waits <= sum(found[name] for name in multiplies)


def test_names_tell_kernels_apart():
    assert len({str(kernel) for kernel in KERNELS}) == len(KERNELS)
