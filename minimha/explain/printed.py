"""Compare the numbers printed in a document with exact values.

The status of a printed number is its relation to the exact value, such as "truncated". It is
computed from the number, the exact value, and the value that follows from the *printed*, rounded
numbers of the previous step. A worked example also states the status that it expects, and a test
compares the expected with the computed status.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Both ways to round a number halfway between two decimals are right.
NEAREST = (ROUND_HALF_EVEN, ROUND_HALF_UP)
DOWN = (ROUND_DOWN,)


class Status(str, Enum):
    """The relation of a printed number to the exact value, which follows from the inputs."""

    EXACT = "exact"
    TRUNCATED = "truncated"
    FROM_ROUNDED = "from rounded"
    WRONG = "wrong"
    ASSUMED = "assumed"
    ILLUSTRATIVE = "illustrative"


IN_WORDS = {
    Status.EXACT: "correctly rounded",
    Status.TRUNCATED: "truncated, not rounded",
    Status.FROM_ROUNDED: "follows from the rounded numbers of the previous step, not from the "
    "exact ones",
    Status.WRONG: "does not follow from {origin}",
    Status.ASSUMED: "assumed by the document, not computed from its inputs",
    Status.ILLUSTRATIVE: "a picture's number, with no inputs behind it",
}


@dataclass(frozen=True)
class Comparison:
    """A printed number, its exact value, and how the two are related.

    ``status`` is the relation that the worked example states, ``computed`` the one that follows
    from the numbers. ``origin`` names what the printed number should follow from.
    """

    value: float  # the printed number
    exact: float | None  # None if the document gives no inputs
    decimals: int  # number of decimals printed
    index: tuple[int, ...]  # index in the step's value
    status: Status  # the status that the worked example states
    computed: Status  # the status computed from the numbers
    origin: str  # what the printed number should follow from
    source: str  # where in the document
    text: str  # the number as printed
    exactly: str = "exact"  # the word before the exact value in the sentence

    @property
    def sentence(self) -> str:
        """The comparison as a sentence.

        >>> PrintedMatrix("weights", ("0.268",), status=Status.TRUNCATED, source="").compare(
        ...     np.array([0.2689414]))[0].sentence
        'printed 0.268, exact 0.268941: truncated, not rounded'
        """
        words = IN_WORDS[self.status].format(origin=self.origin)
        if self.exact is None:
            return f"printed {self.text}: {words}"
        exact = f"{self.exact:.6f}" if np.isfinite(self.exact) else "-∞"
        return f"printed {self.text}, {self.exactly} {exact}: {words}"


@dataclass(frozen=True)
class PrintedMatrix:
    """The numbers that a document prints for one step, and the expected status of each.

    ``status`` is that of all numbers, except those whose index ``but`` maps to another one.
    ``exact`` are the exact values, by default the step's own. ``rounded`` are the values that
    follow from the printed numbers of the previous step.
    """

    step: str  # the name of the step
    rows: tuple[str, ...]  # one line per row, decimals kept: ("0.268 0.731 0",)
    source: str  # where in the document
    status: Status = Status.EXACT  # of every number that ``but`` does not name
    but: Mapping[tuple[int, ...], Status] = field(default_factory=dict)
    head: int | None = None  # the number of the head, if the step has heads
    exact: NDArray[Any] | None = None  # what the inputs give; by default the step's own value
    rounded: NDArray[Any] | None = None  # what the printed numbers of the previous step give
    origin: str = "the document's own inputs"  # what the numbers should follow from
    says: str = ""  # the document's own words, if they decide the status: "Assume: …"
    has_inputs: bool = True  # False for a picture's numbers, which have nothing to compare with
    exactly: str = "exact"  # the word before the exact value in a sentence

    @property
    def values(self) -> NDArray[np.float64]:
        """The printed numbers as a float64 array of shape (rows, columns)."""
        return np.array([[_number(text) for text in row.split()] for row in self.rows])

    def compare(self, step_value: NDArray[Any]) -> tuple[Comparison, ...]:
        """Compare each printed number with its exact value, row by row.

        The exact values are ``self.exact`` or, if that is None, ``step_value``. Raise ValueError if
        the document prints another number of values.
        """
        exact = step_value if self.exact is None else self.exact
        texts = [text for row in self.rows for text in row.split()]
        if len(texts) != exact.size:
            raise ValueError(
                f"{self.source} prints {len(texts)} numbers for {self.step}, "
                f"which has shape {exact.shape}"
            )
        indices = np.ndindex(exact.shape)
        return tuple(self._compare(text, i, exact) for text, i in zip(texts, indices, strict=True))

    def _compare(self, text: str, index: tuple[int, ...], exact: NDArray[Any]) -> Comparison:
        value = float(exact[index]) if self.has_inputs else None
        rounded = None if self.rounded is None else float(self.rounded[index])
        computed = classify(text, value, rounded, is_assumed="assume" in self.says.lower())
        return Comparison(
            value=_number(text), exact=value, decimals=_decimals(text), index=index,
            status=self.but.get(index, self.status), computed=computed, origin=self.origin,
            source=self.source, text=text, exactly=self.exactly,
        )  # fmt: skip


def classify(
    text: str, exact: float | None, rounded: float | None = None, *, is_assumed: bool = False
) -> Status:
    """Return the status of the printed number ``text``, whose decimals are as printed.

    ``exact`` is the value that follows from the document's inputs, or None if it has none.
    ``rounded`` is the value that follows from the printed numbers of the previous step, if known.
    ``is_assumed`` states whether the document calls the number an assumption.

    >>> [classify(text, 0.2689414).value for text in ("0.269", "0.268", "0.3", "0.25")]
    ['exact', 'truncated', 'exact', 'wrong']
    """
    if exact is None:
        return Status.ILLUSTRATIVE
    if _rounds_to(exact, text, NEAREST):
        return Status.EXACT
    if _rounds_to(exact, text, DOWN):
        return Status.TRUNCATED
    if rounded is not None and _rounds_to(rounded, text, NEAREST):
        return Status.FROM_ROUNDED
    return Status.ASSUMED if is_assumed else Status.WRONG


def _rounds_to(value: float, text: str, roundings: tuple[str, ...]) -> bool:
    printed = _number(text)
    if not np.isfinite(value) or not np.isfinite(printed):
        return value == printed
    step = Decimal(1).scaleb(-_decimals(text))
    # A sum such as 0.401 · 1 + 0.198 · 3 misses its decimal value by a few float64 roundings,
    # which must not change its truncation.
    clean = Decimal(repr(round(value, 12)))
    return Decimal(repr(printed)) in [clean.quantize(step, rounding=way) for way in roundings]


def _number(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf"))


def _decimals(text: str) -> int:
    return len(text.partition(".")[2])
