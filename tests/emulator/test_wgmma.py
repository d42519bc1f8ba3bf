"""``wgmma`` alone: one warpgroup multiplies (64, 16) by (16, 16), whole numbers of 16 bits.

Shared memory is laid out here as the PTX ISA has it, 9.7.15.5: rows of 128 bytes, in which a chunk
of 16 bytes is where the exclusive or of its index and the row's number, modulo 8, says.
"""

import numpy as np
import pytest

from emulator import PTXError
from emulator.test_emulator import execute

A = np.random.default_rng(0).integers(-4, 5, (64, 16))
B = np.random.default_rng(1).integers(-4, 5, (16, 16))
A_AT, ROWS_OF_B_AT, COLUMNS_OF_B_AT, SIZE = 0, 8192, 10240, 12288
BITS = 1 << 62 | 1024 >> 4 << 32  # 128-byte swizzle; eight rows are 1024 bytes
FENCE, BARRIER = "fence.proxy.async.shared::cta;", "bar.sync 0;"
BEGIN, END = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
D = "{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}"
FORMS = {
    "shared": f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {D}, %d5, %d6, %p0, 1, 1, 0, 0;",
    "registers": (
        f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {D}, "
        "{%r4, %r5, %r6, %r7}, %d7, %p0, 1, 1, 1;"
    ),
}
thread = np.arange(128)
row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)


def image():
    """Shared memory with A, with B's columns as rows, and with B's rows; and A's fragments."""
    halves = np.zeros(SIZE // 2, np.float16)
    for at, matrix in ((A_AT, A), (COLUMNS_OF_B_AT, B), (ROWS_OF_B_AT, B.T)):
        for r, numbers in enumerate(matrix):
            for chunk in range(2):
                first = (at + 128 * r + 16 * (chunk ^ r % 8)) // 2
                halves[first : first + 8] = numbers[8 * chunk : 8 * chunk + 8]
    corners = [(0, 0), (8, 0), (0, 8), (8, 8)]
    pairs = [A[row + r, column + c + x] for r, c in corners for x in range(2)]
    fragments = np.array(pairs, np.float16).reshape(4, 2, 128).transpose(0, 2, 1)
    return np.concatenate([halves, fragments.ravel()]).view(np.uint32)


def product(form, number, *, change=lambda body: body, order=None, adds=0):
    """Accumulator ``number`` of every thread after that form of wgmma; all begin at 100."""
    lines = ["mov.u64 %d8, dynamic; cvt.u32.u64 %r8, %d8; shl.b32 %r9, %r0, 2;"]
    lines += ["add.u32 %r9, %r9, %r8;"]
    for i in range(SIZE // 512):
        lines.append(
            f"ld.global.u32 %r10, [%d3 + {512 * i}]; st.shared.u32 [%r9 + {512 * i}], %r10;"
        )
    for i in range(4):
        lines.append(f"ld.global.u32 %r{4 + i}, [%d3 + {SIZE + 512 * i}];")
    for register, at in (("%d5", A_AT), ("%d6", ROWS_OF_B_AT), ("%d7", COLUMNS_OF_B_AT)):
        lines.append(f"mov.u64 {register}, {BITS | at >> 4};")
    lines += [f"mov.f32 %f{e}, 0f42C80000;" for e in range(8)]
    lines += [f"setp.ne.b32 %p0, {adds}, 0;", FENCE, BARRIER, BEGIN, FORMS[form], END, WAIT]
    body = change("\n".join([*lines, f"st.global.f32 [%d4], %f{number};"]))
    return execute(body, image(), threads=128, shared=SIZE, dtype=np.float32, order=order)


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_spread_over_four_warps(form, number, order):
    r, c = row + 8 * (number // 2 % 2), column + 8 * (number // 4) + number % 2
    for adds in range(2):
        got = product(form, number, order=order, adds=adds)
        np.testing.assert_array_equal(got, (A @ B)[r, c] + 100 * adds)


@pytest.mark.parametrize(
    ("missing", "order", "sentence"),
    [
        (FENCE, None, "has not passed a fence.proxy.async"),
        (BARRIER, 0, "never written|unsynchronised"),
        (BEGIN, None, "no wgmma.fence was passed"),
        (END, None, "was not waited for"),
        (WAIT, None, "was not waited for"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_what_may_not_be_missing(form, missing, order, sentence):
    with pytest.raises(PTXError, match=sentence):
        product(form, 0, change=lambda body: body.replace(missing, ""), order=order)


@pytest.mark.parametrize(
    ("instead", "sentence"),
    [
        ("mov.u32 %r5, 0;", "uses a register of a wgmma"),  # part of A
        ("mov.f32 %f7, 0f00000000;", "uses a register of a wgmma"),  # of D
        ("st.shared.u32 [%r9 + 10240], 0;", "overwrites what a wgmma"),
    ],
)
def test_what_a_product_under_way_needs_may_not_change(instead, sentence):
    with pytest.raises(PTXError, match=sentence):
        product("registers", 0, change=lambda body: body.replace(WAIT, instead + WAIT))
