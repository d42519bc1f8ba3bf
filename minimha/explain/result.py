"""The result of an experiment: tables, figures, and the conclusion drawn from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minimha.explain.chart import Bars, Grid, Lines
    from minimha.explain.figures.drawing import Drawing


@dataclass(frozen=True)
class Table:
    """Rows of exact values under ``columns``, each with the function that writes its values."""

    title: str
    columns: Mapping[str, Callable[[Any], str]]
    rows: tuple[tuple[Any, ...], ...]

    def records(self) -> list[dict[str, Any]]:
        """Return column → exact value, for each row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def written(self) -> list[dict[str, str]]:
        """Return column → text, for each row."""
        writers = tuple(self.columns.values())
        return [
            dict(zip(self.columns, (w(x) for w, x in zip(writers, row, strict=True)), strict=True))
            for row in self.rows
        ]


@dataclass(frozen=True)
class Result:
    """An experiment's result."""

    name: str
    title: str
    about: str  # what was computed from which inputs
    seed: int  # of everything that was drawn
    tables: tuple[Table, ...]
    figures: tuple[Lines | Bars | Grid | Drawing, ...]  # a Drawing is shown in pictures only
    conclusion: str  # one sentence, made from the numbers in ``tables``
