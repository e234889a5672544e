"""Grids: tile counters, semaphores, atomics, local memory, launches that do not fit the chip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.emulator.ptx import Program
from tilewright.emulator import Options, parallel
from tilewright.emulator.errors import OutOfBounds
from tilewright.emulator.memory import Global
from tilewright.emulator.tensor_map import TensorMap, load_box

# Array 0 is a counter that hands out tiles, array 1 (tile) gets the number of the CTA that took it.
TILES = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r9, buffer;
    setp.ne.u32 %p0, %r0, 0;
NEXT:
    @%p0 bra SHARE;
    atom.global.add.u32 %r2, [%d0], 1;
    st.shared.b32 [%r9], %r2;
SHARE:
    bar.sync 0;
    ld.shared.b32 %r3, [%r9];
    bar.sync 0;
    setp.ge.u32 %p1, %r3, 10;
    @%p1 bra END;
    mul.wide.u32 %d5, %r3, 4;
    add.s64 %d5, %d1, %d5;
    red.global.add.u32 [%d5], 1;
    bra NEXT;
END:
"""


def test_a_persistent_kernel_takes_every_tile_once() -> None:
    counter, tiles = np.zeros(1, np.uint32), np.zeros(10, np.uint32)
    counters, _ = Program(TILES, counter, tiles, threads=64, grid=3).run()
    assert (tiles == 64).all() and counter[0] == 10 + 3
    assert len(counters.ctas) == 3


def test_ctas_take_turns_by_a_semaphore_in_reverse_order() -> None:
    """CTA i waits for the semaphore to reach 3 - i: the first started must wait for all others."""
    body = """
        mov.u32 %r1, %ctaid.x; sub.s32 %r2, 3, %r1;
    WAIT:
        ld.acquire.gpu.global.b32 %r3, [%d0];
        setp.ne.u32 %p0, %r3, %r2;
        @%p0 bra WAIT;
        mov.u32 %r4, %tid.x; setp.ne.u32 %p1, %r4, 0;
        @%p1 bra END;
        atom.release.gpu.global.add.u32 %r5, [%d0], 1;
    END:
    """
    semaphore = np.zeros(1, np.uint32)
    Program(body, semaphore, grid=4).run()
    assert semaphore[0] == 4


def test_vector_reductions_add_to_floats() -> None:
    body = """
        mov.u32 %r0, %tid.x; mov.b32 %r1, 0f3F800000; mov.b32 %r2, 0f40000000;
        and.b32 %r3, %r0, 3; mul.wide.u32 %d5, %r3, 8; add.s64 %d5, %d0, %d5;
        red.relaxed.gpu.global.add.v2.f32 [%d5], {%r1, %r2};
    """
    out = np.zeros(8, np.float32)
    Program(body, out).run()
    np.testing.assert_array_equal(out, [8, 16] * 4)


def test_compare_and_swap_returns_the_old_value() -> None:
    body = """
        mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0;
        @%p0 bra END;
        atom.global.cas.b32 %r1, [%d0], 5, 9; st.global.b32 [%d0+4], %r1;
        atom.global.cas.b32 %r1, [%d0], 5, 7; st.global.b32 [%d0+8], %r1;
    END:
    """
    words = np.array([5, 0, 0], np.uint32)
    Program(body, words).run()
    np.testing.assert_array_equal(words, [9, 5, 9])


def test_local_memory_belongs_to_its_thread() -> None:
    body = """
        .local .align 4 .b8 depot[16];
        mov.u32 %r0, %tid.x; mov.b64 %d4, depot;
        st.local.b32 [%d4+8], %r0; ld.local.b32 %r1, [%d4+8];
        mul.wide.u32 %d5, %r0, 4; add.s64 %d5, %d0, %d5; st.global.b32 [%d5], %r1;
    """
    out = np.zeros(32, np.uint32)
    Program(body, out).run()
    np.testing.assert_array_equal(out, np.arange(32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_bytes": 300 * 1024}, "shared memory"),
        ({"block": (2048, 1, 1)}, "threads"),
        ({"cluster": (2, 1, 1), "grid": (3, 1, 1)}, "multiple of the cluster"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    program = Program("")
    program.launch = replace(program.launch, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        program.run()


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="eager, late, random"):
        Program("").run(schedule="sometimes")
    assert Options().schedule == "eager"


def test_a_tensor_map_larger_than_its_tensor_is_refused() -> None:
    program = Program("", np.zeros((4, 8), np.float32))
    (tensor,) = program.tensors
    wide = TensorMap(tensor.address, (8, 5), (4, 32), (8, 1), kind=7, span=0)
    memory = Global(program.tensors)
    assert not load_box(wide, memory, (0, 3)).any()
    with pytest.raises(OutOfBounds, match="ends 32 bytes behind array0"):
        load_box(wide, memory, (0, 4))


SQUARES = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; shl.b32 %r2, %r1, 5; add.s32 %r2, %r2, %r0;
    mul.lo.s32 %r3, %r2, %r2; mul.wide.u32 %d5, %r2, 4; add.s64 %d5, %d0, %d5;
    st.global.b32 [%d5], %r3;
"""


def test_processes_share_clusters_that_cannot_see_each_other() -> None:
    alone, shared = np.zeros(160, np.uint32), np.zeros(160, np.uint32)
    wanted, _ = Program(SQUARES, alone, grid=5).run()
    p = Program(SQUARES, shared, grid=5)
    options = Options(workers=2)
    assert parallel.is_divisible(p.kernel)
    counters, _ = parallel.run(p.kernel, p.launch, p.tensors, p.chip, options)
    np.testing.assert_array_equal(shared, np.arange(160) ** 2)
    assert counters == wanted


def test_a_fault_in_a_worker_process_is_raised() -> None:
    p = Program(SQUARES, np.zeros(150, np.uint32), grid=5)
    with pytest.raises(OutOfBounds, match="array0"):
        parallel.run(p.kernel, p.launch, p.tensors, p.chip, Options(workers=2))


def test_a_kernel_with_a_tile_counter_is_not_divided() -> None:
    arrays = np.zeros(1, np.uint32), np.zeros(10, np.uint32)
    assert not parallel.is_divisible(Program(TILES, *arrays).kernel)
