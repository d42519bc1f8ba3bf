"""The command ``check``: exit status, formats, answers from elsewhere, and bad input."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from minimha import attention
from minimha.check.exchange import names_of
from minimha.check.problems import graded
from minimha.cli import main

KERNELS = Path(__file__).parents[2] / "walkthroughs" / "kernels"
SOURCE = """
import os
import numpy as np

def right(q, k, v):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v

def zeros(q, k, v):
    return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)

def tokens_first(q, k, v):
    return right(q, k, v).swapaxes(1, 2)

def needs_more(q, k, v, mask):
    return right(q, k, v)

def crashes(q, k, v):
    os.write(2, b"free(): invalid pointer\\n")
    os.abort()

def hangs(q, k, v):
    while True:
        pass

def without_return(q, k, v):
    right(q, k, v)
"""


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run ``check`` in a folder with a kernel; return its exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    Path("kernel.py").write_text(SOURCE)

    def run(line, *more):
        status = main(["check", *line.split(), *more])
        return status, *capsys.readouterr()

    return run


def test_right_is_0_and_lists_every_option(run):
    status, out, err = run("minimha:attention")
    assert (status, err) == (0, "")
    assert out.startswith("minimha:attention is right in all ")
    for option in ("is_causal", "sinks", "return_lse", "NaN in hidden keys"):
        assert [option, "right"] in [
            line.rsplit(None, 1) for line in map(str.strip, out.splitlines())
        ]


def test_wrong_is_1_and_the_verdict_comes_first(run):
    status, out, err = run(f"{KERNELS / '04.py'}:attention")
    assert (status, err) == (1, "")
    words = " ".join(out.split())
    assert words.startswith(f"{KERNELS / '04.py'}:attention is wrong: query head h reads key/value "
                            "head h mod Hkv. This explains all")  # fmt: skip
    for part in ("the smallest problem that shows it", "expected", "got", "what to change"):
        assert part in out
    assert "*" in out
    assert max(map(len, out.splitlines())) <= 80


def test_zeros_are_wrong(run):
    assert run("kernel.py:zeros")[0] == 1


@pytest.mark.parametrize(("kind", "start"), [("json", "{"), ("markdown", "k"), ("html", "<!doc")])
def test_formats(run, kind, start):
    status, out, _ = run(f"kernel.py:zeros --format {kind}")
    assert status == 1
    assert out.startswith(start)
    status, shown, _ = run(
        f"kernel.py:zeros --output report.{'md' if kind == 'markdown' else kind}"
    )
    assert (status, shown) == (1, "")
    (written,) = Path().glob("report.*")
    assert written.read_text(encoding="utf-8") == out


def test_the_dialect_and_the_dtype_are_arguments(run):
    line = "minimha.dialects.torch:scaled_dot_product_attention --arrays numpy --dtype float16"
    status, out, _ = run(f"{line} --speaks torch")
    assert status == 0
    assert "causal is aligned top-left, as torch does" in " ".join(out.split())


def test_a_numpy_kernel_takes_seconds(run):
    started = time.monotonic()
    run("kernel.py:right")
    assert time.monotonic() - started < 20  # 1 to 2 on a machine that does nothing else


# Answers from elsewhere


@pytest.fixture
def problems(run, tmp_path):
    status, out, _ = run("--write-problems problems")
    assert status == 0
    listed = json.loads(Path("problems/problems.json").read_text())
    assert f"{len(listed['problems'])} problems are in problems" in out
    return listed["problems"]


def answer(problem, **changes):
    """What the file says, computed as another language would."""
    with np.load(f"problems/{problem['file']}") as file:
        arguments = {name: file[name] for name in file.files}
    if "window_size" in arguments:
        sides = arguments["window_size"].tolist()
        arguments["window_size"] = tuple(None if side < 0 else side for side in sides)
    scalars = ("is_causal", "return_lse", "scale", "softcap")
    arguments |= {name: arguments[name].item() for name in scalars if name in arguments}
    arguments = {
        n: a.item() if n == "q_offset" and a.ndim == 0 else a for n, a in arguments.items()
    }
    output = attention(**arguments | changes)
    return dict(
        zip(("output", "lse"), output if isinstance(output, tuple) else [output], strict=False)
    )


def test_answers_in_a_folder_are_right(run, problems):
    for problem in problems:
        np.savez(f"problems/{problem['answer']}", **answer(problem))
    status, out, err = run("--compare problems")
    assert (status, err) == (0, "")
    assert out.startswith("problems is right in all")


def test_answers_in_one_file_may_be_wrong_and_some_may_be_missing(run, problems):
    found = {}
    for problem in problems:
        if "sinks" in problem["options"]:
            continue
        changes = {"is_causal": False} if "is_causal" in problem["options"] else {}
        name = problem["file"].removesuffix(".npz")
        found |= {f"{name}.{part}": a for part, a in answer(problem, **changes).items()}
    np.savez("out.npz", **found)
    status, out, _ = run("--compare out.npz --format json")
    report = json.loads(out)
    assert status == 1
    assert report["deviations"] == ["causal_ignored"]
    assert "sinks" in report["refused"]


def test_answers_that_are_missing_are_not_right(run, problems):
    for problem in problems[:4]:
        np.savez(f"problems/{problem['answer']}", **answer(problem))
    status, out, err = run("--compare problems")
    assert (status, out) == (2, "")
    assert f"problems has answers to 4 of {len(problems)} problems; {len(problems) - 4} are" in err
    assert json.loads(run("--compare problems --format json")[1])["verdict"] == "cannot tell"


def test_an_answer_may_be_that_it_is_refused(run, problems):
    for problem in problems:
        found = {"refused": True} if "sinks" in problem["options"] else answer(problem)
        np.savez(f"problems/{problem['answer']}", **found)
    status, out, err = run("--compare problems")
    assert (status, err) == (0, "")
    assert "It does not take sinks." in " ".join(out.split())


def test_problems_of_16_bits_are_compared_in_16_bits(run):
    assert run("--write-problems problems --dtype float16")[0] == 0
    listed = json.loads(Path("problems/problems.json").read_text())
    for problem in listed["problems"]:
        np.savez(f"problems/{problem['answer']}", **answer(problem))
    assert run("--compare problems --dtype float16")[0] == 0
    status, _, err = run("--compare problems")
    assert status == 2
    assert "lists problems in float16, not in float32: add --dtype float16" in err


# Bad input


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "check takes one of: a function such as mykernel.py:attention, --layer module:"),
        ("kernel.py:right --compare x.npz", "check takes one of"),
        ("none.py:f", "none.py cannot be read: no such file"),
        ("kernel.py", "'kernel.py' names no function: expected mykernel.py:attention or"),
        ("kernel.py:rihgt", "kernel.py has no 'rihgt', did you mean 'right'?"),
        ("kernel.py:needs_more", "takes none of the problems; on the plainest, 'one head': "
         "TypeError: needs_more() missing 1 required positional argument: 'mask'"),
        ("kernel.py:tokens_first", "kernel.py:tokens_first gives no output that can be compared: "
         "its output has shape (1, 5, 1, 4): expected (B, H, Lq, Dv) = (1, 1, 5, 4)"),
        ("kernel.py:crashes", "gives no output that can be compared: it was ended by signal "
         "SIGABRT; the end of its stderr: free(): invalid pointer"),
        ("kernel.py:hangs --timeout 0.2", "it did not return within 0.6 s"),
        ("kernel.py:without_return", "it returned NoneType: expected an array of numbers"),
        ("kernel.py:right --speaks pytorch", "speaks is 'pytorch': expected one of 'minimha'"),
        ("kernel.py:right --dtype float64", "dtype is 'float64': expected one of 'float32'"),
        ("kernel.py:right --arrays lists", "arrays is 'lists': expected one of 'numpy'"),
        ("kernel.py:right --arrays numpy --device cuda", "device is 'cuda', but only torch's"),
        ("kernel.py:right --device nonsense", "device is 'nonsense': "),
        ("kernel.py:right --timeout 0", "timeout is 0.0: expected a number of at least 0.001"),
        ("kernel.py:right --timeout nan", "timeout is nan: expected a finite number"),
        ("kernel.py:right --format csv", "the formats of a report are text, json, markdown, html"),
        ("kernel.py:right --output x.png", "ends in '.png', which names no format of a report"),
        ("kernel.py:right --output none/x.md", "the folder none does not exist"),
        ("--compare none.npz", "none.npz cannot be read: No such file"),
        ("--compare empty.npz", "empty.npz holds no answers: expected arrays such as 01_one_head"),
        ("--compare other.npz", "other.npz has the array 'q', which is the answer to none of"),
        ("--compare kernel.py", "kernel.py is refused: expected an npz archive"),
        ("--compare folder", "folder holds no answers"),
        ("--compare foreign", "is not the list that --write-problems wrote"),
        ("--write-problems folder/none/there", "the folder folder/none does not exist"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(run, line, sentence):
    np.savez("empty.npz")
    np.savez("other.npz", q=np.ones(2))
    for folder in ("folder", "foreign"):
        Path(folder).mkdir()
    Path("foreign/problems.json").write_text("[1]")
    status, out, err = run(line)
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_answers_of_the_wrong_shape_are_named_by_problem(run):
    name = names_of(graded())[0]
    np.savez("out.npz", **{f"{name}.output": np.ones((5, 4), np.float32)})
    status, _, err = run("--compare out.npz")
    assert status == 2
    assert f"{name}.output has shape (5, 4): expected (B, H, Lq, Dv) = (1, 1, 5, 4)" in err


def test_json_says_also_of_what_cannot_be_compared_what_was_seen(run):
    status, out, _ = run("kernel.py:tokens_first --format json")
    assert status == 2
    assert json.loads(out)["deviations"] == ["wrong_shape"]


def test_a_problem_of_another_version_is_refused(run, problems):
    path = Path("problems/problems.json")
    path.write_text(path.read_text().replace('"digest": "', '"digest": "0'))
    status, _, err = run("--compare problems")
    assert status == 2
    assert "lists the problems of another version" in err


def test_the_folder_of_problems_is_not_overwritten_unasked(run, problems):
    status, _, err = run("--write-problems problems")
    assert status == 2
    assert "--write-problems problems is not empty: add --force" in err
    assert run("--write-problems problems --force")[0] == 0
    assert len(os.listdir("problems")) == len(problems) + 1
