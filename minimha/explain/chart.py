"""Charts as data: line charts, bar charts and shaded grids, for terminals and for SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

Written = Callable[[float], str]
Point = tuple[float, float] | None  # None is a gap
MOST_STEPS = 5  # between ticks
CLOSE = 1e-9  # the largest rounding error of a whole number


class Axis(NamedTuple):
    """An axis of a chart: its name, the base of its scale, and its number format.

    Without a ``base``, the scale is linear; with one, it is logarithmic.
    """

    name: str
    base: int | None = None
    written: Written = "{:g}".format


@dataclass(frozen=True)
class Lines:
    """A line chart of one or more series over the x values ``places``.

    ``series`` maps the name of each line to its y values. A line has a gap at a value that is not
    finite, or that is 0 or negative on a logarithmic axis.
    """

    title: str
    x: Axis
    y: Axis
    places: tuple[float, ...]
    series: Mapping[str, tuple[float, ...]]

    def scales(self) -> tuple[Scale, Scale]:
        """Return the scales of x and y; the scale of y begins and ends at round numbers."""
        values = [value for series in self.series.values() for value in series]
        y = Scale.of(values if self.y.base else [0, *values], self.y.base)
        first, *_, last = y.ticks()
        return Scale.of(self.places, self.x.base), Scale(first, last, y.base)

    def points(self, values: tuple[float, ...], width: float) -> list[Point]:
        """Return the points (x, y) of a line with the y values ``values``, or None for each gap.

        x is from 0 to ``width``, and y is from 0 to 1.
        """
        across, up = self.scales()
        found = ((across.at(x), up.at(y)) for x, y in zip(self.places, values, strict=True))
        return [None if x is None or y is None else (x * width, y) for x, y in found]


@dataclass(frozen=True)
class Bars:
    """A bar chart with a group of bars for each of ``names``.

    ``series`` maps a label to one non-negative value for each name.
    """

    title: str
    names: tuple[str, ...]
    series: Mapping[str, tuple[float, ...]]
    written: Written = "{:g}".format

    @property
    def longest(self) -> float:
        """The largest value, or 1 if all values are 0."""
        return max((x for series in self.series.values() for x in series), default=0) or 1


@dataclass(frozen=True)
class Grid:
    """A table of numbers from 0 to 1, each on a background whose shade shows the number."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    written: Written = "{:.2f}".format


class Scale(NamedTuple):
    """The range of an axis from ``low`` to ``high``, logarithmic if ``base`` is given."""

    low: float
    high: float
    base: int | None = None

    @classmethod
    def of(cls, values: Iterable[float], base: int | None) -> Scale:
        """Return the scale from the least to the greatest finite value.

        With a ``base``, only positive values count.
        """
        shown = [x for x in values if math.isfinite(x) and (x > 0 or not base)]
        return cls(min(shown, default=1), max(shown, default=1), base)

    def at(self, number: float) -> float | None:
        """Return the position of ``number`` on the scale, which is 0 at ``low`` and 1 at ``high``.

        Return None for a number that is not finite, or that is 0 or negative on a logarithmic
        scale.

        >>> Scale(1, 100, 10).at(10), Scale(0, 4).at(1), Scale(1, 2, 10).at(0)
        (0.5, 0.25, None)
        """
        if not math.isfinite(number) or (self.base and number <= 0):
            return None
        low, high = self.low, self.high
        if self.base:
            low, high, number = map(math.log10, (low, high, number))
        return (number - low) / (high - low) if high > low else 0.0

    def ticks(self) -> list[float]:
        """Return at least two round numbers that enclose the scale.

        With a base, they are powers of the base. Without one, they are the multiples of 1, 2 or 5
        times a power of 10.

        >>> Scale(0, 0.93).ticks(), Scale(3, 700, 10).ticks()
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [1.0, 10.0, 100.0, 1000.0])
        """
        if self.base:
            first = math.floor(math.log(self.low, self.base) + CLOSE)
            last = max(math.ceil(math.log(self.high, self.base) - CLOSE), first + 1)
            step = math.ceil((last - first) / MOST_STEPS)
            return [float(self.base) ** n for n in range(first, last + step, step)]
        least = (self.high - self.low) / MOST_STEPS or 1
        power = 10.0 ** math.floor(math.log10(least))
        size = next(n * power for n in (1, 2, 5, 10) if n * power > least - CLOSE)
        first = math.floor(self.low / size + CLOSE)
        last = max(math.ceil(self.high / size - CLOSE), first + 1)
        return [round(n * size, 12) for n in range(first, last + 1)]
