"""Draw the charts of an experiment's result as SVG."""

import textwrap
from itertools import pairwise

from minimha.explain.chart import Bars, Grid, Lines
from minimha.explain.figures.drawing import SIZE, Drawing, breadth, in_rows, stacked
from minimha.explain.figures.matrix import ROW, cell
from minimha.explain.result import Result

WIDTH, HEIGHT = 360, 220  # of the plane on which lines are drawn
BAR, LONGEST = 16, 260
TOP = 24
SMALL = 12
KINDS = ("one", "two", "three", "four")
WIDEST, GAP = 960, 28
COLUMNS = 120  # characters of a line of text


def svg(result: Result) -> str:
    """Return one SVG picture with the title, every figure and the conclusion of ``result``."""
    head, end = Drawing(), Drawing()
    head.text(0, SIZE / 2 + 2, result.title, "bold", size=SIZE + 3)
    for drawing, words, kind in ((head, result.about, "muted"), (end, result.conclusion, "bold")):
        for line in textwrap.wrap(words, COLUMNS):
            drawing.text(0, drawing.height + SIZE, line, kind)
    drawn = [figure if isinstance(figure, Drawing) else chart(figure) for figure in result.figures]
    return stacked([head, in_rows(drawn, WIDEST, GAP), end], GAP).svg(result.title)


def chart(data: Lines | Bars | Grid) -> Drawing:
    """Draw a line chart, bar chart or grid with its title; several series have a legend."""
    drawing = Drawing()
    drawing.text(0, SIZE / 2, data.title, "bold")
    if isinstance(data, Grid):
        drawing.place(_grid(data), 0, drawing.height + 12)
        return drawing
    x = 0.0
    for name, kind in zip(data.series, KINDS, strict=False):
        if len(data.series) > 1:
            drawing.rect(x, ROW + 2, 10, 10, f"tip-{kind}")
            drawing.text(x + 16, ROW + 7, name, size=SMALL)
            x += 32 + breadth(name, SMALL)
    body = _lines(data) if isinstance(data, Lines) else _bars(data)
    drawing.place(body, 0, drawing.height + 12)
    return drawing


def _grid(data: Grid) -> Drawing:
    drawing = Drawing()
    left = max(breadth(name, SMALL) for name in data.rows) + 12
    width = max(breadth(name, SMALL) for name in data.columns) + 12
    for j, name in enumerate(data.columns):
        middle = left + (j + 0.5) * width
        drawing.text(middle, ROW / 2, name, "muted", anchor="middle", size=SMALL)
    for i, (name, row) in enumerate(zip(data.rows, data.values, strict=True), 1):
        middle = (i + 0.5) * ROW
        drawing.text(left - 8, middle, name, "muted", anchor="end", size=SMALL)
        for j, value in enumerate(row):
            cell(drawing, left + j * width, i * ROW, width, data.written(value), value)
    return drawing


def _lines(data: Lines) -> Drawing:
    drawing = Drawing()
    left = _axes(drawing, data)
    for kind, values in zip(KINDS, data.series.values(), strict=False):
        line = [
            point and (left + point[0], TOP + HEIGHT * (1 - point[1]))
            for point in data.points(values, WIDTH)
        ]
        for start, end in pairwise(line):
            if start and end:
                drawing.line(start, end, kind=kind)
        for x, y in filter(None, line):
            drawing.rect(x - 3, y - 3, 6, 6, f"tip-{kind}")
    return drawing


def _axes(drawing: Drawing, data: Lines) -> float:
    """Draw both axes and their ticks; return the left end of the x axis."""
    across, up = data.scales()
    ticks = {tick: data.y.written(tick) for tick in up.ticks()}
    left = max(breadth(words, SMALL) for words in ticks.values()) + 10
    drawing.text(0, SMALL / 2, data.y.name, "muted", size=SMALL)
    for tick, words in ticks.items():
        y = TOP + HEIGHT * (1 - (up.at(tick) or 0))
        drawing.line((left, y), (left + WIDTH, y), kind="cell")
        drawing.text(left - 8, y, words, "muted", anchor="end", size=SMALL)
    bottom, end = TOP + HEIGHT, 0.0
    for place in data.places:
        words, x = data.x.written(place), left + WIDTH * (across.at(place) or 0)
        half = breadth(words, SMALL) / 2
        if x - half > end:
            drawing.text(x, bottom + 14, words, "muted", anchor="middle", size=SMALL)
            end = x + half + 6
    drawing.line((left, TOP), (left, bottom), (left + WIDTH, bottom))
    middle = left + WIDTH / 2
    drawing.text(middle, bottom + 34, data.x.name, "muted", anchor="middle", size=SMALL)
    return left


def _bars(data: Bars) -> Drawing:
    drawing = Drawing()
    left = max(breadth(name, SMALL) for name in data.names) + 12
    y = 0.0
    for n, name in enumerate(data.names):
        middle = y + BAR * len(data.series) / 2
        drawing.text(left - 8, middle, name, "muted", anchor="end", size=SMALL)
        for kind, values in zip(KINDS, data.series.values(), strict=False):
            length = LONGEST * values[n] / data.longest
            drawing.rect(left, y + 1, length, BAR - 2, f"tip-{kind}")
            end = left + length + 6, y + BAR / 2
            drawing.text(*end, data.written(values[n]), "number", size=SMALL)
            y += BAR
        y += 8
    drawing.line((left, 0), (left, y - 8))
    return drawing
