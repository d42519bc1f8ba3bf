"""Arguments that several commands share, and the converters of their values."""

import argparse
from collections.abc import Callable
from typing import Any

from minimha.examples import sentences

MAX_TOKENS = max(sentences.SENTENCES)


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a converter for argparse: a whole number from ``low`` to ``high``, where given."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text!r}")
        return number

    return convert


tokens = whole(1, MAX_TOKENS)
count = whole(1)
natural = whole(0)
decimals = whole(0, 17)


def add_sentence(group: Any, which: str) -> None:
    """Add ``--tokens``, whose help says ``which`` sentences these are, and ``--sentence``."""
    group.add_argument("--tokens", type=tokens, metavar="N", help=f"1 to {MAX_TOKENS}: {which}")
    group.add_argument("--sentence", metavar="WORDS", help="a sentence of your own")


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add ``--causal``, ``--scale`` and ``--seed``, which change an example's numbers."""
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--causal", action=flag, help="hide later tokens, or not")
    parser.add_argument("--scale", action=flag, help="divide the scores by √d_k, or not")
    drawn = "of embeddings and weights (default 1)"
    parser.add_argument("--seed", type=natural, metavar="N", help=drawn)


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add ``--only`` and ``--decimals``, which steps to show and how."""
    which = "show this step only (may be repeated)"
    how = "of numbers that are not whole (default 3)"
    parser.add_argument("--only", action="append", default=[], metavar="STEP", help=which)
    parser.add_argument("--decimals", type=decimals, default=3, metavar="N", help=how)
