"""Arguments shared by several commands, and converters of their values."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from minimha.examples import Example, sentences

MAX_TOKENS = max(sentences.SENTENCES)
LARGEST_COUNT = 2**20
LARGEST_STEP = 2**22  # numbers of one step, all heads together, in a trace that keeps every step


def number(text: str) -> float:
    """Return a number as a float; ``inf``, ``∞``, ``nan`` and a printed minus sign are known.

    Numbers beyond float64 are refused, and what only Python reads as numbers (``1_0``,
    ``infinity``, digits of other scripts).

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
    """Return a whole number, by the rules of ``number``."""
    text = text.replace("−", "-")
    if not text.isascii() or "_" in text:
        raise ValueError
    return int(text)


def check_step(what: str, *sizes: int, largest: int = LARGEST_STEP) -> None:
    """Refuse a step of these sizes if it would hold too many numbers."""
    total = math.prod(sizes)
    if total > largest:
        size = " × ".join(str(n) for n in sizes)
        raise ValueError(
            f"{what} would hold {size} = {total:,} numbers where {largest:,} can be kept: "
            f"the library, minimha.attention, has no such limit"
        )


def check_sizes(example: Example, num_heads: int, d_model: int) -> None:
    """Refuse a sentence whose steps are too large to be traced, before they are computed."""
    queries, keys = (len(example.labels.get(axis, ())) for axis in ("Lq", "Lk"))
    check_step("W_q", d_model, d_model)
    check_step("x", max(queries, keys), d_model)
    check_step("scores", num_heads, queries, keys)


def real(text: str) -> float:
    """Convert for argparse: ``number``, or a sentence."""
    try:
        return number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a converter for argparse: a whole number from ``low`` to ``high``, where given."""
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
    """Add ``--tokens``, with ``which`` sentences these are in its help, and ``--sentence``."""
    group.add_argument("--tokens", type=tokens, metavar="N", help=f"1 to {MAX_TOKENS}: {which}")
    group.add_argument("--sentence", metavar="WORDS", help="your sentence")


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add ``--causal``, ``--scale`` and ``--seed``, which change an example's numbers."""
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--causal", action=flag, help="hide later tokens, or not")
    parser.add_argument("--scale", action=flag, help="divide the scores by √d_k, or not")
    drawn = "of embeddings and weights (default 1)"
    parser.add_argument("--seed", type=natural, metavar="N", help=drawn)


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose steps and how they are shown."""
    add = parser.add_argument
    which = (
        "show this step only, by its name or heading, or heatmap, or picks: how every query picks "
    )
    which += "its values (may be repeated)"
    add("--only", action="append", default=[], metavar="STEP", help=which)
    add("--head", type=natural, metavar="N", help="show this head only, counted from 0")
    rows = "show the rows of this query only, and how it picks values"
    add("--query", default="", metavar="WORD", help=rows)
    entry = "write out one cell of each step, by words or numbers: sat,cat; --only adds matrices"
    add("--cell", default="", metavar="ROW,COLUMN", help=entry)
    blank = "leave this step's numbers blank, as a worksheet (may be repeated)"
    add("--hide", action="append", default=[], metavar="STEP", help=blank)
    add("--answer", metavar="CSV", help="check these numbers of the hidden step")
    how = "of numbers that are not whole (default 3)"
    add("--decimals", type=decimals, default=3, metavar="N", help=how)
