"""A caller's functions as machine code: what is compiled, when anew, and what is refused.

That they compute what they say is tested in ``tests/test_backends.py``.
"""

import functools
import logging
import math
import types
import weakref

import numpy as np
import pytest

from minimha import BackendUnavailable, attention
from minimha.equations import problem
from minimha.equations.functions import contents
from minimha.kernels import auto, remembered
from minimha.kernels.auto import choose  # as it is: tests take dense by default
from minimha.kernels.cpu import backend, functions

X = np.random.default_rng(0).normal(size=(1, 2, 40, 8))
SETTINGS = types.ModuleType("settings")


def on_cpu(**options):
    return attention(X, X, X, **options, backend="cpu")


def as_dense(**options):
    return attention(X, X, X, **options, backend="dense")


def adding(value):
    return lambda s, b, h, i, j: s + value


def test_equal_functions_are_compiled_once(monkeypatch):
    on_cpu(score_mod=adding(0.25))
    monkeypatch.setattr(functions, "_compile", None)
    on_cpu(score_mod=adding(0.25))


def test_calls_with_equal_functions_are_planned_once(monkeypatch):
    x = np.random.default_rng(1).normal(size=(1, 1, 40, 8))
    results, planned, plan, array = [], [], backend.plan, weakref.ref(x)
    monkeypatch.setattr(backend, "plan", lambda problem: planned.append(1) or plan(problem))
    for value in (0.5, 0.5, 0.75):
        options = {"mask_mod": lambda b, h, i, j: i >= j, "score_mod": adding(value)}
        results.append(attention(x, x, x, **options, backend="cpu"))
        x = x.copy()
    assert len(planned) == 2
    assert array() is None  # what is remembered keeps nobody's arrays
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("Lq", [40, 2])
def test_a_call_that_fails_leaves_no_trace_in_the_next_one(Lq):
    table, q = np.zeros(10), np.zeros((1, 1, Lq, 8))
    options = {"score_mod": lambda s, b, h, i, j: table[int(s)], "q_offset": 0, "backend": "cpu"}
    k, large = np.ones((1, 1, 40, 8)), np.full((1, 1, Lq, 8), 100.0)
    for _ in range(2):
        np.testing.assert_allclose(attention(q, k, k, **options), 1)
        with pytest.raises(RuntimeError, match="score_mod raised an exception in machine code"):
            attention(large, k, k, **options)


def from_settings(s, b, h, i, j):
    return s - SETTINGS.slope * abs(i - j)


def test_what_is_captured_never_goes_stale():
    table = np.zeros(40)
    options = {"score_mod": lambda s, b, h, i, j: s + table[j]}
    for value in (0, 3):
        table[7] = value
        np.testing.assert_allclose(on_cpu(**options), as_dense(**options), rtol=1e-9)
    for SETTINGS.slope in (0.5, 2.0):
        got = on_cpu(score_mod=from_settings)
        np.testing.assert_allclose(got, as_dense(score_mod=from_settings), rtol=1e-9)


def test_what_is_captured_is_read_once_for_each_call(monkeypatch):
    table, read = np.zeros(40), []
    options = {
        "score_mod": lambda s, b, h, i, j: s + table[j],
        "mask_mod": lambda b, h, i, j: table[j] == 0,
    }
    on_cpu(**options)
    for module in (problem, functions, remembered):
        monkeypatch.setattr(module, "contents", lambda f: read.append(f) or contents(f))
    on_cpu(**options)
    assert read == list(options.values())


@pytest.mark.parametrize("Lq", [40, 2])
def test_what_a_function_raises_is_raised(Lq):
    table = np.zeros(10)

    def failing(s, b, h, i, j):
        if j > 33:
            raise KeyError("too far")
        return s

    q = X[:, :, :Lq]
    with pytest.raises(IndexError, match="index 10 is out of bounds for axis 0 with size 10"):
        attention(q, X, X, score_mod=lambda s, b, h, i, j: s + table[j], q_offset=0, backend="cpu")
    with pytest.raises(IndexError, match="index 10 is out of bounds"):
        attention(q, X, X, mask_mod=lambda b, h, i, j: table[j] == 0, q_offset=0, backend="cpu")
    with pytest.raises(KeyError, match="too far"):
        attention(q, X, X, score_mod=failing, q_offset=0, backend="cpu")


def opens(s, b, h, i, j):
    twice = 2 * s
    return twice if i >= 0 else open("x")


def test_what_numba_cannot_compile_is_refused_by_its_line():
    sentence = r"numba cannot compile score_mod, line \d+ of test_functions.py, return twice if i"
    with pytest.raises(BackendUnavailable, match=sentence):
        on_cpu(score_mod=opens)
    for other, sentence in (
        (functools.partial(opens), "score_mod is a partial: numba compiles plain functions"),
        (lambda s, b, h, i, j: np.where(i > j, s, 0), "score_mod returns an array in machine code"),
    ):
        with pytest.raises(BackendUnavailable, match=sentence):
            on_cpu(score_mod=other)


def test_auto_then_takes_dense_and_says_so(caplog, monkeypatch):
    on_cpu()
    monkeypatch.setattr(auto, "choose", choose)
    monkeypatch.setattr(auto, "_spent", 60.0)
    with caplog.at_level(logging.WARNING, "minimha"):
        got = attention(X, X, X, score_mod=opens)
        attention(X, X, X, score_mod=opens)
    np.testing.assert_array_equal(got, as_dense(score_mod=lambda s, b, h, i, j: 2 * s))
    assert caplog.text.count("NumPy computes instead: numba cannot compile score_mod") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"score_mod": lambda s, b, h, i, j: None}, "score_mod returned None: expected"),
        ({"score_mod": lambda s, b, h, i, j: s if i else None}, "returned float64 or None"),
        ({"score_mod": lambda s, b, h, i, j: s * 1j}, "score_mod returned complex128: expected"),
        ({"score_mod": lambda s, b, h, i, j: i > j}, "score_mod returned bool: expected"),
        ({"score_mod": lambda s, b, h, i, j: (s, s)}, "score_mod returned UniTuple"),
        ({"mask_mod": lambda b, h, i, j: 1}, "mask_mod returned int64: expected bool"),
        ({"mask_mod": lambda b, h, i, j: i & 1}, "mask_mod returned int64: expected bool"),
    ],
)
def test_a_function_that_returns_the_wrong_thing_is_refused(options, sentence):
    with pytest.raises(TypeError, match=sentence):
        on_cpu(**options)


def test_integers_and_dispatchers_are_accepted():
    numba = pytest.importorskip("numba", reason="numba, which compiles kernels, is not installed")
    compiled = numba.njit(lambda s, b, h, i, j: -((i - j) ** 2))
    np.testing.assert_allclose(on_cpu(score_mod=compiled), as_dense(score_mod=compiled.py_func))


def test_float16_is_modified_in_float32():
    x = X.astype(np.float16)
    got = attention(x, x, x, score_mod=lambda s, b, h, i, j: math.sin(s) + h, backend="cpu")
    wide = attention(X, X, X, score_mod=lambda s, b, h, i, j: math.sin(s) + h, backend="dense")
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, wide, atol=5e-3)
