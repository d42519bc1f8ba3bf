"""``lab``: experiments on a terminal of 80 columns, in ASCII, and in every format."""

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path

import pytest

from minimha import labs
from minimha.cli import main
from minimha.labs import removed

REPOSITORY = Path(__file__).parents[2]
LEFT_OUT = {"memory", "parallel"} | ({"pytorch"} if find_spec("torch") is None else set())
FAST = [name for name in labs.EXPERIMENTS if name not in LEFT_OUT]  # and the same when run again


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """The shipped model is asked little."""
    monkeypatch.setattr(removed, "NUM_QUESTIONS", 1)


def shown(capsys, *line):
    assert main(["lab", *line]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_all_experiments_are_listed(capsys):
    records = json.loads(shown(capsys, "--format", "json"))
    assert [record["experiment"] for record in records] == list(labs.EXPERIMENTS)
    assert all(record["asks"].endswith("?") for record in records)


@pytest.mark.parametrize("name", FAST)
def test_json_holds_the_exact_numbers_of_the_same_seed(capsys, name):
    found = json.loads(shown(capsys, name, "--seed", "7", "--format", "json"))
    result = labs.run(name, 7)
    assert (found["experiment"], found["seed"]) == (name, 7)
    assert found["conclusion"] == result.conclusion
    for table, expected in zip(found["tables"], result.tables, strict=True):
        for row, record in zip(table["rows"], expected.records(), strict=True):
            assert {k: str(v) for k, v in row.items()} == {k: str(v) for k, v in record.items()}


def test_json_has_no_nan_of_its_own(capsys):
    out = shown(capsys, "masking", "--format", "json")
    json.loads(out, parse_constant=pytest.fail)
    assert '"nan"' in out


def test_csv_holds_the_exact_numbers(capsys):
    rows = list(csv.DictReader(shown(capsys, "scale", "--format", "csv").splitlines()))
    (table,) = labs.run("scale").tables
    assert [float(row["slope"]) for row in rows] == [row[5] for row in table.rows]


def test_csv_of_several_tables_says_which_row_is_whose(capsys, monkeypatch):
    from minimha.labs import memory

    monkeypatch.setattr(memory, "TIMED_LENGTHS", (8,))
    rows = list(csv.DictReader(shown(capsys, "memory", "--format", "csv").splitlines()))
    titles = list(dict.fromkeys(row["table"] for row in rows))
    assert len(titles) == 3
    cache = [row for row in rows if row["table"] == titles[1]]
    assert cache[0]["bytes"] == str(2**32)
    assert all(row["n"] == "" for row in cache)


@pytest.mark.parametrize("name", FAST)
def test_a_picture_is_xml_with_every_figure_and_the_conclusion(capsys, name):
    picture = shown(capsys, name, "--format", "svg")
    said = " ".join(text.strip() for text in ET.fromstring(picture).itertext())
    result = labs.run(name)
    assert " ".join(result.conclusion.split()) in " ".join(said.split())
    for figure in result.figures:
        if hasattr(figure, "series"):
            assert all(part in said for part in (figure.title, *figure.series))


@pytest.mark.skipif(os.name != "posix", reason="a pseudo-terminal is POSIX's")
@pytest.mark.parametrize("name", FAST)
def test_an_experiment_fits_a_terminal_of_80_columns(name):
    import pty

    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "cli.py", "lab", name], cwd=REPOSITORY, stdout=follower, close_fds=True,
        env=os.environ | {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"},
    ) as process:  # fmt: skip
        os.close(follower)
        parts = []
        try:
            while part := os.read(leader, 4096):
                parts.append(part)
        except OSError:  # how Linux says that the other side has closed
            pass
        os.close(leader)
        assert process.wait(60) == 0
    lines = [plain(line) for line in b"".join(parts).decode().splitlines()]
    assert max(map(len, lines)) <= 80
    assert any(set(line) & {"|", "█"} for line in lines)


def plain(line):
    """A line without the terminal's escape sequences."""
    return "".join(
        part.partition("m")[2] if n else part for n, part in enumerate(line.split("\x1b"))
    )


def test_a_pipe_that_knows_ascii_alone_gets_marks_of_its_own():
    done = subprocess.run(
        [sys.executable, "cli.py", "lab", "scale"], cwd=REPOSITORY, capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.isascii()
    assert b"o q*k   x q*k / sqrt D" in done.stdout


def test_listing_experiments_runs_none():
    run = "import sys\nfrom minimha.cli import main\nmain(['lab'])\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert not {"minimha.labs.scale", "numba", "json"} & set(done.stdout.split())
