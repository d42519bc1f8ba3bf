"""The kit for a machine with a GPU: built for the stand-in, and used where little is installed."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from kernels.cuda import standin

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")
if standin.missing():
    pytest.skip(standin.missing(), allow_module_level=True)

from gpu_kit import cases
from minimha.equations.problem import Problem
from minimha.kernels.cuda import rung4_tensor_cores, rung6_warpgroups

LIMIT = 250  # seconds
NUMPY_ALONE = """
import sys

class Refused:
    def find_spec(self, name, *rest):
        if name in ("numba", "numba_cuda", "llvmlite", "cuda", "ml_dtypes", "rich", "pytest"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refused())
"""
CALL = """
import ml_dtypes, numpy as np, minimha
from minimha.kernels import disk
from minimha.kernels.cuda import linker
disk.folders = lambda folders=disk.folders(): folders[:1]  # not what was compiled here before
def forbidden(*arguments): raise SystemExit("compiled again")
linker.compiled = forbidden
q, k = np.ones((2, 4, 5, 16), ml_dtypes.bfloat16), np.ones((2, 2, 33, 16), ml_dtypes.bfloat16)
print(minimha.attention(q, k, k, backend="cuda").astype(float).sum())
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A kit with a kernel of each rung."""
    folder = tmp_path_factory.mktemp("kit") / "kit"
    command = [sys.executable, "-m", "tests.gpu_kit", "build", folder, "--sample", "--stand-in"]
    done = subprocess.run(
        command, cwd=standin.TESTS.parent, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert "copy it, and run" in done.stdout
    return folder


@pytest.fixture
def kit(built, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(built, tmp_path / "kit"))


def run(kit, *words, python=None):
    """What ``run.sh`` prints, and its status; with the stand-in if no Python is given."""
    (program, *module), environment = standin.command()
    here = {"PYTHON": python or " ".join([program, *module]), "OUT": str(kit / "out")}
    done = subprocess.run(
        ["sh", kit / "run.sh", *words], env=environment | here,
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    return done.stdout + done.stderr, done.returncode


def test_check_is_right_with_numpy_alone(kit, monkeypatch):
    (kit / "sitecustomize.py").write_text(NUMPY_ALONE)
    monkeypatch.setenv("PYTHONPATH", str(kit))
    output, status = run(kit, "check")
    assert "8 cases, 3 runs each: 8 right, 0 wrong" in output
    assert status == 0
    found = json.loads((kit / "out" / "check.json").read_text())
    assert (found["cases"], found["wrong"]) == (8, {})
    assert [one["ms"] for one in found["timed"].values()] == [1, 1]  # by the stand-in's clock
    table = (kit / "out" / "table.md").read_text()
    for keys in ("", " B_c=32"):
        name = f"rung4_tensor_cores bfloat16 B=1 H=16 Hkv=16 Lq=64 Lk=64 D=16 none{keys}"
        assert f"{name} | 1.0 |" in table
    assert "8 cases, 0 wrong." in table


def test_what_is_measured():
    measured = {cases.label(case) for case in cases.timed()}
    sizes = "B=4 H=16 Hkv=16 Lq=4096 Lk=4096 D=128 none"
    for name in ("rung4_tensor_cores", "rung6_warpgroups"):
        assert f"cuda.{name} bfloat16 {sizes}" in measured
    assert f"cuda.rung4_tensor_cores bfloat16 {sizes} B_c=32" in measured
    for L, D in product((1024, 4096, 16384), (64, 128)):
        for rung in ("rung3", "rung4", "rung5", "rung6"):
            assert any(rung in name and f"Lk={L} D={D} none" in name for name in measured)


def test_every_buffer_is_used_nine_times():
    for rung, B_c in ((rung4_tensor_cores, 64), (rung6_warpgroups, 128)):
        name = rung.__name__.removeprefix("minimha.kernels.")
        longest = max(case["Lk"] for case in cases.cases() if case["rung"] == name)
        q = np.zeros((1, 1, 1, 64), np.float16)
        assert rung.blocks(rung.variant(Problem.of(q, q, q)))[1] == B_c
        assert longest > 2 * 9 * B_c


def kernels_of(kit, rung):
    return sorted((kit / "cubins" / "minimha").glob(f"minimha-{rung}-[!m]*.code"))


def test_check_names_what_is_wrong_and_goes_on(kit):
    for path in kernels_of(kit, "rung4_tensor_cores"):
        code = path.read_bytes()[32:]
        assert b"ex2.approx.ftz.f32" in code
        code = code.replace(b"ex2.approx.ftz.f32", b"lg2.approx.ftz.f32")
        path.write_bytes(hashlib.sha256(code).digest() + code)
    output, status = run(kit, "check")
    assert "WRONG cuda.rung4_tensor_cores bfloat16 B=2 H=4 Hkv=2 Lq=5 Lk=33 D=16 causal: " in output
    assert "8 cases, 3 runs each: 7 right, 1 wrong" in output
    assert status == 1


WRONG = """
import sys, check, time, os
def failing(case, results, right=check.fault):
    rung = case["rung"]
    if "rung1" in rung: time.sleep(1000)
    if "rung2" in rung: os._exit(3)
    if "rung3" in rung: raise check.DriverError("cuCtxSynchronize", 700, "an illegal address")
    return right(case, results)
check.fault = failing
check.__file__ = __file__
sys.exit(check.main())
"""


def test_cases_that_hang_crash_or_lose_the_context_do_not_end_the_others(kit):
    (kit / "failing.py").write_text(WRONG)
    (program, *module), environment = standin.command()
    here = {"PYTHON": " ".join([program, *module])}
    done = subprocess.run(
        [program, *module, kit / "failing.py", "--each", "12", "--output", kit / "check.json"],
        env=environment | here, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    found = json.loads((kit / "check.json").read_text())
    reasons = [
        "it does not end within 12 s", "its process ended with status 3",
        "cuCtxSynchronize failed: an illegal address (700)",
    ]  # fmt: skip
    assert list(found["wrong"].values()) == reasons, done.stderr
    assert "8 cases, 3 runs each: 5 right, 3 wrong" in done.stdout
    assert all(f"| {reason} |" in (kit / "table.md").read_text() for reason in reasons)


def test_a_nan_where_one_is_expected_is_right(kit):
    code = """
import check, cases, numpy as np
case = cases.cases(sample=True)[0]
given = cases.problem(case)
given[2][0, 0, 0] = np.nan
cases.problem = lambda case: given
O, L = check.dense.forward(check.Problem.of(*given[:3], **given[3]))
bytes_of = [x.astype(np.float32).view(np.uint8).reshape(-1) for x in (O, L)]
print(np.isnan(O).any(), check.fault(case, [bytes_of]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=kit, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout == "True None\n", done.stderr


def test_what_is_lacking_is_said(kit):
    tape = json.loads((kit / "tape.json").read_text())
    (kit / "tape.json").write_text(json.dumps(tape | {"cc": [8, 0]}))
    output, status = run(kit, "check")
    assert "the kernels are compiled for sm_80, and this GPU is sm_90: build the kit" in output
    assert status == 2
    (kit / "tape.json").write_text(json.dumps(tape))
    (path,) = kernels_of(kit, "rung1_rows")
    path.write_bytes(path.read_bytes()[:-1])
    output, status = run(kit, "check")
    assert f"cubins/minimha/{path.name} is damaged: copy the folder again" in output
    assert status == 2


@pytest.mark.skipif(find_library("cuda") is not None, reason="NVIDIA's driver is here")
def test_commands_say_what_they_need(kit):
    output, status = run(kit, "probe", "check", "all", python=sys.executable)
    assert "Python 3." in output
    assert "check needs NVIDIA's driver: there is no libcuda.so.1 here" in output
    assert "all is none of probe, check, tests, bench, profile, sanitize" in output
    assert status == 2
    output, status = run(kit, "tests", python=f"{sys.executable} -S")
    assert "lacking here: numpy, numba, numba_cuda" in output
    assert status == 2


def test_minimha_itself_finds_the_carried_kernels(kit):
    (kit / "call.py").write_text(CALL)
    (*command, script), environment = standin.command(kit / "carried.py")
    environment["PYTHONPATH"] += f"{os.pathsep}{kit}"
    done = subprocess.run(
        [*command, script, "-m", "call"], env=environment,
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.stdout == "640.0\n", done.stderr


def test_runs_that_differ_are_a_race(kit):
    code = "import check, numpy as np\nprint(check.fault({}, [[np.array([1])], [np.array([2])]]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=kit, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout == "its runs differ: there is a race\n", done.stderr


# NVIDIA's tools, by the options that they document: each runs the program that follows them.
TOOLS = {
    "ncu": """
add("--target-processes", choices=["all", "application-only"])
add("--clock-control", choices=["base", "none"])
add("--set", choices=["basic", "detailed", "full", "roofline"])
add("--force-overwrite", action="store_true")
add("--export")
add("--import", dest="report", type=argparse.FileType())
add("--page", choices=["details", "raw", "source", "session"])
""",
    "compute-sanitizer": """
add("--target-processes", choices=["all", "application-only"])
add("--tool", choices=["memcheck", "racecheck", "initcheck", "synccheck"], default="memcheck")
add("--error-exitcode", type=int, default=0)
add("--log-file", type=argparse.FileType("w"))
""",
}
TOOL = """#!{python}
import argparse, subprocess, sys
parser = argparse.ArgumentParser()
add = parser.add_argument
{options}
add("program", nargs=argparse.REMAINDER)
args = parser.parse_args()
if "report" in args and args.report:
    print("the page", args.page, "of", args.report.read())
    raise SystemExit
status = subprocess.run(args.program).returncode
if "export" in args:
    open(args.export + ".ncu-rep", "w").write("a report")
if "log_file" in args:
    errors = int(args.tool == "racecheck" and {has_race})
    args.log_file.write(f"========= {{args.tool}}\\n========= ERROR SUMMARY: {{errors}} errors\\n")
    status = status or errors and args.error_exitcode
raise SystemExit(status)
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Installs a stand-in for each of NVIDIA's tools on PATH."""

    def install(has_race=False):
        for name, options in TOOLS.items():
            text = TOOL.format(python=sys.executable, options=options, has_race=has_race)
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return install


def test_the_sanitizer_s_tools_look_at_the_cases_that_are_named(tools, kit, monkeypatch):
    monkeypatch.setenv("ONLY", "rung4")  # whose timed cases are left out
    tools()
    output, status = run(kit, "sanitize")
    assert output.count("1 cases, 1 runs each: 1 right, 0 wrong") == 3
    assert output.count("========= ERROR SUMMARY: 0 errors") == 3
    assert status == 0
    tools(has_race=True)
    output, status = run(kit, "sanitize")
    assert output.count("========= ERROR SUMMARY: 0 errors") == 2
    assert "== sanitize ended with status 9" in output
    assert status == 9
    logs = {path.name for path in (kit / "out").iterdir()}
    assert logs == {"memcheck.txt", "racecheck.txt", "synccheck.txt"}


def test_a_profile_is_written_as_text_too(tools, kit, monkeypatch):
    monkeypatch.setenv("ONLY", "no such call")
    tools()
    output, status = run(kit, "profile")
    assert status == 0, output
    assert (kit / "out" / "profile.ncu-rep").read_text() == "a report"
    assert (kit / "out" / "profile.txt").read_text() == "the page details of a report\n"


def test_the_tests_of_the_folder_run_there(kit, monkeypatch):
    monkeypatch.setenv("ONLY", "test_queries_that_see_nothing and rung1_rows and 5")
    output, status = run(kit, "tests")
    assert "1 passed" in output
    assert status == 0
    assert 'tests="1"' in (kit / "out" / "tests.xml").read_text()


def test_the_bench_says_that_torch_sees_no_gpu(kit):
    pytest.importorskip("torch", reason="torch, which the bench compares with, is not installed")
    output, status = run(kit, "bench")
    assert "which the bench on a GPU compares with, finds no GPU: install one" in output
    assert "Traceback" not in output
    assert status == 2
