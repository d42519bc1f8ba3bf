"""Label rows and columns by tokens, or by indices if the tokens are unknown."""

import re
from collections.abc import Iterable, Mapping
from unicodedata import category

from minimha.explain.catalogue import beside

Labels = Mapping[str, tuple[str, ...]]
TOKEN_AXES = ("L", "Lq", "Lk", "Lc")
BLOCK_AXES = {"B_r": "Lq", "B_c": "Lk"}  # axis of a block → axis of the whole matrix
PREFIXES = {"Lq": "q", "Lk": "k"}  # of unlabelled tokens: q0, k0
BLOCK = re.compile(r"\[i=(\d+)(?:,j=(\d+))?\]")
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, bidirectional ones among them; separators
JOINERS = "\u200c\u200d"  # which Persian words and many emoji need
NOT_IN_XML = "\ufffe\uffff"


def token_labels(
    queries: Iterable[str], keys: Iterable[str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return a dictionary from the names of token axes to their labels.

    ``queries`` and ``keys`` are the tokens. Default of ``keys`` is ``queries``.

    >>> token_labels(["cat", "sat"])["Lk"]
    ('cat', 'sat')
    """
    queries = tuple(queries)
    keys = queries if keys is None else tuple(keys)
    return {"L": queries, "Lq": queries, "Lk": keys, "Lc": keys}


def first_token(name: str, axis: str, blocks: tuple[int, int] | None) -> int:
    """Return the index of the first token along ``axis`` of the traced array ``name``.

    It is 0, except in an array for one block, such as ``S[i=0,j=1]``. ``blocks`` is (B_r, B_c), the
    block sizes.
    """
    block = BLOCK.search(name)
    if axis not in BLOCK_AXES or block is None or blocks is None:
        return 0
    n = list(BLOCK_AXES).index(axis)
    return int(block[n + 1]) * blocks[n]


def axis_labels(
    name: str, axis: str, size: int, known: Labels, blocks: tuple[int, int] | None
) -> tuple[str, ...] | None:
    """Return the labels along ``axis`` of the traced array ``name``.

    ``known`` has the labels of the run, ``size`` is the length of the axis, and ``blocks`` is
    (B_r, B_c), the block sizes. If ``known`` has too few labels, the labels of an axis of tokens
    are indices. Return None for another axis without ``size`` labels.
    """
    start = first_token(name, axis, blocks)
    if axis in BLOCK_AXES:
        if BLOCK.search(name) is None or blocks is None:
            return None
        axis = BLOCK_AXES[axis]
    if axis not in (*TOKEN_AXES, *known):
        return None
    labels = known.get(beside(name, axis), known.get(axis, ()))
    if axis not in TOKEN_AXES:
        return labels if len(labels) == size else None
    labels = labels[start : start + size]
    prefix = PREFIXES.get(axis, "")
    return labels if len(labels) == size else tuple(f"{prefix}{start + n}" for n in range(size))


def printable(text: str) -> str:
    """Return ``text`` with invisible control characters escaped.

    Control characters can change the state of a terminal, or the order of text. XML forbids some of
    them.

    >>> print(printable("a\\x1b[2J \\u202eb"))
    a\\x1b[2J \\u202eb
    """
    return "".join(
        c.encode("unicode_escape").decode()
        if (category(c) in INVISIBLE and c not in JOINERS) or c in NOT_IN_XML
        else c
        for c in text
    )
