"""What the small world's model is asked: passages up to the word that shows a relation."""

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
    """A text and the grammar's probability of each word that may follow.

    Attributes
    ----------
    words : tuple of str
    answers : dict of str to float
        Most probable first; they add up to 1.
    """

    words: tuple[str, ...]
    answers: dict[str, float]


@dataclass(frozen=True)
class Score:
    """How a model answered.

    Attributes
    ----------
    right : float
        The share of questions where its most probable word is one of the grammar's most probable.
    largest, mean : float
        Over the questions, of the largest difference between a word's two probabilities.
    """

    right: float
    largest: float
    mean: float


# What is asked, the kind of passage that it is asked in, and the words right before the answer.
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


# Of these kinds the grammar has so many passages that those asked about can be kept from training.
HELD_OUT = ("receiver", "thing received", "repetition", "description")


def questions(relation: str, number: int = 200, *, before: int = 0) -> list[Question]:
    """Different questions about one relation, each after some passages of any kind.

    Parameters
    ----------
    relation : str
        A key of RELATIONS.
    number : int, default 200
        How many; fewer where the grammar does not have that many different ones.
    before : int, default 0
        Passages before the one that is asked about, which is the same for any number of them.

    Raises
    ------
    ValueError
        No such relation.
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
        context = list(
            chain(*(grammar.passage(grammar.any_kind(other), other) for _ in range(before)))
        )
        found.append(Question((*context, *words), grammar.next_words([*context, *words])))
    return found


def passages(number: int = 40) -> list[str]:
    """That many passages of each kind, always the same."""
    draw = random.Random("passages")
    return [" ".join(grammar.passage(kind, draw)) for kind in grammar.KINDS for _ in range(number)]


def subjects(words: Sequence[str]) -> NDArray[np.bool_]:
    """Which word (column) is the subject of the verb that follows a word (row): (L, L).

    A subject that stands right before its verb is left out: the model need not look back for it.

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
    """What the passages begin with that no model was trained on."""
    return {question.words for relation in HELD_OUT for question in questions(relation)}


def score(model: Transformer, asked: Sequence[Question]) -> Score:
    """How near the model's next words come to the grammar's."""
    right, distances = [], []
    for question in asked:
        p = probabilities(model.logits(" ".join(question.words))[-1])
        exact = np.zeros_like(p)
        exact[model.encode(" ".join(question.answers))] = list(question.answers.values())
        right.append(exact[p.argmax()] > exact.max() - 1e-6)
        distances.append(np.abs(p - exact).max())
    return Score(float(np.mean(right)), float(np.max(distances)), float(np.mean(distances)))
