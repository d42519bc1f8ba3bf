"""A caller's functions as machine code: what is compiled, when anew, and what is refused.

That they compute what they say is tested in ``tests/test_backends.py``.
"""

import functools
import gc
import logging
import math
import types
import weakref

import numpy as np
import pytest

from minimha import BackendUnavailable, attention
from minimha.equations import functions as equations
from minimha.equations.functions import read as reading
from minimha.kernels import auto
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


def test_numbers_and_arrays_that_change_compile_nothing(monkeypatch):
    monkeypatch.setattr(functions, "_kept", {})  # nor is one forgotten, however many are kept
    values = [
        (0.25, -3.5), (2, 3, -(2**62)), (np.float32(0.1), np.float32(7)),
        (np.uint64(2**63), np.uint64(1)),
    ]  # fmt: skip
    for first, *others in values:
        on_cpu(score_mod=adding(first))
        with monkeypatch.context() as patch:
            patch.setattr(functions, "_compile", None)
            for value in (*others, first):
                got = on_cpu(score_mod=adding(value))
                np.testing.assert_allclose(got, as_dense(score_mod=adding(value)), rtol=1e-9)

    def of_table(table, mask):
        score_mod, mask_mod = lambda s, b, h, i, j: s * table[h, j], lambda b, h, i, j: mask[j]
        return {"score_mod": score_mod, "mask_mod": mask_mod}

    def drawn(seed):
        rng = np.random.default_rng(seed)
        return rng.normal(size=(2, 40 + seed)), rng.random(40 + seed) < 0.5

    for seed in range(3):
        options = of_table(*drawn(seed))
        for first in (options, of_table(*(x[..., ::-1] for x in drawn(seed)))):
            np.testing.assert_allclose(on_cpu(**first), as_dense(**first), rtol=1e-9)
        monkeypatch.setattr(functions, "_compile", None)
    unaligned = of_table(
        *(np.frombuffer(b"\0" + x.tobytes(), x.dtype, x.size, 1).reshape(x.shape) for x in drawn(3))
    )  # as a cluster may deliver them
    np.testing.assert_allclose(on_cpu(**unaligned), as_dense(**unaligned), rtol=1e-9)
    with pytest.raises(IndexError, match="index 2 is out of bounds"):
        on_cpu(**of_table(drawn(0)[0][:, :2], drawn(0)[1]))


def chosen(flag, name, pair):
    return lambda s, b, h, i, j: s * pair[0] if flag and name == "twice" else s + pair[1]


def test_what_is_no_number_is_compiled_in():
    for given in ((True, "twice", (2, 0.5)), (False, "twice", (2, 0.5)), (True, "half", (2, 0.5)),
                  (True, "twice", (3, 0.5))):  # fmt: skip
        expected = X @ X.swapaxes(-1, -2) / math.sqrt(8)
        expected = expected * given[2][0] if given[:2] == (True, "twice") else expected + 0.5
        got = on_cpu(score_mod=chosen(*given))
        np.testing.assert_allclose(got, attention(X, X, X, scale=0, attn_bias=expected), rtol=1e-9)


def test_what_compiles_with_constants_only_does():
    def picking(pair, at):
        return lambda s, b, h, i, j: s * pair[at]

    for at in (0, 1, 0):
        got = on_cpu(score_mod=picking((2, 0.5), at))
        expected = as_dense(score_mod=lambda s, b, h, i, j, at=at: s * (2, 0.5)[at])
        np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_modules_defaults_and_inner_functions_give_their_values_of_now():
    def by_default(s, b, h, i, j, factor=2.0):
        return s * factor

    def aliased(s, b, h, i, j):
        settings = SETTINGS
        return s * settings.factor

    def nested(s, b, h, i, j):
        return (lambda x: x * SETTINGS.factor)(s) + h

    def through_a_cell(s, b, h, i, j):
        return (lambda x: x * factor)(s)

    for factor in (2.0, 0.5):
        SETTINGS.factor, by_default.__defaults__ = factor, (factor,)
        for function in (by_default, aliased, through_a_cell):
            expected = as_dense(score_mod=lambda s, b, h, i, j, factor=factor: s * factor)
            np.testing.assert_allclose(on_cpu(score_mod=function), expected, rtol=1e-9)
        expected = as_dense(score_mod=lambda s, b, h, i, j, factor=factor: s * factor + h)
        np.testing.assert_allclose(on_cpu(score_mod=nested), expected, rtol=1e-9)


def test_a_captured_variable_a_global_and_an_attribute_of_one_name(monkeypatch):
    SETTINGS.weight, SETTINGS.shift = 2.0, 0.25
    monkeypatch.setitem(globals(), "weight", np.ones(3))

    def scaling(weight, shift):
        return lambda s, b, h, i, j: s * weight * SETTINGS.weight + shift * j

    for weight, shift in ((2, 0.5), (3, 0.25), (0.5, 2)):
        got = on_cpu(score_mod=scaling(weight, shift))
        expected = as_dense(score_mod=lambda s, b, h, i, j, w=weight, x=shift: s * w * 2 + x * j)
        np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_a_module_of_two_names_gives_its_values_of_now():
    one = two = SETTINGS
    for factor in (2.0, 0.5):
        SETTINGS.factor = factor
        got = on_cpu(score_mod=lambda s, b, h, i, j: s * one.factor + two.factor * j)
        expected = as_dense(score_mod=lambda s, b, h, i, j, factor=factor: (s + j) * factor)
        np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_parameters_that_need_not_be_given():
    def keyword_only(s, b, h, i, j=0, *, factor=2.0, table=X[0, 0, :, 0]):
        return s * factor + table[j]

    def taking_any(s, b, h, i, j, *rest, factor=2.0):
        return s * factor

    for factor in (2.0, 0.5):
        keyword_only.__kwdefaults__["factor"] = factor
        np.testing.assert_allclose(
            on_cpu(score_mod=keyword_only), as_dense(score_mod=keyword_only), rtol=1e-9
        )
    with pytest.raises(BackendUnavailable, match=r"it takes \(s, b, h, i, j, \*rest"):
        on_cpu(score_mod=taking_any)


@pytest.mark.parametrize("ending", ["", "open"])
def test_nothing_kept_holds_what_a_call_was_given(ending):
    def adding_of(table):
        return lambda s, b, h, i, j: s + table[j] + (open("x") if ending else 0)

    q, table = X.copy(), np.ones(40)
    held = weakref.ref(q), weakref.ref(table)
    try:
        attention(q, q, q, score_mod=adding_of(table), backend="cpu")
    except BackendUnavailable:
        assert ending
    del q, table
    gc.collect()
    assert [x() for x in held] == [None, None]


def test_an_array_that_is_gone_is_not_read_again():
    def masking(table):
        return lambda b, h, i, j: table[j] > 0

    first = np.ones(40)
    first[20:] = 0
    expected = on_cpu(mask_mod=masking(first.copy()))
    np.testing.assert_array_equal(on_cpu(mask_mod=masking(first)), expected)
    again = first.copy()
    first[:] = 1
    np.testing.assert_array_equal(on_cpu(mask_mod=masking(again)), expected)


def test_machine_code_that_is_forgotten_is_freed(monkeypatch):
    monkeypatch.setattr(functions, "MOST", 2)
    on_cpu(score_mod=lambda s, b, h, i, j: s + 1)
    freed = weakref.ref([*functions._kept.values()][-1]._library._codegen)
    for function in (lambda s, b, h, i, j: s + 2, lambda s, b, h, i, j: s + 3):
        on_cpu(score_mod=function)
    gc.collect()
    assert freed() is None
    assert len(functions._kept) <= 2


def test_calls_with_equal_functions_are_planned_once(monkeypatch):
    x = np.random.default_rng(1).normal(size=(1, 1, 40, 8))
    results, planned, plan, array = [], [], backend.plan, weakref.ref(x)
    monkeypatch.setattr(backend, "plan", lambda problem: planned.append(1) or plan(problem))
    for value in (0.5, 0.5, 0.75):
        options = {"mask_mod": lambda b, h, i, j: i >= j, "score_mod": adding(value)}
        results.append(attention(x, x, x, **options, backend="cpu"))
        x = x.copy()
    assert len(planned) == 1
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
    monkeypatch.setattr(equations, "read", lambda f: read.append(f) or reading(f))
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
        (lambda s, b, h, i, j: np.array(s), "score_mod returns an array in machine code"),
    ):
        with pytest.raises(BackendUnavailable, match=sentence):
            on_cpu(score_mod=other)


def test_auto_then_takes_dense_and_says_so(caplog, monkeypatch):
    on_cpu()
    monkeypatch.setattr(auto, "choose", choose)
    monkeypatch.setitem(auto._spent, "attention", 60.0)
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
