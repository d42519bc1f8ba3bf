"""Examples of two other scores for document 004's Q, K and V: cosine and additive attention."""

import numpy as np

from minimha.api import attention
from minimha.equations.tap import Tap, staged
from minimha.examples.example import Example, Note
from minimha.examples.given_qkv import K, Q, V
from minimha.layers.additive import additive_attention
from minimha.layers.cosine import cosine_attention


def run_cosine(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run dot-product attention, compute lengths and angles, then run cosine attention."""
    scale = None if is_scaled else 1.0
    attention(Q, K, V, is_causal=is_causal, scale=scale, tap=staged(tap, "dot"))
    for name, x in (("q_length", Q), ("k_length", K)):
        tap(name, np.linalg.norm(x, axis=1, keepdims=True))
    q, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (Q, K))
    apart, along = (np.linalg.norm(x, axis=2) for x in (q[:, None] - k, q[:, None] + k))
    tap("angle", np.degrees(2 * np.arctan2(apart, along)))  # exact where an arccosine is not
    cosine_attention(Q, K, V, is_causal=is_causal, tap=staged(tap, "cosine"))


def run_additive(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run additive attention with a hidden layer of width 2 and identity matrices.

    Raise ValueError if ``is_scaled``, since additive scores have no factor 1/√d_k.
    """
    if is_scaled:
        raise ValueError("additive attention has no product of vectors to divide by √d_k")
    I = np.eye(2)
    additive_attention(Q, K, V, I, I, np.ones(2), is_causal=is_causal, tap=tap)


COSINE = Example(
    name="cosine", title="dot product against cosine similarity, on the Q, K and V of document 004",
    source="document 004, section 'Dot Product vs Cosine Similarity', which offers it; Liu et al. "
    "2022 (Swin Transformer V2), section 3.3",
    sentence="three tokens without words", run=run_cosine,
    notes={
        "scores[dot]": "Query 2 and key 1 are both [1, 1]: being longer, they score twice as high "
        "as query 0 and key 0, which point the same way too.",
        "cosine[cosine]": "Here both pairs have cosine 1: length no longer counts.",
        "angle": "q2 · k1 = |q2| |k1| cos θ = 1.414 · 1.414 · cos 0° = 2, while "
        "q0 · k0 = 1 · 1 · cos 0° = 1: the angle is the same and the lengths are not.",
        "weights[cosine]": Note(
            "Scores lie between -1 and 1, so no key can get more than e² ≈ 7.4 times the weight of "
            "another. Models that use cosines learn a factor for them.",
            is_causal=False,
        ),
    },
)  # fmt: skip
ADDITIVE = Example(
    name="additive", title="additive (Bahdanau) attention on the Q, K and V of document 004",
    source="document 004, 'Alternatives'; Bahdanau et al. 2015, appendix A.1.2; the network's "
    "weights are chosen here",
    sentence="three tokens without words", run=run_additive, is_scaled=False,
    notes={
        "energies": "Here the longer key wins, whatever the query is: a network that adds must "
        "learn matrices with which the sum of a matching pair is large.",
    },
)  # fmt: skip
