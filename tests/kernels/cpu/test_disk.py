"""Machine code on disk: found again, never the wrong one, and no error where it cannot be kept."""

import errno
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kernels.cpu.test_rungs import ragged
from thorough import thorough_after

import minimha
from minimha.equations import dense
from minimha.equations.problem import Problem
from minimha.kernels import disk
from minimha.kernels.cpu import backend, rung1_rows
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.kernel import Kernel

LIMIT = 300  # seconds, for a process that could wait for ever
ONE = """
import numpy as np
from minimha.equations.problem import Problem
from minimha.kernels.cpu import rung1_rows
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 9, 4), np.float32)
print(rung1_rows.forward(Problem.of(q, k, v, scale=1.0))[0].sum(dtype=float))
"""
PROBLEM = Problem.of(*ragged(Lq=3, Lk=50))


FACTS = """
from minimha.kernels.cpu.disk import digest_of_all
from minimha.kernels.cpu.simd.vector import FEATURES, VECTOR_BITS
print(digest_of_all(), VECTOR_BITS, any(name.startswith("avx") for name in FEATURES))
"""


def computed(**settings):
    """What a process of its own prints, and what it logs."""
    done = subprocess.run(
        [sys.executable, "-c", ONE], capture_output=True, text=True, timeout=LIMIT, **settings
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout), done.stderr


def a_fresh_kernel():
    """Rung 1 as a process has it that has compiled nothing."""
    return Kernel(rung1_rows.rows, rung1_rows.BUFFERS, rung1_rows.sizes)


def assert_right(kernel):
    O, L = kernel.forward(PROBLEM)
    for got, expected in zip((O, L), dense.forward(PROBLEM), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The only folder for compiled kernels."""
    monkeypatch.setattr(disk, "folders", lambda: [tmp_path])
    tmp_path.chmod(0o755)
    return tmp_path


def stored(folder):
    (file,) = folder.glob("minimha-rows-*.code")
    return file


@pytest.fixture
def fresh(tmp_path):
    """Settings of a process that finds a copy of the package, and no compiled kernel anywhere."""
    shutil.copytree(
        Path(minimha.__file__).parent,
        tmp_path / "minimha",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    here = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    return {"cwd": tmp_path, "env": os.environ | here}


def test_other_features_of_the_processor_are_other_machine_code():
    settings = (
        {},
        {"NUMBA_ENABLE_AVX": "0"},
        {"NUMBA_CPU_NAME": "generic"},
        {"NUMBA_CPU_FEATURES": "+sse3"},
    )
    unforced = {x: y for x, y in os.environ.items() if not x.startswith("NUMBA_CPU_")}
    found = [
        subprocess.run(
            [sys.executable, "-c", FACTS], env=unforced | setting,
            capture_output=True, text=True, timeout=LIMIT, check=True,
        ).stdout.split()
        for setting in settings
    ]  # fmt: skip
    if found[0][2] == "False":
        pytest.skip("this processor has no AVX that could be left out")
    assert len({digest for digest, *_ in found}) == len(settings)
    assert [facts for _, *facts in found[1:]] == [["128", "False"]] * 3


def test_a_second_process_finds_the_machine_code(fresh):
    first, log = computed(**fresh)
    assert "compiling rows-float32, some seconds, once on this machine" in log
    assert computed(**fresh) == (first, "")


def test_one_of_several_processes_compiles_and_the_others_wait(fresh):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ONE], **fresh, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]  # fmt: skip
    said = [process.communicate(timeout=LIMIT) for process in processes]
    assert len({output for output, _ in said}) == 1
    assert sum(log.count("compiling") for _, log in said) == 1


@pytest.mark.parametrize("changed", ["kernels/score.py", "kernels/cpu/mask.py"])
def test_an_upgrade_in_place_computes_with_the_new_code(changed, fresh):
    """numba's own cache knows only the file of the kernel itself, not those that it imports."""
    package = fresh["cwd"] / "minimha"
    before, _ = computed(**fresh)
    source = package / changed
    text, status = source.read_text(), source.stat()
    upgraded = text.replace("s *= head.scale", "s *= 2 * head.scale").replace(
        "return not is_hidden(", "return j != 1 and not is_hidden("
    )
    assert upgraded != text
    source.write_text(upgraded)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a reproducible build has it
    for cached in package.rglob("__pycache__/*.pyc"):
        cached.unlink()
    after, log = computed(**fresh)
    assert "compiling" in log
    assert after != before


@pytest.mark.parametrize(
    "damage",
    thorough_after(
        4,
        [
            lambda code: b"",
            lambda code: code[:-1],
            lambda code: code[:1000] + b"?" + code[1001:],
            lambda code: b"\x80" * 5000,
            lambda code: code[:10],
            lambda code: bytes(len(code)),
            lambda code: code[:32] + os.urandom(len(code) - 32),
        ],
    ),
)
def test_a_damaged_file_is_not_found(damage, folder):
    assert_right(a_fresh_kernel())
    stored(folder).write_bytes(damage(stored(folder).read_bytes()))
    assert_right(a_fresh_kernel())
    assert len(stored(folder).read_bytes()) > 5000  # whole again


def test_machine_code_that_does_not_load_is_compiled_anew(folder, caplog):
    """Whole, but no pickle of numba's."""
    assert_right(a_fresh_kernel())
    file = stored(folder)
    File("rows-float32", "").write(b"x")
    (other,) = set(folder.glob("*.code")) - {file}
    other.replace(file)
    assert_right(a_fresh_kernel())
    assert "cannot be loaded" in caplog.text


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no owners of files")
@pytest.mark.parametrize("path", ["folder", "file"])
@pytest.mark.parametrize("harm", ["owned by another user", "writable by others"])
def test_what_somebody_else_could_have_written_is_not_read(harm, path, folder, monkeypatch):
    assert_right(a_fresh_kernel())
    name = Path(stored(folder)).name
    target = folder if path == "folder" else folder / name
    if harm == "writable by others":
        target.chmod(0o777)
    else:
        stat, foreign = Path.stat, 4242

        def owned(self, **options):
            found = stat(self, **options)
            if self != target:
                return found
            return os.stat_result((*found[:4], foreign, *found[5:]))

        monkeypatch.setattr(Path, "stat", owned)
    read = []
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self) or b"")
    assert disk.is_trusted(target) is False
    file = File("rows-float32", "")
    monkeypatch.setattr(file, "file", name)
    assert file.read() is None
    assert read == []


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are POSIX's")
def test_a_full_disk_is_no_error(fresh):
    limited = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited + ONE],
        **fresh,
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be stored in") == 1
    assert not list(fresh["cwd"].rglob(".minimha-*"))


def test_no_folder_at_all_is_no_error(monkeypatch, caplog):
    monkeypatch.setattr(disk, "folders", list)
    disk._warn_once.cache_clear()
    assert_right(a_fresh_kernel())
    assert_right(a_fresh_kernel())
    assert caplog.text.count("every process compiles them") == 1


def test_a_folder_that_is_a_file_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(disk, "folders", lambda: [tmp_path / "file", tmp_path / "new" / "cache"])
    assert_right(a_fresh_kernel())
    assert stored(tmp_path / "new" / "cache")


@pytest.mark.skipif(sys.platform == "win32", reason="the home folder is found in another way")
@pytest.mark.parametrize("setting", [{}, {"XDG_CACHE_HOME": "cache"}])
def test_a_user_without_a_home_has_no_cache_in_the_working_folder(setting, monkeypatch):
    """As under a number without a name, which is how some containers run."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert all(folder.is_absolute() for folder in disk.folders())


def test_a_read_only_folder_is_read(tmp_path, monkeypatch):
    """As in a container whose kernels were compiled when it was built."""
    monkeypatch.setattr(disk, "folders", lambda: [tmp_path])
    tmp_path.chmod(0o755)
    assert_right(a_fresh_kernel())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(disk.File, "write", lambda self, code: pytest.fail("compiled again"))
    assert_right(a_fresh_kernel())


IN_A_CONTAINER = """
import numpy as np, minimha
from minimha.kernels import disk
disk._writable_folder = lambda: None  # its file system is read-only
minimha.set_num_threads(minimha.kernels.cpu.threads.usable_cpus())
for Lq in (1, 200):
    q, k, v = (np.ones((1, 8, L, 64), np.float32) for L in (Lq, 200, 200))
    minimha.attention(q, k, v, backend="cpu")
"""


@pytest.mark.long
def test_a_container_compiles_nothing_after_its_build(fresh):
    """Neither the kernels nor what the helper threads run."""

    def python(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], **fresh, capture_output=True, text=True, timeout=LIMIT
        )

    built = python("-m", "minimha", "kernels", "--compile", "--format", "json")
    assert built.returncode == 0, built.stderr
    assert all(row["kept in"].startswith(str(fresh["cwd"])) for row in json.loads(built.stdout))
    used = python("-c", IN_A_CONTAINER)
    assert (used.returncode, used.stderr) == (0, "")


@pytest.fixture
def others(folder, monkeypatch):
    """Processes that would compile the second kernel of three; they sleep instead."""
    started = []

    def start(command, **options):
        sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]
        started.append(popen(sleeper, **options))
        return started[-1]

    monkeypatch.setattr(backend, "get_num_threads", lambda: 2)
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_an_interrupted_compilation_leaves_no_process_behind(others, monkeypatch):
    def interrupted(kernel, storage, is_ahead):
        raise KeyboardInterrupt

    monkeypatch.setattr(Kernel, "compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.compile_ahead(["float32"])
    assert [process.poll() is None for process in others] == [False]


@pytest.mark.parametrize("can_start", [True, False])
def test_this_process_compiles_what_another_one_does_not(can_start, others, monkeypatch):
    compiled, told = [], []

    def compile_one(kernel, storage, is_ahead):
        compiled.append(kernel.name(storage))
        for process in others:
            process.kill()

    def fail(*arguments, **options):
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(Kernel, "compile", compile_one)
    if not can_start:
        monkeypatch.setattr(subprocess, "Popen", fail)
    kept = backend.compile_ahead(["float32"], told.append)
    assert compiled == told == ["tiles-float32", "delta_rule-float32", "decode-float32"]
    assert kept == dict.fromkeys(compiled)
    assert len(others) == can_start


@pytest.mark.parametrize("dtypes", [["uint8"], ["float32", "float128"]])
def test_only_dtypes_of_kernels_can_be_compiled(dtypes):
    with pytest.raises(ValueError, match=f"dtypes is '{dtypes[-1]}': expected one of 'float32', "):
        minimha.compile(dtypes)


def test_8_bits_are_compiled_for_attention_on_the_cpu_alone(monkeypatch):
    monkeypatch.setattr(Kernel, "compile", lambda *arguments, **options: None)
    monkeypatch.setattr(backend, "_compiled_elsewhere", lambda shares: nullcontext())
    kept = minimha.compile(["int8", ml_dtypes.float8_e4m3fn])
    assert list(kept) == ["tiles-int8", "decode-int8", "tiles-uint8", "decode-uint8"]
    with pytest.raises(ValueError, match="dtypes is 'int8': expected one of 'float32', "):
        minimha.compile("int8", backend="cuda")


def test_nobody_waits_for_ever(folder, monkeypatch):
    """The lock's holder may be stuck."""
    holder = subprocess.Popen(
        [sys.executable, "-c",
         "import fcntl, sys, time\n"
         "lock = open(sys.argv[1], 'ab')\n"
         "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
         "print('held', flush=True)\n"
         "time.sleep(300)\n", str(folder / "minimha-rows-float32.lock")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(disk, "WAIT", 0.2)
        assert_right(a_fresh_kernel())
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize(("version", "waits"), [("the same", True), ("another", False)])
def test_only_who_wants_the_same_version_waits(version, waits, folder, monkeypatch):
    holder = subprocess.Popen(
        [sys.executable, "-c",
         "import pathlib, sys, time\n"
         "from minimha.kernels import disk\n"
         "disk.folders = lambda: [pathlib.Path(sys.argv[1])]\n"
         "with disk.File('rows', 'the same').exclusive():\n"
         "    print('held', flush=True)\n"
         "    time.sleep(300)\n", str(folder)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        waited = []
        monkeypatch.setattr(disk, "WAIT", 0.2)
        monkeypatch.setattr(disk.time, "sleep", waited.append)
        with disk.File("rows", version).exclusive():
            assert bool(waited) == waits
    finally:
        holder.kill()
        holder.communicate()


def test_old_versions_are_deleted(folder):
    for n in range(disk.KEPT + 3):
        file = File("rows-float32", str(n))
        file.write(b"code")
        os.utime(folder / file.file, (n, n))
    assert len(list(folder.glob("*.code"))) == disk.KEPT
    assert File("rows-float32", str(disk.KEPT + 2)).read() == b"code"
    assert File("rows-float32", "0").read() is None


def test_nothing_is_left_behind_by_a_write_that_fails(folder, monkeypatch, caplog):
    def full(*paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    disk._warn_once.cache_clear()
    assert_right(a_fresh_kernel())
    assert "No space left on device" in caplog.text
    assert not list(folder.glob("*.tmp"))
