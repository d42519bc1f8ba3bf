"""Document 000's translation: encoder, masked decoder and cross-attention, set by hand.

"The boy trains the puppy" → "Le garçon entraîne le chiot". A token is written as 0 and 1 in named
columns: what it means, in either language, and its position. Three things have to be found out:
whether "trains" is a noun or a verb, which article belongs to which noun, and which English word
each French word translates. Residual connections let a token keep what it was; layer normalisation
and feed-forward layers, which a whole transformer has, would only hide the numbers.
"""

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap, staged
from minimha.examples.example import Example
from minimha.explain.trace import token_labels
from minimha.layers.multihead import MultiHeadAttention

ENGLISH = ("The", "boy", "trains", "the", "puppy")
FRENCH = ("Le", "garçon", "entraîne", "le", "chiot")
MEANINGS = ("article", "boy", "puppy", "trains, noun", "to train")
SHORT = ("art", "boy", "pup", "noun", "verb", "after", *map(str, range(5)))  # of the columns of x
AFTER = len(MEANINGS)  # the column that says: this token follows the verb
E = len(SHORT)
GAIN = 16.0  # of every query, so that one matching column more or less decides


def embeddings(verb: tuple[float, float]) -> NDArray[np.float64]:
    """Shape (5, E): both sentences are article, boy, train, article, puppy.

    ``verb`` is what its third word means by itself, as a noun and as a verb.
    """
    x = np.zeros((5, E))
    x[[0, 3], 0] = x[1, 1] = x[4, 2] = 1
    x[2, 3:5] = verb
    x[:, AFTER + 1 :] = np.eye(5)
    return x


def encoder() -> MultiHeadAttention:
    """Head 0: was the token before me the verb? Head 1: am I a noun or a verb?"""
    before, after = _previous_token()
    asks, offers = np.zeros((2, E, 5))
    asks[[3, 4], 0] = GAIN  # an ambiguous word asks for nouns …
    asks[[0, 1, 2], 1] = GAIN  # … and any other for an article, which passes on nothing
    offers[[1, 2], 0] = offers[0, 1] = 1
    is_train, is_noun = np.zeros((2, E, 1))
    is_train[[3, 4]] = is_noun[[1, 2]] = 1
    W_o = np.zeros((2, E))
    W_o[0, AFTER] = 1
    W_o[1, [3, 4]] = -0.5, 0.5  # nouns beside it: it is the verb
    return MultiHeadAttention.from_heads([before, asks], [after, offers], [is_train, is_noun], W_o)


def decoder() -> MultiHeadAttention:
    """One head: was the word before me the verb? French needs no more, entraîne is a verb."""
    before, after = _previous_token()
    is_train, W_o = np.zeros((E, 1)), np.zeros((1, E))
    is_train[[3, 4]] = W_o[0, AFTER] = 1
    return MultiHeadAttention.from_heads([before], [after], [is_train], W_o)


def cross() -> MultiHeadAttention:
    """One head: which English word means what I mean, and is on my side of the verb?"""
    D = AFTER + 1
    W, W_v = np.zeros((E, D)), np.zeros((E, AFTER))
    W[:AFTER, :AFTER] = W_v[:AFTER] = np.eye(AFTER)
    W[AFTER, AFTER] = 2  # with the bias: -1 before the verb, 1 after it
    side = np.zeros(D)
    side[AFTER] = -1
    return MultiHeadAttention.from_heads(
        [GAIN * W], [W], [W_v], np.eye(AFTER), b_q=GAIN * side, b_k=side
    )


def _previous_token() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """W_q and W_k (E, 5) with which each token reads the one before it, the first itself."""
    W_q, W_k = np.zeros((2, E, 5))
    W_q[AFTER + 1 :] = GAIN * np.eye(5)[[0, 0, 1, 2, 3]]
    W_k[AFTER + 1 :] = np.eye(5)
    return W_q, W_k


def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Encoder self-attention → masked decoder self-attention → cross-attention."""
    scale = None if is_scaled else 1.0
    english, french = embeddings(verb=(0.5, 0.5)), embeddings(verb=(0, 1))
    heard = staged(tap, "encoder")
    memory = heard("added", english + encoder()(english, scale=scale, tap=heard))
    heard = staged(tap, "decoder")
    found = decoder()(french, is_causal=is_causal, scale=scale, tap=heard)
    state = heard("added", french + found)
    cross()(state, memory, scale=scale, tap=staged(tap, "cross"))


LABELS = {
    f"{axis}[{stage}]": labels
    for stage, queries, keys in (
        ("encoder", ENGLISH, ENGLISH), ("decoder", FRENCH, FRENCH), ("cross", FRENCH, ENGLISH),
    )
    for axis, labels in token_labels(queries, keys).items()
}  # fmt: skip

EXAMPLE = Example(
    name="translation",
    title=f"{' '.join(ENGLISH)} → {' '.join(FRENCH)}: encoder, decoder, cross-attention",
    source="document 000, sections 4 and 5; Vaswani et al. 2017, figure 1; weights set by hand",
    sentence=f"{' '.join(ENGLISH)} → {' '.join(FRENCH)}", run=run, labels=LABELS | {"E": SHORT},
    is_causal=True,
    notes={
        "x[encoder]": "Columns: article, boy, puppy, 'trains' as a noun and as a verb, follows the "
        "verb (nothing yet), position. By itself 'trains' may be either: ½ and ½.",
        "weights[encoder], head 0": "Each token reads the one before it, the first itself.",
        "weights[encoder], head 1": "'trains' looks at the nouns; the others rest on the articles, "
        "whose value there is 0.",
        "added[encoder]": "'trains' has become a verb, because there are nouns beside it, and the "
        "second 'the' is known to follow the verb.",
        "masked[decoder]": "A French word sees no later one, which is not yet written.",
        "added[decoder]": "Now the two 'le' differ: the second follows the verb.",
        "x[cross]": "Z of the decoder.",
        "context[cross]": "Z of the encoder.",
        "weights[cross]": "The alignment of the two sentences. No head looks at positions here: "
        "meaning and side of the verb decide.",
        "output[cross]": "What each French word has retrieved: article, boy, puppy, noun, verb.",
    },
)  # fmt: skip
