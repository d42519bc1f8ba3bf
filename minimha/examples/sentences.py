"""Examples of multi-head attention on any sentence, with weights small enough to follow by eye.

The documents announce such an example but omit it. Nothing is learned: embeddings and weights are
random integers, drawn with a seed. With the same seed, a word always has the same embedding.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap
from minimha.examples.example import Example
from minimha.explain.trace import token_labels
from minimha.layers.multihead import MultiHeadAttention

# The documents' sentences (and one title), by their number of tokens.
SENTENCES = {
    1: ("Attention", "000"),
    2: ("Multi-Head Attention", "002"),
    3: ("The cat sat", "003"),
    4: ("Translation quality would collapse", "000"),
    5: ("The quick brown fox jumps", "001"),
    6: ("The bank approved the loan yesterday", "002"),
    7: ("One head alone cannot learn all this", "000"),
    8: ("The cat that I saw yesterday ran away", "001"),
    9: ("A single attention head captures one type of relationship", "001"),
    10: ("All heads work in parallel and their knowledge is combined", "002"),
    11: ("Each output token embedding is computed by weighted sum over values", "003"),
    12: (
        "Self-attention helps each word understand its meaning by looking at surrounding words",
        "000",
    ),
}
DEFAULT_SEED = 1  # no zero columns, and row maxima that grow from block to block
BANK_RELATIONS = (
    "The document names relations that heads may learn in this sentence (bank ↔ loan, approved ↔ "
    "bank, yesterday ↔ approved, its structure) and prints no numbers. These weights are drawn, "
    "not learned, and show none of that; those of example heads-002 do."
)


def of_length(num_tokens: int, **settings: Any) -> Example:
    """Return the example ``sentence`` for the built-in sentence of ``num_tokens`` tokens.

    ``num_tokens`` is from 1 to 12, and ``settings`` are the options of ``sentence``.
    """
    words, document = SENTENCES[num_tokens]
    return sentence(words.split(), source=f"a sentence of document {document}", **settings)


def sentence(
    tokens: Sequence[str],
    *,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    d_model: int = 4,
    seed: int = DEFAULT_SEED,
    rope: bool = False,
    context: Sequence[str] | None = None,
    source: str = "your own sentence",
) -> Example:
    """Return an example that runs multi-head attention over ``tokens``.

    It is causal self-attention or, if another sentence is given as ``context``, cross-attention.
    Each head has width ``d_model`` / ``num_heads``. If ``rope``, queries and keys are rotated by
    their positions. Embeddings and weights are drawn with ``seed``. ``source`` is the text that the
    trace shows as the sentence's source.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check(tokens, num_heads, num_kv_heads, d_model, seed)

    if context is not None and not context:
        raise ValueError("the sentence to attend to has no tokens: expected at least one word")
    if rope and d_model // num_heads % 2:
        raise ValueError(
            f"d-model is {d_model} and heads is {num_heads}: rotary positions rotate pairs, so "
            f"a head's width must be even"
        )
    rotation: Any = None
    if rope:
        from minimha.layers.rope import RoPE  # imported here because the import is slow

        rotation = RoPE(d_model // num_heads)

    def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
        if context is not None and is_causal:
            raise ValueError(
                "a causal mask has no meaning between two sentences: all of the other one is "
                "visible"
            )
        weights = draw_weights(d_model, num_heads, num_kv_heads, seed)
        layer = MultiHeadAttention.from_heads(*weights, rope=rotation)
        x = embeddings(tokens, d_model, seed)
        other = None if context is None else embeddings(context, d_model, seed)
        layer(x, other, is_causal=is_causal, scale=None if is_scaled else 1.0, tap=tap)

    text = " ".join(tokens)
    if context is not None:
        text += f", attending to {' '.join(context)}"
    heads = f"{num_heads} head{'s' * (num_heads > 1)}"
    if num_kv_heads != num_heads:
        heads += f" on {num_kv_heads} key/value head{'s' * (num_kv_heads > 1)}"
    if rope:
        heads += ", rotary positions"
    return Example(
        name=f"{len(tokens)} token{'s' * (len(tokens) > 1)}", title=f"{text}, {heads}",
        source=f"{source}; embeddings and weights drawn with seed {seed}", sentence=text, run=run,
        labels=token_labels(tokens, context), is_causal=context is None,
        notes=_notes(text, num_heads, num_kv_heads),
    )  # fmt: skip


def embeddings(tokens: Sequence[str], d_model: int, seed: int) -> NDArray[np.float64]:
    """Return random embeddings (L, E) of -1, 0 and 1; equal words have equal rows."""

    def row(token: str) -> NDArray[np.int64]:
        rng = np.random.default_rng([seed, zlib.crc32(token.casefold().encode("utf-8", "replace"))])
        return rng.integers(-1, 2, d_model)

    return np.stack([row(token) for token in tokens]).astype(np.float64)


def draw_weights(
    d_model: int, num_heads: int, num_kv_heads: int, seed: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Draw random weights of -1, 0 and 1: W_q (H, E, D), W_k, W_v (Hkv, E, D), W_o (H · D, E).

    A column has about 2.4 nonzero numbers, whatever ``d_model`` is. If this number grew with
    ``d_model``, so would the scores, and each query would attend to a single key.
    """
    rng = np.random.default_rng([seed, d_model, num_heads, num_kv_heads])
    D = d_model // num_heads
    shapes = [(num_heads, d_model, D), *[(num_kv_heads, d_model, D)] * 2, (num_heads * D, d_model)]
    share = min(1.0, 2.4 / d_model)
    shares = [share / 3, 1 - share, 2 * share / 3]
    W_q, W_k, W_v, W_o = (rng.choice([-1.0, 0.0, 1.0], size=size, p=shares) for size in shapes)
    return W_q, W_k, W_v, W_o


def check(
    tokens: Sequence[str], num_heads: int, num_kv_heads: int, d_model: int, seed: int
) -> None:
    """Raise ValueError if an argument is invalid; the error names the command line's option."""
    if not tokens:
        raise ValueError("the sentence has no tokens: expected at least one word")
    counts = {"heads": num_heads, "kv-heads": num_kv_heads, "d-model": d_model}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}: expected at least 1")
    if d_model % num_heads:
        raise ValueError(
            f"d-model is {d_model} and heads is {num_heads}: the model width must be a multiple of "
            f"the number of heads"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"heads is {num_heads} and kv-heads is {num_kv_heads}: the number of heads must be a "
            f"multiple of the number of key/value heads"
        )
    if seed < 0:
        raise ValueError(f"seed is {seed}: expected 0 or more")


def _notes(text: str, num_heads: int, num_kv_heads: int) -> dict[str, str]:
    notes = {"x": "A word has the same row at every position."}
    if text == SENTENCES[6][0]:
        notes["weights"] = BANK_RELATIONS
    group = num_heads // num_kv_heads
    if group > 1:
        shared = "; ".join(
            f"key/value head {h} serves heads {h * group} to {(h + 1) * group - 1}"
            for h in range(num_kv_heads)
        )
        notes |= {"k": f"Shared: {shared}.", "v": f"Shared: {shared}."}
    return notes


BANK = replace(of_length(6), name="bank-drawn", document="002")
