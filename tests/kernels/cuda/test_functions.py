"""A caller's functions on a GPU: which rung takes them, what is kept of them, what is refused.

That they compute what they say is tested in ``test_simulator.py`` (rungs 1 and 2) and
``test_rungs.py`` (rung 3).
"""

import functools
import gc
import weakref
from importlib import import_module

import numpy as np
import pytest

from minimha import block_mask
from minimha.equations.problem import Problem

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")

import numba

from minimha.kernels.cuda import backend, linker, rung1_rows, rung4_tensor_cores, rung5_decode
from minimha.kernels.cuda import functions as on_gpu
from minimha.kernels.ladder import CUDA_LADDER

HOPPER = backend.gpu.Device(0, (9, 0), 2, 227 << 10, None, 0)


def problem(dtype=np.float32, Lq=40, D=8, **options):
    q, k = (np.zeros((1, 2, n, D), dtype) for n in (Lq, 40))
    return Problem.of(q, k, k, q_offset=0, **options)


def adding(value):
    table = np.full(40, value)
    return lambda s, b, h, i, j: s + table[j]


def earlier(b, h, i, j):
    return i >= j


@pytest.mark.parametrize(
    ("sizes", "rung"),
    [
        ({}, "cuda.rung3_register_tiles"),
        ({"Lq": 1}, "cuda.rung3_register_tiles"),
        ({"dtype": np.float16}, "cuda.rung3_register_tiles"),
        ({"dtype": np.float64}, "cuda.rung2_tiles"),
        ({"D": 257}, "cuda.rung2_tiles"),
    ],
)
def test_the_best_rung_that_takes_functions(sizes, rung):
    for functions in ({"score_mod": adding(1.0)}, {"mask_mod": earlier}):
        assert backend.rung_for(problem(**sizes, **functions), HOPPER)[0] == rung


def test_rungs_4_and_5_say_that_rung_3_takes_functions():
    sentence = "takes no functions: rung 3 is used for score_mod and mask_mod"
    both = {"score_mod": adding(1.0), "mask_mod": earlier}
    for rung in (rung4_tensor_cores, rung5_decode):
        assert sentence in rung.unsupported(problem(np.float16, **both))
        assert rung.unsupported(problem(np.float16)) is None


@pytest.mark.parametrize("name", CUDA_LADDER)
def test_no_rung_takes_key_indices(name):
    rung = import_module(f"minimha.kernels.{name}")
    sentence = "GPU kernels read every key, so they take no key_indices: use backend 'cpu', or give"
    picking = (problem(x, key_indices=np.zeros((40, 3), int)) for x in (np.float16, np.float32))
    reasons = [rung.unsupported(one) for one in picking]  # one may be about the dtype
    assert None not in reasons
    assert any(sentence in reason for reason in reasons)
    assert sentence in backend.unsupported(problem(np.float32, key_indices=np.zeros((40, 0), int)))


def test_a_block_mask_counts_as_its_function():
    mask = block_mask(earlier, 40, 40)
    (_, found), (_, same) = (on_gpu.device_functions(problem(mask_mod=x)) for x in (mask, earlier))
    assert found == same
    assert found.function is earlier


# what is refused


@numba.njit
def twice(x):
    return 2 * x


@numba.njit
def checked(x):
    assert x < 100
    return x


def calls(s, b, h, i, j, slope=0.5):
    return twice(s) - slope * j


def opens(s, b, h, i, j):
    doubled = 2 * s
    return doubled if i >= 0 else open("x")


def lists(s, b, h, i, j):
    weights = s
    return weights + [1.0, 2.0][h]


def raises(s, b, h, i, j):
    if j > 33:
        raise KeyError("too far")
    return s


REFUSED = {
    opens: r"line \d+ of test_functions.py, return doubled if .*: Untyped global name 'open'",
    lists: r"line \d+ of test_functions.py, return weights \+ .*: NRT required but not enabled",
    raises: r'line \d+ of test_functions.py, raise KeyError\("too far"\): an exception on a GPU',
    lambda s, b, h, i, j: checked(s): r"test_functions.py, assert x < 100: an exception on a GPU",
    lambda s, b, h, i, j: np.exp(s): "np.exp is not there: expected functions of math",
    lambda s, b, h, i, j: np.where(i > j, s, 0): "it calls a function of NumPy or Python that only",
}


def test_functions_that_numba_compiled_and_defaults_are_accepted():
    given = problem(score_mod=calls)
    assert on_gpu.unsupported(given) is None
    on_gpu.check(given)


@pytest.mark.parametrize("function", REFUSED)
def test_what_numba_cannot_compile_is_refused_by_its_line(function):
    given = problem(score_mod=function)
    with pytest.raises(on_gpu.Refused, match=REFUSED[function]):
        backend.rung_for(given, HOPPER)
    assert backend.unsupported(given).startswith("numba cannot compile score_mod for a GPU, line ")


def test_what_is_no_plain_function_is_refused():
    partial = functools.partial(calls, slope=0.25)
    sentence = "score_mod is a partial: numba compiles plain functions, made by def or lambda"
    assert backend.unsupported(problem(score_mod=partial)) == sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"score_mod": lambda s, b, h, i, j: None}, "score_mod returned None: expected"),
        ({"score_mod": lambda s, b, h, i, j: s if i else None}, "returned float32 or None"),
        ({"score_mod": lambda s, b, h, i, j: s * 1j}, "score_mod returned complex"),
        ({"score_mod": lambda s, b, h, i, j: i > j}, "score_mod returned bool: expected"),
        ({"mask_mod": lambda b, h, i, j: i & 1}, "mask_mod returned int64: expected bool"),
    ],
)
def test_a_function_that_returns_the_wrong_thing_is_refused(options, sentence):
    assert backend.unsupported(problem(**options)) is None
    with pytest.raises(TypeError, match=sentence):
        backend.rung_for(problem(**options), HOPPER)


# what is kept


def launched(value):
    """The launch for ``adding(value)``, checked, and references to the function and the kernel."""
    given = problem(score_mod=adding(value))
    on_gpu.check(given)
    ((launch, _),) = rung1_rows.launches(given, None, None)
    return launch, weakref.ref(given.score_mod), weakref.ref(launch.function)


def test_equal_functions_share_a_kernel():
    assert launched(0.25)[0] == launched(0.25)[0]
    assert launched(0.25)[0] != launched(0.5)[0]


def test_kernels_and_functions_that_were_not_used_lately_are_let_go():
    launch, *references = launched(0.125)
    linker.compiled(launch)
    del launch
    gc.collect()
    assert all(reference() is not None for reference in references)
    for value in range(on_gpu.KEPT):
        launched(1.0 + value)
    gc.collect()
    assert all(reference() is None for reference in references)
