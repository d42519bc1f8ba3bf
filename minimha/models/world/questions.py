"""Ask the small world's model questions: passages cut before the word that shows a relation."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from minimha.models.sampling import probabilities
from minimha.models.transformer import Transformer
from minimha.models.world import grammar
from minimha.models.world.grammar import Kind


@dataclass(frozen=True)
class Question:
    """A text, and the probability of each possible next word by the grammar."""

    words: tuple[str, ...]
    answers: dict[str, float]  # most probable first


@dataclass(frozen=True)
class Score:
    """How well a model answers: its share of right answers, and errors of its probabilities.

    An answer is right if the model's most probable word is also one of the grammar's. A question's
    error is the largest over words; ``largest`` and ``mean`` are over the questions.
    """

    right: float
    largest: float
    mean: float


# Each relation's kind of passage, and a pattern of the words before the answer.
RELATIONS: dict[str, tuple[Kind, str]] = {
    "seat": (grammar.seat, r"on the$"),
    "agreement": (grammar.agreement, r"(that \w+|near) the \w+$"),
    "he or she": (grammar.reason, r"because$"),
    "it or they": (grammar.seat, r"because$"),
    "too wide or too tired": (grammar.barrier, r"too$"),
    "reason": (grammar.reason, r"because \w+ was$"),
    "bank of the river": (grammar.bank, r"bank of the$"),
    "loan of the bank": (grammar.bank, r"the bank \w+ the$"),
    "which bank": (grammar.bank, r"bank was$"),
    "receiver": (grammar.receiver, r"now$"),
    "thing received": (grammar.receiver, r"now \w+ has the$"),
    "repetition": (grammar.repetition, r"then .* a$"),
    "description": (grammar.description, r"\. the .*the \w+$|\. the \w+$"),
}


# The grammar has enough passages of these kinds to leave the questions out of training.
HELD_OUT = ("receiver", "thing received", "repetition", "description")


def questions(relation: str, number: int = 200, *, before: int = 0) -> list[Question]:
    """Return up to ``number`` different questions about ``relation``, a key of RELATIONS.

    ``before`` is the number of passages of any kind before each question. The questions are the
    same for every ``before``.
    """
    if relation not in RELATIONS:
        raise ValueError(f"relation is {relation!r}: expected one of {', '.join(RELATIONS)}")
    kind, ask = RELATIONS[relation]
    draw, other = random.Random(relation), random.Random(relation)
    asked: dict[tuple[str, ...], None] = {}
    for _ in range(10 * number):
        passage = grammar.passage(kind, draw)
        ends = [i for i in range(len(passage)) if re.search(ask, " ".join(passage[:i]))]
        asked |= dict.fromkeys(tuple(passage[:i]) for i in ends)
    found = []
    for words in list(asked)[:number]:
        passages = [grammar.passage(grammar.any_kind(other), other) for _ in range(before)]
        text = (*chain(*passages), *words)
        found.append(Question(text, grammar.next_words(text)))
    return found


def passages(number: int = 40) -> list[str]:
    """Return ``number`` passages of each kind. Every call returns the same passages."""
    draw = random.Random("passages")
    return [" ".join(grammar.passage(kind, draw)) for kind in grammar.KINDS for _ in range(number)]


def subjects(words: Sequence[str]) -> NDArray[np.bool_]:
    """Return a mask (L, L): for a word before a verb (row), True at the verb's subject (column).

    A subject right before its verb is not marked.

    >>> np.argwhere(subjects("the cats near the dog were wet .".split())).tolist()
    [[4, 1]]
    """
    found = np.zeros((len(words), len(words)), bool)
    for i in range(5, len(words)):
        if words[i] in ("was", "were") and words[i - 2] == "the":
            link = 2 if words[i - 3] == "near" else 3 if words[i - 4] == "that" else 0
            if link:
                found[i - 1, i - 2 - link] = True
    return found


def held_out() -> set[tuple[str, ...]]:
    """Return, as words, all questions that were left out of training."""
    return {question.words for relation in HELD_OUT for question in questions(relation)}


def score(model: Transformer, asked: Sequence[Question]) -> Score:
    """Compare the model's probabilities of next words with the grammar's, in all questions."""
    right, distances = [], []
    for question in asked:
        p = probabilities(model.logits(" ".join(question.words))[-1])
        exact = np.zeros_like(p)
        exact[model.encode(" ".join(question.answers))] = list(question.answers.values())
        right.append(exact[p.argmax()] > exact.max() - 1e-6)
        distances.append(np.abs(p - exact).max())
    return Score(float(np.mean(right)), float(np.max(distances)), float(np.mean(distances)))
