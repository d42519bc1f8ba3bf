"""One head of the shipped model removed: which relations it no longer gets right.

A removed head gives, for every token, its mean output over the tokens of all questions, so that the
layers after it meet no number that they never met.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from minimha.explain.chart import Bars, Written
from minimha.explain.result import Table
from minimha.models import Transformer, world
from minimha.models.world.questions import RELATIONS, Question, questions, score

NUM_QUESTIONS = 20  # for each relation
LEARNED = 0.9  # a relation of which fewer answers are right is left out: it has little to lose
BROKEN = 0.1  # a share of right answers that falls by more is said to break


class Head(NamedTuple):
    """A head by its layer and its number, both from 0; written 1.0."""

    layer: int
    number: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.number}"


class Row(NamedTuple):
    """The relation that loses most without a head, its right answers with and without it."""

    head: str
    relation: str
    whole: float
    without: float
    broken: int


def removals(progress: Callable[[str], None]) -> tuple[Table, Bars, str]:
    """Return, for each head, what breaks without it: a table, a figure and a sentence."""
    model = world.load()
    asked = {name: questions(name, NUM_QUESTIONS) for name in RELATIONS}
    means = mean_outputs(model, [one for found in asked.values() for one in found])
    heads = [Head(*place) for place in np.ndindex(len(means), len(means[0]))]
    whole: dict[str, float] = {}
    without: dict[str, dict[Head, float]] = {}
    for name, found in asked.items():
        progress(name)
        whole[name] = score(model, found).right
        if whole[name] >= LEARNED:
            without[name] = {
                head: score(cast(Transformer, Removed(model, head, means[head])), found).right
                for head in heads
            }
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
    """Return how many heads are not missed, and which one is missed most."""
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


class Removed:
    """A model, as far as ``score`` asks it, one of whose heads gives ``output`` (D,) always."""

    def __init__(self, model: Transformer, head: Head, output: NDArray[Any]) -> None:
        self.model, self.head, self.output = model, head, output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(self, ids: Any) -> NDArray[Any]:
        """Return the logits of each next token, (L, V)."""
        name = f"head_output[layer {self.head.layer}]"

        def tap(heard: str, value: Any) -> Any:
            if heard != name:
                return value
            value = value.copy()
            value[:, self.head.number] = self.output
            return value

        return self.model.logits(ids, backend="dense", tap=tap)


def mean_outputs(model: Transformer, asked: Sequence[Question]) -> NDArray[np.float64]:
    """Return each head's mean output over all tokens of the questions, (layers, heads, D)."""
    config = model.config
    sums = np.zeros((config.num_layers, config.num_heads, config.head_dim))
    for one in asked:
        for layer, output in enumerate(_outputs(model, one.words)):
            sums[layer] += output[0].sum(axis=1)
    return sums / sum(len(one.words) for one in asked)


def _outputs(model: Transformer, words: Sequence[str]) -> Iterator[NDArray[Any]]:
    heard: list[NDArray[Any]] = []

    def tap(name: str, value: Any) -> Any:
        if name.startswith("head_output["):
            heard.append(value)
        return value

    model.logits(" ".join(words), backend="dense", tap=tap)
    yield from heard


def _row(head: Head, whole: dict[str, float], without: dict[str, dict[Head, float]]) -> Row:
    fallen = {name: whole[name] - found[head] for name, found in without.items()}
    name = max(fallen, key=lambda one: fallen[one])
    broken = sum(fall > BROKEN for fall in fallen.values())
    said = name if fallen[name] > 0 else "nothing"
    return Row(str(head), said, whole[name], without[name][head], broken)
