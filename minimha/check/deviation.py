"""Describe a known bug (deviation): the record, and the table's rows of one stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Deviation:
    """A known bug of attention: its identifier, what is wrong, and what to change."""

    identifier: str
    stage: str
    wrong: str  # a sentence
    change: str  # a sentence: what to change
    needs: tuple[str, ...] = ()  # it changes an answer only if one of these options is given
    values: tuple[Any, ...] = (1,)  # its forms, the usual one first


def stage(stage: str, needs: tuple[str, ...], *rows: tuple[Any, ...]) -> list[Deviation]:
    """Return the deviations of one stage; a row is (identifier, wrong, change, values)."""
    return [
        Deviation(identifier, stage, wrong, change, needs, *values)
        for identifier, wrong, change, *values in rows
    ]
