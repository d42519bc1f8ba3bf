"""Compute one or more texts in a batch, and return the results without padding.

Axes: ``B`` texts, ``L`` tokens of the longest text, ``E`` model width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_integers, choice
from minimha.equations.option_types import Backend
from minimha.equations.tap import Steps, Tap
from minimha.models.layer import LayerCache
from minimha.models.tokens import Tokenizer, numbers

Array = NDArray[Any]
Pooling = Literal["mean", "first", "last"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Token ids of one or more texts, padded on the right with token 0.

    Attributes
    ----------
    ids : ndarray of shape (L,) or (B, L), int64
        (L,) for one text, (B, L) for a batch of texts.
    lengths : ndarray of shape (B,), int64
        The number of tokens in each text.
    is_list : bool
        Whether results are a list with one array per text: True for a list of texts, which may
        differ in length.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    is_list: bool = False

    @property
    def is_padded(self) -> bool:
        """True if any text is shorter than the longest one."""
        return bool((self.lengths < self.ids.shape[-1]).any())

    def unpadded(self, rows: Array) -> Any:
        """Return ``rows`` (B, L, n) without padding.

        The result is (L, n) for one text, (B, L, n) for an array (B, L) of token ids, and a list of
        arrays (length, n) for a list of texts.
        """
        if self.is_list:
            return [row[:length] for row, length in zip(rows, self.lengths, strict=True)]
        return np.asarray(rows if self.ids.ndim == 2 else rows[0])


Several: TypeAlias = "list[str] | tuple[str, ...]"
Texts: TypeAlias = "str | Several | ArrayLike | Batch"


class Options(TypedDict, total=False):
    """Types of the options that all models share."""

    backend: Backend
    tap: Tap
    replace: Steps


class CachedOptions(Options, total=False):
    """Types of the options of models that accept a cache of earlier tokens."""

    cache: Sequence[LayerCache] | None


def batch(name: str, ids: Texts, V: int, tokenizer: Tokenizer | None) -> Batch:
    """Return the checked token ids of a text, a list of texts, or an array (L,) or (B, L).

    ``name`` is the argument's name in errors, ``V`` is the size of the vocabulary, and
    ``tokenizer`` converts texts. If ``ids`` is a ``Batch`` already, it is returned unchecked.

    Raises
    ------
    TypeError, ValueError
        A text without tokens or without a tokenizer, or an id that is not from 0 to V - 1.
    """
    if isinstance(ids, Batch):
        return ids
    texts = isinstance(ids, list | tuple) and all(isinstance(text, str) for text in ids)
    given: Any = ids if isinstance(ids, str) or (texts and ids) else as_integers(name, ids)
    if isinstance(given, str) or (not texts and given.ndim != 2) or not len(given):
        one = numbers(name, given, V, tokenizer)
        return Batch(one, np.array([len(one)]))
    rows = [numbers(f"{name}[{n}]", row, V, tokenizer) for n, row in enumerate(given)]
    lengths = np.array([len(row) for row in rows])
    padded = np.zeros((len(rows), max(lengths)), np.int64)
    for to, row in zip(padded, rows, strict=True):
        to[: len(row)] = row
    return Batch(padded, lengths, is_list=bool(texts))


def pooled(batch: Batch, rows: Array, pooling: Pooling) -> Array:
    """Return one row for each text, made from the ``rows`` (B, L, E) of its tokens.

    The result is (E,) for one text, else (B, E). ``pooling`` is "mean" (of all tokens), "first"
    (the token [CLS] in BERT) or "last". Padding is ignored.
    """
    choice("pooling", pooling, get_args(Pooling))
    texts = zip(rows, batch.lengths, strict=True)
    if pooling == "mean":
        found = [row[:length].mean(axis=0) for row, length in texts]
    else:
        found = [row[0 if pooling == "first" else length - 1] for row, length in texts]
    return np.asarray(found if batch.ids.ndim == 2 else found[0])
