"""attention() and backends(): the choice of a backend, the log-sum-exp, and taps."""

from types import SimpleNamespace

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


def test_only_cuda_initialises_the_gpu_driver(monkeypatch):
    def initialise():
        raise AssertionError("the driver was initialised")

    monkeypatch.setattr("minimha.api.reason_without_cuda", initialise)
    for backend in ("auto", "dense", "tiled", "cpu"):
        attention(Q, K, V, backend=backend)


def test_kernels_refuse_a_tap_and_name_the_backends_that_accept_one():
    sentence = "backend 'cpu' cannot run: it keeps no steps to tap; dense and tiled do"
    with pytest.raises(BackendUnavailable, match=sentence):
        attention(Q, K, V, backend="cpu", tap=Trace())


def test_an_unknown_backend_is_named():
    with pytest.raises(
        ValueError, match="backend is 'gpu': expected auto, dense, tiled, cpu, cuda"
    ):
        attention(Q, K, V, backend="gpu")


def test_a_backend_that_cannot_run_the_problem_says_why(monkeypatch):
    monkeypatch.setattr("minimha.equations.tiled.unsupported", lambda problem: "it is Sunday")
    with pytest.raises(BackendUnavailable, match="backend 'tiled' cannot run: it is Sunday"):
        attention(Q, K, V, backend="tiled")


def test_the_log_sum_exp_is_returned_only_on_request():
    assert isinstance(attention(Q, K, V), np.ndarray)
    output, lse = attention(Q, K, V, return_lse=True)
    np.testing.assert_array_equal(output, attention(Q, K, V))
    np.testing.assert_allclose(lse, np.log(np.exp(Q @ K.swapaxes(-1, -2) / np.sqrt(5)).sum(-1)))


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_a_traced_run_returns_the_same_bits(backend):
    options = {"is_causal": True, "softcap": 2.0, "return_lse": True, "backend": backend}
    options |= {"sinks": [0.5, 1.0, -1.0], "alibi_slopes": [1, 2, 3]}
    untraced = attention(Q, K, V, **options)
    traced = attention(Q, K, V, **options, tap=Trace())
    for one, other in zip(untraced, traced, strict=True):
        assert one.tobytes() == other.tobytes()


def test_every_option_adds_its_step_to_the_trace():
    trace = Trace()
    attention(
        Q, K, V, is_causal=True, softcap=2.0, attn_bias=np.zeros((4, 4)), alibi_slopes=[1, 2, 3],
        sinks=[0, 1, 2], score_mod=lambda s, b, h, i, j: s, return_lse=True, tap=trace,
    )  # fmt: skip
    assert list(trace) == [
        "q", "k", "v", "scores", "scaled", "softcap", "capped", "attn_bias", "slopes",
        "distances", "bias", "biased", "modified", "masked", "sinks", "row_max", "exponentials",
        "row_sum", "weights", "output", "lse",
    ]  # fmt: skip


def test_distributed_is_found_when_it_is_first_used(monkeypatch):
    pytest.importorskip("dask", reason="dask, on which distributed stands, is not installed")
    monkeypatch.delattr(minimha, "distributed", raising=False)
    assert minimha.distributed.attention.__module__ == "minimha.distributed.attending"


@pytest.mark.parametrize(
    ("dtypes", "names"),
    [
        ("float64", ["float64"]),
        (np.float32, ["float32"]),
        (np.dtype("float16"), ["float16"]),
        (["bfloat16", np.float32], ["bfloat16", "float32"]),
    ],
)
def test_compile_takes_one_dtype_or_several(monkeypatch, dtypes, names):
    heard = []
    ahead = SimpleNamespace(
        compile_ahead=lambda dtypes, progress: heard.extend(dtypes) or {}, CompilationFailed=OSError
    )
    monkeypatch.setattr("minimha.api.imported", lambda name: ahead)
    assert minimha.compile(dtypes) == {}
    assert heard == names


@pytest.mark.parametrize("dtypes", ["float8", [int], [None]])
def test_compile_refuses_other_dtypes(dtypes):
    with pytest.raises(ValueError, match=r"dtypes is .*: expected one of 'float32', 'float64'"):
        minimha.compile(dtypes)


def test_the_public_names():
    functions = ["assert_close", "attention", "backends", "block_mask", "check", "compile"]
    functions += ["error_bound", "gated_delta_rule", "get_num_threads", "merge"]
    functions += ["set_num_threads"]
    packages = ["dialects", "explain", "layers", "models"]
    classes = ["BackendUnavailable", "BlockMask"]
    assert sorted(minimha.__all__) == sorted([*classes, *functions, *packages])
    assert sorted(dir(minimha)) == sorted([*minimha.__all__, "__version__"])
    assert all(hasattr(minimha, name) for name in minimha.__all__)
    for package in (minimha.dialects, minimha.layers, minimha.models):
        assert all(hasattr(package, name) for name in package.__all__)
        assert not hasattr(package, "RoPe")
    assert dir(minimha.layers) == minimha.layers.__all__
    assert minimha.layers.RoPE is minimha.layers.rope.RoPE
    with pytest.raises(AttributeError, match="module 'minimha' has no attribute 'atention'"):
        _ = minimha.atention
