"""Some two hundred random problems on every backend that needs no GPU; and that faults are noticed.

They are those of seed 0, unless Hypothesis is given another one.
"""

import ctypes
import os
import sys

import numpy as np
import pytest
from hypothesis import settings

from fuzz.bounds import Expected
from fuzz.cases import Case, Layout, draw, plain
from fuzz.forms import FORMS
from fuzz.memory import placed
from fuzz.run import RUN_ON, Failure, check, failures, solve
from fuzz.smaller import reduced

PROBLEMS = settings.default.max_examples
# "cpu" takes rung 6 for all that it does not leave to rung 4.
TESTED = [name for name in RUN_ON if name != "cpu.rung6_matrix_unit"]

guarded = pytest.mark.skipif(sys.platform != "linux", reason="mprotect is called as on Linux")


@pytest.fixture(scope="module")
def seed(pytestconfig):
    return int(pytestconfig.option.hypothesis_seed or 0)


@pytest.fixture(scope="module")
def found(seed):
    """Failures of all backends: the reference is computed once for all of them."""
    return list(failures(TESTED, seed, range(PROBLEMS)))


@pytest.mark.parametrize("backend", TESTED)
def test_random_problems(backend, found, seed):
    reports = [failure.report(seed) for failure in found if failure.backend == backend]
    assert not reports, "\n".join([f"{len(reports)} of {PROBLEMS} fail, among them", *reports[:3]])


@pytest.mark.thorough
def test_more_random_problems(seed):
    more = failures(TESTED, seed, range(PROBLEMS, 2 * PROBLEMS))
    reports = [failure.report(seed) for failure in more]
    assert not reports, "\n".join([f"{len(reports)} fail, among them", *reports[:3]])


def one_query(k, v, dtype=np.float32, q=1.0):
    """One query against some keys, all of width 1."""
    arrays = {"q": q, "k": k, "v": v}
    return {name: np.array(x, dtype).reshape(1, 1, -1, 1) for name, x in arrays.items()}


def nan(bits, uint):
    return np.array([bits], uint).view(f"f{np.dtype(uint).itemsize}")[0]


FOUND = {  # found so, and made as small as possible
    "NaN of all bits, float32": one_query([1, nan(0xFFFFFFFF, "u4")], [1, 2]),
    "NaN of all bits, float64": one_query([1, nan(2**64 - 1, "u8")], [1, 2], np.float64),
    "NaN of all bits, in the query": one_query([1, 2], [1, 2], q=nan(0xFFFFFFFF, "u4")),
    "NaN that is R's NA": one_query([1, nan(0x7FF00000000007A2, "u8")], [1, 2], np.float64),
    "mean of huge values, float32": one_query([1, 1], [2e38, 2e38]),
    "mean of huge values, float64": one_query([1, 1], [-1e308, -1e308], np.float64),
    "mean of huge values, many queries": one_query([1] * 9, [3e38] * 9, q=[1] * 20),
    "infinite value, all scores -inf": one_query([np.inf], [np.inf], q=-1),
    "NaN value, all scores -inf": one_query([np.inf, np.inf], [1, np.nan], q=-1),
}


@pytest.mark.parametrize("backend", RUN_ON)
@pytest.mark.parametrize("arrays", FOUND.values(), ids=FOUND)
def test_what_was_found_before(arrays, backend):
    assert check(Case(arrays, {}), backend) == []


def test_a_seed_and_a_number_are_one_problem():
    for number in range(20):
        one, same, other = draw(3, number), draw(3, number), draw(4, number)
        assert str(one) == str(same) != str(other)
        for x, y in zip(one.arrays.values(), same.arrays.values(), strict=True):
            assert x.tobytes() == y.tobytes()


def test_many_forms_are_drawn():
    cases = [draw(0, number) for number in range(500)]
    given = {name for case in cases for name in (*case.arrays, *case.options)}
    assert given == {
        "q", "k", "v", "is_causal", "q_offset", "window_size", "attn_mask", "attn_bias",
        "kv_lengths", "key_indices", "alibi_slopes", "scale", "softcap", "sinks",
        "score_mod", "mask_mod", "k_scale", "v_scale",
    }  # fmt: skip
    assert {case.arrays["v"].dtype.name for case in cases} == {
        "float16", "bfloat16", "float32", "float64", "int8", "float8_e4m3fn",
    }  # fmt: skip
    lengths = {case.arrays[name].shape[2] for case in cases for name in "qk"}
    assert {0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257} <= lengths
    layouts = [layout for case in cases for layout in case.layouts.values()]
    assert {step for layout in layouts for step in layout.steps} == {-2, -1, 0, 1, 2, 3}
    assert any(layout.shift for layout in layouts)
    assert {case.rank for case in cases} == {2, 3, 4}
    assert {case.form for case in cases} == set(FORMS)


PROBE = Layout((2, 0, 1), (2, -1, 1))


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 1, 1), (0, 2, 3)])
@pytest.mark.parametrize("layout", [plain(3), PROBE, Layout((0, 1, 2), (1, 0, -3), 1, False)])
def test_an_array_holds_its_values_wherever_it_lies(layout, shape):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    values[:] = values[:, :1]  # the same along the axis that the last layout gives one item
    array = placed(values, layout)
    np.testing.assert_array_equal(array, values)
    if layout.shift and array.size:
        assert not array.flags.aligned


def touch(case, backend, expected):
    """Read the byte before an array, the one after it, or write to one; and end for others."""
    array = placed(
        np.ones((2, 3, 1), np.float32), Layout((0, 1, 2), (1, 1, 1), 0, backend != "before")
    )
    first = array.ctypes.data
    if backend == "write":
        ctypes.memset(first, 0, 1)
    if backend == "exit":
        os._exit(3)
    if backend != "nothing":
        ctypes.string_at(first - 1 if backend == "before" else first + array.nbytes, 1)
    return []


@guarded
def test_a_process_that_ends_is_reported_and_the_next_one_goes_on():
    backends = ["nothing", "before", "after", "write", "exit", "nothing"]
    ended = list(failures(backends, 0, [5], touch))
    assert [failure.backend for failure in ended] == backends[1:5]
    assert all("SIGSEGV ended the process" in failure.faults[0] for failure in ended[:3])
    assert ended[3] == Failure(5, "exit", ["the process ended with exit code 3"])
    assert "python -m tests.fuzz --backend after --seed 0 --only 5" in ended[1].report(0)


def some_case():
    """Query 0 sees nothing, and query 6 alone key 5: NaN in head 0, of infinite value in head 1."""
    rng = np.random.default_rng(0)
    arrays = {"q": rng.normal(size=(1, 2, 7, 4)), "k": rng.normal(size=(1, 2, 6, 4))}
    arrays["v"] = rng.normal(size=(1, 2, 6, 3))
    arrays["k"][0, 0, 5, 0], arrays["v"][0, 1, 5, 2] = np.nan, np.inf
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    return Case(arrays, {"is_causal": True, "q_offset": -1})


WRONG = {
    "a digit": (0, (0, 0, 2, 1), 1e-4, "too far from the exact output"),
    "a log-sum-exp": (1, (0, 0, 2), 1e-4, "wrong log-sum-exp"),
    "a hidden query": (0, (0, 0, 0, 0), 1e-9, "a query that sees no key"),
    "its log-sum-exp": (1, (0, 0, 0), np.inf, "wrong log-sum-exp"),
    "a NaN": (0, (0, 0, 3, 0), np.nan, "too far from the exact output"),
    "another sign of infinity": (0, (0, 1, 6, 2), -np.inf, "NaN or infinity at the wrong place"),
}


@pytest.mark.parametrize(("which", "at", "value", "sentence"), WRONG.values(), ids=WRONG)
def test_a_wrong_number_is_noticed(which, at, value, sentence):
    case = some_case()
    expected, results = Expected(case), solve("dense", case.arrays, case.options)
    assert expected.faults(*results) == []
    results[which][at] = value if np.isinf(value) else results[which][at] + value
    faults = expected.faults(*results)
    assert len(faults) == 1
    assert faults[0].startswith(sentence)


@pytest.mark.parametrize("at", [(0, 0, 6, 0), (0, 1, 6, 2)])
def test_a_number_in_place_of_nan_or_infinity_is_noticed(at):
    case = some_case()
    output, lse = solve("dense", case.arrays, case.options)
    output[at] = 0.5
    assert any(
        fault.startswith("NaN or infinity at the wrong place, or none at the right one: 1 of")
        for fault in Expected(case).faults(output, lse)
    )


def test_a_failing_problem_is_made_smaller(monkeypatch):
    def broken(case, backend):
        return ["it is broken: 1 of 1"] if (case.arrays["k"] > 1).any() else []

    monkeypatch.setattr("fuzz.smaller.check", broken)
    number = next(n for n in range(100) if broken(draw(0, n), "dense"))
    small = reduced(draw(0, number), "dense")
    assert {name: array.size for name, array in small.arrays.items()} == {"q": 1, "k": 1, "v": 1}
    assert small.arrays["k"].item() > 1
    assert (small.options, small.layouts) == ({}, {})
