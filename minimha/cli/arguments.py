"""Define arguments that commands have in common, and convert their values."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from minimha.examples import Example, sentences

MAX_TOKENS = max(sentences.SENTENCES)
LARGEST_COUNT = 2**20
LARGEST_STEP = 2**22  # numbers of one step, all heads together, in a trace that keeps every step


def number(text: str) -> float:
    """Convert ``text`` to a float; ``inf``, ``∞``, ``nan`` and a typographic minus are accepted.

    Raises ValueError for a number beyond float64, and for text that only Python reads as a number:
    ``1_0``, ``infinity``, digits of other scripts.

    >>> number("1e3"), number("-inf"), number("−0.5")
    (1000.0, -inf, -0.5)
    """
    text = text.replace("−", "-").replace("∞", "inf")
    if not text.isascii() or "_" in text or "infinity" in text.lower():
        raise ValueError
    found = float(text)
    if math.isinf(found) and "inf" not in text.lower():
        raise ValueError
    return found


def integer(text: str) -> int:
    """Convert ``text`` to an int.

    A typographic minus is accepted. Raises ValueError for other text, and for text that only Python
    reads as an int, such as ``1_0``.
    """
    text = text.replace("−", "-")
    if not text.isascii() or "_" in text:
        raise ValueError
    return int(text)


def check_step(what: str, *sizes: int, largest: int = LARGEST_STEP) -> None:
    """Raise ValueError if an array of ``sizes``, called ``what``, is larger than ``largest``."""
    total = math.prod(sizes)
    if total > largest:
        size = " × ".join(str(n) for n in sizes)
        raise ValueError(
            f"{what} would hold {size} = {total:,} numbers where {largest:,} can be kept: "
            f"the library, minimha.attention, has no such limit"
        )


def check_sizes(example: Example, num_heads: int, d_model: int) -> None:
    """Raise ValueError if the example's matrices are too large to be kept and shown."""
    queries, keys = (len(example.labels.get(axis, ())) for axis in ("Lq", "Lk"))
    check_step("W_q", d_model, d_model)
    check_step("x", max(queries, keys), d_model)
    check_step("scores", num_heads, queries, keys)


def real(text: str) -> float:
    """Convert ``text`` to a float for argparse, with an error that argparse can show."""
    try:
        return number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a function that converts text to an int from ``low`` to ``high`` (None: no limit)."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"

    def convert(text: str) -> int:
        try:
            found = integer(text)
        except ValueError:
            found = low - 1
        if found < low or (high is not None and found > high):
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text!r}")
        return found

    return convert


tokens = whole(1, MAX_TOKENS)
count = whole(1, LARGEST_COUNT)
natural = whole(0)
decimals = whole(0, 17)


def add_sentence(group: Any, which: str) -> None:
    """Add the options ``--tokens`` and ``--sentence``; ``which`` ends the help of ``--tokens``."""
    group.add_argument("--tokens", type=tokens, metavar="N", help=f"1 to {MAX_TOKENS}: {which}")
    group.add_argument("--sentence", metavar="WORDS", help="your sentence")


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add ``--causal``, ``--scale`` and ``--seed``, which change an example's numbers."""
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--causal", action=flag, help="hide later tokens, or not")
    parser.add_argument("--scale", action=flag, help="divide the scores by √d_k, or not")
    drawn = "seed of the embeddings and weights (default 1)"
    parser.add_argument("--seed", type=natural, metavar="N", help=drawn)
