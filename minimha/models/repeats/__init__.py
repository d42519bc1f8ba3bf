"""A second small model in this package, which repeats letters by an induction circuit of two heads.

It was trained on random blocks of letters that are repeated. In the second copy, the next letter is
the one that followed the same letter in the first copy. An induction head in the second layer finds
it, with the help of a previous-token head in the first layer (Olsson et al., "In-context Learning
and Induction Heads", 2022).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import integer
from minimha.models.transformer import Transformer
from minimha.models.world import read

__all__ = ["load", "score", "texts"]

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WEIGHTS = Path(__file__).with_name("repeats.npz")


def load() -> Transformer:
    """Return the small model that repeats letters; its tokens are single letters and digits.

    Examples
    --------
    >>> model = load()
    >>> model.tokenizer.label(model.logits("k f t a k f")[-1].argmax())
    't'
    """
    return read(WEIGHTS)


def texts(count: int = 20, seed: int = 0) -> list[str]:
    """Return random texts, each of which is a block of 8 to 30 letters or digits written twice.

    Raises
    ------
    TypeError, ValueError
        ``count`` is not a positive integer, or ``seed`` is negative or not an integer.

    Examples
    --------
    >>> texts(1)[0][:20], len(texts(1)[0].split())
    ('w s j l b c a g 3 x ', 54)
    """
    draw = np.random.default_rng(integer("seed", seed, 0))
    blocks = [
        draw.choice(list(LETTERS), draw.integers(8, 31)) for _ in range(integer("count", count))
    ]
    return [" ".join([*block, *block]) for block in blocks]


def score(model: Transformer, blocks: Sequence[str] | None = None) -> float:
    """Return the share of repeated letters that ``model`` predicts correctly, from 0 to 1.

    Only the second half of each text in ``blocks`` counts, without its first letter, which cannot
    be predicted. Default is ``texts()``. A prediction is the letter with the largest logit.
    """
    found: list[NDArray[np.bool_]] = []
    for text in texts() if blocks is None else blocks:
        ids = model.encode(text)
        half = len(ids) // 2
        found.append(model.logits(ids)[half:-1].argmax(axis=-1) == ids[half + 1 :])
    return float(np.concatenate(found).mean())
