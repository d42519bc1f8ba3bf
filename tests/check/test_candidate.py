"""Somebody's function: how it is found, called, limited and restarted, and what is seen of it."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from minimha.check.calling import Caller
from minimha.check.candidate import Candidate
from minimha.check.problems import graded
from minimha.check.target import load

REPOSITORY = Path(__file__).parents[2]
KERNELS = """
import os, subprocess, sys, time
import numpy as np

def right(q, k, v, is_causal=False):
    s = q @ k.swapaxes(-1, -2) / q.dtype.type(q.shape[-1] ** 0.5)
    if is_causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v

def talks(q, k, v):
    print("to stdout"); print("to stderr", file=sys.stderr); sys.stdin.read()
    return right(q, k, v)

def crashes(q, k, v):
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 11)

def leaves(q, k, v):
    os._exit(7)

def exits(q, k, v):
    sys.exit("enough")

def hangs(q, k, v):
    while True:
        time.sleep(1)

def floods(q, k, v):
    while True:
        print("x" * 9999)

def grows(q, k, v):
    kept = []
    while True:
        kept.append(np.ones(2**22))
        time.sleep(0.01)

def answers_and_leaves_a_daemon(q, k, v):
    subprocess.Popen(["sleep", "20"], start_new_session=True)
    return right(q, k, v)

def hangs_beside_a_daemon(q, k, v):
    subprocess.Popen(["sleep", "20"], start_new_session=True)
    hangs(q, k, v)

def crashes_beside_a_fork(q, k, v):
    if not os.fork():
        os.setsid()
        time.sleep(20)
    os._exit(7)

def into_all(q, k, v, content):
    for number in range(3, 32):
        try:
            os.write(number, content)
        except OSError:
            pass
    return right(q, k, v)

def writes_words(q, k, v):
    return into_all(q, k, v, b"kernel compiled for 128 registers")

def writes_a_byte(q, k, v):
    return into_all(q, k, v, b"m")

def writes_a_length(q, k, v):
    return into_all(q, k, v, (7).to_bytes(8, "little") * 2 + b"[1, 2]")

def writes_half_a_record(q, k, v):
    return into_all(q, k, v, b"mha:" + bytes(4) + (7).to_bytes(8, "little") * 2 + b"{")

def writes_what_has_no_end(q, k, v):
    return into_all(q, k, v, b"mha:" + bytes(4) + (2**40).to_bytes(8, "little") * 2)

def closes_all(q, k, v):
    os.closerange(3, 32)
    return right(q, k, v)

def closes_all_and_hangs(q, k, v):
    os.closerange(3, 32)
    hangs(q, k, v)

def crashes_if_causal(q, k, v, is_causal=False):
    return os._exit(3) if is_causal else right(q, k, v)

def writes(q, k, v):
    output = right(q, k, v)
    q *= 2
    return output

def returns_v(q, k, v):
    return v[..., : q.shape[-2], :] if v.shape[-2] >= q.shape[-2] else np.zeros(1)

def random(q, k, v):
    return right(q, k, v) + np.random.normal(size=(*q.shape[:-1], v.shape[-1])).astype("f")

def flat(q, k, v):
    return right(q, k, v).ravel()

def half(q, k, v):
    return right(q, k, v).astype(np.float16)

def words(q, k, v):
    return "attention"

def nothing(q, k, v):
    pass

def lists(q, k, v):
    return right(q, k, v).tolist()

def needs_more(q, k, v, mask):
    return right(q, k, v)

def warns(q, k, v):
    np.log(np.zeros(1))
    return right(q, k, v)

def shape_of_lse(q, k, v, return_lse=False):
    return (right(q, k, v), np.zeros((*q.shape[:-1], 1), "f")) if return_lse else right(q, k, v)

def with_weights(q, k, v):
    return right(q, k, v), q @ k.swapaxes(-1, -2)

number = 3
"""
PROBLEMS = graded()
PLAIN = PROBLEMS[0]
ASKS_LSE = next(p for p in PROBLEMS if p.arguments.get("return_lse"))
CAUSAL = next(p for p in PROBLEMS if p.name == "causal")


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture
def ask(kernels):
    """The answers of one of the functions above, in a separate process."""

    def ask(name, *problems, timeout=5.0, **settings):
        settings = {"speaks": "minimha", "dtype": "float32"} | settings
        with Candidate(f"{kernels}:{name}", timeout, **settings) as candidate:
            return candidate.answers(problems or [PLAIN])

    return ask


# In its own process


@pytest.mark.parametrize("name", ["right", "talks", "warns", "lists"])
def test_output_comes_back_whatever_is_printed_or_warned_about(ask, name):
    (answer,) = ask(name)
    assert set(answer.faults) <= {"wrong_dtype"}  # a list's numbers are float64
    assert answer.output.shape == (1, 1, 5, 4)
    assert answer.refusal is None


@pytest.mark.parametrize(
    ("name", "fault", "note"),
    [
        ("crashes", "crashes", "signal SIGSEGV; the end of its stderr: the last words"),
        ("leaves", "crashes", "it ended with exit status 7"),
        ("exits", "crashes", "it ended the process: SystemExit('enough')"),
        ("hangs", "hangs", "it did not return within 1.5 s"),
        ("floods", "hangs", "it did not return within 1.5 s"),
        ("words", "not_an_array", "it returned str: expected an array of numbers"),
        ("nothing", "not_an_array", "it returned NoneType: expected an array of numbers"),
    ],
)
def test_what_ends_a_call_is_named(ask, name, fault, note):
    (answer,) = ask(name, timeout=0.5)
    assert answer.faults == (fault,)
    assert note in answer.note
    assert answer.output is None
    assert answer.refusal is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_is_limited(ask):
    (answer,) = ask("grows", memory=2**27, timeout=20)
    assert answer.faults == ("exhausts_memory",)
    assert "GiB of memory" in answer.note


def test_after_a_crash_the_next_problem_is_asked(ask):
    answers = ask("crashes_if_causal", PLAIN, CAUSAL, PLAIN)
    assert [answer.faults for answer in answers] == [(), ("crashes",), ()]


def test_what_always_hangs_is_not_asked_for_ever(ask):
    started = time.monotonic()
    answers = ask("hangs", *PROBLEMS, timeout=0.2)
    assert time.monotonic() - started < 15
    assert len(answers) == len(PROBLEMS)
    assert answers[-1].refusal == "not asked, after it had failed: it did not return within 0.6 s"


def test_nothing_is_left_running(ask, tmp_path, kernels):
    kernels.write_text(
        "import subprocess, sys\n"
        "def parent(q, k, v):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "    while True: pass\n"
    )
    ask("parent", timeout=0.7)
    child = int((tmp_path / "pid").read_text())
    for _ in range(50):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the function's child outlived it")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a daemon is forked")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("answers_and_leaves_a_daemon", ()),
        ("hangs_beside_a_daemon", ("hangs",)),
        ("crashes_beside_a_fork", ("crashes",)),
    ],
)
def test_daemons_that_outlive_it_are_not_waited_for(ask, name, faults):
    """They hold its pipes open: there is no end of file as long as they live."""
    started = time.monotonic()
    (answer,) = ask(name, timeout=0.5)
    assert time.monotonic() - started < 15  # 2 to 4 on a machine that does nothing else
    assert answer.faults == faults


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [
        "writes_words", "writes_a_byte", "writes_a_length", "writes_half_a_record",
        "writes_what_has_no_end", "closes_all", "closes_all_and_hangs",
    ],
)  # fmt: skip
def test_a_descriptor_that_is_not_its_own_is_named(ask, name):
    (answer,) = ask(name)
    assert answer.faults == ("crashes",)
    assert "a file descriptor not its own" in answer.note


@pytest.mark.usefixtures("signals_that_arrive")
def test_ctrl_c_ends_both(kernels):
    code = f"from minimha.cli import main; raise SystemExit(main(['check', '{kernels}:hangs']))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, text=True) as process:
        threading.Timer(2.0, process.send_signal, [signal.SIGINT]).start()
        try:
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()


# What is seen of one call


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("writes", "writes_into_inputs"),
        ("random", "not_deterministic"),
        ("half", "wrong_dtype"),
        ("flat", "wrong_shape"),
    ],
)
def test_faults_are_seen_and_the_output_comes_back(kernels, name, fault):
    answer = Caller(load(f"{kernels}:{name}"), "minimha", "float32").answer(PLAIN.arguments)
    assert answer.faults == (fault,)
    assert answer.output is not None


def test_a_view_of_an_input_is_no_output_of_ones_own(kernels):
    caller = Caller(load(f"{kernels}:returns_v"), "minimha", "float32")
    assert "returns_its_input" in caller.answer(CAUSAL.arguments | {"is_causal": False}).faults


def test_notes_name_shapes_in_letters_and_numbers(kernels):
    answer = Caller(load(f"{kernels}:flat"), "minimha", "float32").answer(PLAIN.arguments)
    assert answer.note == ("its output has shape (20,): expected (B, H, Lq, Dv) = (1, 1, 5, 4)")
    caller = Caller(load(f"{kernels}:shape_of_lse"), "minimha", "float32")
    note = caller.answer(ASKS_LSE.arguments).note
    assert note == "its log-sum-exp has shape (1, 2, 5, 1): expected (B, H, Lq) = (1, 2, 5)"


def test_a_second_result_that_was_not_asked_for_is_no_log_sum_exp(kernels):
    answer = Caller(load(f"{kernels}:with_weights"), "minimha", "float32").answer(
        ASKS_LSE.arguments
    )
    assert (answer.faults, answer.lse) == ((), None)
    assert answer.output is not None


def test_what_it_raises_is_a_refusal(kernels):
    caller = Caller(load(f"{kernels}:right"), "minimha", "float32")
    answer = caller.answer({**PLAIN.arguments, "softcap": 2.0})
    assert "unexpected keyword argument 'softcap'" in answer.refusal
    assert not answer.faults


def test_the_log_sum_exp_may_be_refused_alone(kernels):
    answer = Caller(load(f"{kernels}:right"), "minimha", "float32").answer(ASKS_LSE.arguments)
    assert answer.refusal is None
    assert answer.lse is None
    assert answer.output is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_arrays_have_the_dtype(dtype):
    seen = []

    def function(q, k, v, sinks=None):
        seen.append((q.dtype.name, v.dtype.name, sinks.dtype.name))
        return v[..., :1, :].repeat(q.shape[-2], -2)

    arguments = {**PLAIN.arguments, "sinks": np.ones(1, np.float32)}
    answer = Caller(function, "minimha", dtype).answer(arguments)
    assert seen == [(dtype, dtype, "float32")] * 2
    assert answer.output.dtype == np.float32
    assert answer.dtype == dtype


def test_torch_tensors_are_tried_where_arrays_are_refused():
    torch = pytest.importorskip("torch", reason="torch, whose tensors are given, is not installed")

    def function(q, k, v):
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

    for dtype in ("float32", "bfloat16"):
        answer = Caller(function, "minimha", dtype, arrays="torch").answer(PLAIN.arguments)
        assert answer.refusal is None
        assert answer.dtype == dtype
    assert Caller(function, "minimha", "float32").answer(PLAIN.arguments).output is not None


def test_what_refuses_every_librarys_arrays_is_quoted_on_each():
    torch = pytest.importorskip("torch", reason="torch, whose tensors are given, is not installed")

    def function(q, k, v):
        return torch.softmax(torch.matmul(q, k.mT).view(3, 99), -1) @ v

    refusal = Caller(function, "minimha", "float32").answer(PLAIN.arguments).refusal
    assert refusal.startswith("given numpy's arrays, TypeError: matmul(): argument 'input'")
    assert "; given torch's arrays, RuntimeError: shape '[3, 99]' is invalid" in refusal


# Where it is


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("kernels.py", "'kernels.py' names no function: expected mykernel.py:attention or"),
        ("none.py:attention", "none.py cannot be read: no such file"),
        ("kernels.py:rihgt", "kernels.py has no 'rihgt', did you mean 'right'?"),
        ("kernels.py:number", "kernels.py:number is of type int: expected a function"),
        ("broken.py:f", "broken.py cannot be imported: SyntaxError"),
        ("raises.py:f", "raises.py cannot be imported: ValueError: no luck (line 2)"),
        ("leaves.py:f", "leaves.py cannot be imported: SystemExit"),
        ("no.such.module:f", "no.such.module cannot be imported: ModuleNotFoundError"),
        ("a b:f", "'a b' is no module's name"),
        ("kernels.py:", "names no function"),
    ],
)
def test_what_cannot_be_found_is_one_sentence(kernels, monkeypatch, target, sentence):
    monkeypatch.chdir(kernels.parent)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    Path("broken.py").write_text("def f(:")
    Path("raises.py").write_text("x = 1\nraise ValueError('no luck')\n")
    Path("leaves.py").write_text("raise SystemExit(1)")
    with pytest.raises(ValueError, match=r".+") as raised:
        load(target)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_module_that_crashes_is_a_sentence(tmp_path):
    path = tmp_path / "crash.py"
    path.write_text("import os; os._exit(5)")
    settings = {"speaks": "minimha", "dtype": "float32"}
    with (
        Candidate(f"{path}:f", 5, **settings) as candidate,
        pytest.raises(
            ValueError, match=r"crash.py:f cannot be loaded: it ended with exit status 5"
        ),
    ):
        candidate.answers([PLAIN])


def test_a_file_finds_its_neighbours_and_hides_no_library(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "neighbour_of_kernel.py").write_text("value = 5")
    path = tmp_path / "json.py"
    path.write_text(
        textwrap.dedent("""
        from neighbour_of_kernel import value
        def f(q, k, v):
            return value
        """)
    )
    assert load(f"{path}:f")(1, 2, 3) == 5
    import json

    assert json.dumps([1]) == "[1]"
