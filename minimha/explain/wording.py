"""Write the words about a trace that all output formats share."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from minimha.explain.numbers import cells
from minimha.explain.printed import Comparison, Status
from minimha.explain.selection import largest
from minimha.explain.trace import Step, Trace

BLANK = "_" * 6  # a number for the reader to find


class Remark(NamedTuple):
    """A sentence about one printed number, or about all numbers of a matrix with one status."""

    status: Status
    sentence: str


class Pick(NamedTuple):
    """The weighted mean of values for one query and head: its weights, values and output."""

    query: int
    weights: Step
    values: Step
    output: Step

    @property
    def keys(self) -> list[int]:
        """The indices of the keys to show; of many keys, those with the largest weights."""
        return largest(self.weights.value[self.query])

    @property
    def rest(self) -> tuple[int, float]:
        """The number of keys that are not shown, and the sum of their weights."""
        row = np.delete(self.weights.value[self.query], self.keys)
        return len(row), float(row.sum())

    @property
    def title(self) -> str:
        """The title of the drawing, with the query, and with the stage and the head if any."""
        places = "".join(f", {part}" for part in (self.output.stage, self.output.place) if part)
        return f"how query {(self.weights.rows or ())[self.query]} picks values{places}"


def legend(trace: Trace) -> str:
    """Return a sentence that explains the letters of the shown axes, or "" without axes."""
    meanings = ", ".join(f"{letter} {words}" for letter, words in trace.legend.items())
    return f"Axes: {meanings}." if meanings else ""


def news(steps: Iterable[Step]) -> Iterator[tuple[Step, bool]]:
    """Yield each step, and whether no earlier step has the same formula and note."""
    known: set[tuple[str, str]] = set()
    for step in steps:
        yield step, (step.formula, step.note) not in known
        known.add((step.formula, step.note))


def numbers(step: Step, decimals: int) -> list[list[str]]:
    """Return the numbers of a step as rows of text, or blanks to fill in."""
    if not step.is_blank:
        return cells(step.value, decimals)
    return [[BLANK for _ in row] for row in cells(step.value, decimals)]


def printed(step: Step) -> Iterator[tuple[str, str, list[Remark]]]:
    """Yield (source, numbers, remarks) for each passage of a document that prints the step.

    Each inexact number has a remark. All exact numbers share one, the last. If no number follows
    from inputs, there is only one remark, which states this.
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
    """Return (title, step) for each heatmap.

    If ``steps`` has several matrices of weights, such as those of several heads, there is a heatmap
    of each. If it has one, there are heatmaps of its raw scores, masked scores and weights.
    """
    steps = [step for step in steps if step.value.ndim == 2 and step.value.size]
    weights = [step for step in steps if step.name == "weights"]
    weights = weights or [step for step in steps if step.base == "weights"]
    if len(weights) > 1:
        return [
            (", ".join(part for part in (step.titled("weights"), step.relation) if part), step)
            for step in weights
        ]
    stage = weights[0].name[len("weights") :] if weights else ""
    order = {
        "scores": "raw scores", "energies": "raw scores", "masked": "masked",
        "weights": "softmax weights",
    }  # fmt: skip
    return [
        (step.titled(title), step)
        for name, title in order.items()
        for step in steps
        if step.name == name + stage
    ]


def picks(trace: Trace) -> list[Pick]:
    """Return a ``Pick`` for each query and head to draw.

    By default, it is the last query, and only if the run has a single head. ``trace.query`` and
    ``trace.head`` choose a query and a head. If ``trace.only`` has ``picks``, all queries are
    drawn, unless ``trace.query`` names one. Raises ValueError if no head has ``trace.query``.
    """
    steps = trace.drawn("picks")
    is_asked = bool(trace.query) or trace.head is not None or "picks" in trace.only
    heads = []
    for step in steps:
        made = trace.origins[step] if is_asked or step.title == "output" else None
        if made is None or made.operation != "product" or step.axes != ("Lq", "Dv"):
            continue
        weights, values = made.operands[:2]
        if weights in steps and values in steps and step.value.size:
            heads.append((weights, values, step))
    found = [Pick(query, *head) for head in heads for query in _query(trace, head[0])]
    if trace.query and not found and not trace.shown:
        rows = dict.fromkeys(row for head in heads for row in head[0].rows or ())
        there = f": the queries are {', '.join(rows)}" if rows else ", with weights and values"
        raise ValueError(f"no query {trace.query!r} here{there}")
    return found


def _query(trace: Trace, weights: Step) -> list[int]:
    """Return the rows to draw: ``trace.query``, else the last, or all for ``picks`` alone."""
    rows = weights.rows or ()
    if not trace.query:
        return list(range(len(rows)))[0 if "picks" in trace.only else -1 :]
    row = weights.number(0, trace.query)
    return [] if row is None else [row]


def _exact_ones(comparisons: Sequence[Comparison]) -> str:
    exact = [c for c in comparisons if c.status is Status.EXACT]
    is_same = all(c.value == c.exact for c in exact)
    words = "exact" if is_same else "exact, correctly rounded"
    if len(comparisons) == 1:
        return words
    if len(exact) == 1:
        return f"the other is {words}"
    return f"{'all' if len(exact) == len(comparisons) else 'the other'} {len(exact)} are {words}"


def _as_printed(comparisons: Sequence[Comparison]) -> str:
    """Return the numbers as the document prints them, row by row: ``[1 0] [0 1]``."""
    rows = groupby(comparisons, key=lambda c: c.index[:-1])
    return " ".join(f"[{' '.join(c.text for c in row)}]" for _, row in rows)


def _where(step: Step, index: tuple[int, ...]) -> str:
    """Return the labels of a number's row and column: ``row cat, column The: ``."""
    if not index:
        return ""
    names = [(step.rows, "row"), (step.columns, "column")][-len(index) :]
    parts = [
        f"{word} {labels[n] if labels else n}"
        for (labels, word), n in zip(names, index, strict=True)
    ]
    return f"{', '.join(parts)}: "
