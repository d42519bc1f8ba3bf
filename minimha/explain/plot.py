"""Draw line and bar charts as lines of text for a terminal."""

from collections.abc import Iterator
from itertools import pairwise

from minimha.explain.chart import Bars, Lines, Point

WIDEST, HEIGHT = 76, 12  # characters; lines from the first tick of y to its last
MARKS, ASCII_MARKS = "●○◆◇", "ox+*"
SHADES, ASCII_SHADES = "█▒░▚", "#=.:"
LEFT, GAP = 4, 2  # characters of the left margin, and between a name and its bar


def plot(data: Lines | Bars, width: int, *, is_ascii: bool) -> list[str]:
    """Draw a chart without its title, as lines of text of at most ``width`` characters.

    A ``width`` below 40 counts as 40. If ``is_ascii``, all marks are ASCII characters. Where marks
    of several series coincide, that of the first series is shown.
    """
    width = max(min(width, WIDEST), 40)
    if isinstance(data, Bars):
        return list(_bars(data, width, ASCII_SHADES if is_ascii else SHADES))
    return list(_lines(data, width, ASCII_MARKS if is_ascii else MARKS, "." if is_ascii else "·"))


def _bars(data: Bars, width: int, shades: str) -> Iterator[str]:
    if len(data.series) > 1:
        yield _legend(data, shades)
    margin = LEFT + max(map(len, data.names)) + GAP
    texts = {name: [data.written(x) for x in values] for name, values in data.series.items()}
    room = width - margin - GAP - max(len(text) for found in texts.values() for text in found)
    for n, name in enumerate(data.names):
        start = " " * LEFT + name
        for shade, (series, values) in zip(shades, data.series.items(), strict=False):
            bar = shade * round(room * values[n] / data.longest)
            yield f"{start:<{margin}}{bar} {texts[series][n]}"
            start = ""


def _lines(data: Lines, width: int, marks: str, between: str) -> Iterator[str]:
    _, up = data.scales()
    labels = {_row(up.at(tick) or 0): data.y.written(tick) for tick in up.ticks()}
    margin = LEFT + max(map(len, labels.values())) + 1
    columns = width - margin - LEFT
    grid = [[" "] * (columns + 1) for _ in range(HEIGHT + 1)]
    lines = [data.points(values, columns) for values in data.series.values()]
    for line in lines:
        _connect(grid, line, between)
    for line, mark in reversed(list(zip(lines, marks, strict=False))):
        for spot in filter(None, line):
            grid[_row(spot[1])][round(spot[0])] = mark
    yield " " * LEFT + data.y.name
    if len(data.series) > 1:
        yield _legend(data, marks)
    for n, cells in enumerate(grid):
        yield f"{labels.get(n, ''):>{margin - 1}} |{''.join(cells)}".rstrip()
    yield " " * margin + "+" + "-" * (columns + 1)
    yield " " * (margin + 1) + _numbers(data, columns)
    yield " " * (margin + 1) + data.x.name.center(columns).rstrip()


def _row(height: float) -> int:
    return round((1 - height) * HEIGHT)


def _legend(data: Lines | Bars, marks: str) -> str:
    pairs = zip(marks, data.series, strict=False)
    return " " * LEFT + "   ".join(f"{mark} {name}" for mark, name in pairs)


def _connect(grid: list[list[str]], line: list[Point], between: str) -> None:
    for start, end in pairwise(line):
        if start and end:
            for column in range(round(start[0]) + 1, round(end[0])):
                part = (column - start[0]) / (end[0] - start[0])
                grid[_row(start[1] + part * (end[1] - start[1]))][column] = between


def _numbers(data: Lines, columns: int) -> str:
    """Return the numbers below the x axis, without those that overlap."""
    across, _ = data.scales()
    line = ""
    for place in data.places:
        words = data.x.written(place)
        start = max(0, round((across.at(place) or 0) * columns) - len(words) // 2)
        if start > len(line) or not line:
            line = line.ljust(start) + words
    return line
