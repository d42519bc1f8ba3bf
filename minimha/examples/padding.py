"""An example of a padding mask: a batch of two sentences of different lengths."""

import numpy as np

from minimha.equations.tap import Tap, staged
from minimha.examples import sentences
from minimha.examples.example import Example
from minimha.explain.trace import token_labels
from minimha.layers.multihead import MultiHeadAttention

LONG, SHORT = (sentences.SENTENCES[n][0].split() for n in (5, 3))
PADDED = [*SHORT, *["<pad>"] * (len(LONG) - len(SHORT))]


def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run one head on a padded batch of two sentences, then on the shorter sentence alone."""
    E, seed, scale = 4, sentences.DEFAULT_SEED, None if is_scaled else 1.0
    layer = MultiHeadAttention.from_heads(*sentences.draw_weights(E, 1, 1, seed))
    x = np.stack([sentences.embeddings(words, E, seed) for words in (LONG, PADDED)])
    lengths = np.array([len(LONG), len(SHORT)])
    layer(x, kv_lengths=lengths, is_causal=is_causal, scale=scale, tap=tap)
    alone = staged(tap, "alone")
    layer(
        x[1:, : len(SHORT)], is_causal=is_causal, scale=scale,
        tap=lambda name, value: value if name.startswith("W_") else alone(name, value),
    )  # fmt: skip


EXAMPLE = Example(
    name="padding",
    title=f"{' '.join(LONG)} / {' '.join(PADDED)}: two lengths in one batch, and a padding mask",
    source="document 004, 'Practical details'; embeddings and weights drawn with seed "
    f"{sentences.DEFAULT_SEED}",
    sentence=f"{' '.join(LONG)} / {' '.join(PADDED)}", run=run,
    labels={
        f"{axis}{of}": words
        for of, found in ((", batch 0", LONG), (", batch 1", PADDED), ("[alone]", SHORT))
        for axis, words in token_labels(found).items()
    },
    notes={
        "x": "All sentences of a batch have one length, so <pad> fills the shorter one. Its "
        "embedding is drawn like any other word's.",
        "masked": "The padding mask: no query sees a <pad>. kv_lengths = [5, 3] hides the keys "
        "from each sentence's length on.",
        "weights": "A <pad> gets weight 0. The rows of <pad> are computed too, and nothing reads "
        "them.",
        "x[alone]": "From here on: the shorter sentence by itself, without padding.",
        "output[alone]": "The same rows as in the batch: padding changes nothing that is read.",
    },
)  # fmt: skip
