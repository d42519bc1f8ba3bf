"""Heatmaps and matrices as drawn: every label at its row or column, every number in its cell."""

import re
import shutil
import struct

import numpy as np
import pytest
from pictures import of, shapes, words

from minimha import attention
from minimha.examples import EXAMPLES, sentences
from minimha.explain import Trace, figures
from minimha.explain.figures import raster
from minimha.explain.figures.drawing import MARGIN, Drawing, breadth, in_rows

CAT = EXAMPLES["the-cat-sat"].trace()


def texts(picture):
    found = [shape for shape in shapes(picture) if shape.tag.endswith("text")]
    return [(words(text), float(text.get("x")), float(text.get("y"))) for text in found]


def shades(picture):
    """How strong each cell is, without those of the scales."""
    cells = [cell for cell in of(shapes(picture), "rect", "heat") if cell.get("height") != "16"]
    return [float(cell.get("fill-opacity")) for cell in cells]


def test_labels_stand_over_their_columns_and_numbers_under_them():
    found = texts(figures.svg(CAT.selected(["weights"]), 3))
    numbers = {number: (x, y) for number, x, y in found}
    heads = [(x, y) for label, x, y in found if label == "cat"]
    assert numbers["0.731"][0] in [x for x, _ in heads]
    assert any(abs(numbers["0.731"][1] - y) < 1 for _, y in heads)


@pytest.mark.parametrize("label", ["mmmmmmmmmm", "WWWWWWWWWWWW", "understanding", "HEADQUOTED"])
def test_the_longest_row_label_begins_where_the_page_does(label):
    """The font's own widths, in parts of the size: DejaVu Sans, the widest of those asked for."""
    widths = dict(zip("mWHEADQUOTunderstaig", (
        0.974, 0.989, 0.752, 0.632, 0.684, 0.770, 0.787, 0.732, 0.787, 0.611,
        0.634, 0.634, 0.635, 0.615, 0.411, 0.521, 0.392, 0.613, 0.278, 0.635,
    ), strict=True), **{"…": 1.0})  # fmt: skip
    trace = sentences.sentence([label, "a"]).trace()
    picture = shapes(figures.figures(trace, 3)["heatmaps"].svg(""))
    ends = [text for text in of(picture, "text", "muted") if text.get("text-anchor") == "end"]
    shown = max(ends, key=lambda text: len(words(text)))
    width = sum(12 * widths[character] for character in words(shown))
    assert width <= float(shown.get("x")) - MARGIN


def test_text_is_inside_the_picture():
    for example in EXAMPLES.values():
        picture = figures.svg(example.trace(), 3)
        width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', picture).groups())
        for _, x, y in texts(picture):
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_a_darker_cell_is_a_larger_weight():
    found = shades(figures.svg(CAT.selected(["weights"]), 3))
    weights = CAT["weights"][np.tril_indices(3)]
    np.testing.assert_allclose(found[:6], weights, atol=0.005)


def test_scores_before_and_after_the_mask_share_one_scale():
    trace = Trace()
    attention([[1.0], [2.0]], [[1.0], [-3.0]], np.eye(2), is_causal=True, scale=1, tap=trace)
    found = shades(figures.svg(trace.selected(["scores", "masked"]), 3))
    np.testing.assert_allclose(found, [7 / 8, 3 / 8, 1, 0, 7 / 8, 1, 0], atol=0.005)


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_a_question_mark_is_explained_where_there_is_one(backend):
    trace = Trace()
    q, k = [[1.0], [2.0]], [[1.0], [np.nan]]
    attention(q, k, np.eye(2), is_causal=True, backend=backend, tap=trace)
    said = " ".join(text for text, _, _ in texts(figures.svg(trace, 3)))
    assert " ? " in said
    assert "? is infinite or NaN." in said
    assert "? is infinite or NaN." not in figures.svg(CAT, 3)


def test_a_block_tells_what_is_infinite_from_what_is_hidden():
    trace = Trace(blocks=(2, 2))
    q, k = [[1.0], [2.0]], [[1.0], [np.nan]]
    attention(q, k, np.eye(2), is_causal=True, backend="tiled", tap=trace)
    found = figures.figures(trace, 3)["blocks"].svg("")
    said = [text for text, _, _ in texts(found)]
    assert (said.count("?"), said.count("×")) == (1, 1)
    assert "? is infinite or NaN." in said


def test_a_scale_has_room_for_its_least_number():
    trace = Trace()
    attention([[1e9], [2e9]], [[1.0], [2.0]], np.eye(2), scale=1, tap=trace)
    picture = shapes(figures.svg(trace.selected(["scores", "weights"]), 3))
    [name] = [text for text in of(picture, "text", "muted") if text.text == "scores"]
    [low] = [text for text in of(picture, "text", "number") if text.text == "1.00e+09"]
    right = float(name.get("x")) + breadth("scores", 12)
    assert right < float(low.get("x")) - breadth("1.00e+09", 12)
    bars = [bar for bar in of(picture, "rect", "heat") if bar.get("height") == "16"]
    assert len({bar.get("x") for bar in bars}) == 20  # both scales begin at one place


def test_a_picture_of_chosen_steps_shows_them_and_what_is_printed():
    said = [text for text, _, _ in texts(figures.svg(CAT.selected(["weights"]), 3))]
    assert "weights, printed in 'Step 3: Softmax Normalization': [1 0 0]" in " ".join(said)
    assert "row cat, column The: printed 0.268, exact 0.268941: truncated, not rounded" in said
    assert "raw scores" not in said


def test_a_picture_selects_as_text_and_escapes_tokens():
    trace = sentences.sentence(["<script>", "a&b", "understanding"]).trace()
    picture = figures.svg(trace, 3)
    assert "<script>" in [text for text, _, _ in texts(picture)]
    assert "<script>" not in picture
    assert "<title>understanding</title>" in picture  # whole, where the label is cut


def test_an_empty_matrix_says_so():
    trace = Trace()
    attention(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros((0, 2)), tap=trace)
    assert "(empty)" in figures.svg(trace.selected(["scores"]), 3)


def test_rows_break_where_they_are_full():
    part = Drawing()
    part.rect(0, 0, 40, 10, "cell")
    whole = in_rows([part] * 3, 100, 10)
    assert (whole.width, whole.height) == (90, 30)


def test_png_is_the_picture_twice_as_large():
    if shutil.which("rsvg-convert") is None:
        pytest.skip("rsvg-convert is not installed (Debian's librsvg2-bin)")
    picture = figures.svg(CAT, 3)
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', picture).groups())
    png = raster.png(picture)
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (2 * width, 2 * height)


def test_without_a_rasteriser_a_sentence_says_which_there_are(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs a rasteriser: install rsvg-convert"):
        raster.png(figures.svg(CAT, 3))
