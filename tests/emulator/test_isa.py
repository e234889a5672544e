"""Instructions whose arithmetic is easy to get wrong, in hand-written PTX against numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.ptx import Program
from tilewright.emulator.errors import Unsupported
from tilewright.emulator.isa import lookup

LOAD = """
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %d5, %r0, 4;
    add.s64 %d6, %d0, %d5; ld.global.b32 %r1, [%d6];
    add.s64 %d6, %d1, %d5; ld.global.b32 %r2, [%d6];
    add.s64 %d7, %d2, %d5;
"""
STORE = "st.global.b32 [%d7], %r3;"


def _run(body: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """%r3 after `body`, with a in %r1 and b in %r2, as uint32."""
    out = np.zeros(32, np.uint32)
    Program(LOAD + body + STORE, a.view(np.uint32), b.view(np.uint32), out).run()
    return out


def _words(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, 32, np.uint32)


def _floats(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(32).astype(np.float32)


def _reversed_bits(x: int) -> int:
    return int(f"{x:032b}"[::-1], 2)


def _funnel(a: int, b: int) -> int:
    return ((b << 32 | a) << 5 >> 32) & 0xFFFFFFFF


INTEGERS = {
    "brev.b32 %r3, %r1;": lambda a, b: _reversed_bits(a),
    "popc.b32 %r3, %r1;": lambda a, b: a.bit_count(),
    "clz.b32 %r3, %r1;": lambda a, b: 32 - a.bit_length(),
    "mul.hi.u32 %r3, %r1, %r2;": lambda a, b: a * b >> 32,
    "shf.l.wrap.b32 %r3, %r1, %r2, 5;": _funnel,
    "bfe.u32 %r3, %r1, 7, 9;": lambda a, b: a >> 7 & 511,
    "bfi.b32 %r3, %r1, %r2, 8, 4;": lambda a, b: b & ~0xF00 | (a & 15) << 8,
    "prmt.b32 %r3, %r1, %r2, 0x7610;": lambda a, b: a & 0xFFFF | b & 0xFFFF0000,
    "lop3.b32 %r3, %r1, %r2, 15, 0x96;": lambda a, b: a ^ b ^ 15,
    "shl.b32 %r3, %r1, 40;": lambda a, b: 0,
    "min.u32 %r3, %r1, %r2;": min,
    "not.b32 %r3, %r1;": lambda a, b: ~a & 0xFFFFFFFF,
    "mad.lo.s32 %r3, %r1, %r2, 3;": lambda a, b: (a * b + 3) & 0xFFFFFFFF,
    "div.u32 %r3, %r1, %r2;": lambda a, b: a // b,
}


@pytest.mark.parametrize("body", INTEGERS)
def test_integer_instructions(body: str) -> None:
    a, b = _words(0), _words(1)
    wanted = [INTEGERS[body](int(x), int(y)) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(_run(body, a, b), np.array(wanted, np.uint32))


def test_signed_division_truncates() -> None:
    a = np.array([-7, 7, -7, 7] * 8, np.int32)
    b = np.array([2, -2, -2, 2] * 8, np.int32)
    quotient = _run("div.s32 %r3, %r1, %r2;", a, b).view(np.int32)
    rest = _run("rem.s32 %r3, %r1, %r2;", a, b).view(np.int32)
    np.testing.assert_array_equal(quotient, [-3, -3, 3, 3] * 8)
    np.testing.assert_array_equal(rest, [-1, 1, -1, 1] * 8)


def test_addition_rounds_down_when_asked() -> None:
    a, b = np.full(32, 1.0, np.float32), np.full(32, 2.0**-30, np.float32)
    body = "mov.b64 %d8, {%r1, %r1}; mov.b64 %d9, {%r2, %r2}; {} mov.b64 {%r3, %r4}, %d8;"
    down = _run(body.replace("{} ", "add.rm.f32x2 %d8, %d8, %d9;"), a, -b).view(np.float32)
    near = _run(body.replace("{} ", "add.rn.f32x2 %d8, %d8, %d9;"), a, -b).view(np.float32)
    assert (near == 1).all() and (down == np.nextafter(np.float32(1), np.float32(0))).all()


def test_maximum_ignores_nan_and_takes_three() -> None:
    a = np.where(np.arange(32) % 2, np.float32(np.nan), _floats(0)).astype(np.float32)
    b = _floats(1)
    got = _run("max.f32 %r3, %r1, %r2, 0f00000000;", a, b).view(np.float32)
    np.testing.assert_array_equal(got, np.fmax(np.fmax(a, b), 0))


def test_comparison_with_nan_is_false_unless_unordered() -> None:
    a, b = np.full(32, np.nan, np.float32), _floats(0)
    for name, wanted in (("ne", 0), ("neu", 1), ("lt", 0), ("ltu", 1), ("nan", 1)):
        body = f"setp.{name}.f32 %p0, %r1, %r2; selp.b32 %r3, 1, 0, %p0;"
        assert (_run(body, a, b) == wanted).all(), name


def test_conversion_packs_the_first_source_high() -> None:
    a, b = _floats(0), _floats(1)
    got = _run("cvt.rn.bf16x2.f32 %r3, %r1, %r2;", a, b).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got[1::2], a.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(got[0::2], b.astype(ml_dtypes.bfloat16))


def test_fp8_conversion_saturates() -> None:
    a, b = np.full(32, 1e6, np.float32), np.full(32, -1e6, np.float32)
    body = "cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2; cvt.u32.u16 %r3, %h0;"
    assert (_run(body, a, b) == 0x7EFE).all()


def test_conversion_to_integer_clamps() -> None:
    a = np.array([1e20, -1e20, np.nan, 2.5] * 8, np.float32)
    got = _run("cvt.rzi.s32.f32 %r3, %r1;", a, a).view(np.int32)
    np.testing.assert_array_equal(got, [2**31 - 1, -(2**31), 0, 2] * 8)


SHUFFLES = {
    "bfly": lambda i: i ^ 5,
    "idx": lambda i: 5,
    "up": lambda i: i - 5 if i >= 5 else i,
    "down": lambda i: i + 5 if i + 5 < 32 else i,
}


@pytest.mark.parametrize("mode", SHUFFLES)
def test_shuffles(mode: str) -> None:
    a = _words(0)
    clamp = 0 if mode == "up" else 31
    got = _run(f"shfl.sync.{mode}.b32 %r3, %r1, 5, {clamp}, -1;", a, a)
    np.testing.assert_array_equal(got, [a[SHUFFLES[mode](i)] for i in range(32)])


def test_divergent_lanes_meet_again() -> None:
    """Even lanes run a loop lane / 2 times; then all take part in one shuffle."""
    body = """
        and.b32 %r4, %r0, 1; setp.ne.u32 %p0, %r4, 0; mov.b32 %r5, 0;
        @%p0 bra JOIN;
        shr.u32 %r6, %r0, 1;
    LOOP:
        setp.ge.u32 %p1, %r5, %r6; @%p1 bra JOIN;
        add.s32 %r5, %r5, 1; bra LOOP;
    JOIN:
        shfl.sync.bfly.b32 %r3, %r5, 1, 31, -1;
    """
    lane = np.arange(32)
    counts = np.where(lane % 2, 0, lane // 2)
    np.testing.assert_array_equal(_run(body, _words(0), _words(1)), counts[lane ^ 1])


def test_a_guarded_instruction_runs_for_its_lanes_only() -> None:
    body = "setp.lt.u32 %p0, %r0, 5; mov.b32 %r3, 1; @!%p0 mov.b32 %r3, 2;"
    wanted = np.where(np.arange(32) < 5, 1, 2)
    np.testing.assert_array_equal(_run(body, _words(0), _words(0)), wanted)


def test_all_threads_take_the_jump_behind_a_guarded_instruction() -> None:
    body = """
        setp.lt.u32 %p0, %r0, 5; mov.b32 %r3, 1;
        @%p0 mov.b32 %r3, 2;
        bra.uni END;
        mov.b32 %r3, 3;
    END:
    """
    wanted = np.where(np.arange(32) < 5, 2, 1)
    np.testing.assert_array_equal(_run(body, _words(0), _words(0)), wanted)


def test_counts_follow_from_what_ran() -> None:
    body = LOAD + "mul.f32 %r3, %r1, %r2; ex2.approx.ftz.f32 %r3, %r3;" + STORE
    out = np.zeros(64, np.uint32)
    ones = np.ones(64, np.float32).view(np.uint32)
    counters, _ = Program(body, ones, ones, out, threads=64).run()
    assert counters.total["fma"] == counters.total["special"] == 64
    assert counters.total["global load"] == 2 * 4 * 64
    assert list(counters.ctas) == [(0, 0, 0)] and list(counters.roles) == ["warps 0-1"]


def test_an_unknown_modifier_names_what_is_known() -> None:
    with pytest.raises(Unsupported, match=r"ex2.approx.rz.f32.*known: ex2.approx"):
        lookup("ex2.approx.rz.f32")


def test_four_rows_go_to_the_first_lane_of_each_warp() -> None:
    """tcgen05.cp.4x256b; word (r, c) of the matrix is c // 4 * 64 + r * 16 + c % 4 * 4 bytes in."""
    body = """
        .shared .align 8 .b64 done;
        .shared .align 4 .b32 holder;
        mov.u32 %r0, %tid.x; mov.u32 %r1, buffer; mov.u32 %r2, holder; mov.u32 %r3, done;
        shl.b32 %r4, %r0, 2; add.s32 %r4, %r4, %r1;
        setp.lt.u32 %p0, %r0, 32; @!%p0 bra READY;
        st.shared.b32 [%r4], %r0;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
        setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r3], 1;
        fence.proxy.async.shared::cta;
    READY:
        bar.sync 0;
        ld.shared.b32 %r5, [holder];
        setp.ne.u32 %p1, %r0, 0; @%p1 bra COPIED;
        shr.u32 %r6, %r1, 4; cvt.u64.u32 %d1, %r6;
        or.b64 %d1, %d1, 0x0000400000040000;
        tcgen05.cp.cta_group::1.4x256b [%r5], %d1;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];
    COPIED:
        mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra COPIED;
        and.b32 %r6, %r0, 0x60; shl.b32 %r6, %r6, 16; add.s32 %r7, %r5, %r6;
        tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r8,%r9,%r10,%r11,%r12,%r13,%r14,%r15}, [%r7];
        mul.wide.u32 %d2, %r0, 32; add.s64 %d2, %d0, %d2;
        st.global.v4.b32 [%d2], {%r8,%r9,%r10,%r11};
        st.global.v4.b32 [%d2+16], {%r12,%r13,%r14,%r15};
        bar.sync 0;
        @%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
    """
    out = np.full((128, 8), 7, np.uint32)
    Program(body, out, arch="sm_100a", threads=128).run(initialised=False)
    wanted = np.zeros((128, 8), np.uint32)
    wanted[::32] = np.arange(32).reshape(2, 4, 4).swapaxes(0, 1).reshape(4, 8)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("shape", ["128x256b.b8x16.b6x16_p32", "64x128b", "128x128b.warpx4"])
def test_a_copy_to_tensor_memory_of_another_shape_is_not_known(shape: str) -> None:
    with pytest.raises(Unsupported, match="is not known"):
        lookup(f"tcgen05.cp.cta_group::1.{shape}")
