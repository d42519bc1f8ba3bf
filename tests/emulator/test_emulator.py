"""The emulator alone, on kernels of a few lines: what they compute, and what they may not do.

Expected values come from Python's numbers and from the text of the PTX ISA.
"""

import math
import re
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from emulator import Arena, Emulator, PTXError

REGISTERS = """
    .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .f32 %f<32>; .reg .b64 %d<16>;
    ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
    mad.lo.s32 %r3, %r1, %r2, %r0;
    mul.wide.u32 %d2, %r3, 4; add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2;
"""


def execute(body, given=(0,), *, threads=32, blocks=1, shared=0, dtype=np.uint32, order=None):
    """What each thread of a kernel stores at [%d4]; ``given`` is at [%d0].

    Besides these, REGISTERS gives each thread its own element of ``given`` at [%d3].
    """
    text = f""".version 9.0
    .extern .shared .align 16 .b8 dynamic[];
    .visible .entry kernel(.param .u64 in, .param .u64 out)
    .maxntid {threads}, 1, 1
    {{ {REGISTERS} {body} ret; }}"""
    memory = Arena()
    given = memory.put(np.asarray(given))
    out = memory.put(np.zeros(threads * blocks, dtype))
    launch = SimpleNamespace(grid=(blocks, 1, 1), threads=threads, shared=shared)
    Emulator(text).run(launch, (given, out), memory, order)
    return memory.get(out, (threads * blocks,), dtype)


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


inf, nan = math.inf, math.nan
SMALLEST = bits(2.0**-149)
HALF_WAY = bits(1 + 2.0**-23)
ONE_RESULT = {
    # from %r4, %r5, %r6 (%f has the same bits) to %r7 or %f7: operands, result
    "add.s32 %r7, %r4, %r5;": [((2**31 - 1, 1), 2**31), ((5, 2**32 - 7), 2**32 - 2)],
    "sub.s32 %r7, %r4, %r5;": [((3, 5), 2**32 - 2)],
    "mul.lo.s32 %r7, %r4, %r5;": [((2**31 + 3, 6), 18)],
    "mul.hi.u32 %r7, %r4, %r5;": [((2**32 - 1, 2**32 - 1), 2**32 - 2)],
    "mul.hi.s32 %r7, %r4, %r5;": [((2**32 - 1, 2**32 - 1), 0), ((2**31, 2), 2**32 - 1)],
    "mad.lo.s32 %r7, %r4, %r5, %r6;": [((7, 6, 2**32 - 2), 40)],
    "div.s32 %r7, %r4, %r5;": [((2**32 - 7, 2), 2**32 - 3), ((7, 2**32 - 2), 2**32 - 3)],
    "div.u32 %r7, %r4, %r5;": [((2**32 - 1, 16), 2**28 - 1)],
    "rem.s32 %r7, %r4, %r5;": [((2**32 - 7, 3), 2**32 - 1), ((7, 2**32 - 3), 1)],
    "min.s32 %r7, %r4, %r5;": [((2**32 - 1, 1), 2**32 - 1)],
    "min.u32 %r7, %r4, %r5;": [((2**32 - 1, 1), 1)],
    "shl.b32 %r7, %r4, %r5;": [((3, 4), 48), ((3, 32), 0), ((1, 31), 2**31)],
    "shr.u32 %r7, %r4, %r5;": [((2**31, 31), 1), ((2**31, 40), 0)],
    "shr.s32 %r7, %r4, %r5;": [((2**31, 31), 2**32 - 1), ((2**31, 40), 2**32 - 1), ((64, 3), 8)],
    "shf.l.wrap.b32 %r7, %r4, %r5, %r6;": [((0xAABBCCDD, 0x11223344, 8), 0x223344AA)],
    "shf.r.wrap.b32 %r7, %r4, %r5, %r6;": [((0xAABBCCDD, 0x11223344, 40), 0x44AABBCC)],
    "shf.r.clamp.b32 %r7, %r4, %r5, %r6;": [((0xAABBCCDD, 0x11223344, 40), 0x11223344)],
    "bfe.u32 %r7, %r4, %r5, %r6;": [((0xABCD1234, 8, 8), 0x12), ((0xABCD1234, 28, 8), 0xA)],
    "bfe.s32 %r7, %r4, %r5, %r6;": [((0x00F0, 4, 4), 2**32 - 1), ((0x70, 4, 4), 7), ((9, 0, 0), 0)],
    "bfi.b32 %r7, %r4, %r5, 8, 4;": [((0xFF, 0x12345678), 0x12345F78)],
    "prmt.b32 %r7, %r4, %r5, 0x5410;": [((0x33221100, 0x77665544), 0x55441100)],
    # the selector's nibbles, lowest first: a byte, or with bit 3 set only its sign
    "prmt.b32 %r7, %r4, %r5, %r6;": [
        ((0x80FF, 0, 0x8991), 0xFFFFFF80),
        ((0x80FF, 0, 0x2291), 0x0000FF80),
    ],
    "lop3.b32 %r7, %r4, %r5, %r6, 0xE8;": [((0b1100, 0b1010, 0b0110), 0b1110)],
    "lop3.b32 %r7, %r4, %r5, %r6, 0x96;": [((0b1100, 0b1010, 0b0110), 0b0000)],
    "popc.b32 %r7, %r4;": [((0xF0F00001,), 9)],
    "clz.b32 %r7, %r4;": [((1,), 31), ((0,), 32), ((2**31,), 0)],
    "brev.b32 %r7, %r4;": [((1,), 2**31), ((0b1101,), 0b1011 << 28)],
    "add.f32 %f7, %f4, %f5;": [((bits(0.1), bits(0.2)), bits(np.float32(0.1) + np.float32(0.2)))],
    # the product has 47 bits, the last of which would be lost if it were rounded
    "fma.rn.f32 %f7, %f4, %f5, %f6;": [
        ((HALF_WAY, HALF_WAY, bits(-1.0)), bits(2.0**-22 + 2.0**-46)),
    ],
    "fma.rm.f32 %f7, %f4, %f5, %f6;": [
        ((bits(0.9), bits(1.0), bits(12582912.0)), bits(12582912.0)),
        ((bits(-0.1), bits(1.0), bits(12582912.0)), bits(12582911.0)),
    ],
    "mul.ftz.f32 %f7, %f4, %f5;": [
        ((SMALLEST, bits(1.0)), 0),
        ((bits(2.0**-149 * -1), bits(3.0)), 2**31),
    ],
    "mul.f32 %f7, %f4, %f5;": [((SMALLEST, bits(1.0)), SMALLEST)],
    "min.f32 %f7, %f4, %f5;": [
        ((bits(nan), bits(3.0)), bits(3.0)),
        ((bits(-inf), bits(3.0)), bits(-inf)),
    ],
    "max.f32 %f7, %f4, %f5;": [
        ((bits(3.0), bits(nan)), bits(3.0)),
        ((bits(-inf), bits(-3.0)), bits(-3.0)),
    ],
    "copysign.f32 %f7, %f4, %f5;": [((bits(-0.0), bits(3.0)), bits(-3.0))],
    "abs.f32 %f7, %f4;": [((bits(-2.5),), bits(2.5))],
    "neg.f32 %f7, %f4;": [((bits(0.0),), bits(-0.0))],
    "ex2.approx.ftz.f32 %f7, %f4;": [
        ((bits(-inf),), 0),
        ((bits(3.0),), bits(8.0)),
        ((bits(-140.0),), 0),
    ],
    "lg2.approx.ftz.f32 %f7, %f4;": [((0,), bits(-inf)), ((bits(8.0),), bits(3.0))],
    "rcp.approx.ftz.f32 %f7, %f4;": [((bits(4.0),), bits(0.25)), ((bits(0.0),), bits(inf))],
    "div.rn.f32 %f7, %f4, %f5;": [((bits(1.0), bits(3.0)), bits(np.float32(1) / np.float32(3)))],
    "sqrt.rn.f32 %f7, %f4;": [((bits(2.0),), bits(np.sqrt(np.float32(2))))],
    "cvt.rn.f32.s32 %f7, %r4;": [((2**32 - 3,), bits(-3.0)), ((2**24 + 1,), bits(2.0**24))],
    "cvt.rzi.s32.f32 %r7, %f4;": [
        ((bits(-2.9),), 2**32 - 2),
        ((bits(nan),), 0),
        ((bits(1e20),), 2**31 - 1),
        ((bits(-inf),), 2**31),
    ],
    "cvt.rni.s32.f32 %r7, %f4;": [((bits(2.5),), 2), ((bits(3.5),), 4)],
    "cvt.sat.f32.f32 %f7, %f4;": [((bits(1.5),), bits(1.0)), ((bits(nan),), 0), ((bits(-1.0),), 0)],
    "cvt.rn.f16x2.f32 %r7, %f4, %f5;": [((bits(1.0), bits(-2.0)), 0x3C00C000)],
    "cvt.rn.bf16x2.f32 %r7, %f4, %f5;": [
        ((bits(1.0), bits(-2.0)), 0x3F80C000),
        ((0x3F808000, 0x3F818000), 0x3F803F82),  # ties go to even
    ],
    "cvt.u32.u16 %r7, %h4;": [((0xFFFF8001,), 0x8001)],
    "cvt.s32.s16 %r7, %h4;": [((0x8001,), 0xFFFF8001)],
    "cvt.f32.f16 %f7, %h4;": [((0x3C01,), bits(1 + 2.0**-10)), ((1,), bits(2.0**-24))],
    "setp.lt.f32 %p1, %f4, %f5; selp.b32 %r7, 1, 0, %p1;": [((bits(nan), bits(1.0)), 0)],
    "setp.geu.f32 %p1, %f4, %f5; selp.b32 %r7, 1, 0, %p1;": [
        ((bits(nan), bits(1.0)), 1),
        ((bits(0.0), bits(1.0)), 0),
    ],
    "setp.neu.f32 %p1, %f4, %f5; selp.b32 %r7, 1, 0, %p1;": [
        ((bits(nan), bits(nan)), 1),
        ((bits(0.0), bits(-0.0)), 0),
    ],
    "setp.hi.u32 %p1|%p2, %r4, %r5; selp.b32 %r7, 1, 0, %p2;": [((2**32 - 1, 1), 0), ((1, 2), 1)],
    "setp.lt.s32 %p2, %r6, 0; setp.gt.and.s32 %p1, %r4, %r5, !%p2; selp.b32 %r7, 1, 0, %p1;": [
        ((5, 2**32 - 1, 0), 1), ((5, 2**32 - 1, 2**31), 0),
    ],
    "mul.wide.s32 %d5, %r4, %r5; shr.s64 %d5, %d5, 4; cvt.u32.u64 %r7, %d5;": [
        ((2**32 - 32, 2**31 - 1), 2),
    ],
    "mov.b64 %d5, {%r4, %r5}; mov.b64 {%r6, %r7}, %d5;": [((1, 2), 2)],
    "mov.b32 {%h1, %h2}, %r4; mov.b32 %r7, {%h2, %h1};": [((0x11112222,), 0x22221111)],
    "{ .reg .b32 t; add.u32 t, %r4, 1; { .reg .b32 t; mov.u32 t, 9; } mov.u32 %r7, t; }": [
        ((4,), 5),
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", ONE_RESULT)
def test_an_instruction_does_what_the_manual_says(text):
    for operands, expected in ONE_RESULT[text]:
        loads = "".join(
            f"mov.b32 %r{4 + i}, {x}; mov.b32 %f{4 + i}, %r{4 + i};" for i, x in enumerate(operands)
        )
        last = "mov.b32 %r7, %f7;" if "%f7" in text else ""
        halves = "cvt.u16.u32 %h4, %r4;"
        (got,) = set(execute(f"{loads} {halves} {text} {last} st.global.u32 [%d4], %r7;").tolist())
        assert got == expected, (hex(got), hex(expected))


def test_tanh_approx_is_as_coarse_as_on_a_gpu():
    x = np.linspace(-4, 4, 32, dtype=np.float32)
    body = "ld.global.f32 %f1, [%d3]; tanh.approx.f32 %f1, %f1; st.global.f32 [%d4], %f1;"
    got = execute(body, x, dtype=np.float32)
    error = abs(got / np.tanh(x.astype(float)) - 1).max()
    assert 2.0**-14 < error <= 2.0**-11


def test_fma_of_float64_keeps_what_its_product_would_lose():
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("a longdouble is a float64 here")
    a, b = 1 + 2.0**-30, 1 + 2.0**-33  # their product has 64 bits, of which c takes all but one
    given = np.array([a, b, -(a + 2.0**-33)])
    loads = "".join(f"ld.global.f64 %fd{x}, [%d0+{8 * x}];" for x in range(3))
    fused = "fma.rn.f64 %fd3, %fd0, %fd1, %fd2; cvt.rn.f32.f64 %f1, %fd3;"
    body = f".reg .f64 %fd<4>; {loads} {fused} st.global.f32 [%d4], %f1;"
    (got,) = set(execute(body, given, dtype=np.float32).tolist())
    assert got == 2.0**-63


def test_threads_that_diverge_reconverge():
    # each lane loops its own number of times; ODD is laid out after the exit
    body = """
        mov.u32 %r5, 0; mov.u32 %r6, 0;
    LOOP:
        setp.gt.u32 %p1, %r5, %r0; @%p1 bra DONE;
        and.b32 %r7, %r5, 1; setp.eq.u32 %p2, %r7, 1; @%p2 bra ODD;
        add.u32 %r6, %r6, %r5;
    BACK:
        add.u32 %r5, %r5, 1; bra LOOP;
    DONE:
        shfl.sync.bfly.b32 %r8, %r6, 1, 31, -1;
        add.u32 %r6, %r6, %r8; st.global.u32 [%d4], %r6; ret;
    ODD:
        add.u32 %r6, %r6, 100; bra BACK;
    """
    alone = [sum(i if i % 2 == 0 else 100 for i in range(t + 1)) for t in range(64)]
    expected = [alone[t] + alone[t ^ 1] for t in range(64)]
    for order in (None, 0):
        np.testing.assert_array_equal(execute(body, threads=64, order=order), expected)


def test_an_instruction_of_whole_warps_waits_for_late_lanes():
    # the odd lanes' branch is laid out after the shuffle, to which they jump back
    body = """
        and.b32 %r5, %r0, 1; setp.eq.u32 %p1, %r5, 1; mov.u32 %r6, %r0; @%p1 bra ODD;
    MEET:
        shfl.sync.idx.b32 %r7, %r6, 5, 31, -1; st.global.u32 [%d4], %r7; ret;
    ODD:
        add.u32 %r6, %r6, 100; bra MEET;
    """
    assert set(execute(body).tolist()) == {105}


def test_a_collective_that_an_exited_lane_misses_is_an_error():
    body = """
        setp.eq.u32 %p1, %r0, 7; @%p1 bra END;
        shfl.sync.bfly.b32 %r7, %r0, 1, 31, -1; st.global.u32 [%d4], %r7;
    END:
    """
    with pytest.raises(PTXError, match=r"shfl.*waits for lanes of its warp that went elsewhere"):
        execute(body)


@pytest.mark.parametrize("order", [None, 0])
def test_a_barrier_of_the_block_does_not_wait_for_exited_lanes(order):
    body = """
        setp.gt.u32 %p1, %r0, 15; @%p1 bra OTHERS; bar.sync 0; st.global.u32 [%d4], 5; ret;
    OTHERS:
        st.global.u32 [%d4], 6;
    """
    assert execute(body, threads=64, order=order).tolist() == [5] * 16 + [6] * 48


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("bfly.b32 %r5, %r0, 3, 31", lambda t: t ^ 3),
        ("down.b32 %r5, %r0, 4, 31", lambda t: t + 4 if t % 32 < 28 else t),
        ("up.b32 %r5, %r0, 4, 0", lambda t: t - 4 if t % 32 >= 4 else t),
        ("idx.b32 %r5, %r0, 9, 31", lambda t: t // 32 * 32 + 9),
        ("idx.b32 %r5, %r0, 1, 0x181f", lambda t: t // 8 * 8 + 1),  # in groups of 8
    ],
)
def test_shuffles(mode, expected):
    got = execute(f"shfl.sync.{mode}, 0xffffffff; st.global.u32 [%d4], %r5;", threads=64)
    np.testing.assert_array_equal(got, [expected(t) for t in range(64)])


def test_votes():
    body = """setp.gt.u32 %p1, %r0, 40; vote.sync.ballot.b32 %r5, %p1, -1;
        vote.sync.any.pred %p2, %p1, -1; @%p2 add.u32 %r5, %r5, 1; st.global.u32 [%d4], %r5;"""
    later = sum(1 << lane for lane in range(9, 32))
    assert execute(body, threads=64).tolist() == [0] * 32 + [later + 1] * 32


def test_barrier_reductions():
    body = """setp.eq.u32 %p1, %r0, 40; bar.red.or.pred %p2, 0, %p1;
        selp.u32 %r5, 10, 20, %p2; setp.lt.u32 %p1, %r0, 33; bar.red.popc.u32 %r6, 0, %p1;
        add.u32 %r5, %r5, %r6; st.global.u32 [%d4], %r5;"""
    for order in (None, 1):
        assert set(execute(body, threads=64, blocks=3, order=order).tolist()) == {43}


def test_atomics_are_applied_one_after_another():
    body = "atom.global.add.u32 %r5, [%d0], 2; st.global.u32 [%d4], %r5;"
    got = execute(body, np.array([7], np.uint32), threads=64)
    assert sorted(got.tolist()) == [7 + 2 * t for t in range(64)]


EXCHANGE = """
    mov.u32 %r4, dynamic; shl.b32 %r5, %r0, 2; add.u32 %r5, %r5, %r4; xor.b32 %r6, %r5, {other};
    st.shared.u32 [%r5], %r0; {barrier} ld.shared.u32 %r7, [%r6]; st.global.u32 [%d4], %r7;
"""


@pytest.mark.parametrize("order", [None, 0, 1])
def test_shared_memory_belongs_to_a_block(order):
    body = EXCHANGE.format(other=128, barrier="bar.sync 0;")
    got = execute(body, threads=64, blocks=5, shared=256, order=order)
    np.testing.assert_array_equal(got, [t ^ 32 for t in range(64)] * 5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("other", "barrier"), [(128, ""), (128, "bar.warp.sync -1;"), (4, "")])
def test_a_missing_barrier_is_caught_in_any_order_of_warps(other, barrier, seed):
    with pytest.raises(PTXError, match=r"unsynchronised|never written"):
        execute(EXCHANGE.format(other=other, barrier=barrier), threads=64, shared=256, order=seed)


def test_a_barrier_of_the_warp_suffices_within_the_warp():
    body = EXCHANGE.format(other=4, barrier="bar.warp.sync -1;")
    np.testing.assert_array_equal(
        execute(body, threads=64, shared=256, order=0), [t ^ 1 for t in range(64)]
    )


@pytest.mark.parametrize("seed", range(5))
def test_overwriting_what_another_warp_reads_is_caught(seed):
    body = EXCHANGE.format(other=128, barrier="bar.sync 0;") + "st.shared.u32 [%r5], %r7;"
    with pytest.raises(PTXError, match=r"unsynchronised"):
        execute(body, threads=64, shared=256, order=seed)


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.shared.u32 %r5, [dynamic];", "never written"),
        ("ld.shared.u32 %r5, [dynamic+256];", "outside of the 256 bytes"),
        ("st.shared.v2.u32 [dynamic+4], {%r0, %r0};", "not a multiple of 8"),
        ("ld.global.u32 %r5, [%d0+2];", "in no array|not a multiple of 4"),
        ("ld.global.u32 %r5, [%d4+256];", "in no array"),
        ("st.global.u32 [%d3+-4], %r0;", "in no array"),
        ("mov.u64 %d5, 0; ld.global.u32 %r5, [%d5];", "in no array"),
        ("setp.lt.u32 %p1, %r0, 9; @%p1 shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1;", "whole warps"),
        ("trap;", "stops"),
    ],
)
def test_an_illegal_access_or_instruction_is_an_error(body, message, order):
    with pytest.raises(PTXError, match=message):
        execute(body, np.zeros(1, np.uint32), shared=256, order=order)


@pytest.mark.parametrize(
    "text",
    ["tex.2d %r5, [%d0];", "div.rz.f32 %f1, %f2, %f3;", "add.sat.s32 %r5, %r6, %r7;",
     "add.cc.u32 %r5, %r6, %r7;", "bar.sync 1;", "add.rz.f64 %d5, %d6, %d7;"],
)  # fmt: skip
def test_what_is_not_emulated_is_refused_before_anything_runs(text):
    with pytest.raises(NotImplementedError, match=f"not emulated: .*{re.escape(text[:6])}"):
        execute(f"setp.lt.u32 %p1, %r0, 0; @%p1 {text}")


COPY = """
    mov.u32 %r4, dynamic; shl.b32 %r5, %r0, 2; add.u32 %r5, %r5, %r4; add.u32 %r6, %r5, 128;
    cp.async.ca.shared.global [%r5], [%d3], 4; cp.async.commit_group;
    cp.async.ca.shared.global [%r6], [%d3+128], 4, {size}; cp.async.commit_group;
    cp.async.wait_group {pending}; ld.shared.u32 %r7, [%r5]; {rest} st.global.u32 [%d4], %r7;
    cp.async.wait_all;
"""


@pytest.mark.parametrize("order", [None, 0])
def test_a_copy_arrives_when_it_is_waited_for(order):
    given = np.arange(100, 164, dtype=np.uint32)
    body = COPY.format(size=4, pending=1, rest="")
    assert execute(body, given, shared=256, order=order).tolist() == list(range(100, 132))
    second = "cp.async.wait_group 0; ld.shared.u32 %r7, [%r6];"
    body = COPY.format(size=2, pending=1, rest=second)
    assert execute(body, given, shared=256, order=order).tolist() == list(range(132, 164))
    body = COPY.format(size=0, pending=0, rest="ld.shared.u32 %r7, [%r6];")
    assert set(execute(body, given, shared=256, order=order).tolist()) == {0}


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize(("pending", "rest"), [(2, ""), (1, "ld.shared.u32 %r7, [%r6];")])
def test_a_copy_that_is_not_waited_for_may_not_be_read(pending, rest, order):
    body = COPY.format(size=4, pending=pending, rest=rest)
    with pytest.raises(PTXError, match=r"cp\.async has not been waited for"):
        execute(body, np.arange(64, dtype=np.uint32), shared=256, order=order)


FILL = """
    mov.u32 %r4, dynamic; shl.b32 %r5, %r0, 4; add.u32 %r6, %r4, %r5; mul.wide.u32 %d5, %r0, 16;
    add.s64 %d5, %d0, %d5; ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%d5];
    st.shared.v4.u32 [%r6], {%r8, %r9, %r10, %r11}; bar.sync 0;
"""


@pytest.mark.parametrize("is_transposed", [False, True])
def test_ldmatrix_distributes_rows_or_columns_in_pairs(is_transposed):
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    trans = ".trans" if is_transposed else ""
    for m in range(4):
        body = (
            FILL
            + f"""ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16
            {{%r12, %r13, %r14, %r15}}, [%r6]; st.global.u32 [%d4], %r{12 + m};"""
        )
        got = execute(body, matrices, shared=512).view(np.uint16).reshape(32, 2)
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, 2 * (lane % 4) + half
                place = (column, row) if is_transposed else (row, column)
                assert got[lane, half] == matrices[m][place]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mma_multiplies_matrices(kind):
    rng = np.random.default_rng(0)
    A, B, C = (rng.integers(-8, 9, shape) for shape in ((16, 16), (16, 8), (16, 8)))
    upper = {"f16": np.float16, "bf16": None}[kind]

    def halves(x):
        if upper:
            return np.float16(x).view(np.uint16)
        return (np.float32(x).view(np.uint32) >> 16).astype(np.uint16)

    words = []  # the fragments of each lane: PTX ISA 9.7.14.5.8
    for lane in range(32):
        g, c = lane // 4, 2 * (lane % 4)
        a = [(g, c), (g + 8, c), (g, c + 8), (g + 8, c + 8)]
        pairs = [(A[i, k], A[i, k + 1]) for i, k in a]
        pairs += [(B[k, g], B[k + 1, g]) for k in (c, c + 8)]
        words += [int(halves(low)) | int(halves(high)) << 16 for low, high in pairs]
        words += [bits(float(C[i, k])) for i in (g, g + 8) for k in (c, c + 1)]
    loads = "".join(f"ld.global.u32 %r{8 + i}, [%d5+{4 * i}];" for i in range(10))
    loads += "".join(f"mov.b32 %f{i}, %r{14 + i};" for i in range(4))
    got = np.zeros((16, 8))
    for i in range(4):
        body = f"""mul.wide.u32 %d5, %r0, 40; add.s64 %d5, %d0, %d5; {loads}
            mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f4, %f5, %f6, %f7}},
            {{%r8, %r9, %r10, %r11}}, {{%r12, %r13}}, {{%f0, %f1, %f2, %f3}};
            st.global.f32 [%d4], %f{4 + i};"""
        values = execute(body, np.array(words, np.uint32), dtype=np.float32)
        for lane in range(32):
            got[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = values[lane]
    np.testing.assert_array_equal(got, A @ B + C)
