"""Draws the pictures that no command draws: ``python walkthroughs/pictures.py swizzle.svg``.

page.png is a photograph of the page that ``example --sentence … --output FILE`` writes. It needs a
browser: ``pip install '.[browser-test]'`` and Chromium.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from minimha.cli import main
from minimha.explain.chart import Grid
from minimha.explain.figures import charts
from minimha.explain.result import Result

PICTURES = Path(__file__).parent / "pictures"
BANKS, WIDTH = 32, 4  # of shared memory; of a chunk of 16 bytes, in banks
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
SENTENCE = "the cat sat on the mat"
WINDOW = {"width": 1120, "height": 700}


def swizzle(folder: Path) -> None:
    """Draw the first bank of each chunk of eight rows, without and with the exclusive or."""

    def grid(title: str, place: Callable[[int, int], int]) -> Grid:
        bank = [[place(row, chunk) * WIDTH / BANKS for chunk in range(8)] for row in range(8)]
        rows, chunks = (tuple(f"{name} {n}" for n in range(8)) for name in ("row", "chunk"))
        return Grid(title, rows, chunks, tuple(map(tuple, bank)), lambda x: f"{x * BANKS:.0f}")

    plain = grid("without: a column is in one set of banks", lambda row, chunk: chunk)
    spread = grid("with: a column is in all banks", lambda row, chunk: chunk ^ row)
    result = Result(
        "swizzle", "Where a tile's rows are in shared memory",
        "A number is the first of a chunk's four banks. Eight lanes read a column at once.",
        0, (), (plain, spread), "chunk ^ row spreads a column over all 32 banks.",
    )  # fmt: skip
    (folder / "swizzle.svg").write_text(charts.svg(result), encoding="utf-8")


def page(folder: Path) -> None:
    """Photograph the page of a sentence with one cell written out."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        document = Path(made) / "page.html"
        main(["example", "--sentence", SENTENCE, "--heads", "2", "--output", str(document)])
        browser = playwright.chromium.launch(executable_path=program)
        view = browser.new_page(viewport=WINDOW)
        view.goto(document.as_uri())
        view.screenshot(path=folder / "page.png")
        browser.close()


DRAWN = {"swizzle.svg": swizzle, "page.png": page}

if __name__ == "__main__":
    for name in sys.argv[1:] or DRAWN:
        DRAWN[name](PICTURES)
