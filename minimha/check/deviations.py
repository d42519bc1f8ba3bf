"""The deviations that ``check`` knows: what is wrong, and what to change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deviation:
    """One way in which attention goes wrong."""

    identifier: str
    stage: str
    wrong: str  # what is wrong, one sentence
    change: str  # what to change, one sentence


DEVIATIONS: dict[str, Deviation] = {}
