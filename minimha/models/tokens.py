"""Tokenizers: from text to the numbers of its tokens, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What a model needs of its tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The numbers of the tokens of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens."""

    def label(self, id: int) -> str:
        """A printable name of one token, never empty."""


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
