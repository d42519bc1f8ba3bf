"""Charts: scales and ticks, and what a terminal and SVG draw of the same data."""

import math

import pytest
from pictures import corners, of, shapes, words

from minimha.explain.chart import Axis, Bars, Lines, Scale
from minimha.explain.figures import charts
from minimha.explain.plot import plot

LINES = Lines(
    "growth", Axis("n", 2), Axis("value"), (1, 2, 4), {"one": (0, 2, 4), "two": (4, math.nan, 0)}
)
BARS = Bars("shares", ("cat", "mouse"), {"before": (1, 0.5), "after": (0.25, 0)}, "{:.2f}".format)


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (Scale(0, 3), [0, 1, 2, 3]),
        (Scale(-2, 7), [-2, 0, 2, 4, 6, 8]),
        (Scale(0, 0), [0, 1]),
        (Scale(1, 1, 10), [1, 10]),
        (Scale(10, 1000, 10), [10, 100, 1000]),
        (Scale(2, 300, 10), [1, 10, 100, 1000]),
        (Scale(2**18, 2**36, 2), [2**18, 2**22, 2**26, 2**30, 2**34, 2**38]),
    ],
)
def test_ticks_are_round_and_enclose_the_scale(scale, ticks):
    assert scale.ticks() == pytest.approx(ticks)


def test_what_an_axis_does_not_have_leaves_a_gap():
    assert Scale(1, 100, 10).at(0) is None
    assert Scale(0, 1).at(math.inf) is None
    assert LINES.points((0, math.nan, 4), 100) == [(0, 0), None, (100, 1)]
    assert Scale.of([0, -1, math.inf, 3, 5], 10) == Scale(3, 5, 10)


def test_a_terminal_shows_the_first_mark_where_two_meet_and_breaks_lines_at_gaps():
    lines = plot(LINES, 80, is_ascii=False)
    assert lines[:2] == ["    value", "    ● one   ○ two"]
    plane = [line.partition("|")[2] for line in lines if "|" in line]
    assert (plane[0][0], plane[0][-1]) == ("○", "●")
    assert (plane[-1][0], plane[-1][-1]) == ("●", "○")
    assert plane[6].index("●") == len(plane[0]) // 2
    assert sum(row.count("○") for row in plane) == 2
    assert lines[-2].split() == ["1", "2", "4"]
    assert lines[-1].strip() == "n"


@pytest.mark.parametrize("width", [10, 40, 60, 80, 200])
@pytest.mark.parametrize("data", [LINES, BARS])
def test_a_plot_is_as_wide_as_it_may_be_and_ascii_where_it_must(data, width):
    for is_ascii in (False, True):
        lines = plot(data, width, is_ascii=is_ascii)
        assert max(map(len, lines)) <= max(40, min(width, 78))
        assert not is_ascii or "".join(lines).isascii()


def test_bars_are_as_long_as_their_values():
    lines = plot(BARS, 80, is_ascii=True)
    assert lines[0] == "    # before   = after"
    long, quarter, half, nothing = (line.split()[-2:] for line in lines[1:])
    assert len(half[0]) == pytest.approx(len(long[0]) / 2, abs=1)
    assert len(quarter[0]) == pytest.approx(len(long[0]) / 4, abs=1)
    assert (long[1], quarter[1], half[1], nothing) == ("1.00", "0.25", "0.50", ["0.00"])


def test_a_picture_has_the_points_that_the_data_have():
    picture = shapes(charts.chart(LINES).svg(""))
    marks = {kind: of(picture, "rect", f"tip-{kind}")[1:] for kind in ("one", "two")}
    places = {kind: [(float(m.get("x")), float(m.get("y"))) for m in found]
              for kind, found in marks.items()}  # fmt: skip
    (x0, y0), (x1, y1), (x2, y2) = places["one"]
    assert x1 - x0 == pytest.approx(charts.WIDTH / 2, abs=0.02)
    assert (x2 - x0, y0 - y2) == pytest.approx((charts.WIDTH, charts.HEIGHT), abs=0.02)
    assert y0 - y1 == pytest.approx(charts.HEIGHT / 2, abs=0.02)
    assert places["two"] == [(x0, y2), (x2, y0)]
    assert len(of(picture, "polyline", "one")) == 2
    assert not of(picture, "polyline", "two")  # its middle is missing


def test_a_picture_has_bars_beside_their_names():
    picture = shapes(charts.chart(BARS).svg(""))
    before = of(picture, "rect", "tip-one")[1:]
    assert [float(bar.get("width")) for bar in before] == [charts.LONGEST, charts.LONGEST / 2]
    texts = [words(text) for text in picture if text.tag.endswith("text")]
    assert texts == ["shares", "before", "after", "cat", "1.00", "0.25", "mouse", "0.50", "0.00"]


def test_the_axes_meet_where_both_scales_begin():
    picture = shapes(charts.chart(LINES).svg(""))
    top, corner, right = corners(of(picture, "polyline", "line")[0])
    assert top[0] == corner[0]
    assert corner[1] == right[1]
    assert (right[0] - corner[0], corner[1] - top[1]) == (charts.WIDTH, charts.HEIGHT)
