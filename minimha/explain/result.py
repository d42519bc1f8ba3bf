"""Define the result of an experiment: tables, figures and a conclusion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minimha.explain.chart import Bars, Grid, Lines
    from minimha.explain.figures.drawing import Drawing


@dataclass(frozen=True)
class Table:
    """A table of exact values, with a format for each column.

    ``columns`` maps each column's name to a function that formats its values.
    """

    title: str
    columns: Mapping[str, Callable[[Any], str]]
    rows: tuple[tuple[Any, ...], ...]

    def records(self) -> list[dict[str, Any]]:
        """Return one dictionary per row, from column name to exact value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def written(self) -> list[dict[str, str]]:
        """Return one dictionary per row, from column name to formatted value."""
        writers = tuple(self.columns.values())
        return [
            dict(zip(self.columns, (w(x) for w, x in zip(writers, row, strict=True)), strict=True))
            for row in self.rows
        ]


@dataclass(frozen=True)
class Result:
    """The tables, figures and conclusion of an experiment."""

    name: str
    title: str
    about: str  # what was computed from which inputs
    seed: int  # of all random numbers
    tables: tuple[Table, ...]
    figures: tuple[Lines | Bars | Grid | Drawing, ...]  # a Drawing is shown in pictures only
    conclusion: str  # one sentence, written from the numbers in ``tables``
