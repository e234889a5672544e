"""Each fault that the emulator knows, in the shortest PTX that has it."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from tests.emulator.ptx import Program
from tilewright.emulator import errors

THREAD = "mov.u32 %r0, %tid.x; mov.u32 %r1, buffer; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2;\n"
LEADER = "setp.ne.u32 %p0, %r0, 0;\n"


def test_deadlock_names_barrier_phase_and_waiters() -> None:
    body = (
        THREAD
        + LEADER
        + """
        @%p0 bra READY;
        mbarrier.init.shared.b64 [buffer], 3;
    READY:
        bar.sync 0;
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p1, [buffer], 0;
        @!%p1 bra WAIT;
    """
    )
    with pytest.raises(errors.Deadlock) as caught:
        Program(body, threads=64).run()
    message = str(caught.value)
    assert "phase 0, 3 of 3 arrivals pending" in message
    assert "warps 0-1" in message and "mbarrier.try_wait" in message


def test_polling_that_nothing_ends_is_a_deadlock() -> None:
    body = "POLL: ld.acquire.gpu.global.b32 %r4, [%d0]; setp.eq.u32 %p0, %r4, 0; @%p0 bra POLL;"
    with pytest.raises(errors.Deadlock, match="polls without change"):
        Program(body, np.zeros(1, np.int32)).run()


def test_ctas_that_wait_for_each_other_run_interleaved() -> None:
    """CTA 0 waits for a flag that CTA 1 sets."""
    body = (
        THREAD
        + """
        mov.u32 %r4, %ctaid.x;
        setp.ne.u32 %p0, %r4, 0;
        @%p0 bra SET;
    POLL:
        ld.acquire.gpu.global.b32 %r5, [%d0];
        setp.eq.u32 %p1, %r5, 0;
        @%p1 bra POLL;
        bra END;
    SET:
        st.release.gpu.global.b32 [%d0], 7;
    END:
    """
    )
    flag = np.zeros(1, np.int32)
    Program(body, flag, grid=2).run()
    assert flag[0] == 7


def test_an_access_one_element_past_a_tensor_names_the_tensor() -> None:
    body = THREAD + "mul.wide.u32 %d5, %r0, 4; add.s64 %d6, %d0, %d5; ld.global.b32 %r4, [%d6+4];"
    with pytest.raises(errors.OutOfBounds, match="array0"):
        Program(body, np.zeros(32, np.float32), np.zeros(32, np.float32)).run()


@pytest.mark.parametrize(("offset", "message"), [("4096", "the CTA has"), ("2", "no multiple")])
def test_a_bad_shared_address_is_reported(offset: str, message: str) -> None:
    with pytest.raises(errors.OutOfBounds, match=message):
        Program(THREAD + f"st.shared.b32 [%r1+{offset}], 0;").run()


def test_a_read_of_shared_memory_that_nothing_wrote_is_reported() -> None:
    with pytest.raises(errors.Uninitialised):
        Program(THREAD + "ld.shared.b32 %r4, [%r3];").run()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "mbarrier.init.shared.b64 [buffer], 1;" * 2
            + "mbarrier.arrive.shared.b64 _, [buffer], 2;",
            "2 arrivals where 1",
        ),
        ("mbarrier.arrive.shared.b64 _, [buffer];", "no mbarrier was initialised"),
        (
            "mbarrier.init.shared.b64 [buffer], 2; mbarrier.arrive.shared.b64 _, [buffer];"
            "mbarrier.init.shared.b64 [buffer], 2;",
            "init again",
        ),
    ],
)
def test_barrier_misuse_is_reported(body: str, message: str) -> None:
    guarded = THREAD + LEADER + f"@%p0 bra END; {body} END:"
    with pytest.raises(errors.BarrierMisuse, match=message):
        Program(guarded).run()


def test_named_barriers_must_agree_on_their_count() -> None:
    body = (
        THREAD
        + """
        setp.lt.u32 %p0, %r0, 32;
        @%p0 bra FIRST;
        bar.sync 1, 96;
    FIRST:
        bar.sync 1, 64;
    """
    )
    with pytest.raises(errors.BarrierMisuse, match="named barrier 1"):
        Program(body, threads=64).run()


def test_registers_beyond_the_pool_are_reported() -> None:
    with pytest.raises(errors.ResourceMisuse, match="registers"):
        Program("setmaxnreg.inc.sync.aligned.u32 240;", threads=384).run()


@pytest.mark.parametrize(("most", "fits"), [(112, True), (120, False)])
def test_a_cta_has_the_registers_of_its_launch_and_no_more(most: int, fits: bool) -> None:
    """Of 640 threads each is launched with 96: 61,440 of the 65,536 that there are."""
    body = (
        THREAD
        + f"""
        setp.lt.u32 %p0, %r0, 128;
        @%p0 bra FEW;
        setmaxnreg.inc.sync.aligned.u32 {most};
        bra DONE;
    FEW:
        setmaxnreg.dec.sync.aligned.u32 24;
    DONE:
    """
    )
    with nullcontext() if fits else pytest.raises(errors.ResourceMisuse, match="the CTA has 61440"):
        Program(body, threads=640).run()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [buffer], 512;" * 2,
            "waits for ever",
        ),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [buffer], 48;", "32 to 512"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [buffer], 64;", "ends with"),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 0, 64;", "dealloc"),
    ],
)
def test_tensor_memory_misuse_is_reported(body: str, message: str) -> None:
    with pytest.raises(errors.ResourceMisuse, match=message):
        Program(body, arch="sm_100a").run()


EXCHANGE = (
    THREAD
    + """
    st.shared.b32 [%r3], %r0;
    {barrier}
    xor.b32 %r4, %r2, 128;
    add.s32 %r4, %r4, %r1;
    ld.shared.b32 %r5, [%r4];
    mul.wide.u32 %d5, %r0, 4;
    add.s64 %d5, %d0, %d5;
    st.global.b32 [%d5], %r5;
"""
)


def test_a_missing_barrier_is_a_race() -> None:
    out = np.zeros(64, np.int32)
    _, reports = Program(EXCHANGE.format(barrier="bar.sync 0;"), out, threads=64).run(races=True)
    assert not reports and (out == np.arange(64) ^ 32).all()
    _, reports = Program(EXCHANGE.format(barrier=""), out, threads=64).run(races=True)
    assert len(reports) == 1 and "st.shared.b32" in reports[0] and "ld.shared.b32" in reports[0]


BULK_STORE = (
    THREAD
    + LEADER
    + """
    st.shared.b32 [%r3], %r0;
    {fence}
    bar.sync 0;
    @%p0 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%d0], [buffer], 128;
    cp.async.bulk.commit_group;
    {wait}
END:
"""
)
FENCE, WAIT = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;"


def test_a_missing_proxy_fence_is_reported() -> None:
    out = np.zeros(32, np.int32)
    _, reports = Program(BULK_STORE.format(fence=FENCE, wait=WAIT), out).run(races=True)
    assert not reports and (out == np.arange(32)).all()
    _, reports = Program(BULK_STORE.format(fence="", wait=WAIT), out).run(races=True)
    assert "fence.proxy.async" in reports[0]


def test_a_cta_may_not_end_while_a_copy_reads_its_memory() -> None:
    program = Program(BULK_STORE.format(fence=FENCE, wait=""), np.zeros(32, np.int32))
    _, reports = program.run(races=True)
    assert len(reports) == 1 and "no wait_group covers it" in reports[0]


BULK_LOAD = (
    THREAD
    + LEADER
    + """
    @%p0 bra END;
    mbarrier.init.shared.b64 [%r1+512], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1+512], 128;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [buffer], [%d0], 128, [%r1+512];
LOOK:
    {wait}
END:
"""
)
LOOKS = "mbarrier.try_wait.parity.shared.b64 %p1, [%r1+512], 0; @!%p1 bra LOOK;"


@pytest.mark.parametrize("wait, reports", [(LOOKS, 0), ("", 1)])
def test_a_cta_may_not_end_before_an_arrival_at_its_barrier(wait: str, reports: int) -> None:
    program = Program(BULK_LOAD.format(wait=wait), np.zeros(32, np.int32))
    _, found = program.run(races=True)
    assert len(found) == reports
    assert all("may end before an arrival" in report for report in found)


@pytest.mark.parametrize(
    "instruction", ["frobnicate.b32 %r4, %r5;", "add.rz.f32 %r4, %r5, %r5;", "mov.u32 %r4, %pm0;"]
)
def test_what_is_unknown_is_named(instruction: str) -> None:
    with pytest.raises(NotImplementedError, match=instruction.split()[0].split(".")[0]):
        Program(instruction).run()


def test_a_view_of_another_width_is_refused() -> None:
    with pytest.raises(errors.InvalidPtx, match="16 bits are wanted"):
        Program("mov.b32 %r4, {%r5, %r6};").run()


def test_ptx_for_another_chip_is_refused() -> None:
    program = Program("", arch="sm_80")
    program.chip = Program("").chip
    with pytest.raises(ValueError, match="sm_80"):
        program.run()


def test_a_report_points_to_the_python_line() -> None:
    program = Program('.file 1 "kernel.py"\n.loc 1 42 0\nld.shared.b32 %r4, [buffer];')
    with pytest.raises(errors.Uninitialised, match=r"kernel.py:42"):
        program.run()
