"""The flow of data, blocks, bars and angles: what is drawn is what the trace holds."""

import itertools
import math
import re

import numpy as np
import pytest
from pictures import corners, of, shapes

from minimha.examples import EXAMPLES, blocks, sentences
from minimha.explain import Trace
from minimha.explain.figures import figures
from minimha.explain.figures.angles import PANEL
from minimha.explain.figures.pick import WHOLE
from minimha.layers.cosine import cosine_attention

HEADS = sentences.of_length(5, num_kv_heads=1).trace()
GIVEN = EXAMPLES["given-qkv"].trace()
FLASH = blocks.of_length(5).trace(is_causal=True)


def drawn(trace, title):
    return shapes(figures(trace, 3)[title].svg(title))


def boxes(picture):
    """Name → left, top, right, bottom."""
    names = [text.text for text in of(picture, "text", "bold")]
    sides = [[float(box.get(key)) for key in ("x", "y", "width", "height")]
             for box in of(picture, "rect", "box")]  # fmt: skip
    return {
        name: (x, y, x + width, y + height)
        for name, (x, y, width, height) in zip(names, sides, strict=True)
    }


def arrows(picture):
    """Where each arrow leads: from and to which name."""
    places = boxes(picture)
    found = set()
    for arrow in of(picture, "polyline", "line"):
        (x0, y0), *_, (x, y) = corners(arrow)
        start = [
            n for n, (a, _, b, bottom) in places.items() if a <= x0 <= b and abs(bottom - y0) < 0.1
        ]
        end = [n for n, (a, top, b, _) in places.items() if a <= x <= b and abs(top - y) < 0.1]
        found.add((*start, *end))
    return found


def test_arrows_lead_from_what_a_matrix_is_computed_from_to_it():
    picture = drawn(HEADS, "flow of data")
    found = arrows(picture)
    assert {("x", "q"), ("W_q", "q"), ("q", "scores"), ("k", "scores"), ("scaled", "masked"),
            ("v", "head_output"), ("weights", "head_output"), ("head_output", "concat"),
            ("concat", "output"), ("W_o", "output")} <= found  # fmt: skip
    assert len(of(picture, "polygon", "tip")) == len(found)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "shapes"])
def test_boxes_do_not_touch_and_have_their_shapes(name):
    trace = EXAMPLES[name].trace()
    picture = drawn(trace, "flow of data")
    found = boxes(picture)
    for one, other in itertools.combinations(found.values(), 2):
        apart = one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
        assert apart
    assert set(found) <= set(trace)
    words = [text.text for text in of(picture, "text", "muted")]
    assert " × ".join(map(str, trace[next(iter(found))].shape)) in words


@pytest.mark.parametrize("name", ["the-cat-sat", "llama", "gpt2", "additive"])
def test_a_long_formula_stands_whole_on_two_lines_inside_its_box(name):
    trace = EXAMPLES[name].trace()
    picture = drawn(trace, "flow of data")
    lines = [text for text in of(picture, "text", "muted") if text.get("font-size") == "11"]
    said = " ".join(text.text for text in lines)
    places = boxes(picture)
    for box in places:
        step = trace.by_name[box][0]
        assert step.formula in (step.symbol, box) or step.formula in said, step.formula
    for line in lines:
        if " may see key " in line.text or "row by row" in line.text:
            x, y = float(line.get("x")), float(line.get("y"))
            assert any(a < x < b and top < y < bottom for a, top, b, bottom in places.values())


@pytest.mark.parametrize("name", ["heads-000", "llama"])
def test_shapes_stand_apart(name):
    picture = drawn(EXAMPLES[name].trace(), "flow of data")
    sides = [[float(box.get(key)) for key in ("x", "y", "width")]
             for box in of(picture, "rect", "ground") if box.get("height") == "14"]  # fmt: skip
    assert sides
    for (x, y, width), (other_x, other_y, other_width) in itertools.combinations(sides, 2):
        assert y != other_y or x + width < other_x or other_x + other_width < x


def test_no_arrow_leads_from_what_gives_no_number():
    found = arrows(drawn(EXAMPLES["additive"].trace(), "flow of data"))
    assert {start for start, end in found if end == "energies"} == {"hidden", "w"}
    assert {start for start, end in found if end == "row_sum"} == {"exponentials"}


@pytest.mark.parametrize("name", ["gpt2", "cosine"])
def test_only_what_comes_out_leads_nowhere(name):
    trace = EXAMPLES[name].trace()
    picture = drawn(trace, "flow of data")
    leading = {start for start, _ in arrows(picture)}
    ends = {box.partition("[")[0] for box in set(boxes(picture)) - leading}
    assert ends == {"residual" if name == "gpt2" else "output"}


def test_heads_are_split_from_what_is_computed_side_by_side():
    found = arrows(drawn(EXAMPLES["gpt2"].trace(), "flow of data"))
    assert {start for start, end in found if end == "q"} == {"q_combined"}


def test_layers_are_joined_where_one_takes_what_another_puts_out():
    found = arrows(drawn(EXAMPLES["translation"].trace(), "flow of data"))
    assert ("added[encoder]", "context[cross]") in found
    assert ("added[decoder]", "x[cross]") in found


def test_blocks_are_numbered_as_they_are_loaded_and_skipped_ones_are_crossed_out():
    picture = drawn(FLASH, "blocks")
    loaded = [name for name in FLASH if name.startswith("S[")]
    orders = [text.text for text in of(picture, "text", "bold")][1:]
    assert orders == [f"{n}." for n in range(1, len(loaded) + 1)]
    assert len(of(picture, "rect", "skipped")) == len(FLASH["skipped"])
    scores = [shape for shape in of(picture, "rect", "heat") if shape.get("height") == "24"]
    finite = sum(int(np.isfinite(FLASH[name]).sum()) for name in loaded)
    assert len(scores) == finite == 15
    crossed = [text.text for text in of(picture, "text", "number muted")]
    assert crossed.count("×") == sum(FLASH[name].size for name in loaded) - finite


def test_bars_are_as_long_as_the_weights():
    bars = [float(bar.get("width")) for bar in of(drawn(GIVEN, "values picked"), "rect", "bar")]
    np.testing.assert_allclose(bars, WHOLE * GIVEN["weights"][-1], atol=0.01)


def test_arrows_have_the_vectors_lengths_and_angles():
    picture = drawn(GIVEN, "angles")
    arrows = [
        [(b[0] - a[0], a[1] - b[1]) for a, b in map(corners, of(picture, "polyline", kind))]
        for kind in ("one", "two")
    ]
    longest = max(np.hypot(*vector) for side in arrows for vector in side)
    assert longest == pytest.approx(PANEL, abs=0.02)
    for (qx, qy), (kx, ky), k in zip(*arrows, GIVEN["k"], strict=True):
        q = GIVEN["q"][-1]
        assert math.hypot(kx, ky) / math.hypot(qx, qy) == pytest.approx(
            np.linalg.norm(k) / np.linalg.norm(q), abs=1e-3
        )
        cosine = q @ k / np.linalg.norm(q) / np.linalg.norm(k)
        found = (qx * kx + qy * ky) / math.hypot(qx, qy) / math.hypot(kx, ky)
        assert found == pytest.approx(cosine, abs=1e-3)


def test_an_angle_is_no_finer_than_the_cosine_beside_it_tells():
    """cos 20.2° is 0.938, and arccos 0.938 is 20.3°: whole degrees agree."""
    trace = Trace()
    turned = [[math.cos(math.radians(20.236)), math.sin(math.radians(20.236))]]
    cosine_attention([[1.0, 0.0]], turned, [[1.0]], tap=trace)
    (words,) = re.findall("cosine [^<]*", figures(trace, 3)["angles"].svg(""))
    assert words == "cosine 0.938, angle 20°"


def test_figures_can_be_chosen_and_a_cell_is_written_out():
    assert list(figures(HEADS.selected(["heatmap"]), 3)) == ["heatmaps"]
    assert list(figures(GIVEN.selected(["picks", "q"]), 3)) == ["values picked", "matrices"]
    picture = figures(GIVEN.selected(query="q0"), 3)["values picked"].svg("")
    assert "how query q0 picks values" in picture
    every = figures(GIVEN.selected(["picks"]), 3)["values picked"].svg("")
    assert re.findall("how query (q.) picks", every) == ["q0", "q1", "q2"]
    assert "scores: S[" in figures(GIVEN.selected(cell="1,2"), 3)["cell"].svg("")


def test_a_figure_that_does_not_suit_a_run_is_left_out():
    assert list(figures(HEADS, 3)) == ["flow of data", "heatmaps"]
    assert list(figures(EXAMPLES["shapes"].trace(), 3)) == ["matrices"]
    assert "blocks" in figures(FLASH, 3)
    assert re.search("angle 45°", figures(GIVEN, 3)["angles"].svg(""))
