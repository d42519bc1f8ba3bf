"""What is said about a step: the same words on a terminal, in Markdown and in LaTeX."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from minimha.explain.printed import Comparison, Status
from minimha.explain.trace import Step


class Remark(NamedTuple):
    """A sentence about one printed number, or about all the exact ones of a matrix."""

    status: Status
    sentence: str


def title(step: Step) -> str:
    """The step's name, and its batch entry and head."""
    return f"{step.name}, {step.place}" if step.place else step.name


def printed(step: Step) -> Iterator[tuple[str, str, list[Remark]]]:
    """For each place that prints numbers for this step: the place, the numbers, the remarks.

    An inexact number has a remark of its own; the exact ones share the last.
    """
    for source, group in groupby(step.printed, key=lambda comparison: comparison.source):
        comparisons = list(group)
        if all(c.status is Status.ILLUSTRATIVE for c in comparisons):
            words = "a picture's numbers, with no inputs behind them"
            yield source, _as_printed(comparisons), [Remark(Status.ILLUSTRATIVE, words)]
            continue
        off = [c for c in comparisons if c.status is not Status.EXACT]
        remarks = [Remark(c.status, _where(step, c.index) + c.sentence) for c in off]
        if len(off) < len(comparisons):
            remarks.append(Remark(Status.EXACT, _exact_ones(comparisons)))
        yield source, _as_printed(comparisons), remarks


def heatmaps(steps: Iterable[Step]) -> list[tuple[str, Step]]:
    """Title and step of each heatmap: weights, and for a single head the scores before them."""
    steps = [step for step in steps if step.value.ndim == 2 and step.value.size]
    weights = [step for step in steps if step.name == "weights"]
    weights = weights or [step for step in steps if step.base == "weights"]
    if len(weights) > 1:
        return [
            (", ".join(part for part in ("weights", step.variant, step.place) if part), step)
            for step in weights
        ]
    order = {
        "scores": "raw scores", "energies": "raw scores", "masked": "masked",
        "weights": "softmax weights",
    }  # fmt: skip
    return [(title, step) for name, title in order.items() for step in steps if step.name == name]


def _exact_ones(comparisons: Sequence[Comparison]) -> str:
    """How many of the printed numbers are exact, in words."""
    exact = [c for c in comparisons if c.status is Status.EXACT]
    is_same = all(c.value == c.exact for c in exact)
    words = "exact" if is_same else "exact, correctly rounded"
    if len(comparisons) == 1:
        return words
    if len(exact) == 1:
        return f"the other is {words}"
    return f"{'all' if len(exact) == len(comparisons) else 'the other'} {len(exact)} are {words}"


def _as_printed(comparisons: Sequence[Comparison]) -> str:
    """The numbers as the document prints them, row by row: ``[1 0] [0 1]``."""
    rows = groupby(comparisons, key=lambda c: c.index[:-1])
    return " ".join(f"[{' '.join(c.text for c in row)}]" for _, row in rows)


def _where(step: Step, index: tuple[int, ...]) -> str:
    """The place of a number: ``row cat, column The: ``."""
    if not index:
        return ""
    names = [(step.rows, "row"), (step.columns, "column")][-len(index) :]
    parts = [
        f"{word} {labels[n] if labels else n}"
        for (labels, word), n in zip(names, index, strict=True)
    ]
    return f"{', '.join(parts)}: "
