"""Rung 4 broken in ways that a GPU answers with wrong numbers, sometimes, and nothing else."""

import re
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest

from emulator import PTXError, forward
from minimha.equations import dense
from minimha.equations.problem import Problem

RUNG = "minimha.kernels.cuda.rung4_tensor_cores"


@pytest.fixture(scope="module")
def rung():
    if not find_spec("numba_cuda"):
        pytest.skip("numba-cuda, which compiles the kernels, is not installed")
    return import_module(RUNG)


def solve(rung, order, change, Lq=32, Lk=192, D=16):
    """The largest error of the rung, its PTX changed, by default on three full tiles of keys."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 1, n, D)).astype(np.float16) for n in (Lq, Lk, Lk))
    O, _ = forward(rung, Problem.of(q, k, v), order, change=change)
    exact, _ = dense.forward(Problem.of(*(x.astype(np.float64) for x in (q, k, v))))
    return abs(O - exact).max()


def replaced(pattern, number, by):
    """A change that replaces one of the matches of ``pattern``."""

    def change(text):
        match = list(re.finditer(pattern, text))[number]
        return text[: match.start()] + match.expand(by) + text[match.end() :]

    return change


def matches(rung, pattern):
    """Numbers of the matches of ``pattern`` in the rung's PTX."""
    found = []
    solve(rung, None, lambda text: found.append(len(re.findall(pattern, text))) or text)
    return range(found[0])


def is_reached(rung, pattern, number):
    """Whether any thread executes what that match of ``pattern`` begins."""
    try:
        solve(rung, None, replaced(pattern, number, r"trap; \g<0>"))
    except PTXError:
        return True
    return False


@pytest.mark.parametrize("order", [None, 0, 1])
def test_the_unchanged_rung_is_right(rung, order):
    assert solve(rung, order, lambda text: text) < 1e-3


BARRIER = r"bar\.sync\s+0;"


def test_each_missing_barrier_is_caught(rung):
    reached = [i for i in matches(rung, BARRIER) if is_reached(rung, BARRIER, i)]
    assert reached
    for i in reached:
        for seed in range(3):
            with pytest.raises(PTXError, match=r"unsynchronised|never written|not been waited for"):
                solve(rung, seed, replaced(BARRIER, i, ""))


@pytest.mark.parametrize("order", [None, 0])
def test_a_wait_that_leaves_one_group_in_flight_is_caught(rung, order):
    wait = r"cp\.async\.wait_group 0"
    with pytest.raises(PTXError, match=r"cp\.async has not been waited for"):
        solve(rung, order, replaced(wait, 0, "cp.async.wait_group 1"))


MMA = r"(mma\.sync\S+\s+\{[^}]*\},\s*\{[^}]*\},\s*\{)([^,]+),([^}]+)\}"


def test_two_swapped_registers_of_a_fragment_change_the_numbers(rung):
    reached = [i for i in matches(rung, MMA) if is_reached(rung, MMA, i)]
    for i in (reached[0], reached[-1]):  # of the first product, and of the second
        assert solve(rung, None, replaced(MMA, i, r"\g<1>\g<3>,\g<2>}")) > 0.01


def test_a_matrix_that_is_not_transposed_changes_the_numbers(rung):
    matrix = r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans"
    for i in matches(rung, matrix):
        if is_reached(rung, matrix, i):
            assert solve(rung, None, replaced(matrix, i, matrix.replace("\\", "")[:-6])) > 0.01
            return
    pytest.fail("no ldmatrix.trans was reached")
