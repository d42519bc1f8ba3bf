"""Examples of heads with weights set by hand, each of which follows one relation between words.

The documents name relations that heads may learn (subject and verb, a pronoun and its noun,
neighbours), without numbers. Here, a token has 0 or 1 in named columns, for its grammar and its
position. A head's W_q and W_k select the columns of one relation, so a score is the number of
matching columns. Heads of trained models rarely follow one relation so clearly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap
from minimha.examples.example import Example, Note
from minimha.explain.trace import token_labels
from minimha.layers.multihead import MultiHeadAttention

GAIN = 16.0  # factor of every query, so that one matching column decides; larger for long sentences
SPREAD = " A query of zeros asks for nothing and spreads evenly."
NEAR = {-1: 0.75, 0: 1.0, 1: 0.75}  # strength of the local head by distance
Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Head:
    """A head with hand-set weights that follow one ``relation``, such as that of verb and subject.

    ``reading`` describes the head's weights. ``asks`` has pairs of columns of x: a query with 1 in
    the first column attends to keys with 1 in the second. Or ``offsets`` is given, which maps the
    distance from query to key to the strength of attention.
    """

    relation: str
    reading: str
    asks: Pairs = ()  # a query with the first column set asks for keys with the second one set
    offsets: Mapping[int, float] | None = None  # strength by distance of the key from the query


def _example(
    name: str, document: str, grammar: Mapping[str, str], columns: Sequence[str],
    heads: list[Head], gain: float = GAIN,
) -> Example:  # fmt: skip
    """Return an example of the words in ``grammar``, a mapping from each word to its columns."""
    words = list(grammar)
    L, E = len(words), len(columns) + len(words)

    def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
        x = np.zeros((L, E))
        for i, kinds in enumerate(grammar.values()):
            x[i, [columns.index(kind) for kind in kinds.split()]] = 1
            x[i, len(columns) + i] = 1
        W_q, W_k = (
            np.stack(W) for W in zip(*(_matrices(h, columns, L, gain) for h in heads), strict=True)
        )
        W_v = np.zeros((len(heads), E, 1))
        W_v[:, len(columns) :, 0] = np.arange(L)
        layer = MultiHeadAttention.from_heads(W_q, W_k, W_v, np.eye(len(heads)))
        layer(x, tap=tap, is_causal=is_causal, scale=None if is_scaled else 1.0)

    readings = {
        f"weights, head {h}": Note(
            f"{head.relation[0].upper()}{head.relation[1:]}. {head.reading}."
            + SPREAD * _has_query_of_zeros(head, grammar),
            *(None, None) if head is PREVIOUS else (False, True),
        )
        for h, head in enumerate(heads)
    }
    return Example(
        name=name,
        title=f"{' '.join(words)}, heads set by hand to do what document {document} says",
        source=f"a sentence of document {document}; weights set by hand", sentence=" ".join(words),
        run=run, labels=token_labels(words)
        | {"E": (*columns, *map(str, range(L))), "H": tuple(head.relation for head in heads)},
        notes={
            "x": "Columns: the token's grammar, 1 where it applies, and its position.",
            "W_v": "Every token passes on its number, so a head's output says which one it reads.",
            "output": "One column per head: the number of the token that it reads, or an average.",
            **readings,
        },
    )  # fmt: skip


def _has_query_of_zeros(head: Head, grammar: Mapping[str, str]) -> bool:
    """Return whether some word has none of the columns that the head's queries use."""
    asking = {column for column, _ in head.asks}
    return head.offsets is None and any(
        asking.isdisjoint(kinds.split()) for kinds in grammar.values()
    )


def _matrices(
    head: Head, columns: Sequence[str], L: int, gain: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return W_q and W_k (E, D) of one head; D is L, one column per position."""
    W_q, W_k = np.zeros((2, len(columns) + L, L))
    for n, key in enumerate(dict.fromkeys(key for _, key in head.asks)):
        W_k[columns.index(key), n] = 1
        for query in (query for query, asked in head.asks if asked == key):
            W_q[columns.index(query), n] = gain
    if head.offsets is not None:
        W_k[len(columns) :] = np.eye(L)
        for i in range(L):
            places = {i + n: share for n, share in head.offsets.items() if 0 <= i + n < L}
            for place, share in (places or {i: 1.0}).items():  # or the token itself
                W_q[len(columns) + i, place] = gain * share
    return W_q, W_k


PREVIOUS = Head(
    "previous token", "Each word reads the one before it, the first itself", (), {-1: 1.0}
)
LOCAL = Head("position", "Each word reads itself and its neighbours", (), NEAR)

ADOPTED, RAN_AWAY, BANK = (
    _example("heads-000", "000",
        {"The": "article main", "cat": "noun subject main", "that": "clause",
         "I": "subject clause", "adopted": "verb clause", "sleeps": "verb main"},
        ("article", "noun", "subject", "verb", "main", "clause"),
        [
            Head("subject relation: cat → sleeps",
                "'cat' reads 'sleeps' and 'I' reads 'adopted', the verb of its own clause: two "
                "columns must agree; the others spread over their clause",
                (("subject", "verb"), ("main", "main"), ("clause", "clause"))),
            Head("relative clause: I adopted → cat",
                "'that', 'I' and 'adopted' read 'cat', of which the clause speaks",
                (("clause", "noun"),)),
            Head("article relation: The → cat", "'The' reads 'cat', its noun",
                (("article", "noun"),)),
            Head("semantic meaning: sleeps → cat",
                "'sleeps' reads 'cat' and 'adopted' reads 'I': who does it; the others spread over "
                "their clause",
                (("verb", "subject"), ("main", "main"), ("clause", "clause"))),
        ]),
    _example("heads-001", "001",
        {"The": "", "cat": "subject action", "that": "clause", "I": "clause",
         "saw": "clause", "yesterday": "", "ran": "verb action", "away": "action"},
        ("subject", "verb", "clause", "action"),
        [
            Head("syntactic structure", "'cat' and 'ran', subject and verb, read each other",
                (("subject", "verb"), ("verb", "subject"))),
            LOCAL,
            Head("relative clause", "'that', 'I' and 'saw' read each other",
                (("clause", "clause"),)),
            Head("long range", "'cat', 'ran' and 'away', who did what, read each other",
                (("action", "action"),)),
        ]),
    _example("heads-002", "002",
        {"The": "", "bank": "lender actor", "approved": "verb",
         "the": "", "loan": "lent", "yesterday": "time"},
        ("lender", "lent", "actor", "verb", "time"),
        [
            Head("meaning", "'bank' and 'loan' read each other",
                (("lender", "lent"), ("lent", "lender"))),
            Head("action", "'approved' and 'bank' read each other",
                (("verb", "actor"), ("actor", "verb"))),
            Head("time", "'yesterday' and 'approved' read each other",
                (("time", "verb"), ("verb", "time"))),
            PREVIOUS,
        ]),
)  # fmt: skip
PRONOUN = replace(
    _example("coreference", "000",
        {"The": "article first main", "cat": "noun living subject first main", "sat": "verb main",
         "on": "preposition second main", "the": "article second main", "mat": "noun second main",
         "because": "clause", "it": "pronoun subject clause", "was": "verb clause",
         "tired": "clause", ".": "stop main"},
        ("article", "noun", "living", "pronoun", "preposition", "subject", "verb", "first",
         "second", "main", "clause", "stop"),
        [
            Head("coreference: it → cat",
                "'it' reads 'cat': what is tired must be alive, and 'mat' is not",
                (("pronoun", "living"),)),
            Head("subject and verb: cat → sat, it → was",
                "Each subject reads the verb of its clause; the others spread over their clause",
                (("subject", "verb"), ("main", "main"), ("clause", "clause"))),
            Head("punctuation: each word → '.'", "Each word reads the full stop",
                (("main", "stop"), ("clause", "stop"))),
            Head("syntax: The → cat, on the → mat",
                "Articles and the preposition read the noun of their phrase; the nouns spread over "
                "their phrase",
                (("article", "noun"), ("preposition", "noun"), ("first", "first"),
                 ("second", "second"))),
        ], gain=28.0),
    title="The cat sat on the mat because it was tired . Heads set by hand: coreference, verbs, "
    "punctuation, syntax",
    source="relations that documents 000 and 001 name; weights set by hand",
)  # fmt: skip
