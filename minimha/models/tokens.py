"""Tokenizers: from text to the numbers of its tokens, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_integers, counted, name_of


class Tokenizer(Protocol):
    """What a model needs of its tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The numbers of the tokens of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens."""

    def label(self, id: int) -> str:
        """A printable name of one token, never empty."""


def numbers(
    name: str, ids: str | ArrayLike, V: int, tokenizer: Tokenizer | None
) -> NDArray[np.int64]:
    """The numbers of the tokens (L,), checked; text goes through the tokenizer.

    Raises
    ------
    TypeError, ValueError
        Text without a tokenizer, no token, or one that is not in the vocabulary of V.
    """
    if isinstance(ids, str):
        if tokenizer is None:
            raise ValueError(
                f"{name_of(name)} is text, but the model has no tokenizer: give the tokens' numbers"
            )
        ids = tokenizer.encode(ids)
    tokens = as_integers(name, ids)
    if tokens.ndim != 1 or not tokens.size:
        raise ValueError(
            f"{name_of(name)} has shape {tokens.shape}: expected (L,) with at least 1 token"
        )
    outside = np.flatnonzero((tokens < 0) | (tokens >= V))
    if outside.size:
        raise ValueError(
            f"{name_of(name)}[{outside[0]}] is {tokens[outside[0]]}: expected 0 to {V - 1}, the "
            f"vocabulary's tokens"
        )
    return tokens


def ends(name: str, eos: ArrayLike | None, default: Sequence[int] = ()) -> tuple[int, ...]:
    """The tokens after which a text ends: one, several or none, or by default those given."""
    return tuple(default if eos is None else as_integers(name, eos).ravel().tolist())


def check_length(name: str, num_tokens: int, start: int, max_length: int) -> None:
    """Refuse more tokens, the first at position ``start``, than there are positions."""
    if start + num_tokens > max_length:
        after = f" after {start} earlier ones" if start else ""
        raise ValueError(
            f"{name_of(name)} has {counted(num_tokens, 'token')}{after}: the model has only "
            f"{max_length} positions"
        )


class SubwordTokenizer:
    """A tokenizer of the package tokenizers.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The numbers of the tokens of ``text``, with those that mark its beginning and end."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, marks of beginning and end included."""
        return str(self._tokenizer.decode([int(n) for n in ids], skip_special_tokens=False))

    def label(self, id: int) -> str:
        """The token's text, ``_`` for a space and ``\\n`` for a new line.

        If it has no text, because it is a part of a character, its name in the vocabulary.
        """
        name = str(self._tokenizer.id_to_token(int(id)))
        text = self.decode([id])
        if name.startswith("▁") and not text.startswith(" "):
            text = f" {text}"  # decoding a sentence drops its first space
        if not text or "\ufffd" in text:
            return name
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text.replace(" ", "_"))


def from_file(path: Path) -> SubwordTokenizer:
    """The tokenizer of a tokenizer.json.

    Raises
    ------
    ValueError
        The package tokenizers is not installed, or the file is no tokenizer.
    """
    tokenizers = library(path)
    try:
        return SubwordTokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{path} is no tokenizer: {error}") from None


def library(path: Path | str) -> Any:
    """The package tokenizers, which reads the tokenizer in ``path``; a ValueError without it."""
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            f"{path} is read by the package tokenizers, which is not installed: "
            f"pip install 'minimha[models]'"
        ) from None
    return tokenizers
