"""Convert text to token ids and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_integers, counted, name_of
from minimha.models.chat import Messages, Template, of_folder
from minimha.models.child import Child
from minimha.models.files import read_bytes

LARGEST_FILE = 2**27  # bytes of a tokenizer.json
MORE = ", and computes more, untrained, with dataclasses.replace(config, max_length=…)"
# Of the process of a ``FileTokenizer``.
CODE = """
from tokenizers import Tokenizer

def make(content):
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_padding(), tokenizer.no_truncation()
    return tokenizer
"""


class Tokenizer(Protocol):
    """The interface of a model's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the token ids ``ids``."""

    def label(self, id: int) -> str:
        """Return a printable, non-empty name of the token ``id``."""


def numbers(
    name: str, ids: str | ArrayLike, V: int, tokenizer: Tokenizer | None
) -> NDArray[np.int64]:
    """Return token ids (L,), checked to be from 0 to V - 1; ``tokenizer`` converts text.

    ``name`` is the argument's name in errors. Raise ValueError for text without a tokenizer, no
    tokens, or an id outside the range.
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
    """Return the ids of the tokens that end a text: ``eos``, or ``default`` if ``eos`` is None.

    ``name`` is the argument's name in errors.
    """
    return tuple(default if eos is None else as_integers(name, eos).ravel().tolist())


def check_length(
    name: str, num_tokens: int, start: int, max_length: int, is_fixed: bool = True
) -> None:
    """Raise ValueError if ``num_tokens`` tokens from position ``start`` exceed ``max_length``.

    ``name`` is the argument's name in the error. If ``is_fixed`` is False, the error suggests a
    larger ``max_length``. True is for models with weights for each position.
    """
    if start + num_tokens > max_length:
        after = f" after {start} earlier ones" if start else ""
        raise ValueError(
            f"{name_of(name)} has {counted(num_tokens, 'token')}{after}: the model has only "
            f"{max_length} positions{'' if is_fixed else MORE}"
        )


class SubwordTokenizer:
    """A ``Tokenizer`` that calls a tokenizer of Hugging Face's package tokenizers.

    ``template`` returns the model's chat template; without it, ``chat`` raises ValueError.
    """

    def __init__(self, tokenizer: Any, template: Callable[[], Template] | None = None) -> None:
        self._tokenizer, self._make_template = tokenizer, template
        self._template: Template | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``.

        If ``add_special_tokens``, they include those that the tokenizer adds, such as a first <s>.
        """
        return list(self._ask("encode", text, None, False, add_special_tokens))

    def chat(self, messages: Messages) -> str:
        """Return the text that the model's chat template makes of a conversation.

        The text includes its special tokens: use ``encode(text, add_special_tokens=False)``.

        Parameters
        ----------
        messages : str, or sequence of mapping
            Mappings like {"role": "user", "content": "Hello"}. A str is one message of the user.

        Raises
        ------
        TypeError, ValueError
            The model has no template, or the template refuses the messages.
        """
        if self._template is None:
            if self._make_template is None:
                raise ValueError("the model has no chat template")
            self._template = self._make_template()
        return self._template.render(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the token ids ``ids``, special tokens included."""
        return str(self._ask("decode", [int(n) for n in ids], False))

    def label(self, id: int) -> str:
        """Return the text of the token ``id``, with ``_`` for a space and ``\\n`` for a new line.

        If the token is only part of a character, the result is its name in the vocabulary.
        """
        name, text = str(self._ask("id_to_token", int(id))), self.decode([id])
        if name.startswith("▁") and not text.startswith(" "):
            text = f" {text}"  # decoding a sentence drops its first space
        if not text or "\ufffd" in text:
            return name
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text.replace(" ", "_"))

    def _ask(self, method: str, *arguments: Any) -> Any:
        found = getattr(self._tokenizer, method)(*arguments)
        return getattr(found, "ids", found)


class FileTokenizer(SubwordTokenizer):
    """A tokenizer from a tokenizer.json, run in a child process with limits on time and memory.

    Without a child process and limits, an untrusted file could make ``encode`` take endless time or
    all memory, or crash this process.
    """

    def __init__(self, path: Path, content: str) -> None:
        super().__init__(None, partial(of_folder, path.parent))
        self._child = Child(CODE, f"{path} is no tokenizer", content)

    def _ask(self, *request: Any) -> Any:
        return self._child.ask(*request)


def from_file(path: Path) -> SubwordTokenizer:
    """Return the tokenizer in the file ``path``, a tokenizer.json.

    Raise ValueError if the package tokenizers is not installed, or if the file is missing, too
    long, or no tokenizer.
    """
    library(path)
    return FileTokenizer(path, read_bytes(path, LARGEST_FILE).decode(errors="replace"))


def library(path: Path | str) -> Any:
    """Return the imported package ``tokenizers``; raise ValueError if it is not installed.

    The error names ``path``, the file that needs the package.
    """
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            f"{path} is read by the package tokenizers, which is not installed: "
            f"pip install 'minimha[models]'"
        ) from None
    return tokenizers
