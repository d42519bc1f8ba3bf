"""CUDA kernels on disk: found by other processes, and distinguished from all others."""

import os
import subprocess
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")

from kernels.cuda import standin

from minimha.equations.problem import Problem
from minimha.kernels import disk
from minimha.kernels.cuda import copies, cubins, linker
from minimha.kernels.cuda.arguments import DeviceArray, contiguous
from minimha.kernels.cuda.launch import launches_of
from minimha.kernels.cuda.linker import MachineCode
from minimha.kernels.ladder import CUDA_LADDER

LIMIT = 250  # seconds
FILES = """
from kernels.cuda.test_cubins import launches
from minimha.kernels.cuda import cubins
print(*[cubins.file(launch, cc).file for launch in launches() for cc in ((8, 0), (9, 0))])
"""
COMPILED = """
from kernels.cuda.test_cubins import launches
from minimha.kernels.cuda import cubins
name, code = cubins.cubin(launches()[0], (9, 0))
print(name, len(code))
"""
CALL = """
import numpy as np, minimha
q = np.eye(4, 16, dtype=np.float32)[None, None]
print(minimha.attention(q, q, q, backend="cuda").sum())
"""
FORBIDDEN = """
from minimha.kernels.cuda import linker
def forbidden(*arguments): raise SystemExit("compiled again")
linker.compiled = forbidden
"""


def launches():
    """Kernels of every rung, all different."""
    return [launch for rung in CUDA_LADDER for launch in kernels_of(rung)]


def kernels_of(rung, dtypes=(np.float32, np.float16, ml_dtypes.bfloat16), D=16, **options):
    module, found = import_module(f"minimha.kernels.{rung}"), []
    for dtype in dtypes:
        problem = Problem.of(*(np.zeros((1, 1, 2, D), dtype),) * 3, **options)
        if module.unsupported(problem) is None:
            found += launches_of(rung, problem)
    return list({(x.function, x.signature): x for x in found}.values())


def python(code, tmp_path, command=(sys.executable, "-c"), **settings):
    path = os.pathsep.join([str(standin.TESTS), str(standin.TESTS.parent)])
    here = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [*command, code], env=os.environ | here | settings,
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_have_the_same_files_in_every_process(tmp_path):
    first, second = (python(FILES, tmp_path, PYTHONHASHSEED=seed) for seed in "12")
    assert first == second
    assert len(set(first.split())) == len(first.split()) == 2 * len(launches())


def test_a_second_process_compiles_nothing(tmp_path):
    first = python(COMPILED, tmp_path)
    (stored,) = tmp_path.glob("minimha/minimha-rung1_rows-rows-sm_90-*.code")
    assert b"\0\x7fELF" in stored.read_bytes()
    assert python(FORBIDDEN + COMPILED, tmp_path) == first


@pytest.mark.skipif(standin.missing() is not None, reason=str(standin.missing()))
def test_a_second_process_calls_the_gpu_without_compiling(tmp_path):
    scripts = tmp_path / "first.py", tmp_path / "second.py"
    for script, code in zip(scripts, (CALL, FORBIDDEN + CALL), strict=True):
        script.write_text(code)
    (*command, first), _ = standin.command(scripts[0])
    assert python(first, tmp_path, command) == python(scripts[1], tmp_path, command)


@pytest.mark.parametrize("rung", CUDA_LADDER)
def test_whatever_changes_a_kernel_changes_its_file(rung):
    variants = [
        launch
        for D in (16, 64)
        for options in ({}, {"softcap": 1.0}, {"is_causal": True}, {"attn_mask": [[True] * 2] * 2})
        for launch in kernels_of(rung, D=D, **options)
    ]
    kernels = {(x.function, x.signature): x for x in variants}
    files = {cubins.file(x, (9, 0)).file for x in kernels.values()}
    assert len(files) == len(kernels)


def test_a_caller_s_function_is_told_apart_by_what_it_does_and_captures():
    def capturing(number):
        return lambda score, b, h, i, j: score + number

    functions = [
        *(capturing(n) for n in (1, 2, 1.0, np.float32(1), np.arange(2000.0), -np.arange(2000.0))),
        lambda score, b, h, i, j: score - i, lambda score, b, h, i, j: score - j,
    ]  # fmt: skip
    found = [repr(cubins.facts(function, {})) for function in functions]
    assert len(set(found)) == len(found)
    assert repr(cubins.facts(capturing(1), {})) == found[0]


def test_what_a_function_reads_of_a_module_tells_it_apart():
    settings = ModuleType("settings")
    settings.slope = 1.0
    known = {"settings": settings}
    exec("def steeper(score, b, h, i, j): return score + settings.slope", known)
    before = repr(cubins.facts(known["steeper"], {}))
    settings.slope = 2.0
    assert repr(cubins.facts(known["steeper"], {})) != before


def test_what_no_other_process_could_recognise_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "folders", lambda: [tmp_path])
    thing = object()
    launch = kernels_of("cuda.rung1_rows")[0]
    monkeypatch.setattr(cubins, "_compiled", lambda launch, cc, how_often: b"name\0code")
    launch = launch._replace(function=lambda: thing)
    assert cubins.cubin(launch, (9, 0)) == ("name", b"code")
    assert cubins.cubin_instead(("name", b"code"), launch, (9, 0)) is None
    assert not list(tmp_path.iterdir())


def test_compiling_is_announced_with_what_it_took_last_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(disk, "folders", lambda: [tmp_path])
    kernel = MachineCode("name", b"code", "no report")
    monkeypatch.setattr(linker.Intermediate, "machine_code", lambda self: kernel)
    launch = kernels_of("cuda.rung1_rows")[0]
    clock = iter([100, 112.3, 200, 202.6, 300, 301])  # seconds: before and after each compilation
    monkeypatch.setattr(cubins, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for how_long in ("some seconds", "12 s last time", "3 s last time"):
        caplog.clear()
        for _ in range(2):
            assert cubins.cubin(launch, (9, 0)) == ("name", b"code")
        sentence = "minimha: compiling rung1_rows-rows-sm_90, {}, once on this machine"
        assert caplog.messages == [sentence.format(how_long)]
        cubins.file(launch, (9, 0)).path().unlink()  # as after an update


def no_toolkit(*given):
    raise ImportError("libNVVM is missing")


def test_what_the_driver_refused_is_passed_over_on_disk(tmp_path, monkeypatch):
    """Also where it cannot be overwritten: a folder of root's, say, that comes first."""
    folders = [tmp_path / "of-root", tmp_path / "of-the-user"]
    for folder in folders:
        folder.mkdir(mode=0o700)
    monkeypatch.setattr(disk, "folders", lambda: folders[:1])
    launch = kernels_of("cuda.rung1_rows")[0]
    cubins.file(launch, (9, 0)).write(b"name\0old")
    monkeypatch.setattr(disk, "folders", lambda: folders)
    monkeypatch.setattr(disk, "_writable_folder", lambda: folders[1])
    monkeypatch.setattr(cubins, "_compiled", lambda launch, cc, how_often: b"name\0new")
    monkeypatch.setattr(cubins, "_made_here", set())
    assert cubins.cubin(launch, (9, 0)) == ("name", b"old")
    assert cubins.cubin_instead(("name", b"old"), launch, (9, 0)) == ("name", b"new")
    assert cubins.cubin_instead(("name", b"new"), launch, (9, 0)) is None  # made here
    cubins._made_here.clear()  # another process, which has no toolkit
    monkeypatch.setattr(cubins, "_compiled", no_toolkit)
    assert cubins.cubin_instead(("name", b"old"), launch, (9, 0)) == ("name", b"new")
    monkeypatch.setattr(disk, "folders", lambda: folders[:1])
    assert cubins.cubin_instead(("name", b"old"), launch, (9, 0)) is None


@pytest.mark.parametrize("changed", ["B_C", "B_R"])
def test_a_constant_that_was_changed_is_another_kernel(changed, monkeypatch):
    (launch,) = kernels_of("cuda.rung2_tiles", [np.float32])
    before = cubins.file(launch, (9, 0)).file
    module = import_module("minimha.kernels.cuda.rung2_tiles")
    monkeypatch.setattr(module, changed, getattr(module, changed) // 2)
    module.kernel.cache_clear()
    (launch,) = kernels_of("cuda.rung2_tiles", [np.float32])
    module.kernel.cache_clear()
    assert cubins.file(launch, (9, 0)).file != before


@pytest.mark.parametrize("what", ["toolkit", "_digest_of_sources"])
def test_another_toolkit_or_source_is_another_file(what, monkeypatch):
    launch = kernels_of("cuda.rung3_register_tiles")[0]
    before = cubins.file(launch, (9, 0)).file
    monkeypatch.setattr(cubins, what, lambda: "another")
    assert cubins.file(launch, (9, 0)).file != before


def test_copies_are_kept_too():
    arrays = [
        DeviceArray(256, (1, 1, 1, n), contiguous((1, 1, 1, n)), np.dtype(np.float32))
        for n in (8, 16)
    ]
    launch, _ = copies.copying(*arrays)
    assert cubins.file(launch, (9, 0)).file.startswith("minimha-copies-")
