"""Rung 6 broken in ways that a GPU answers with wrong numbers, sometimes, and nothing else."""

from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest

from emulator import PTXError, forward
from emulator.test_broken_rung import BARRIER, replaced
from minimha.equations import dense
from minimha.equations.problem import Problem

RUNG = "minimha.kernels.cuda.rung6_warpgroups"
D, B_r, B_c, TILES = 64, 192, 96, 3  # as ``blocks`` has them, and a panel of 64 columns
FENCE, BEGIN, END = r"fence\.proxy\.async\S*;", r"wgmma\.fence\S*;", r"wgmma\.commit_group\S*;"


@pytest.fixture(scope="module")
def rung():
    if not find_spec("numba_cuda"):
        pytest.skip("numba-cuda, which compiles the kernels, is not installed")
    return import_module(RUNG)


def error(rung, order=None, change=lambda text: text):
    """The largest error of the rung, its PTX changed, on full tiles of keys."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 1, n, D)).astype(np.float16) for n in (100, *[TILES * B_c] * 2))
    O, _ = forward(rung, Problem.of(q, k, v), order, change=change)
    exact, _ = dense.forward(Problem.of(*(x.astype(np.float64) for x in (q, k, v))))
    return abs(O - exact).max()


def is_noticed(rung, pattern, number, by, order=None):
    """Whether the emulator refuses the rung, or its numbers are wrong."""
    try:
        return not error(rung, order, replaced(pattern, number, by)) < 0.01
    except (PTXError, NotImplementedError):
        return True


@pytest.mark.parametrize("order", [None, 0])
def test_the_unchanged_rung_is_right(rung, order):
    assert error(rung, order) < 1e-3


@pytest.mark.parametrize("order", [None, 0])
@pytest.mark.parametrize("number", range(3))  # before the first tile, in the loop, after it
def test_each_missing_fence_between_copies_and_products_is_caught(rung, number, order):
    with pytest.raises(PTXError, match=r"has not passed a fence\.proxy\.async"):
        error(rung, order, replaced(FENCE, number, ""))


@pytest.mark.parametrize("number", range(3))
def test_each_missing_barrier_is_caught(rung, number):
    for order in range(2):
        with pytest.raises(
            PTXError, match=r"unsynchronised|nobody wrote|not been waited|has not pa"
        ):
            error(rung, order, replaced(BARRIER, number, ""))


@pytest.mark.parametrize("number", range(4))
def test_each_wait_for_products_that_is_too_weak_is_caught(rung, number):
    weaker = replaced(r"(wgmma\.wait_group\S*) \d", number, r"\g<1> 2")
    with pytest.raises(PTXError, match=r"was not waited for"):
        error(rung, None, weaker)


@pytest.mark.parametrize("number", range(3))
def test_each_wait_for_copies_that_is_too_weak_is_caught(rung, number):
    weaker = replaced(r"cp\.async\.wait_group \d", number, "cp.async.wait_group 2")
    with pytest.raises(PTXError, match=r"cp\.async has not been waited for"):
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
