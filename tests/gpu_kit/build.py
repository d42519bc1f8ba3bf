"""What a kit holds: compiled kernels, a tape of calls, the package, its tests and the commands."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHIPPED = ("run.sh", "check.py", "cases.py", "carried.py", "calls.py")
LIMIT = 60 << 20  # bytes


def build(folder: Path, cc: tuple[int, int], sample: bool, is_for_standin: bool) -> None:
    """Compile and write a kit; what this machine has compiled before is taken from its cache."""
    from kernels.cuda import standin

    if standin.missing():
        raise SystemExit(f"no kit can be built: {standin.missing()}")
    driver = standin.start()
    driver.configure(cc=cc)
    if is_for_standin:
        standin.machine_code_is_ptx()
    _copy(folder)
    from gpu_kit.tape import Tape
    from minimha.kernels import disk
    from minimha.kernels.cuda import cubins

    asked: dict[str, Any] = {}

    def ask(launch: Any, cc: tuple[int, int]) -> str:
        file = cubins.file(launch, cc).file
        asked.setdefault(file, launch)
        return file

    disk.LOG.setLevel("ERROR")  # what is compiled is shown as progress
    (folder / "toolkit.txt").write_text(cubins.toolkit())
    _record(folder, Tape(driver, ask), sample)
    driver.execute = lambda *launch: None
    for launch in () if sample else (*_of_bench(), *_of_tests()):
        with suppress(cubins.NoFacts):  # a function that only its own process knows
            ask(launch, cc)
    _compile(list(asked.values()), cc, folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"\n{folder}: {size / 2**20:.1f} MiB; copy it, and run: sh run.sh probe check")
    if size > LIMIT:
        raise SystemExit(f"that is more than {LIMIT >> 20} MiB")


def _compile(launches: list[Any], cc: tuple[int, int], folder: Path) -> None:
    """Put the kernels' machine code into the kit, compiled by one process per CPU.

    They are forked, since kernels are functions that have no name to find them by.
    """
    fork = multiprocessing.get_context("fork")
    begun = fork.Value("i", 0)

    def work() -> None:
        while True:
            with begun.get_lock():
                i = begun.value
                begun.value += 1
            if i >= len(launches):
                return
            print(f"\r{i + 1} of {len(launches)} kernels", end="", file=sys.stderr)
            _carry(launches[i], cc, folder)

    workers = [fork.Process(target=work) for _ in os.sched_getaffinity(0)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("no kit can be built: a kernel could not be compiled, see above")


def _carry(launch: Any, cc: tuple[int, int], folder: Path) -> None:
    """Put a kernel's machine code into the kit, compiled now if it was not before."""
    from minimha.kernels.cuda import cubins

    cubins.cubin(launch, cc)
    kept = cubins.file(launch, cc)
    path = kept.path()
    if path is None:
        raise SystemExit("no kit can be built: no folder for compiled kernels can be written")
    shutil.copy(path, folder / "cubins" / "minimha" / kept.file)


def _copy(folder: Path) -> None:
    """The commands, the package and its tests."""
    shutil.rmtree(folder / "cubins", ignore_errors=True)
    (folder / "cubins" / "minimha").mkdir(parents=True)
    for name in SHIPPED:
        shutil.copy(HERE / name, folder / name)
    shutil.rmtree(folder / "src", ignore_errors=True)
    dull = shutil.ignore_patterns("__pycache__", "*.pyc", "conformance", "*.code", "*.lock")
    for name in ("minimha", "tests"):
        shutil.copytree(ROOT / name, folder / "src" / name, ignore=dull)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "src" / name)


def _of_bench() -> list[Any]:
    """Of every shape that ``bench --backend cuda`` measures, the rung that the backend chooses."""
    from gpu_kit.calls import outline
    from minimha.bench.gpu import SHAPES, TINY
    from minimha.kernels.cuda import backend
    from minimha.kernels.cuda import driver as gpu
    from minimha.kernels.cuda.launch import launches_of

    chosen = (backend.rung_for(outline(shape), gpu.current()) for shape in (*SHAPES, TINY))
    return [launch for rung, problem in chosen for launch in launches_of(rung, problem)]


def _of_tests() -> list[Any]:
    """What the GPU tests ask for, besides what is loaded: they run, launch nothing, and fail."""
    import pytest
    from kernels.cuda.standin import tensors

    from minimha.kernels.cuda import driver as gpu

    asked: list[Any] = []
    print("\nrunning the GPU tests, for the kernels that they ask for", file=sys.stderr)

    def noted(launch: Any, cc: tuple[int, int]) -> tuple[str, bytes]:
        asked.append(launch)
        return "kernel", b".visible .entry kernel()\0"

    gpu.cubin = noted
    tensors.install()  # torch, if it is here at all, sees no GPU
    for name in ("assert_allclose", "assert_array_equal"):  # after which a test may ask for more
        setattr(np.testing, name, lambda *given, **how: None)
    tests = str(ROOT / "tests" / "kernels" / "cuda" / "test_driver.py")
    with open(os.devnull, "w") as silent:
        saved, sys.stdout = sys.stdout, silent
        try:
            # A test that took too long would end this process, which compiles for half an hour.
            pytest.main(["--tb=no", "-p", "no:cacheprovider", "-o", "timeout=0", tests])
        finally:
            sys.stdout = saved
    return asked


def _called(tape: Any, case: dict[str, Any], given: Any) -> dict[str, Any]:
    """Record the call of a case's rung for a problem."""
    from gpu_kit.cases import settings
    from minimha.kernels.cuda import backend

    found: dict[str, Any] = tape.record(
        lambda: backend.solve(case["rung"], given, **settings(case))
    )
    return found


def _timed(tape: Any, sample: bool) -> Iterator[dict[str, Any]]:
    """Record the calls to be measured, whose numbers are made where they are measured."""
    from gpu_kit.cases import label, timed
    from minimha.equations.problem import Problem
    from minimha.kernels.cuda import backend

    for case in timed(sample):
        if tape.cc != backend.ONLY_ON.get(case["rung"], tape.cc):
            continue
        print(f"\r{label(case):90}", end="", file=sys.stderr)
        dtype = np.dtype(getattr(import_module("ml_dtypes"), case["dtype"], case["dtype"]))
        q = np.zeros([case[letter] for letter in ("B", "H", "Lq", "D")], dtype)
        k = np.zeros([case[letter] for letter in ("B", "Hkv", "Lk", "D")], dtype)
        given = Problem.of(q, k, k)
        tape.is_timed = True
        one = _called(tape, case, given)
        tape.is_timed = False
        yield {"case": case, **one, "downloads": []}


def _record(folder: Path, tape: Any, sample: bool) -> None:
    """Write what the calls of all cases do."""
    from gpu_kit.cases import cases, label, problem
    from minimha.equations.problem import Problem
    from minimha.kernels.cuda import backend

    recorded = []
    for case in cases(sample):
        q, k, v, options = problem(case)
        dtype = np.dtype(getattr(import_module("ml_dtypes"), case["dtype"], case["dtype"]))
        given = Problem.of(*(x.astype(dtype) for x in (q, k, v)), **options)
        module = import_module(f"minimha.kernels.{case['rung']}")
        is_for_another = tape.cc != backend.ONLY_ON.get(case["rung"], tape.cc)
        if is_for_another or module.unsupported(given):
            continue
        print(f"\r{label(case):90}", end="", file=sys.stderr)
        one = _called(tape, case, given)
        recorded.append({"case": case, **one})
    whole = {"cc": list(tape.cc), "cases": recorded, "timed": list(_timed(tape, sample))}
    (folder / "tape.json").write_text(json.dumps(whole))
    np.savez_compressed(folder / "tape.npz", **tape.contents)
