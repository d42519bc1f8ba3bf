"""Test the small world model with questions: passages cut off before the word to predict."""

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
    """A text, and the grammar's probability of each possible next word."""

    words: tuple[str, ...]
    answers: dict[str, float]  # most probable first


@dataclass(frozen=True)
class Score:
    """A model's share of right answers, and the errors of its next-word probabilities.

    ``right`` is the share of questions for which the model's most probable word is a most probable
    word of the grammar too. A question's error is the largest difference of the two probabilities
    over all words. ``largest`` and ``mean`` are the largest and the mean error over the questions.
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

    ``before`` passages of random kinds precede each question in its text. The questions themselves
    are the same for each ``before``.
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
    """Return the mask (L, L) that is True at (i, j) if word j is the subject of the verb i + 1.

    Only verbs "was" and "were" count. A subject directly before its verb is not marked.

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
    """Return the set of questions, as tuples of words, that were left out of training."""
    return {question.words for relation in HELD_OUT for question in questions(relation)}


def score(model: Transformer, asked: Sequence[Question]) -> Score:
    """Compare a model's next-word probabilities with the grammar's in the questions ``asked``."""
    right, distances = [], []
    for question in asked:
        p = probabilities(model.logits(" ".join(question.words))[-1])
        exact = np.zeros_like(p)
        exact[model.encode(" ".join(question.answers))] = list(question.answers.values())
        right.append(exact[p.argmax()] > exact.max() - 1e-6)
        distances.append(np.abs(p - exact).max())
    return Score(float(np.mean(right)), float(np.max(distances)), float(np.mean(distances)))
