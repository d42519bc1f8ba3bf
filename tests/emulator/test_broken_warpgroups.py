"""Rung 6 broken in ways that a GPU answers with wrong numbers, sometimes, and nothing else."""

import re
from importlib import import_module
from importlib.util import find_spec

import pytest

from emulator import PTXError
from emulator.test_broken_rung import replaced, solve

RUNG = "minimha.kernels.cuda.rung6_warpgroups"
D, B_r, B_c, TILES = 64, 192, 128, 4  # as ``blocks`` has them, and a panel of 64 columns
PARTIAL = TILES * B_c - 9  # keys, of which the last tile has fewer
FENCE, BEGIN, END = r"fence\.proxy\.async\S*;", r"wgmma\.fence\S*;", r"wgmma\.commit_group\S*;"
ARRIVE = r"mbarrier\.arrive\.shared\S+ \S+, \[\S+\];"
ARRIVE_WITH_COPIES = r"cp\.async\.mbarrier\.arrive\.noinc\.\S+ (\[\S+\]);"
WAIT = r"(\.reg \.pred %is_over;) (mbarrier\.try_wait\S+ \S+ \S+) (\S+); selp\.u32 (\S+) 1, 0, \S+;"
OTHER_PHASE = (
    r"\g<1> .reg .b32 %other; xor.b32 %other, \g<3>, 1; "
    r"\g<2> %other; selp.u32 \g<4> 1, 0, %is_over;"
)
NO_PHASE = r"mov.u32 \g<4> 1;"
UNSYNCHRONISED = r"unsynchronised|never written|not been waited|is no mbarrier|wgmma that was not"


@pytest.fixture(scope="module")
def rung():
    if not find_spec("numba_cuda"):
        pytest.skip("numba-cuda, which compiles the kernels, is not installed")
    return import_module(RUNG)


def error(rung, order=None, change=lambda text: text, keys=TILES * B_c):
    """The largest error of the rung, its PTX changed, by default on full tiles of keys."""
    return solve(rung, order, change, 100, keys, D)


def is_noticed(rung, pattern, number, by, order=None):
    """Whether the emulator refuses the rung, or its numbers are wrong."""
    try:
        return not error(rung, order, replaced(pattern, number, by)) < 0.01
    except (PTXError, NotImplementedError):
        return True


@pytest.mark.parametrize("keys", [TILES * B_c, PARTIAL])
@pytest.mark.parametrize("order", [None, 0])
def test_the_unchanged_rung_is_right(rung, order, keys):
    assert error(rung, order, keys=keys) < 1e-3


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize("number", range(3))  # before the first tile, in the loop, after it
def test_each_missing_fence_between_copies_and_products_is_caught(rung, number, order):
    with pytest.raises(PTXError, match=r"has not passed a fence\.proxy\.async"):
        error(rung, order, replaced(FENCE, number, ""))


def test_fences_ahead_of_the_waits_for_copies_are_caught(rung):
    def too_early(text):
        text = re.sub(FENCE, "", text)
        return re.sub(r"setmaxnreg\.inc[^;]*;", r"\g<0> fence.proxy.async.shared::cta;", text)

    with pytest.raises(PTXError, match=r"has not passed a fence\.proxy\.async"):
        error(rung, 0, too_early)


@pytest.mark.parametrize("number", range(2))  # after the mbarriers' beginning, before O_i is stored
def test_each_missing_barrier_is_caught(rung, number):
    for order in range(2):
        with pytest.raises(PTXError, match=UNSYNCHRONISED):
            error(rung, order, replaced(r"bar\.sync\s+\d[^;]*;", number, ""))


@pytest.mark.parametrize("number", range(6))  # full; empty, of K and of V; each of them twice
def test_each_mbarrier_that_does_not_begin_is_caught(rung, number):
    with pytest.raises(PTXError, match=r"is no mbarrier|never written"):
        error(rung, None, replaced(r"mbarrier\.init[^;]*;", number, ""))


# Of a partial tile's copies; of those who release the first tile of keys, later ones, and values.
@pytest.mark.parametrize("number", range(4))
def test_each_missing_arrival_is_waited_for_for_ever(rung, number):
    for order in (None, 0):
        with pytest.raises(PTXError, match="waits for ever at the mbarrier"):
            error(rung, order, replaced(ARRIVE, number, ""), keys=PARTIAL)


@pytest.mark.parametrize("number", range(2))  # of the queries and the first keys, of the others
def test_each_arrival_that_does_not_wait_for_copies_is_caught(rung, number):
    plain = r"{ .reg .b64 %s; mbarrier.arrive.shared::cta.b64 %s, \g<1>; }"
    with pytest.raises(PTXError, match=r"cp\.async has not been waited for"):
        error(rung, None, replaced(ARRIVE_WITH_COPIES, number, plain))


def test_values_that_are_searched_before_they_are_there_are_caught(rung):
    with pytest.raises(PTXError, match=r"cp\.async has not been waited for"):
        error(rung, None, replaced(r"cp\.async\.wait_all;", 0, ""), keys=PARTIAL)


@pytest.mark.parametrize("order", [None, 0])
def test_a_copying_thread_that_exits_before_its_last_copies_have_landed_is_caught(rung, order):
    with pytest.raises(PTXError, match=r"exits before its cp\.async were waited for"):
        error(rung, order, replaced(r"cp\.async\.wait_all;", -1, ""))


@pytest.mark.parametrize("number", range(5))  # two in the warps that copy, three in the others
@pytest.mark.parametrize("by", [OTHER_PHASE, NO_PHASE])
def test_each_wait_for_a_wrong_phase_or_for_none_is_caught(rung, number, by):
    def change(text):  # the compiler tries once ahead of each loop, and then in it
        return replaced(WAIT, 2 * number, by)(replaced(WAIT, 2 * number + 1, by)(text))

    with pytest.raises(PTXError):
        error(rung, 0, change)


def test_registers_that_are_not_given_back_are_waited_for_for_ever(rung):
    for order in (None, 0):
        with pytest.raises(PTXError, match="waits for ever for registers"):
            error(rung, order, replaced(r"setmaxnreg\.dec[^;]*;", 0, ""))


@pytest.mark.parametrize("number", range(4))
def test_each_wait_for_products_that_is_too_weak_is_caught(rung, number):
    weaker = replaced(r"(wgmma\.wait_group\S*) \d", number, r"\g<1> 2")
    with pytest.raises(PTXError, match=r"was not waited for"):
        error(rung, None, weaker)


@pytest.mark.parametrize("number", [0, 1, 3])  # between the second and the third is no access
def test_each_missing_fence_between_registers_and_products_is_caught(rung, number):
    with pytest.raises(PTXError, match=r"no wgmma\.fence was passed"):
        error(rung, None, replaced(BEGIN, number, ""))


@pytest.mark.parametrize("number", range(4))
def test_each_group_of_products_that_is_not_committed_is_caught(rung, number):
    with pytest.raises(PTXError, match=r"was not waited for"):
        error(rung, None, replaced(END, number, ""))


def descriptor(rows, stride=1024, swizzle=1, leading=None):
    """The constant part of a descriptor, of a panel of that many rows: PTX ISA, 9.7.15.5.1.2."""
    leading = 128 * rows if leading is None else leading
    return swizzle << 62 | stride >> 4 << 32 | leading >> 4 << 16


@pytest.mark.parametrize("rows", [B_r, B_c])
@pytest.mark.parametrize("change", [{"stride": 512}, {"stride": 2048}, {"swizzle": 0}])
def test_each_wrong_descriptor_is_caught(rung, rows, change):
    right, wrong = str(descriptor(rows)), str(descriptor(rows, **change))
    with pytest.raises((PTXError, NotImplementedError, AssertionError)):
        assert error(rung, None, lambda text: right in text and text.replace(right, wrong)) < 0.01


@pytest.mark.parametrize("number", range(4))
def test_each_group_that_begins_at_a_wrong_chunk_is_caught(rung, number):
    step = r"(add\.s64\s+%[ab]\S*, \S+, )(2|128);"
    assert is_noticed(rung, step, number, r"\g<1>4;")


@pytest.mark.parametrize("number", range(4))
def test_two_swapped_accumulators_change_the_numbers(rung, number):
    first = r"(wgmma\.mma_async\S+\s+\{)([^,]+),([^,]+),"
    products = 2 * (D // 16) + 2 * (B_c // 16)
    assert is_noticed(rung, first, number * products // 4, r"\g<1>\g<3>,\g<2>,")
