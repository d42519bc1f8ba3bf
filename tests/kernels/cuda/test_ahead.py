"""CUDA kernels that are compiled ahead of their first use."""

import numpy as np
import pytest

import minimha
from minimha import BackendUnavailable, api, backends, cli

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")

from minimha.equations.problem import Problem
from minimha.kernels import disk
from minimha.kernels.cuda import ahead, backend, cubins
from minimha.kernels.cuda import driver as gpu
from minimha.kernels.cuda.launch import launches_of

HOPPER = gpu.Device(0, (9, 0), 132, 227 << 10, None, 0)


@pytest.fixture
def on_hopper(tmp_path, monkeypatch):
    """A GPU, for which what is compiled is a word."""
    monkeypatch.setattr(api, "reason_without_cuda", lambda: None)
    monkeypatch.setattr(ahead.gpu, "current", lambda: HOPPER)
    monkeypatch.setattr(cubins, "_compiled", lambda launch, cc, how_often: b"name\0code")
    monkeypatch.setattr(disk, "folders", lambda: [tmp_path])


def test_a_later_call_finds_its_kernels(on_hopper, monkeypatch):
    named = []
    kept = minimha.compile(["bfloat16"], named.append, backend="cuda")
    assert named == list(kept)
    assert len(set(kept.values())) == len(kept) == 6
    assert named[:3] == [
        "cuda.rung6_warpgroups wgmma bfloat16 D=64",
        "cuda.rung5_decode tensor_cores bfloat16 D=64 H/Hkv=1",
        "cuda.rung5_decode merge bfloat16 D=64 H/Hkv=1",
    ]
    monkeypatch.setattr(cubins, "_compiled", None)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for H, Hkv, Lq in ((3, 3, 100), (8, 2, 1), (8, 1, 1)):
        q, k = (np.zeros((2, *shape, 128), ml_dtypes.bfloat16) for shape in ((H, Lq), (Hkv, 300)))
        problem = Problem.of(q, k, k, is_causal=True, q_offset=200)
        rung, _ = backend.rung_for(problem, HOPPER)
        for launch in launches_of(rung, problem):
            assert cubins.cubin(launch, HOPPER.cc) == ("name", b"code")


def test_every_dtype_has_kernels(on_hopper):
    for dtype in api.DTYPES:
        names = minimha.compile([dtype], backend="cuda")
        assert names
        assert all(dtype in name for name in names)


def test_a_missing_toolkit_is_named(on_hopper, monkeypatch):
    def missing(*given):
        raise RuntimeError("libnvvm.so was not found")

    monkeypatch.setattr(cubins, "_compiled", missing)
    with pytest.raises(BackendUnavailable, match=r"the CUDA kernels cannot be compiled: libnvvm"):
        minimha.compile(backend="cuda")


@pytest.mark.skipif(backends()["cuda"] is None, reason="a GPU is here")
def test_without_a_gpu_there_is_nothing_to_compile_for(capsys):
    with pytest.raises(BackendUnavailable, match=r"the CUDA kernels cannot be compiled: "):
        minimha.compile(backend="cuda")
    assert cli.main(["kernels", "--compile", "--backend", "cuda"]) == 2
    assert "minimha: the CUDA kernels cannot be compiled: " in capsys.readouterr().err


def test_what_cannot_be_compiled_is_refused(capsys):
    with pytest.raises(ValueError, match="backend is 'tiled': expected one of 'cpu', 'cuda'"):
        minimha.compile(backend="tiled")
    assert cli.main(["kernels", "--backend", "cuda"]) == 2
    assert "--backend is an option of --compile: add --compile" in capsys.readouterr().err
