"""Generate the training sentences of the small world model, with exact next-word probabilities.

A kind of passage is a generator function. It yields either a text, whose words follow with
certainty, or a choice: a tuple of equally likely words, or a dictionary from words to
probabilities. ``yield`` returns the word that was drawn. The words so far therefore determine how a
passage of each kind continues, and ``next_words`` applies Bayes' rule to the kinds.
"""

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

Options: TypeAlias = "str | Sequence[str] | Mapping[str, float]"
Passage: TypeAlias = Generator[Options, str, None]
Kind: TypeAlias = Callable[[], Passage]

MEN = ("tom", "ben", "sam", "max", "leo", "paul", "john", "peter")
WOMEN = ("anna", "lucy", "mia", "eva", "emma", "mary", "alice", "clara")
PEOPLE = MEN + WOMEN
THINGS = (
    "ball", "book", "key", "cup", "hat", "letter", "phone", "coin", "ring", "pen", "map", "lamp",
)  # fmt: skip
LOOKS = ("young", "small", "big", "black", "white", "brown", "grey", "wet")
SEATS = {
    "cat": {"mat": 0.5, "sofa": 0.3, "chair": 0.2},
    "dog": {"porch": 0.5, "rug": 0.3, "mat": 0.2},
    "bird": {"branch": 0.6, "roof": 0.3, "fence": 0.1},
    "frog": {"leaf": 0.6, "stone": 0.4},
    "duck": {"grass": 0.7, "stone": 0.3},
    "horse": {"grass": 0.6, "straw": 0.4},
}
ANIMALS = tuple(SEATS)
PLURALS = {f"{animal}s": animal for animal in ANIMALS}
STATES = ("happy", "sad", "hungry", "tired", "old", "young", "small", "wet")
FEELINGS = {"sat": {"tired": 0.6, "happy": 0.4}, "slept": {"tired": 0.7, "sick": 0.3}}
REASONS = {
    "home": {"tired": 0.4, "sick": 0.4, "late": 0.2},
    "bed": {"tired": 0.7, "sick": 0.3},
    "kitchen": {"hungry": 0.6, "thirsty": 0.4},
    "doctor": {"sick": 1.0},
}
BARRIERS = {"street": {"wide": 0.5, "busy": 0.5}, "river": {"wide": 0.5, "deep": 0.5}}
PLACES = {
    "sat": "on the bank of the river",
    "swam": "in the river . the bank was",
    "needed": "a loan . the bank was",
}
BANKS = {"swam": {"wet": 0.6, "muddy": 0.4}, "needed": {"open": 0.6, "closed": 0.4}}


def either(first: Options, share: float, second: Options) -> dict[str, float]:
    """Combine two choices: ``first`` has total probability ``share``, ``second`` the rest."""
    parts = [(_shares(first), share), (_shares(second), 1 - share)]
    return {word: part * p for shares, part in parts for word, p in shares.items()}


def others(words: Sequence[str], *taken: str) -> list[str]:
    """Return the ``words`` that are not in ``taken``."""
    return [word for word in words if word not in taken]


def seat() -> Passage:
    """Generate passages such as "the big cat sat on the mat because it was tired ."."""
    yield "the"
    subject = yield either(LOOKS, 0.3, either(ANIMALS, 0.7, tuple(PLURALS)))
    if subject in LOOKS:
        subject = yield either(ANIMALS, 0.7, tuple(PLURALS))
    verb = yield tuple(FEELINGS)
    yield "on the"
    yield SEATS[PLURALS.get(subject, subject)]
    if (yield {".": 0.7, "because": 0.3}) == "because":
        yield "they were" if subject in PLURALS else "it was"
        yield FEELINGS[verb]
        yield "."


def agreement() -> Passage:
    """Generate passages such as "the cats that saw the dog were tired ."."""
    yield "the"
    subject = yield (*ANIMALS, *PLURALS)
    verb = "were" if subject in PLURALS else "was"
    link = yield {verb: 0.1, "that": 0.6, "near": 0.3}
    if link == "that":
        yield ("saw", "chased", "liked")
    if link != verb:
        yield "the"
        yield (*ANIMALS, *PLURALS)
        yield verb
    yield STATES
    yield "."


def barrier() -> Passage:
    """Generate passages such as "the dogs did not cross the street because it was too wide ."."""
    yield "the"
    subject = yield (*ANIMALS, *PLURALS)
    yield "did not cross the"
    place = yield tuple(BARRIERS)
    yield "because"
    if subject in PLURALS:
        pronoun = yield ("they", "it")
        yield "was too" if pronoun == "it" else "were too"
        yield BARRIERS[place] if pronoun == "it" else ("tired", "scared")
    else:
        yield "it was too"
        yield either(BARRIERS[place], 0.5, ("tired", "scared"))
    yield "."


def reason() -> Passage:
    """Generate passages such as "anna went to the kitchen because she was hungry ."."""
    person = yield PEOPLE
    yield "went"
    place = yield ("home", "to")
    if place == "to":
        place = yield ("bed", "the")
    if place == "the":
        place = yield ("kitchen", "doctor")
    yield "because"
    yield "he was" if person in MEN else "she was"
    yield REASONS[place]
    yield "."


def receiver() -> Passage:
    """Generate passages such as "anna gave the key to tom . now tom has the key ."."""
    giver = yield PEOPLE
    verb = yield ("gave", "sold", "took")
    first = yield either("the", 0.5, others(PEOPLE, giver)) if verb != "took" else "the"
    if first != "the":
        yield "the"
    thing = yield THINGS
    if first == "the":
        yield "from" if verb == "took" else "to"
        first = yield others(PEOPLE, giver)
    yield f". now {giver if verb == 'took' else first} has the {thing} ."


def repetition() -> Passage:
    """Generate passages such as "mia bought a cup , a hat and a key . then sam bought a cup …"."""
    person = yield PEOPLE
    verb = yield ("bought", "found", "lost")
    yield "a"
    one = yield THINGS
    yield ", a"
    two = yield others(THINGS, one)
    yield "and a"
    three = yield others(THINGS, one, two)
    yield ". then"
    yield others(PEOPLE, person)
    yield f"{verb} a {one} , a {two} and a {three} too ."


def description() -> Passage:
    """Generate passages such as "tom saw a black cat and a white dog . the white dog liked …"."""
    seen: dict[str, str] = {}
    yield PEOPLE
    link = yield "saw"
    while link != ".":
        yield "a"
        look = yield others(LOOKS, *seen)
        seen[look] = yield others(ANIMALS, *seen.values())
        link = yield "." if link == "and" else ("and", ",") if len(seen) == 1 else "and"
    yield "the"
    subject = yield tuple(seen)
    yield seen[subject]
    yield ("chased", "liked")
    yield "the"
    yield seen[(yield others(tuple(seen), subject))]
    yield "."


def bank() -> Passage:
    """Generate passages such as "the boat reached the bank of the river ."."""
    subject = yield either("the", 0.7, PEOPLE)
    if subject == "the":
        subject = yield {"bank": 0.6, "boat": 0.4}
        if subject == "bank":
            yield ("approved", "refused")
            yield "the loan"
            if (yield {".": 0.7, "yesterday": 0.3}) == ".":
                return
        else:
            yield ("reached", "left")
            yield "the bank of the river"
        yield "."
    else:
        verb = yield ("sat", *BANKS)
        yield PLACES[verb]
        if verb != "sat":
            yield BANKS[verb]
        yield "."


KINDS: dict[Kind, float] = {
    seat: 0.2, agreement: 0.15, barrier: 0.1, reason: 0.1, bank: 0.1, receiver: 0.12,
    repetition: 0.1, description: 0.13,
}  # fmt: skip


def walk(kind: Kind, draw: random.Random) -> Iterator[tuple[str, dict[str, float]]]:
    """Draw a passage of ``kind``; yield each word and the probabilities from which it was drawn."""
    steps = _steps(kind())
    shares = next(steps)
    while shares:
        word = draw.choices(list(shares), list(shares.values()))[0]
        yield word, shares
        shares = steps.send(word)


def passage(kind: Kind, draw: random.Random) -> list[str]:
    """Draw a random passage of ``kind`` and return its words."""
    return [word for word, _ in walk(kind, draw)]


def any_kind(draw: random.Random) -> Kind:
    """Draw a random kind of passage, with the probabilities in ``KINDS``."""
    return draw.choices(list(KINDS), list(KINDS.values()))[0]


def vocabulary() -> list[str]:
    """Return the words of 2000 random passages of each kind, in alphabetical order."""
    draw = random.Random(0)
    return sorted({word for kind in KINDS for _ in range(2000) for word in passage(kind, draw)})


def next_words(words: Sequence[str]) -> dict[str, float]:
    """Return the probability of each possible next word after ``words``, most probable first.

    ``words`` must begin with the beginning of a passage. Let a(j) be the probability that a text
    begins with the words before j and has a passage that begins at j. Then a(0) = 1, and a(j) =
    Σ_i Σ_kinds a(i) P(kind) P(words i … j−1 are a passage of this kind). P(next word) is
    proportional to Σ_i Σ_kinds a(i) P(kind) P(words from i on, next word).
    """
    begins = [1.0] + [0.0] * len(words)
    found: dict[str, float] = {}
    for i, begin in enumerate(begins):
        for kind, share in KINDS.items() if begin else ():
            steps, p = _steps(kind()), begin * share
            shares = next(steps)
            for j, word in enumerate(words[i:], i):
                p *= shares.get(word, 0.0)
                shares = steps.send(word) if p else {}
                if not shares:
                    begins[j + 1] += p
                    break
            else:
                for word in shares:
                    found[word] = found.get(word, 0.0) + p * shares[word]
    total = sum(found.values())
    if not total:
        raise ValueError(f"the grammar has no text that begins {' '.join(words)!r}")
    return {word: p / total for word, p in sorted(found.items(), key=lambda item: -item[1])}


def _steps(passage: Passage) -> Generator[dict[str, float], str, None]:
    """Yield the probabilities of each next word, and an empty dictionary at the end."""
    options = next(passage)
    with suppress(StopIteration):
        while True:
            if isinstance(options, str):
                for word in options.split():
                    last = yield {word: 1.0}
            else:
                last = yield _shares(options)
            options = passage.send(last)
    yield {}


def _shares(options: Options) -> dict[str, float]:
    if isinstance(options, Mapping):
        return dict(options)
    words = options.split() if isinstance(options, str) else options
    return dict.fromkeys(words, 1 / len(words))
