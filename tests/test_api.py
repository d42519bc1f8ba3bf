"""The door: choosing a backend, returning the log-sum-exp, tapping without a trace on the bits."""

import numpy as np
import pytest

import minimha
from minimha import BackendUnavailable, attention, backends
from minimha.explain import Trace

Q, K, V = np.random.default_rng(0).normal(size=(3, 2, 3, 4, 5))


def test_backends_say_which_can_run_and_why_not():
    found = backends()
    assert list(found) == ["dense", "tiled", "cpu", "cuda"]
    assert found["dense"] is None
    assert found["tiled"] is None
    assert found["cpu"] is None
    assert found["cuda"] is None or "numba-cuda" in found["cuda"] or "GPU" in found["cuda"]


def test_a_backend_whose_library_is_missing_says_so(monkeypatch):
    monkeypatch.setattr("minimha.api.find_spec", lambda name: None)
    assert "numba, which compiles the kernels, is not installed" in backends()["cpu"]
    with pytest.raises(BackendUnavailable, match="backend 'cpu' cannot run: numba, which"):
        attention(Q, K, V, backend="cpu")


def test_a_named_backend_never_falls_back(monkeypatch):
    monkeypatch.setattr("minimha.api.reason_without_cuda", lambda: "no GPU is found")
    assert backends()["cuda"] == "no GPU is found"
    with pytest.raises(BackendUnavailable, match="backend 'cuda' cannot run: no GPU is found"):
        attention(Q, K, V, backend="cuda")


def test_only_cuda_wakes_the_driver_of_a_gpu(monkeypatch):
    def wake():
        raise AssertionError("the driver was asked")

    monkeypatch.setattr("minimha.api.reason_without_cuda", wake)
    for backend in ("auto", "dense", "tiled", "cpu"):
        attention(Q, K, V, backend=backend)


def test_a_kernel_takes_no_tap_and_says_which_backends_do():
    sentence = "backend 'cpu' cannot run: it keeps no steps to tap; dense and tiled do"
    with pytest.raises(BackendUnavailable, match=sentence):
        attention(Q, K, V, backend="cpu", tap=Trace())


def test_an_unknown_backend_is_named():
    with pytest.raises(
        ValueError, match="backend is 'gpu': expected auto, dense, tiled, cpu, cuda"
    ):
        attention(Q, K, V, backend="gpu")


def test_a_backend_that_cannot_take_the_problem_says_why(monkeypatch):
    monkeypatch.setattr("minimha.equations.tiled.unsupported", lambda problem: "it is Sunday")
    with pytest.raises(BackendUnavailable, match="backend 'tiled' cannot run: it is Sunday"):
        attention(Q, K, V, backend="tiled")


def test_auto_is_dense_for_a_toy_and_the_kernels_for_what_is_worth_compiling():
    np.testing.assert_array_equal(attention(Q, K, V), attention(Q, K, V, backend="dense"))
    q, k, v = np.random.default_rng(0).normal(size=(3, 8, 256, 64))
    np.testing.assert_array_equal(attention(q, k, v), attention(q, k, v, backend="cpu"))
    trace = Trace()
    attention(q, k, v, tap=trace)
    assert "weights" in trace


def test_log_sum_exp_only_when_asked():
    assert isinstance(attention(Q, K, V), np.ndarray)
    output, lse = attention(Q, K, V, return_lse=True)
    np.testing.assert_array_equal(output, attention(Q, K, V))
    np.testing.assert_allclose(lse, np.log(np.exp(Q @ K.swapaxes(-1, -2) / np.sqrt(5)).sum(-1)))


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_a_traced_run_returns_the_same_bits(backend):
    options = {"is_causal": True, "softcap": 2.0, "return_lse": True, "backend": backend}
    untraced = attention(Q, K, V, **options)
    traced = attention(Q, K, V, **options, tap=Trace())
    for one, other in zip(untraced, traced, strict=True):
        assert one.tobytes() == other.tobytes()


def test_every_option_has_its_step():
    trace = Trace()
    attention(
        Q, K, V, is_causal=True, softcap=2.0, alibi_slopes=[1, 2, 3], return_lse=True, tap=trace
    )
    assert list(trace) == [
        "q", "k", "v", "scores", "scaled", "capped", "biased", "masked", "weights", "output", "lse"
    ]  # fmt: skip


def test_public_names():
    assert sorted(minimha.__all__) == ["BackendUnavailable", "attention", "backends"]
