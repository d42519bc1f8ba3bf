"""Remove each head of the shipped model in turn, and measure how many answers become wrong.

The output of a removed head is replaced by a constant: its mean over the tokens of all questions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minimha.explain.chart import Bars, Written
from minimha.explain.result import Table
from minimha.models import world
from minimha.models.interpretability import Head, mean_outputs, without_heads
from minimha.models.world.questions import RELATIONS, questions, score

NUM_QUESTIONS = 20  # for each relation
LEARNED = 0.9  # relations with a smaller share of right answers are left out
BROKEN = 0.1  # a relation is broken if its share of right answers falls by more


class Row(NamedTuple):
    """The effect of removing one head on the model's answers.

    A relation is a kind of question. ``relation`` is the one that loses most right answers, or
    "nothing" if none does. ``whole`` is its share of right answers with the head, ``without`` the
    share without the head. ``broken`` is the number of relations whose share falls by more than
    ``BROKEN``.
    """

    head: str
    relation: str
    whole: float
    without: float
    broken: int


def removals(progress: Callable[[str], None]) -> tuple[Table, Bars, str]:
    """Remove each head of the model in turn; return a table, a figure and a sentence on the loss.

    ``progress`` is called with the name of each relation.
    """
    model = world.load()
    asked = {name: questions(name, NUM_QUESTIONS) for name in RELATIONS}
    means = mean_outputs(model, (" ".join(q.words) for found in asked.values() for q in found))
    heads = [Head(*place) for place in np.ndindex(means.shape[:2])]
    removed = {head: without_heads(model, [head], means) for head in heads}
    whole: dict[str, float] = {}
    without: dict[str, dict[Head, float]] = {}
    for name, found in asked.items():
        progress(name)
        whole[name] = score(model, found).right
        if whole[name] >= LEARNED:
            without[name] = {head: score(less, found).right for head, less in removed.items()}
    rows = tuple(_row(head, whole, without) for head in heads)
    fixed: Written = "{:.2f}".format
    columns: dict[str, Callable[[Any], str]]
    columns = {"head": str, "breaks most": str, "right": fixed, "without it": fixed,
               "relations broken": str}  # fmt: skip
    title = f"right answers of the shipped model about {len(without)} relations, one head removed"
    names = tuple(f"{row.head} {row.relation}" for row in rows)
    series = {"right": tuple(r.whole for r in rows), "without it": tuple(r.without for r in rows)}
    return Table(title, columns, rows), Bars(title, names, series, fixed), conclude(rows)


def conclude(rows: Sequence[Row]) -> str:
    """Return a sentence on how many heads can be removed without loss, and which matters most."""
    worst = min(rows, key=lambda row: row.without - row.whole)
    spared = sum(not row.broken for row in rows)
    words = (
        f"of the {len(rows)} heads of the shipped model {spared} can be removed alone without any "
        f"relation losing more than {BROKEN:.0%} of its answers"
    )
    if not worst.broken:
        return words
    return (
        f"{words}, and without head {worst.head} '{worst.relation}' falls from {worst.whole:.0%} "
        f"to {worst.without:.0%}"
    )


def _row(head: Head, whole: dict[str, float], without: dict[str, dict[Head, float]]) -> Row:
    fallen = {name: whole[name] - found[head] for name, found in without.items()}
    name = max(fallen, key=lambda one: fallen[one])
    broken = sum(fall > BROKEN for fall in fallen.values())
    shown = name if fallen[name] > 0 else "nothing"
    return Row(str(head), shown, whole[name], without[name][head], broken)
