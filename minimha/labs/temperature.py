"""Show how a temperature T, which divides logits before the softmax, changes a distribution."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.explain.chart import Axis, Bars, Lines
from minimha.explain.result import Result, Table
from minimha.models.sampling import probabilities

TEMPERATURES = (0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0)
SHOWN = (0.25, 1.0, 4.0)
NUM_WORDS, SPREAD, NUM_DRAWS = 8, 2.0, 1000
TITLE = "temperature: a distribution sharpened and flattened"
ABOUT = (
    f"{NUM_WORDS} logits drawn from N(0, {SPREAD:g}²), divided by T before the softmax; "
    f"{NUM_DRAWS} draws from each distribution. Dividing scores by √d_k is a temperature too."
)


class Row(NamedTuple):
    """Statistics of the distribution at temperature ``T``.

    ``largest`` and ``smallest`` are probabilities, ``entropy`` is in bits, and ``words`` is
    2^entropy. ``greedy`` is the share of draws that give the most probable word.
    """

    T: float
    largest: float
    smallest: float
    entropy: float
    words: float
    greedy: float


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: compute softmax(logits / T) for nine temperatures T."""
    rng = np.random.default_rng(seed)
    logits = np.sort(SPREAD * rng.standard_normal(NUM_WORDS))[::-1]
    rows = tuple(_row(T, logits, rng) for T in TEMPERATURES)
    three = "{:.3f}".format
    columns = {
        "T": "{:g}".format, "largest probability": three, "smallest": three,
        "entropy in bits": three, "2^entropy, words": "{:.2f}".format,
        "drawn: the greedy choice": "{:.1%}".format,
    }  # fmt: skip
    names = tuple(f"word {n}" for n in range(NUM_WORDS))
    shares = {f"T = {T:g}": tuple(probabilities(logits, T).tolist()) for T in SHOWN}
    entropy = {"entropy": tuple(row.entropy for row in rows)}
    figures = (
        Bars("probability of each word", names, shares, three),
        Lines("entropy", Axis("T", 10), Axis("bits"), TEMPERATURES, entropy),
    )
    table = Table(f"the same {NUM_WORDS} logits at each temperature T", columns, rows)
    return Result("temperature", TITLE, ABOUT, seed, (table,), figures, conclude(rows))


def conclude(rows: Sequence[Row]) -> str:
    """Return a sentence on the distributions at the lowest and the highest temperature."""
    cold, hot = rows[0], rows[-1]
    entropies = [row.entropy for row in rows]
    is_steady = entropies == sorted(set(entropies))
    return (
        f"At T = {cold.T:g} {'every' if cold.greedy == 1 else 'not every'} draw is the greedy "
        f"choice, the most probable word ({cold.largest:.3f}); at T = {hot.T:g} the entropy is "
        f"{hot.entropy:.2f} bits, where {NUM_WORDS} equally probable words have "
        f"{np.log2(NUM_WORDS):.2f}; it {'rises' if is_steady else 'does not rise'} with every step "
        f"of T."
    )


def _row(T: float, logits: NDArray[np.float64], rng: np.random.Generator) -> Row:
    p = probabilities(logits, T)
    entropy = float((p * -np.log2(np.where(p > 0, p, 1))).sum())
    greedy = float((rng.choice(NUM_WORDS, NUM_DRAWS, p=p) == p.argmax()).mean())
    return Row(T, float(p.max()), float(p.min()), entropy, 2**entropy, greedy)
