"""The CPU kernel of the gated delta rule: threads, plans, widths, and what it does not touch."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from delta import by_rows, drawn, error

import minimha
from minimha import BackendUnavailable, delta_rule, gated_delta_rule, set_num_threads
from minimha.equations.delta_problem import DeltaProblem
from minimha.explain import Trace
from minimha.kernels import auto, remembered
from minimha.kernels.cpu import backend, kernel
from minimha.kernels.cpu import delta_rule as module
from minimha.kernels.cpu.threads import get_num_threads


@pytest.fixture(autouse=True)
def memory_is_never_zero(monkeypatch):
    """What a kernel does not write must not be read."""
    new = module._aligned

    def spoilt(number, dtype):
        block = new(number, dtype)
        block[:] = np.nan
        return block

    monkeypatch.setattr(module, "_aligned", spoilt)


def run(q, k, v, g, beta, state=None, **options):
    options = {"return_state": True, "backend": "cpu"} | options
    return gated_delta_rule(q, k, v, g, beta, initial_state=state, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("L", [1, 2, 3, 5, 64, 67, 131])
@pytest.mark.parametrize(("D", "Dv"), [(1, 1), (7, 33), (16, 128), (128, 131), (12, 256)])
def test_every_length_and_width(dtype, channels, L, D, Dv):
    given = drawn(L, B=1, Hk=1, H=2, L=L, D=D, Dv=Dv, channels=channels, dtype=dtype)
    allowed = 20 * np.finfo(dtype).eps
    for arrays in (given, given[:5]):
        for got, right in zip(run(*arrays), by_rows(*arrays), strict=True):
            assert error(got, right) < allowed


@pytest.mark.parametrize("threads", [1, get_num_threads()])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("L", [1, 100])
def test_any_number_of_threads_computes_the_same_bits(threads, heads, L, monkeypatch):
    monkeypatch.setattr(module, "WORTH_SHARING", 0)
    given = drawn(1, B=1, Hk=heads, H=heads, L=L, D=64, Dv=192, dtype=np.float32)
    before = get_num_threads()
    try:
        set_num_threads(threads)
        O, S = run(*given)
        for _ in range(10):
            for got, first in zip(run(*given), (O, S), strict=True):
                np.testing.assert_array_equal(got, first)
    finally:
        set_num_threads(before)
    for got, right in zip((O, S), by_rows(*given), strict=True):
        assert error(got, right) < 1e-6


def test_a_constant_decay_loses_no_digits_token_by_token():
    *tokens, state = drawn(2, B=1, Hk=1, H=1, L=3000, D=16, Dv=16, dtype=np.float32)
    tokens[3][:] = -8e-4
    exact = by_rows(*tokens, state)[1]
    for t in range(3000):
        _, state = run(*(x[:, :, t : t + 1] for x in tokens), state)
    assert error(state, exact) < 2e-6


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_remembered_plan_computes_what_the_first_call_did(dtype):
    remembered.forget()
    for channels in (False, True):
        tokens = drawn(3, dtype=dtype, channels=channels)[:5]
        state = drawn(3)[-1].astype(np.float32)
        tokens[3:] = [x.astype(np.float32) for x in tokens[3:]]
        O, S = run(*tokens, state)
        others = [x[::-1].copy() for x in tokens]
        run(*others, state)
        assert len(remembered._plans) == 1 + channels
        for got, first in zip(run(*tokens, state), (O, S), strict=True):
            np.testing.assert_array_equal(got, first)
        assert isinstance(run(*tokens, state, return_state=False), np.ndarray)
        remembered._plans.popitem()  # of the call without a state


def test_plans_depend_on_every_option():
    given = drawn(4, dtype=np.float32)
    wide = [x.astype(np.float64) for x in given]
    for options in ({}, {"scale": 2.0}, {"normalize": False}, {"scale": 1}):
        exact = run(*wide, **options, backend="recurrent")
        for _ in range(2):
            for got, right in zip(run(*given, **options), exact, strict=True):
                assert error(got, right) < 1e-6
    with pytest.raises(TypeError, match="scale is True: expected a number"):
        run(*given, scale=True)
    with pytest.raises(ValueError, match="k has L=20 but q has L=21"):
        run(given[0], given[1][:, :, :20], *given[2:])


def test_states_without_tokens_stay_as_they_are():
    q, k, v, g, beta, state = drawn(5, B=1, dtype=np.float32)
    states = np.concatenate([state, state + 1, state + 2])
    O, S = run(q, k, v, g, beta, states, cu_seqlens=[0, 0, 21, 21])
    np.testing.assert_array_equal(S[[0, 2]], states[[0, 2]])
    np.testing.assert_allclose(O, by_rows(q, k, v, g, beta, states[1:2])[0], atol=1e-6)
    assert not run(q, k, v, g, beta, kv_lengths=0)[1].any()


def test_a_long_call_runs_beside_the_main_thread(monkeypatch):
    given = drawn(6, dtype=np.float32)
    right = run(*given)
    remembered.forget()
    monkeypatch.setattr(module, "LONG", 1)
    called = []
    monkeypatch.setattr(
        module, "os_threads",
        SimpleNamespace(call=lambda tasks, cancel: called.append(cancel) or tasks[0]()),
    )  # fmt: skip
    for got, expected in zip(run(*given), right, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert len(called) == 1
    remembered.forget()


def test_a_cancelled_call_computes_nothing():
    problem = DeltaProblem.of(*drawn(7, dtype=np.float32)[:5])
    plan = module.Plan(problem, has_state=False)
    arrays = plan._arrays(problem.arrays)
    arrays[-1][0] = kernel.CANCELLED
    arrays[3][:] = 5
    line = plan._line[:]
    line[: len(arrays)] = module.array("q", map(id, arrays))
    plan._launch(line, arrays)
    assert (arrays[3] == 5).all()


def test_auto_takes_the_kernel_once_it_is_worth_it(monkeypatch):
    given = drawn(8, dtype=np.float32)
    used = []
    plan = module.Plan
    monkeypatch.setattr(module, "Plan", lambda *x: used.append(x) or plan(*x))
    remembered.forget()
    run(*given, backend="auto")
    assert bool(used) == module.is_ready(used[0][0] if used else DeltaProblem.of(*given[:5]))
    remembered.forget()
    run(*given)
    used.clear()
    remembered.forget()
    run(*given, backend="auto")
    assert len(used) == 1


def test_where_the_kernel_cannot_be_compiled_auto_goes_on(monkeypatch, caplog):
    def fail(problem, has_state):
        raise kernel.CompilationFailed("delta_rule-float32 cannot be compiled here: no memory")

    given = drawn(9, dtype=np.float32)
    run(*given)
    remembered.forget()
    monkeypatch.setattr(module, "Plan", fail)
    monkeypatch.setattr(auto, "_broken", False)
    with pytest.raises(BackendUnavailable, match="backend 'cpu' cannot run: delta_rule-float32 ca"):
        run(*given)
    with caplog.at_level(logging.WARNING, "minimha"):
        O, _ = run(*given, backend="auto")
    assert "the CPU kernels cannot run here, NumPy computes instead" in caplog.text
    assert error(O, by_rows(*given)[0]) < 1e-6


def test_the_kernel_keeps_no_steps(monkeypatch):
    with pytest.raises(BackendUnavailable, match="'cpu' cannot run: it keeps no steps to tap"):
        run(*drawn(10), tap=Trace())
    monkeypatch.setattr(delta_rule, "reason_without", lambda backend: "it is Sunday")
    remembered.forget()
    with pytest.raises(BackendUnavailable, match="backend 'cpu' cannot run: it is Sunday"):
        run(*drawn(10))


def test_it_is_compiled_ahead_with_the_others(monkeypatch):
    monkeypatch.setattr(kernel.Kernel, "compile", lambda self, dtype, is_ahead: None)
    monkeypatch.setattr(backend, "get_num_threads", lambda: 1)
    assert "delta_rule-uint16" in backend.compile_ahead(["bfloat16"])
    with pytest.raises(ValueError, match="dtypes is 'float8_e5m2': expected one of 'float32', "):
        minimha.compile([ml_dtypes.float8_e5m2])


ALONE = """
import sys
from delta import by_rows, drawn, error
from minimha import gated_delta_rule
for L in (1, 70):
    for channels in (False, True):
        *given, state = drawn(1, L=L, D=20, Dv=70, channels=channels, dtype="f4")
        O = gated_delta_rule(*given, initial_state=state, return_state=True, backend="cpu")
        assert max(map(error, O, by_rows(*given, state))) < 1e-6
"""


@pytest.mark.skipif("NUMBA_CPU_NAME" in os.environ, reason="they are forced already")
@pytest.mark.parametrize(
    "setting", [{"NUMBA_ENABLE_AVX": "0"}, {"NUMBA_CPU_NAME": "generic"}], ids=str
)
def test_registers_may_be_fewer_and_narrower(setting, tmp_path):
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | setting | {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
