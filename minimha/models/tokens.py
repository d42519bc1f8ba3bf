"""Convert text to the numbers of its tokens, and back, with tokenizers."""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_integers, counted, name_of
from minimha.models.files import read_bytes

LARGEST_FILE = 2**27  # bytes of a tokenizer.json
# The process of a ``FileTokenizer`` reads a method and arguments as a line of JSON, and answers so.
CHILD = """
import json, sys, time
from tokenizers import Tokenizer
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
except ImportError:  # Windows
    resource = None
tokenizer = Tokenizer
for line in sys.stdin:
    if resource:  # seconds of the processor
        end = int(time.process_time()) + 1 + len(line) // 2**19
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
    try:
        method, *arguments = json.loads(line)
        answer = getattr(tokenizer, method)(*arguments)
        if method == "from_str":
            tokenizer, answer = answer, None
            tokenizer.no_padding(), tokenizer.no_truncation()
        text = json.dumps([getattr(answer, "ids", answer), None])
    except BaseException as error:  # a panic of the package is no Exception
        text = json.dumps([None, str(error)])
    print(text, flush=True)
"""


class Tokenizer(Protocol):
    """The methods that a model's tokenizer must have."""

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the tokens of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens ``ids``."""

    def label(self, id: int) -> str:
        """Return a printable name of the token ``id``, never empty."""


def numbers(
    name: str, ids: str | ArrayLike, V: int, tokenizer: Tokenizer | None
) -> NDArray[np.int64]:
    """Return the numbers (L,) of tokens, checked to be below V. Text needs ``tokenizer``."""
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
    """Return the tokens that end a text: ``eos``, or ``default`` if ``eos`` is None."""
    return tuple(default if eos is None else as_integers(name, eos).ravel().tolist())


def check_length(name: str, num_tokens: int, start: int, max_length: int) -> None:
    """Raise ValueError if ``num_tokens`` tokens from position ``start`` exceed ``max_length``."""
    if start + num_tokens > max_length:
        after = f" after {start} earlier ones" if start else ""
        raise ValueError(
            f"{name_of(name)} has {counted(num_tokens, 'token')}{after}: the model has only "
            f"{max_length} positions"
        )


class SubwordTokenizer:
    """A model's ``Tokenizer`` that calls a ``tokenizers.Tokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the text's tokens, with begin and end tokens."""
        return list(self._ask("encode", text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens ``ids``, begin and end tokens included."""
        return str(self._ask("decode", [int(n) for n in ids], False))

    def label(self, id: int) -> str:
        """Return the token's text, with ``_`` for a space and ``\\n`` for a new line.

        If a token is only part of a character, returns the token's name in the vocabulary.
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
    """The tokenizer of a tokenizer.json, in a process with limits of time and memory.

    With an untrusted file, a text may take endless time or all memory, or crash the process.
    """

    def __init__(self, path: Path, content: str) -> None:
        self._given, self._lock, self._owner = (path, content), Lock(), 0
        self._ask("from_str", content)

    def __reduce__(self) -> Any:
        return FileTokenizer, self._given

    def _ask(self, *request: Any) -> Any:
        path, content = self._given
        with self._lock:
            requests = [request]
            if self._owner != os.getpid():  # at first, after an end, or in a fork
                self._process: Any = Popen(
                    [sys.executable, "-c", CHILD], stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
                    text=True, encoding="ascii", start_new_session=True,
                )  # fmt: skip
                weakref.finalize(self, self._process.__exit__, None, None, None)
                self._owner, requests = os.getpid(), [("from_str", content), request]
            try:
                for each in requests:
                    self._process.stdin.write(f"{json.dumps(each)}\n")
                    self._process.stdin.flush()
                    answer, error = json.loads(self._process.stdout.readline())
                    if error is not None:
                        raise ValueError(f"{path} is no tokenizer: {error}")
            except (OSError, json.JSONDecodeError):
                self._owner = 0
                raise ValueError(f"{path} is no tokenizer: out of time or memory") from None
        return answer


def from_file(path: Path) -> SubwordTokenizer:
    """Return the tokenizer in a tokenizer.json; the package tokenizers must be installed."""
    library(path)
    return FileTokenizer(path, read_bytes(path, LARGEST_FILE).decode(errors="replace"))


def library(path: Path | str) -> Any:
    """Import ``tokenizers``; if it is not installed, raise a ValueError that names ``path``."""
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            f"{path} is read by the package tokenizers, which is not installed: "
            f"pip install 'minimha[models]'"
        ) from None
    return tokenizers
