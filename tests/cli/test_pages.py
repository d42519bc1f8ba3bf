"""README and walkthroughs: pictures show what their command shows, commands run, links lead on."""

import re
import runpy
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from minimha.cli import build_parser, main
from minimha.labs import removed

REPOSITORY = Path(__file__).parents[2]
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "walkthroughs").glob("*.md"))]
NAMES = [page.name for page in PAGES]
WRITTEN = sorted(
    {
        line.strip().removeprefix("python cli.py ")
        for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("    python cli.py ") and ".csv" not in line
    }
)  # fmt: skip
COMMANDS = [command for command in WRITTEN if not command.startswith("bench")]
IN_PICTURES = "--output walkthroughs/pictures/"
PICTURES = [command for command in COMMANDS if IN_PICTURES in command]
SCRIPT = runpy.run_path(str(REPOSITORY / "walkthroughs" / "pictures.py"))  # draws the other ones


def words(picture):
    return " ".join(" ".join(ET.fromstring(picture).itertext()).split())


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(removed, "NUM_QUESTIONS", 1)  # of the shipped model
    arguments = shlex.split(command)
    if "--output" in arguments:
        name = Path(arguments[arguments.index("--output") + 1]).name
        arguments[arguments.index("--output") + 1] = str(tmp_path / name)
    has_bug = command.startswith("check walkthroughs/kernels/")
    assert main(arguments) == (1 if has_bug else 0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", sorted(set(WRITTEN) - set(COMMANDS)))
def test_commands_that_take_minutes_are_well_formed(command):
    build_parser().parse_args(shlex.split(command))


@pytest.mark.parametrize("command", PICTURES)
def test_pictures_show_what_their_command_shows_now(command, tmp_path):
    *arguments, name = shlex.split(command)
    assert main([*arguments, str(tmp_path / "new.svg")]) == 0
    new = (tmp_path / "new.svg").read_text(encoding="utf-8")
    tracked = (REPOSITORY / name).read_text(encoding="utf-8")
    assert words(new) == words(tracked), f"run: python cli.py {command} --force"


def test_every_walkthrough_leads_to_another():
    for page in (REPOSITORY / "walkthroughs").glob("[0-9]*.md"):
        last = page.read_text("utf-8").splitlines()[-1]
        assert re.match(r"Next: \[.+\]\(.+\.md\)\.", last), page.name


def test_the_script_draws_what_the_walkthrough_shows(tmp_path):
    SCRIPT["swizzle"](tmp_path)
    tracked = (REPOSITORY / "walkthroughs" / "pictures" / "swizzle.svg").read_text("utf-8")
    assert words((tmp_path / "swizzle.svg").read_text("utf-8")) == words(tracked)


def test_every_picture_has_its_command():
    shown = {Path(command.split()[-1]).name for command in WRITTEN if IN_PICTURES in command}
    pictures = {path.name: path for path in (REPOSITORY / "walkthroughs" / "pictures").iterdir()}
    assert shown | set(SCRIPT["DRAWN"]) == set(pictures)
    assert max(path.stat().st_size for path in pictures.values()) < 200_000


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target
