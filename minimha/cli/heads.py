"""Show what each head of a model does, over a set of sentences: the command ``heads``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minimha.cli import models
from minimha.cli.output import RESULT_FORMATS, add_output, deliver_result, format_of
from minimha.equations.arguments import argument_names, counted
from minimha.explain import render
from minimha.explain.trace import printable

if TYPE_CHECKING:
    from minimha.explain.result import Result
    from minimha.models.interpretability import Behaviours
    from minimha.models.transformer import Transformer

UNIFORM = "uniform"
CLEAR = 0.5  # least share of attention for which a head "does" a pattern
WORDS = {
    "previous": "the token before",
    "first": "the first token",
    "itself": "the token itself",
    "matching": "earlier tokens that are the same",
    "induction": "what followed the same token earlier",
    "agreement": "the subject of the verb that comes next, where it is some words away",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``heads`` to its parser."""
    parser.description = (
        "Find what each head of a model does: the mean share of a query's attention "
        "that goes to the keys of a pattern, over a set of sentences. Beside it stands the share "
        "that a uniform head gives to these keys. The patterns: "
        f"{'; '.join(f'{name}, {words}' for name, words in WORDS.items())}."
    )
    models.add_model(parser)
    models.add_sentences(parser)
    add_output(parser, RESULT_FORMATS)


def run(args: argparse.Namespace) -> None:
    """Show, for each pattern of keys, the share of attention that each head gives to these keys."""
    kind = format_of(args)
    model, sentences = models.load(args), models.sentences(args)
    with render.progress(sys.stderr, len(sentences)) as progress, argument_names(ids="a sentence"):
        found = _behaviours(model, sentences, progress)
    deliver_result(args, _result(found, len(sentences), is_text=kind == "text"))


def _behaviours(
    model: Transformer, sentences: Sequence[str], progress: Callable[[str], None]
) -> Behaviours:
    from minimha.models import interpretability as heads
    from minimha.models.world.questions import subjects

    def agreement(ids: heads.Ids) -> NDArray[np.bool_]:
        words = models.labels(model, ids.tolist())
        return subjects([word.strip("_").lower() for word in words])

    def reported() -> Iterator[str]:
        for sentence in sentences:
            progress(printable(sentence[:40]))
            yield sentence

    return heads.behaviours(model, reported(), heads.PATTERNS | {"agreement": agreement})


def _result(found: Behaviours, num_sentences: int, *, is_text: bool) -> Result:
    """Return the scores of every head, as a heatmap and, unless ``is_text``, as a table."""
    from minimha.explain.chart import Grid
    from minimha.explain.result import Result, Table
    from minimha.models.interpretability import Head

    if np.isnan(found.scores).any():
        raise ValueError("the model's weights of attention are NaN, so no head looks anywhere")
    places = [Head(*place) for place in np.ndindex(found.scores.shape[:2])]
    scores = {str(head): tuple(found.scores[head].tolist()) for head in places}
    scores[UNIFORM] = tuple(found.uniform.tolist())
    does = {name: _does(found, row) for name, row in scores.items() if name != UNIFORM}
    title = "mean share of a query's attention"
    fixed: Callable[[Any], str] = "{:.2f}".format
    columns: dict[str, Callable[[Any], str]]
    columns = {"head": str, **dict.fromkeys(found.names, fixed), "does": str}
    rows = tuple((name, *row, does.get(name, "")) for name, row in scores.items())
    table = Table(title, columns, rows)
    grid = Grid(title, tuple(scores), found.names, tuple(scores.values()))
    keys = "; ".join(
        f"{name}, {WORDS[name]} ({count:,} {'query' if count == 1 else 'queries'})"
        for name, count in zip(found.names, found.counts.tolist(), strict=True)
    )
    about = (
        f"Over {counted(num_sentences, 'sentence')}, of the queries that have such keys: {keys}. "
        f"The last row is what a head would give that attends uniformly to all that it sees."
    )
    return Result(
        "heads", "what each head looks at", about, 0, () if is_text else (table,), (grid,),
        _conclusion(does),
    )  # fmt: skip


def _does(found: Behaviours, row: tuple[float, ...]) -> str:
    """Return the pattern with half of the attention and twice its uniform share, or "" if none."""
    n = int(np.argmax(row))
    return found.names[n] if row[n] >= max(CLEAR, 2 * found.uniform[n]) else ""


def _conclusion(does: dict[str, str]) -> str:
    """Return a sentence about the heads that mostly attend to one kind of key."""
    by_pattern: dict[str, list[str]] = {}
    for head, pattern in does.items():
        by_pattern.setdefault(pattern, []).append(head)
    none = len(by_pattern.pop("", []))
    mostly = [f"in {', '.join(heads)} to {WORDS[name]}" for name, heads in by_pattern.items()]
    if not mostly:
        return f"None of the {len(does)} heads gives half of its attention to one of these."
    rest = f"; in the other {none} to none of these" if none else ""
    return f"Half of the attention or more goes {'; '.join(mostly)}{rest}."
