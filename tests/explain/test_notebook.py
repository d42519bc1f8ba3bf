"""A trace at the end of a notebook's cell is its page, in a frame."""

import re
from html import unescape
from pathlib import Path

import pytest

from minimha.examples import EXAMPLES
from minimha.explain import page

ROOT = Path(__file__).parents[2]
CAT = EXAMPLES["the-cat-sat"].trace()


def test_a_trace_shows_its_page_in_a_frame_that_can_do_nothing_else():
    shown = CAT._repr_html_()
    assert re.match('<iframe sandbox="allow-scripts" title="the-cat-sat', shown)
    assert unescape(re.search('srcdoc="([^"]*)"', shown)[1]) == page.page(CAT, 3)


def test_a_trace_that_is_too_large_says_so(monkeypatch):
    monkeypatch.setattr(page, "LARGEST", 10)
    assert CAT._repr_html_().startswith("<p>a page would hold")


@pytest.fixture
def nbformat():
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    return pytest.importorskip("nbformat", reason="nbformat is not installed")


def execute(notebook):
    """Run every cell; a cell that raises fails the test."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    resources = {"metadata": {"path": str(ROOT)}}  # where minimha is found if it is not installed
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()


def test_a_notebook_runs(nbformat):
    code = """\
from minimha import attention
from minimha.explain import Trace
trace = Trace()
attention([[1, 0], [0, 1]], [[1, 0], [0, 1]], [[1], [3]], tap=trace)
trace"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    execute(notebook)
    (output,) = notebook.cells[0].outputs
    assert output["data"]["text/html"].startswith("<iframe sandbox")


def test_the_notebook_of_the_first_lesson_runs(nbformat):
    notebook = nbformat.read(ROOT / "walkthroughs" / "first_lesson.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # none are kept
    execute(notebook)
    shown = [o.data for cell in notebook.cells for o in cell.get("outputs", ()) if "data" in o]
    assert any(data.get("text/html", "").startswith("<iframe sandbox") for data in shown)
