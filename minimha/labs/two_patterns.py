"""Test whether one head can follow two patterns at once, or two heads are needed.

Every token has a content, a kind and a position. Each kind has two tokens. For each token, the task
asks for two contents: that of the previous token, and that of the other token of the same kind.
W_q is set by hand: queries are ``x W_q``, and keys are x. The answer is a linear map of the heads'
outputs and of the token itself, fitted by least squares.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention
from minimha.explain.chart import Axis, Lines
from minimha.explain.result import Result, Table
from minimha.labs.removed import removals

NUM_CONTENTS, NUM_KINDS = 8, 6
LENGTH = 2 * NUM_KINDS
WIDTH = NUM_CONTENTS + NUM_KINDS + LENGTH
NUM_SEQUENCES = 256  # for the fit, and 256 others for the test
STRENGTH = 20.0  # the score of the wanted key; any other key gets e^-20 times the weight
SHARES = (0.0, 0.25, 0.4, 0.45, 0.5, 0.55, 0.6, 0.75, 1.0)
CHANCE = 1 / NUM_CONTENTS
# Previous and matching token are the same (1 of LENGTH - 1), have equal contents, or are guessed.
ALIKE = (1 + (LENGTH - 2) * CHANCE) / (LENGTH - 1)
GUESSED = (1 + ALIKE) / 2
PATTERNS = "previous token", "matching token"
TITLE = "heads: two patterns at once"
ABOUT = (
    f"Sequences of {LENGTH} tokens, each with a content (1 of {NUM_CONTENTS}), a kind (2 tokens "
    f"have the same) and a position. Asked of each token: the content of the previous one and of "
    f"the matching one, of its kind. Scores are set by hand; the answer is a linear map of the "
    f"heads' outputs and the token itself, fitted by least squares on {NUM_SEQUENCES} sequences "
    f"and tested on {NUM_SEQUENCES} others. A removed head gives its mean output. Chance is "
    f"{CHANCE:.3f}; knowing both contents and guessing their order is right in {GUESSED:.3f}. Then "
    f"each head of the shipped model is removed, and the model is asked about its relations."
)
Heads = tuple[tuple[float, float], ...]  # for each head, the strength of both patterns


class Task(NamedTuple):
    """Sequences ``x``, and the right answers ``asked``: two contents for each token."""

    x: NDArray[np.float64]  # (sequences, LENGTH, WIDTH)
    asked: NDArray[np.int64]  # (sequences, LENGTH, 2)


class Row(NamedTuple):
    """The shares of right answers about the previous token, the matching token, and both.

    The matching token is the other token of the same kind.
    """

    heads: str
    previous: float
    matching: float
    both: float


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: test one head, two heads, and two heads with one removed."""
    rng = np.random.default_rng(seed)
    fitted, tested = draw(rng), draw(rng)
    two = (STRENGTH, 0.0), (0.0, STRENGTH)
    single = tuple(
        _row(f"one head, {n:.0%} previous token", fitted, tested,
             ((n * STRENGTH, (1 - n) * STRENGTH),)) for n in SHARES
    )  # fmt: skip
    rows = (
        *single,
        _row("two heads", fitted, tested, two),
        _row("two, without the first", fitted, tested, two, removed=0),
        _row("two, without the second", fitted, tested, two, removed=1),
    )
    names = *PATTERNS, "both"
    columns = {"heads": str} | dict.fromkeys(names, "{:.3f}".format)
    series = {name: tuple(float(row[n]) for row in single) for n, name in enumerate(names, 1)}
    across = Axis("share of the head's scores for the previous token", None, "{:.0%}".format)
    figure = Lines("right answers of one head", across, Axis("share"), SHARES, series)
    table = Table("right answers, as shares of all", columns, rows)
    removed, missed, words = removals(progress)
    tables, figures = (table, removed), (figure, missed)
    conclusion = f"{conclude(rows).removesuffix('.')}; {words}."
    return Result("heads", TITLE, ABOUT, seed, tables, figures, conclusion)


def conclude(rows: Sequence[Row]) -> str:
    """Return a sentence on the right answers of one head, two heads, and two with one removed."""
    *single, two, first, second = rows
    best = max(row.both for row in single)
    return (
        f"The best single head is right about both tokens in {best:.1%} of the cases (guessing "
        f"which is which: {GUESSED:.1%}), two heads in {two.both:.1%}; without the first "
        f"{_lost(two, first)}, without the second {_lost(two, second)} (chance: {CHANCE:.1%})."
    )


def _lost(whole: Row, less: Row) -> str:
    """Return in words which shares fall by more than a tenth when a head is removed."""
    pairs = (whole.previous, less.previous), (whole.matching, less.matching)
    fallen = [
        f"the {name} falls to {after:.1%}"
        for name, (before, after) in zip(PATTERNS, pairs, strict=True)
        if after < 0.9 * before
    ]
    return " and ".join(fallen) or "neither falls"


def draw(rng: np.random.Generator) -> Task:
    """Draw ``NUM_SEQUENCES`` random sequences, with the right answers for each token."""
    size = NUM_SEQUENCES, LENGTH
    contents = rng.integers(NUM_CONTENTS, size=size)
    kinds = rng.permuted(np.tile(np.arange(LENGTH) % NUM_KINDS, (NUM_SEQUENCES, 1)), axis=1)
    positions = np.broadcast_to(np.arange(LENGTH), size)
    parts = (contents, NUM_CONTENTS), (kinds, NUM_KINDS), (positions, LENGTH)
    same = (kinds[:, :, None] == kinds[:, None]) & ~np.eye(LENGTH, dtype=bool)
    matching = np.take_along_axis(contents, same.argmax(axis=-1), axis=1)
    asked = np.stack([np.roll(contents, 1, axis=1), matching], axis=-1)
    return Task(np.concatenate([np.eye(n)[part] for part, n in parts], axis=-1), asked)


def query_weights(previous: float, matching: float) -> NDArray[np.float64]:
    """Return W_q (WIDTH, WIDTH) of a head that looks for two tokens.

    The keys are the tokens x. ``previous`` is the score of the token one position back, which for
    the first token is the last one. ``matching`` is the score of the other token of the same kind.
    """
    W_q = np.zeros((WIDTH, WIDTH))
    kinds = slice(NUM_CONTENTS, NUM_CONTENTS + NUM_KINDS)
    positions = slice(NUM_CONTENTS + NUM_KINDS, WIDTH)
    W_q[kinds, kinds] = matching * np.eye(NUM_KINDS)
    W_q[positions, positions] = previous * np.roll(np.eye(LENGTH), -1, axis=1)
    W_q[positions, positions] -= matching * np.eye(LENGTH)
    return W_q


def _row(name: str, fitted: Task, tested: Task, heads: Heads, removed: int | None = None) -> Row:
    """Fit the output of ``heads`` and test it; the head ``removed`` gives its mean output."""
    seen, shown = _read(fitted.x, heads), _read(tested.x, heads)
    targets = np.eye(NUM_CONTENTS)[fitted.asked].reshape(len(seen), -1)
    W = np.linalg.lstsq(seen, targets, rcond=None)[0]
    if removed is not None:
        part = slice(removed * WIDTH, (removed + 1) * WIDTH)
        shown[:, part] = seen[:, part].mean(axis=0)
    answers = (shown @ W).reshape(*tested.asked.shape, NUM_CONTENTS).argmax(axis=-1)
    right = answers == tested.asked
    previous, matching = right.mean(axis=(0, 1)).tolist()
    return Row(name, previous, matching, float(right.all(axis=-1).mean()))


def _read(x: NDArray[np.float64], heads: Heads) -> NDArray[np.float64]:
    """Return the heads' outputs and the token itself, one row per token."""
    keys = x[:, None]
    queries = (keys @ query_weights(*strengths) for strengths in heads)
    read = [attention(q, keys, keys, scale=1.0, backend="dense")[:, 0] for q in queries]
    return np.concatenate([*read, x], axis=-1).reshape(-1, (len(heads) + 1) * WIDTH)
