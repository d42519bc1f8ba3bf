"""Odd and hostile command lines, all of which end in a status and perhaps a sentence.

Every case has a number, which is its test's name:
``pytest -m "" tests/cli/test_corpus.py -k 0123``.
"""

import io
import itertools
import os
import re
import signal
import socket
import struct
import sys
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from unicodedata import category

import numpy as np
import pytest
from thorough import in_turn, thorough_after

from minimha.cli import build_parser, main
from minimha.cli.inputs import KEYS

resource = pytest.importorskip("resource", reason="this system limits no process's memory")
PARSER = build_parser()  # once: it is a third of a case's time
SECONDS = 10
MEMORY = 2**30  # bytes beyond what the process has mapped already

# Values of options

WORDS = (
    "", " ", "0", "-1", "1_0", "99999999999999999999", "9" * 5000, "1.5", "1e999", "nan",
    "infinity", "１", "None", "-", "--", "=", ",", "1,2,3", "[[1]]", "\x1b[2J\x07",
    "a\u202eb", "\udcff", "\0", "\n", "🙂" * 500, "a" * 5000,
)  # fmt: skip
ATTEND = "attend --q q.csv --k k.csv --v v.csv"
OPTIONS = {
    "example": "--tokens --sentence --document --heads --kv-heads --d-model --cross --seed --only "
    "--decimals --format --output",
    "flash": "--tokens --sentence --block-queries --block-keys --d-model --only",
    ATTEND: "--q-offset --window --attn-mask --attn-bias --kv-lengths --alibi-slopes --scale "
    "--softcap --sinks --backend --labels",
    "sizes": "--preset --length --dtype",
    "kernels": "--rung",
    "bench --format none": "--shape --seconds --threads --backend",
    "check": "--compare --write-problems",
    "check none.py:f": "--speaks --dtype --arrays --device --timeout --format",
    "check ": "",
    "attend": "",
    "example --format json": "",
    "": "",
}
CHOICES = {  # later than the others, so that these keep their numbers
    "example": "--head --query --cell --hide",
    "example --hide weights": "--answer",
    "flash --tokens 3": "--cell --head",
    "lab temperature": "--seed --format --output",
    "lab": "",
    "next the": "--top --generate --temperature --top-k --top-p --layer --head --without-head "
    "--query --cell --only --model --sentences --format --output",
    "next": "",
    "heads": "--model --sentences",
    f"{ATTEND} --causal": "--key-indices",
}


def products(options_of):
    """Each option of each command with each of the words."""
    return [
        [*command.split(), *([f"{option}={word}"] if option else [word])]
        for command, options in options_of.items()
        for option in options.split() or [""]
        for word in WORDS
    ]


LARGE = [
    line.split()
    for line in (
        "example --heads 1048576 --d-model 1048576",
        "example --d-model 1048576 --output x.npz",
        "example --d-model 65536 --heads 1 --output x.npz",
        "example --heads 99999999999999999999 --d-model 99999999999999999999",
        "flash --block-queries 1048576 --block-keys 1048576",
        "flash --d-model 1048576",
        "flash --block-queries 99999999999999999999",
        "attend wide.npz",
        "attend wide.npz --backend tiled",
        "attend heads.npz",
        "sizes --length 1048576",
        "bench --shape 1048576,1048576,1048576,1048576,1048576,1048576 --format none",
    )
] + [
    ["example", "--output", "x.json", "--sentence", "a " * 10_000],
    ["example", "--output", "x.json", "--sentence", "a", "--cross", "a " * 10_000],
    ["flash", "--output", "x.json", "--sentence", "a " * 1000],
    ["flash", "--block-queries=1", "--block-keys=1", "--output=x.json", "--sentence", "a " * 500],
    ["example", *["x"] * 10_000],
    ["example", *["--only", "x"] * 1_000],
    [*ATTEND.split(), "--labels", "a " * 50_000],
    [*ATTEND.split(), "--sinks", "1," * 50_000 + "1"],
    ["example", "--sentence", "a" * 20_000],
    ["-" * 100_000],
    ["example", "-" + "x" * 100_000],
    [],
    ["--"],
    ["example", "--", "--", "--help"],
    ["example", "--he", "1"],
    ["example", "@/etc/passwd"],
]

# Names to write to

NAMES = (
    "", ".", "..", "out", "full", "loop", "link", "pipe", "q.csv", "q.csv/x", "none/x.json",
    "x.json/", "/dev/full", "/dev/null", "/dev/zero", "/dev/fd/99", "/proc/x",
    "a" * 255, "a" * 300, "a/" * 5000, "./" * 1000 + "x", "\x1b[2J.json", "a\u202eb.json", "~",
    "\udcff", "-x", "x\n.json", "*", "CON", "\0",
)  # fmt: skip
OUTPUTS = [
    ["example", f"--output={name}", f"--format={kind}", *force]
    for name, kind, force in itertools.product(NAMES, ("json", "csv"), ([], ["--force"]))
]

# Files to read

JSON_VALUES = (
    "null", "true", "0", "-1", "1.5", "1e999", "-1e999", "NaN", "1" + "0" * 400, "9" * 5000,
    "18446744073709551616", '""', '"a\\u202e\\u001b\\ud800"', '"inf"', "[]", "[[]]", "[[[]], []]",
    "[1]", "[[1]]", "[[1], [1, 2]]", "[[null]]", '[["nan"]]', "[[true]]", "[[1e308]]", "{}",
    '{"a": {}}', "[[18446744073709551616]]", "[" * 9 + "1" + "]" * 9,
)  # fmt: skip
ARRAYS = (
    True, -1, 0, 2**63 - 1, 2**64 - 1, 1e308, np.nan, np.inf, 1j, b"\xff", "\x1b[2J", np.float16(1),
    np.datetime64("2020-01-01"), np.timedelta64("nat", "s"), np.zeros(0), np.ones(1),
    np.ones((1, 1)), np.ones((1, 1), "i1"), np.ones((7, 5)), np.ones((1,) * 9),
    np.zeros((0, 0)), np.array([["a"]]), np.zeros((1, 1), [("a", "f8")]), np.ones((1, 1), ">f8"),
    np.zeros((1, 1), "V8"), np.full((1, 1), np.nan), np.full((1, 1), 1.7e308), np.ones((1, 1), "g"),
)  # fmt: skip
CELLS = (
    "1_0", "infinity", "-Infinity", "Inf", "NaN", "1e999", "1e-999", "１", "0x1p3", "1 0", "1;0",
    '"1"', '"1', "1,", ",", "\x00", "\x1b[2J", "a\u202eb", "\u2028", "\x0b", "\x1c", "=1+1",
    "\ufeff1", "\r", "1\r1", " 1 ", "--1", "1" * 400, "\n" * 10_000, "1," * 10_000 + "1",
    "1\n" * 3000,
)  # fmt: skip
PLACES = (
    "/dev/zero", "/dev/null", "/dev/full", "/dev/urandom", "/dev/stdin", "/dev/fd/99",
    "/proc/self/mem", "/", ".", "", "loop", "pipe", "socket", "none", "q.csv/x", "a" * 300,
    "\x1b[31mno", "a\u202eb", "\udcff", "\0", "long.csv", "random",
)  # fmt: skip
PROBLEMS = (
    [["attend", f"{key}={n}.json"] for key in KEYS for n in range(len(JSON_VALUES))]
    + [["attend", f"{key}={n}.npz"] for key in KEYS for n in range(len(ARRAYS))]
    + [
        [*f"attend --q cell{n}.csv --k {k} --v {k}".split(), *mask]
        for n in range(len(CELLS))
        for k, mask in (
            ("k.csv", []), (f"cell{n}.csv", []), ("k.csv", ["--attn-mask", f"cell{n}.csv"])
        )
    ]
    + [["attend", "--q", place, *["--k", "q.csv", "--v", "q.csv"]] for place in PLACES]
    + [[*ATTEND.split(), "--attn-bias", place] for place in PLACES]
)  # fmt: skip


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def header(shape, descr="<f8"):
    """The start of an .npy file, without its numbers."""
    words = str({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(words)) + words


def add_member(archive, name, content, size=None, compression=zipfile.ZIP_STORED):
    """Add a member of ``size`` bytes; what ``content`` lacks is a hole in the file."""
    info, file = zipfile.ZipInfo(name), archive.fp
    info.compress_type, info.CRC = compression, zipfile.crc32(content) if size is None else 0
    local = info.FileHeader(zip64=False)  # with a size from 2 GiB on Python 3.10 refuses
    info.file_size = len(content) if size is None else size
    info.compress_size = info.file_size if compression == zipfile.ZIP_STORED else len(content)
    info.header_offset = file.tell()
    file.write(local + content)
    file.seek(info.header_offset + len(local) + info.compress_size)
    archive.filelist.append(info)
    archive.NameToInfo[info.filename] = info
    archive.start_dir, archive._didModify = file.tell(), True


def zeros(size):
    """``size`` MiB of zeros, deflated, without having been anywhere."""
    deflate = zlib.compressobj(9, wbits=-15)
    block = deflate.compress(bytes(2**20)) + deflate.flush(zlib.Z_FULL_FLUSH)
    return block * size + deflate.flush()


@contextmanager
def archive(path, **arrays):
    with zipfile.ZipFile(path, "w") as opened:
        for name, array in arrays.items():
            opened.writestr(f"{name}.npy", npy(array))
        yield opened


def with_q(q, name="q.npy"):
    """An archive of good k and v, and a member that this is."""

    def make(path):
        with archive(path, k=np.ones((1, 1)), v=np.ones((1, 1))) as opened:
            add_member(opened, name, q)

    return make


def shaped(q, k, v):
    return lambda path: np.savez(path, q=np.ones(q), k=np.ones(k), v=np.ones(v))


def foreign(path):
    with archive(path, **dict.fromkeys("qkv", np.ones((1, 1)))) as opened:
        add_member(opened, "weights.npy", header((2**29,)), size=2**32 - 2**20)


def bomb(path):
    with archive(path, k=np.ones((1, 1)), v=np.ones((1, 1))) as opened:
        add_member(opened, "q.npy", zeros(2**11), 2**31, zipfile.ZIP_DEFLATED)


def members(path):
    with zipfile.ZipFile(path, "w") as opened:
        for n in range(20_000):
            add_member(opened, f"{n:0100}", b"")


def twice(path):
    with archive(path, **dict.fromkeys("qkv", np.ones((1, 1)))) as opened:
        add_member(opened, "q.npy", header((1, 1)) + bytes(8))


def raw(path):
    with zipfile.ZipFile(path, "w") as opened:
        for name in "qkv":
            opened.writestr(name, b"1")


def encrypted(path):
    with archive(path, **dict.fromkeys("qkv", np.ones((1, 1)))) as opened:
        opened.filelist[0].flag_bits |= 1


def commented(path):
    with archive(path, **dict.fromkeys("qkv", np.ones((1, 1)))) as opened:
        opened.comment = b"x" * 65_535


def bind(path):
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path.name)


FROM_PYTHON_2 = b"\x93NUMPY\x01\x00" + struct.pack("<H", 80)
FROM_PYTHON_2 += b"{'descr': '<f8', 'fortran_order': False, 'shape': (1L, 1L)}".ljust(79) + b"\n"
STEP = '{"name": "weights", "shape": [1, 1], "value": [[1]]'
TRACES = [  # what follows "steps" in a file that seems to be exported
    "3", "null", "{}", "[3]", '["x"]', "[{}]", f"[{STEP}}}]", f"[{STEP}}}, {STEP}}}]",
    f'[{STEP}, "head": 7}}]', f'[{STEP}, "head": "x", "batch": []}}]', f'[{STEP}, "kv_head": -1}}]',
    f'[{STEP}, "hidden": [[7, 7]]}}]', f'[{STEP}, "hidden": 7}}]', f'[{STEP}, "printed": 7}}]',
    f'[{STEP}, "printed": [{{}}]}}]', f'[{STEP}, "dtype": "object"}}]',
    f'[{STEP}, "dtype": "V99999999999"}}]',
    STEP.replace("weights", "\\u202e../x").join(("[", "}]")),
    STEP.replace("weights", "S[i=9999999999999999999999,j=1]").join(("[", "}]")),
    STEP.replace("[1, 1]", "[99999999999, 99999999999]").join(("[", "}]")),
    STEP.replace("[1, 1]", "[-1]").join(("[", "}]")), STEP.replace("[[1]]", "[[" * 9).join("[]"),
    STEP.replace("[[1]]", '[["\\u001b"]]').join(("[", "}]")),
    STEP.replace("[[1]]", "[[1e999]]").join(("[", "}]")),
]  # fmt: skip
FILES = {
    "q.csv": lambda: "1,0\n0,1\n",
    "k.csv": lambda: "1,0\n1,1\n",
    "v.csv": lambda: "1,0\n0,2\n",
    "long.csv": lambda: "1,1\n" * 10_000_000,
    "random": lambda: bytes(range(256)) * 100,
    "random.npz": lambda: b"PK\3\4" + bytes(range(256)) * 100,
    "random.json": lambda: bytes(range(256)),
    "long.json": lambda: '{"q": [' + "1," * 20_000_000,
    "keys.json": lambda: "{" + ",".join(f'"{n}": 1' for n in range(100_000)) + "}",
    "twice.json": lambda: "{" + ",".join(f'"{n % 99_999}": 1' for n in range(100_000)) + "}",
    "key.json": lambda: '{"' + "a\u202e" * 1_000_000 + '": 1}',
    "abyss.json": lambda: '{"q":' * 100_000,
    "bom.json": lambda: "\ufeff{}",
    "utf16.json": lambda: "{}".encode("utf-16"),
    "tail.json": lambda: "{} {}",
    "nul.json": lambda: '{"\0": 1}',
}
MAKERS = {
    "full": lambda path: (path.mkdir(), (path / "mine.txt").write_text("precious")),
    "out": Path.mkdir,
    "link": lambda path: path.symlink_to("nowhere"),
    **dict.fromkeys(("loop", "loop.npz", "loop.json"), lambda path: path.symlink_to(path.name)),
    **dict.fromkeys(("pipe", "pipe.npz", "pipe.json"), os.mkfifo),
    **dict.fromkeys(("socket", "socket.npz", "socket.json"), bind),
    "wide.npz": shaped((2**20, 1), (2**20, 1), (2**20, 1)),
    "heads.npz": shaped((2048, 1, 1), (1, 2048, 1), (1, 2048, 2048)),
    "foreign.npz": foreign,
    "bomb.npz": bomb,
    "members.npz": members,
    "twice.npz": twice,
    "raw.npz": raw,
    "encrypted.npz": encrypted,
    "commented.npz": commented,
    "claims.npz": with_q(header((2**40, 2**20))),
    "lies.npz": with_q(header((2**26,)) + bytes(8)),
    "object.npz": with_q(header((1, 1), "|O") + bytes(8)),
    "negative.npz": with_q(header((-1, -1)) + bytes(8)),
    "cancelling.npz": with_q(header((-(2**40),))),
    "spread.npz": with_q(header((0, 2**70))),
    "weightless.npz": with_q(header((2**40,), "<U0")),
    "header.npz": with_q(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1)),
    "version.npz": with_q(b"\x93NUMPY\x09\x00" + bytes(100)),
    "python2.npz": with_q(FROM_PYTHON_2 + bytes(8)),
    "pickle.npz": with_q(b"cos\nsystem\n(S'touch pwned'\ntR."),
    "short.npz": with_q(b""),
    "dots.npz": with_q(header((1, 1)) + bytes(8), "../../q.npy"),
    "escape.npz": with_q(header((1, 1)) + bytes(8), "q\x1b[2J\u202e.npy"),
    "folder.npz": with_q(b"", "q.npy/"),
}
CASES = [
    *(["attend", name] for name in (*FILES, *MAKERS)),
    *(["check", f"--compare={name}"] for name in (*FILES, *MAKERS)),
    *LARGE,
    *PROBLEMS,
    *OUTPUTS,
    *products(OPTIONS),
    *(["attend", f"trace{n}.json"] for n in range(len(TRACES))),
    *products(CHOICES),
]


def make(path):
    """Make the file that an argument names, if it is one of those above."""
    stem, ending = path.stem, path.suffix
    key, _, number = stem.partition("=")
    content = FILES.get(path.name, lambda: None)()
    if path.name in MAKERS:
        MAKERS[path.name](path)
    elif re.fullmatch(r"trace\d+", stem):
        rest = '"example": "", "source": "", "labels": {}, "notes": {}, "given": [], "computed": []'
        steps = TRACES[int(stem[5:])]
        content = f'{{{rest}, "blocks": [2, 2], "num_heads": 1, "steps": {steps}}}'
    elif re.fullmatch(r"cell\d+", stem):
        content = CELLS[int(stem[4:])]
    elif key in KEYS and ending == ".json":
        numbers = dict.fromkeys("qkv", "[[1.0]]") | {key: JSON_VALUES[int(number)]}
        content = "{" + ", ".join(f'"{k}": {v}' for k, v in numbers.items()) + "}"
    elif key in KEYS and ending == ".npz":
        np.savez(path, **(dict.fromkeys("qkv", np.ones((1, 1))) | {key: ARRAYS[int(number)]}))
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


class OutOfTimeError(BaseException):
    """Not an Exception, which somebody could turn into a sentence."""


def out_of_time(number, frame):
    raise OutOfTimeError


@contextmanager
def bounded():
    """Limit time and, where Linux says how much of it is in use, memory."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        if sys.platform == "linux":
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, limits[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize(
    "arguments",
    thorough_after(len(CASES) // 2, in_turn(CASES)),
    ids=[f"{n:04}" for n in in_turn(range(len(CASES)))],
)
def test_a_case_ends_in_a_status_and_a_sentence(arguments, tmp_path, monkeypatch, capsys):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr("minimha.cli.build_parser", lambda words: PARSER)
    for name in {*arguments, *(argument.partition("=")[2] for argument in arguments)}:
        if re.fullmatch(r"[\w=.]{1,40}", name, re.ASCII):
            make(here / name)
    try:
        with bounded():
            status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert status in (0, 2)
    assert (status == 0) == (err == "")
    assert err.count("\n") == (status == 2)
    assert len(err) < 15_000
    assert "does not fit into memory" not in err
    assert not {category(c) for c in out + err if c != "\n"} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert not list(tmp_path.rglob(".minimha*"))
    assert not list(tmp_path.rglob("pwned"))
