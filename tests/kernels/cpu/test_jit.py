"""Functions of kernels are compiled as parts of what calls them, and for Python as wholes."""

import numba
import numpy as np
import pytest

from minimha.kernels.cpu.jit import jit, jit_inline, jit_too


@jit
def plus_one(x):
    return x + 1


@jit_inline
def plus_two(x):
    return plus_one(plus_one(x))


@jit_too
def plus_three(x):
    return x + 3


@jit
def plus_twelve(x):  # through one part in several ways
    return plus_three(plus_three(plus_two(plus_two(plus_one(plus_one(x))))))


@numba.njit
def plus_thirteen(x):
    return plus_twelve(plus_one(x))


@pytest.mark.parametrize("number", [7, 0.5])
def test_compiled_code_and_python_call_the_same_parts(number):
    assert plus_thirteen(number) == number + 13  # compiles the parts first,
    assert plus_twelve(number) == number + 12  # each then also as a whole
    assert plus_two(number) == number + 2
    assert plus_one(number) == number + 1


@jit
def sum_of(x, y):
    return x + y


@numba.njit
def plus_all(x):
    for y in range(3):
        x = sum_of(x, y)
    return sum_of(sum_of(sum_of(x, 4), y=True), 5)


def test_constants_share_a_version_with_other_numbers_of_their_type():
    assert plus_all(1) == 14
    kinds = [(numba.int64, numba.int64), (numba.int64, numba.boolean)]
    assert set(sum_of.overloads) == set(kinds)


def test_python_calls_a_function_that_is_also_a_part_as_it_is():
    assert plus_three(2**70) == 2**70 + 3  # of Python's integers, which machine code has not


def test_a_part_has_a_version_for_each_type_it_is_called_with():
    assert plus_one(np.int8(127)) == 128
    assert plus_one(2j) == 1 + 2j
