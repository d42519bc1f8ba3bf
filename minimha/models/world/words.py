"""Define the tokenizer of the small world model, with one token per word."""

import re
from collections.abc import Sequence


class Words:
    """A tokenizer whose tokens are lower-case words and punctuation marks.

    A token's id is its index in ``vocabulary``.

    >>> words = Words(["the", "cat", "sat", "."])
    >>> words.encode("The cat sat.")
    [0, 1, 2, 3]
    >>> words.decode([0, 1, 2, 3])
    'the cat sat.'
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self._ids = {word: i for i, word in enumerate(self.vocabulary)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of the words and marks of ``text``, in which case is ignored.

        Raise ValueError for words outside the vocabulary.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is {text!r}: expected a string")
        words = re.findall(r"\w+|[^\w\s]", text.lower())
        if unknown := [word for word in dict.fromkeys(words) if word not in self._ids]:
            nearest = "; ".join(f"{word!r} (nearest: {self._nearest(word)})" for word in unknown)
            raise ValueError(
                f"text has words outside the vocabulary of {len(self.vocabulary)} words: {nearest}"
            )
        return [self._ids[word] for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words of ``ids``, joined by spaces except before punctuation."""
        return re.sub(r" (?=[^\w\s])", "", " ".join(map(self.label, ids)))

    def label(self, id: int) -> str:
        """Return the word whose token id is ``id``."""
        if not 0 <= id < len(self.vocabulary):
            raise ValueError(
                f"id is {id} but the vocabulary has {len(self.vocabulary)} words: expected "
                f"0 to {len(self.vocabulary) - 1}"
            )
        return self.vocabulary[id]

    def _nearest(self, word: str) -> str:
        from difflib import get_close_matches  # only where a word is unknown

        return ", ".join(get_close_matches(word, self.vocabulary, n=3, cutoff=0))
