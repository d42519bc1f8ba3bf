"""Multi-head attention as GPT-2 and LLaMA use it, with weights small enough to follow by eye."""

import numpy as np

from minimha.equations.tap import Tap
from minimha.examples import sentences
from minimha.examples.example import Example
from minimha.explain.trace import token_labels
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.rope import RoPE

SENTENCE, DOCUMENT = sentences.SENTENCES[3]
WORDS = tuple(SENTENCE.split())
SEED = sentences.DEFAULT_SEED
DRAWN = f"a sentence of document {DOCUMENT}; embeddings and weights drawn with seed {SEED}"


def run_gpt2(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Learned positions, one product with c_attn for Q, K and V, c_proj at the end."""
    num_heads, E = 2, 4
    rng = np.random.default_rng([SEED, E])
    wte = tap("wte", sentences.embeddings(WORDS, E, SEED))
    wpe = tap("wpe", rng.integers(-1, 2, (len(WORDS), E)).astype(float))
    c_attn = tap("c_attn", rng.integers(-1, 2, (E, 3 * E)).astype(float))
    bias = tap("c_attn_bias", rng.integers(0, 2, 3 * E).astype(float))
    c_proj, c_proj_bias = rng.integers(-1, 2, (E, E)), rng.integers(0, 2, E)
    W_q, W_k, W_v = np.split(c_attn, 3, axis=1)
    b_q, b_k, b_v = np.split(bias, 3)
    layer = MultiHeadAttention.from_combined(
        W_q, W_k, W_v, c_proj, num_heads=num_heads, b_q=b_q, b_k=b_k, b_v=b_v, b_o=c_proj_bias
    )
    layer(wte + wpe, is_causal=is_causal, scale=None if is_scaled else 1.0, tap=tap)


def run_llama(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Queries and keys are rotated by position; two query heads share one key/value head."""
    num_heads, num_kv_heads, E = 2, 1, 8
    weights = sentences.draw_weights(E, num_heads, num_kv_heads, SEED)
    layer = MultiHeadAttention.from_heads(*weights, rope=RoPE(E // num_heads))
    x = sentences.embeddings(WORDS, E, SEED)
    layer(x, is_causal=is_causal, scale=None if is_scaled else 1.0, tap=tap)


GPT2 = Example(
    name="gpt2",
    title=f"{SENTENCE}, as GPT-2 computes it: learned positions, a fused c_attn, biases",
    source=f"Radford et al. 2019 (GPT-2) and its code; {DRAWN}", sentence=SENTENCE, run=run_gpt2,
    labels=token_labels(WORDS), is_causal=True,
    notes={
        "x": "The sum of the two: wte + wpe. (Its layer normalisation is left out.)",
        "c_attn": "Columns 0 to 3 are W_q of both heads, 4 to 7 W_k, 8 to 11 W_v.",
        "W_q": "Columns 0 and 1 of c_attn are head 0's, 2 and 3 head 1's.",
        "q_combined": "Columns 0 to 3 of X c_attn + b_attn.",
        "k_combined": "Columns 4 to 7.",
        "v_combined": "Columns 8 to 11.",
        "W_o": "GPT-2 calls it c_proj.",
    },
)  # fmt: skip
LLAMA = Example(
    name="llama",
    title=f"{SENTENCE}, as LLaMA computes it: rotary positions, grouped heads, no biases",
    source=f"Touvron et al. 2023 (LLaMA 2), section 2.2; Su et al. 2021 (RoFormer); {DRAWN}",
    sentence=SENTENCE, run=run_llama, labels=token_labels(WORDS), is_causal=True,
    notes={
        "x": "No position is added here. (LLaMA's normalisation of X is left out.)",
        "k": "One key/value head serves both query heads.",
        "cos[q]": "Pair 0 is rotated by 1 per token, pair 1 by 1/100: θ_i = 10000^(-2i/4).",
        "q_rotated": "Numbers 0 and 2 are pair 0, numbers 1 and 3 pair 1 (the half-split layout). "
        "The first token, at position 0, is not rotated.",
        "scores": "V is not rotated: positions decide which tokens are read, not what those "
        "pass on.",
    },
)  # fmt: skip
