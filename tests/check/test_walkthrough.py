"""The walkthrough's twelve kernels have the bugs that its solutions name."""

import re
from pathlib import Path

import pytest

import minimha

FOLDER = Path(__file__).parents[2] / "walkthroughs"
PAGE = (FOLDER / "9-find-the-bug.md").read_text(encoding="utf-8")
SOLUTIONS = re.findall(r"^\| (\d\d) \| (.*?) \|", PAGE, re.MULTILINE)


def test_every_kernel_has_a_solution():
    assert [f"{name}.py" for name, _ in SOLUTIONS] == sorted(
        path.name for path in (FOLDER / "kernels").glob("*.py")
    )


@pytest.mark.parametrize(("name", "solution"), SOLUTIONS)
def test_check_finds_the_solution(name, solution):
    report = minimha.check(f"{FOLDER / 'kernels' / name}.py:attention")
    assert report.verdict == "wrong"
    assert set(report.deviations) == set(re.findall(r"`(\w+)`", solution))
    assert (report.explains[0] == report.explains[1]) is bool(report.deviations)
    assert not report.alternatives
