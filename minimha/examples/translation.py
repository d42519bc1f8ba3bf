"""The translation example of document 000: an encoder-decoder with weights set by hand.

The sentence is "The boy trains the puppy" → "Le garçon entraîne le chiot". A token has 0 or 1 in
named columns, for its meaning and its position. The encoder decides whether "trains" is a noun or a
verb. The decoder reads ``<s>`` and the words written so far, and predicts what kind of word may
follow. Cross-attention then finds the English word of this kind.

The example first computes all words at once, as in training. Then it writes one word after the
other, as in generation. Finally, to show their purpose, it omits cross-attention, the shift and the
mask in turn. There are residual connections, but no norms or feed-forward layers, so that the
numbers remain easy to follow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.dense import softmax
from minimha.equations.tap import Tap, no_tap, staged
from minimha.examples.example import Example, Note, matrix
from minimha.explain.trace import token_labels
from minimha.layers.multihead import MultiHeadAttention

Array = NDArray[np.float64]

ENGLISH = ("The", "boy", "trains", "the", "puppy")
FRENCH = ("Le", "garçon", "entraîne", "le", "chiot")
READ = ("<s>", *FRENCH[:-1])  # the decoder's input: the translation, shifted by one
VOCABULARY = ("le", "garçon", "chiot", "train", "entraîne")  # one French word for each meaning
SHORT = ("art", "boy", "pup", "noun", "verb", "after", "<s>", *map(str, range(5)))  # columns of x
AFTER, START, E = 5, 6, len(SHORT)  # columns "the verb has been read" and <s>; the width
TRAINS = [3, 4]  # the columns of "trains", as a noun and as a verb
GAIN = 16.0  # factor of every query, so that a single matching column decides

IN_ENGLISH = matrix("1 0 0 0 0", "0 1 0 0 0", "0 0 0 0.5 0.5", "1 0 0 0 0", "0 0 1 0 0")
IN_FRENCH = np.eye(5)[[VOCABULARY.index(word.lower()) for word in FRENCH]]
# Row: the last word (article, three nouns, verb, <s>). Column: the kind of word expected next.
NEXT = np.array([[0, 1 / 3, 1 / 3, 1 / 3, 0], *[[0, 0, 0, 0, 1]] * 3, *[[1, 0, 0, 0, 0]] * 2])
W_VOCAB = GAIN * np.eye(E, 5)  # a word's logit is the share of its meaning


def embeddings(meanings: Array, is_shifted: bool = False) -> Array:
    """Return embeddings (L, E), each of which has a word's meaning and its position.

    ``meanings`` has a row for each word. If ``is_shifted``, row 0 of the result is the start token
    ``<s>``, and the words follow.
    """
    x = np.zeros((len(meanings) + is_shifted, E))
    x[int(is_shifted) :, :AFTER] = meanings
    x[0, START] = is_shifted
    x[:, START + 1 :] = np.eye(len(x), 5)
    return x


def encoder() -> MultiHeadAttention:
    """Return the encoder's attention: head 0 looks for a verb, head 1 decides what "trains" is."""
    so_far, places, asks, offers = np.zeros((4, E, 6))
    so_far[START + 1 :] = GAIN * np.c_[2 * np.tri(5), np.ones(5)]  # words up to the query; "trains"
    places[START + 1 :, :5] = np.eye(5)
    places[TRAINS, 5] = 1
    asks[TRAINS, 0] = GAIN  # an ambiguous word asks for nouns, …
    asks[[0, 1, 2], 1] = GAIN  # … any other word for an article, whose value is 0
    offers[[1, 2], 0] = offers[0, 1] = 1
    is_train, is_noun = np.zeros((2, E, 1))
    is_train[TRAINS] = is_noun[[1, 2]] = 1
    W_o = np.zeros((2, E))
    W_o[0, AFTER] = 1
    W_o[1, TRAINS] = -0.5, 0.5  # if there are nouns, "trains" is a verb
    return MultiHeadAttention.from_heads([so_far, asks], [places, offers], [is_train, is_noun], W_o)


def decoder() -> MultiHeadAttention:
    """Return the decoder layer: head 0 looks for a verb, head 1 predicts the next kind of word."""
    asks, offers = np.zeros((2, E, 5))
    asks[START + 1 :, :2] = GAIN * np.array([2, 1])  # a verb, or else <s>, whose value is 0
    offers[TRAINS, 0] = offers[START, 1] = 1
    me = np.eye(E, 5, -START - 1)  # the token's position
    is_train, meaning = np.zeros((2, E, 6))
    is_train[TRAINS, 0] = 1
    meaning[:AFTER, :5] = np.eye(5)
    meaning[START, 5] = 1
    W_o = np.zeros((12, E))
    W_o[0, AFTER] = 1
    W_o[6:, :AFTER] = NEXT
    W_o[6:] -= meaning.T  # the expected meaning replaces the meaning read
    return MultiHeadAttention.from_heads([asks, GAIN * me], [offers, me], [is_train, meaning], W_o)


def cross() -> MultiHeadAttention:
    """Return a cross-attention layer whose head finds the English word to translate next."""
    W, side = np.eye(E, 6), np.eye(6)[AFTER]
    W[AFTER] *= 2  # with the bias: -1 before the verb, 1 from the verb on
    meaning = np.eye(E, 5)
    return MultiHeadAttention.from_heads(
        [GAIN * W * (3, 3, 3, 3, 3, 1)], [W], [meaning], meaning.T, b_q=-GAIN * side, b_k=-side
    )


def copying() -> MultiHeadAttention:
    """Return a layer whose single head copies the next word, as it could without a mask."""
    me, meaning = np.eye(E, 5, -START - 1), np.eye(E, 5)
    ahead = np.zeros((E, 5))
    ahead[START + 1 : -1] = np.eye(5)[1:]
    return MultiHeadAttention.from_heads([GAIN * ahead], [me], [meaning], meaning.T)


def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Translate all words at once, then one by one, then without cross-attention, shift or mask."""
    scale = None if is_scaled else 1.0
    english, french = embeddings(IN_ENGLISH), embeddings(IN_FRENCH[:-1], is_shifted=True)
    staged_tap = staged(tap, "encoder")
    memory = staged_tap("added", english + encoder()(english, scale=scale, tap=staged_tap))
    staged_tap = staged(tap, "decoder")
    found = decoder()(french, is_causal=is_causal, scale=scale, tap=staged_tap)
    state = staged_tap("added", french + found)
    staged_tap = staged(tap, "cross")
    found = cross()(state, memory, scale=scale, tap=staged_tap)
    tap("W_vocab", W_VOCAB)
    probabilities(staged_tap("added", state + found), staged_tap)
    write(memory, scale, tap)
    probabilities(state, staged(tap, "decoder"))
    staged_tap = staged(tap, "unshifted")
    probabilities(staged_tap("x", embeddings(IN_FRENCH)), staged_tap)
    staged_tap = staged(tap, "unmasked")
    probabilities(copying()(french, scale=scale, tap=staged_tap), staged_tap)


def probabilities(x: Array, tap: Tap) -> Array:
    """Return the probabilities (L, 5) of the vocabulary's words for decoder outputs x (L, E)."""
    logits = tap("logits", x @ W_VOCAB)
    return np.asarray(tap("probabilities", softmax(logits)[0]))


def write(memory: Array, scale: float | None, tap: Tap) -> list[str]:
    """Generate five French words one by one, from the encoder's output ``memory``; return them."""
    words: list[int] = []
    for step in range(1, 6):
        read = embeddings(np.eye(5)[words], is_shifted=True)
        state = (read + decoder()(read, is_causal=True, scale=scale))[-1:]
        staged_tap = _looking(staged(tap, f"cross, step {step}"))
        found = cross()(state, memory, scale=scale, tap=staged_tap)
        words.append(int(probabilities(state + found, no_tap).argmax()))
    return [VOCABULARY[word] for word in words]


def _looking(tap: Tap) -> Tap:
    """Return a tap that passes on only the query and the weights of a step."""
    new = "x", "q", "scores", "scaled", "row_max", "exponentials", "row_sum", "weights"

    def receive(name: str, value: Any) -> Any:
        return tap(name, value) if name in new else value

    return receive


def _labels(stage: str, queries: Sequence[str], keys: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {f"{axis}[{stage}]": labels for axis, labels in token_labels(queries, keys).items()}


def _step_notes() -> dict[str, str]:
    return {
        f"weights[cross, step {n}]": f"Written so far: {' '.join(READ[:n])}. The decoder looks at "
        f"'{english}' and writes '{french}'."
        for n, (english, french) in enumerate(zip(ENGLISH, FRENCH, strict=True), 1)
    }


LABELS = {
    axis: labels
    for stage, queries, keys in (
        ("encoder", ENGLISH, ENGLISH), ("decoder", READ, READ), ("cross", FRENCH, ENGLISH),
        *((f"cross, step {n}", (word,), ENGLISH) for n, word in enumerate(FRENCH, 1)),
        ("unshifted", FRENCH, FRENCH), ("unmasked", READ, READ),
    )
    for axis, labels in _labels(stage, queries, keys).items()
}  # fmt: skip

EXAMPLE = Example(
    name="translation",
    title=f"{' '.join(ENGLISH)} → {' '.join(FRENCH)}: encoder, decoder, cross-attention",
    source="document 000, sections 4 and 5; Vaswani et al. 2017, figure 1; weights set by hand",
    sentence=f"{' '.join(ENGLISH)} → {' '.join(FRENCH)}", run=run,
    labels=LABELS | {"E": SHORT, "V": VOCABULARY}, is_causal=True,
    notes={
        "x[encoder]": "Columns: article, boy, puppy, 'trains' as a noun and as a verb, the verb "
        "has been read (nothing yet), <s>, position. By itself 'trains' may be either: ½ and ½.",
        "weights[encoder], head 0": "'trains' and the words after it read 'trains'; those before "
        "it read the words so far.",
        "weights[encoder], head 1": "'trains' looks at the nouns; the others rest on the articles, "
        "whose value there is 0.",
        "added[encoder]": "'trains' has become a verb, because there are nouns beside it, and from "
        "there on it is known that the verb has been read.",
        "x[decoder]": "The translation, shifted by one behind <s>: the last word of a row's "
        "sentence so far, from which the next word is to follow. Here all five rows are computed "
        "at once, as in training.",
        "masked[decoder]": "A French word sees no later one, which is not yet written.",
        "weights[decoder], head 0": Note(
            "'entraîne' and the word after it read the verb; the others rest on <s>, whose value "
            "is 0.",
            is_causal=True,
        ),
        "weights[decoder], head 1": "Each word reads itself.",
        "added[decoder]": Note(
            "What is expected next: after <s> an article, after an article any noun (⅓ each), "
            "after a noun a verb. The two 'le' differ: only after the second has a verb been read.",
            is_causal=True,
        ),
        "x[cross]": "Z of the decoder. From here on a row carries the word that it is to write, "
        "not the last one that it has read.",
        "context[cross]": "Z of the encoder.",
        "weights[cross]": Note(
            "A row is what the decoder looks at to write its word. No head looks at positions "
            "here: meaning and side of the verb decide.",
            is_causal=True,
        ),
        "output[cross]": Note(
            "What has been found for each French word: article, boy, verb, article, puppy.",
            is_causal=True,
        ),
        "added[cross]": "What was expected, and what was found.",
        "W_vocab": "A French word for each meaning: le, garçon, chiot, train (the noun), entraîne.",
        "logits[cross]": Note(
            "Without the mask, the verb is seen before it is written: the first article is taken "
            "for the second, and the noun after it for the object, 'chiot'.",
            is_causal=False,
        ),
        "probabilities[cross]": Note(
            "In each row the next word: Le garçon entraîne le chiot.", is_causal=True
        ),
        "x[cross, step 1]": "Z of the decoder. From here on it writes, one word after the other, "
        "and reads what it has written. With the mask every step is a row of the matrices above: "
        "training and writing compute the same.",
        **_step_notes(),
        "logits[decoder]": "From here on: what goes wrong without a part. First the decoder "
        "without cross-attention, Z of the decoder alone.",
        "probabilities[decoder]": Note(
            "Its grammar is right and it writes blindly: 'garçon', 'chiot' and 'train' are equally "
            "likely, whatever the English says. (Of verbs this vocabulary has only one.)",
            is_causal=True,
        ),
        "x[unshifted]": "Without the shift: the decoder reads the very words that it is to write.",
        "probabilities[unshifted]": "Every word is right without any attention: it is copied from "
        "the input. Nothing is learned of English, and where the next word is not yet written "
        "there is nothing to copy.",
        "x[unmasked]": "With the shift, but without the mask: the answer is one place ahead.",
        "weights[unmasked]": "One head that looks one place ahead. The last row has nothing there "
        "to look at, and asks for nothing.",
        "probabilities[unmasked]": "Right without reading a word of English, except for the last "
        "row, which is the only one that is like writing: what is ahead does not exist.",
    },
)  # fmt: skip
