"""One layer each of GPT-2, LLaMA and BERT, with weights small enough to follow by eye.

Each layer has attention and a feed-forward network, with a residual connection around each. The
layers differ in norms, positions and the activation of the feed-forward network.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap, prefixed, renamed
from minimha.examples import sentences
from minimha.examples.example import Example
from minimha.explain.trace import token_labels
from minimha.layers.feed_forward import FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import layer_norm, rms_norm
from minimha.layers.rope import RoPE

Norm = Callable[[NDArray[Any], str], NDArray[Any]]  # of x and a prefix for names of steps

SENTENCE, DOCUMENT = sentences.SENTENCES[3]
WORDS = tuple(SENTENCE.split())
MARKED = ("[CLS]", *SENTENCE.lower().split(), "[SEP]")  # the tokens that BERT reads
SEED = sentences.DEFAULT_SEED
DRAWN = f"a sentence of document {DOCUMENT}; embeddings and weights drawn with seed {SEED}"
F = 8  # width inside the feed-forward


def run_gpt2(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run a GPT-2 layer: learned positions, one matrix for q, k and v, pre-norm, tanh GELU."""
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
    norm, options = _layer_norm(rng, E, 1e-5, tap), _options(is_causal, is_scaled)
    x = tap("x", wte + wpe)
    added = tap("added", x + layer(norm(x, ""), tap=renamed(tap, x=None), **options))
    made = _feed_forward(rng, E, "gelu_tanh")(norm(added, "added_"), tap)
    tap("residual", added + made)


def run_llama(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run a LLaMA layer: RoPE, two query heads that share one key/value head, RMSNorm, SwiGLU."""
    num_heads, num_kv_heads, E = 2, 1, 8
    weights = sentences.draw_weights(E, num_heads, num_kv_heads, SEED)
    layer = MultiHeadAttention.from_heads(*weights, rope=RoPE(E // num_heads))
    rng = np.random.default_rng([SEED, E])
    options = _options(is_causal, is_scaled)

    def norm(x: NDArray[Any], prefix: str) -> NDArray[Any]:
        return rms_norm(x, rng.integers(1, 3, E).astype(float), 1e-5, prefixed(tap, prefix))

    x = tap("x", sentences.embeddings(WORDS, E, SEED))
    added = tap("added", x + layer(norm(x, ""), tap=renamed(tap, x=None), **options))
    sizes = (E, F), (E, F), (F, E)
    W_gate, W_in, W_out = (rng.integers(-1, 2, size).astype(float) for size in sizes)
    made = FeedForward(W_in, W_out, "silu", W_gate=W_gate)(norm(added, "added_"), tap)
    tap("residual", added + made)


def run_bert(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run a BERT layer: learned positions, no mask, post-norm, and exact GELU."""
    num_heads, E = 2, 4
    rng = np.random.default_rng([SEED, E])
    weights = sentences.draw_weights(E, num_heads, num_heads, SEED)
    b_q, b_k, b_v, b_o = rng.integers(0, 2, (4, E)).astype(float)
    layer = MultiHeadAttention.from_heads(*weights, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o)
    norm, options = _layer_norm(rng, E, 1e-12, tap), _options(is_causal, is_scaled)
    wte = tap("wte", sentences.embeddings(MARKED, E, SEED))
    wpe = tap("wpe", rng.integers(-1, 2, (len(MARKED), E)).astype(float))
    x = norm(tap("embedded", wte + wpe), "embedded_")
    normed = norm(tap("added", x + layer(x, tap=tap, **options)), "added_")
    made = _feed_forward(rng, E, "gelu")(normed, tap)
    norm(tap("post_residual", normed + made), "post_residual_")


def _options(is_causal: bool, is_scaled: bool) -> dict[str, Any]:
    return {"is_causal": is_causal, "scale": None if is_scaled else 1.0}


def _layer_norm(rng: np.random.Generator, E: int, epsilon: float, tap: Tap) -> Norm:
    """Return a layer norm that draws a gain of 1 and 2 and a bias of 0 and 1 at each call."""

    def norm(x: NDArray[Any], prefix: str) -> NDArray[Any]:
        gain, bias = rng.integers(1, 3, E).astype(float), rng.integers(0, 2, E).astype(float)
        return layer_norm(x, gain, bias, epsilon, prefixed(tap, prefix))

    return norm


def _feed_forward(rng: np.random.Generator, E: int, activation: Any) -> FeedForward:
    W_in, W_out = (rng.integers(-1, 2, size).astype(float) for size in ((E, F), (F, E)))
    b_in, b_out = (rng.integers(0, 2, width).astype(float) for width in (F, E))
    return FeedForward(W_in, W_out, activation, b_in=b_in, b_out=b_out)


GPT2 = Example(
    name="gpt2",
    title=f"{SENTENCE}, a layer of GPT-2: learned positions, a fused c_attn, norms before, GELU",
    source=f"Radford et al. 2019 (GPT-2), section 2.3, and its code; {DRAWN}", sentence=SENTENCE,
    run=run_gpt2, labels=token_labels(WORDS), is_causal=True,
    notes={
        "x": "The sum of the two: wte + wpe.",
        "norm_gain": "GPT-2 calls it ln_1.weight.",
        "norm_bias": "GPT-2 calls it ln_1.bias.",
        "variance": "To this, ε = 0.00001 is added, so that a row of equal numbers can be divided.",
        "c_attn": "Columns 0 to 3 are W_q of both heads, 4 to 7 W_k, 8 to 11 W_v.",
        "W_q": "Columns 0 and 1 of c_attn are head 0's, 2 and 3 head 1's.",
        "q_combined": "Columns 0 to 3 of X' c_attn + b_attn.",
        "k_combined": "Columns 4 to 7.",
        "v_combined": "Columns 8 to 11.",
        "W_o": "GPT-2 calls it c_proj.",
        "added": "What is added is X itself, not X': whatever a layer finds, the sum goes through "
        "all layers unchanged.",
        "W_in": "GPT-2 calls it c_fc and makes it four times as wide as X; here it is twice.",
        "activated": "φ is GELU, approximated by tanh.",
        "residual": "The next layer's X. After the last layer it is normalised once more.",
    },
)  # fmt: skip
LLAMA = Example(
    name="llama",
    title=f"{SENTENCE}, a layer of LLaMA: rotary positions, grouped heads, RMSNorm, SwiGLU",
    source=f"Touvron et al. 2023 (LLaMA 2), section 2.2; Su et al. 2021 (RoFormer); {DRAWN}",
    sentence=SENTENCE, run=run_llama, labels=token_labels(WORDS), is_causal=True,
    notes={
        "x": "No position is added here.",
        "normed": "No mean is subtracted, and there is no bias. To s, ε = 0.00001 is added.",
        "k": "One key/value head serves both query heads.",
        "cos[q]": "Pair 0 is rotated by 1 per token, pair 1 by 1/100: θ_i = 10000^(-2i/4).",
        "q_rotated": "Numbers 0 and 2 are pair 0, numbers 1 and 3 pair 1 (the half-split layout). "
        "The first token, at position 0, is not rotated.",
        "scores": "V is not rotated: positions decide which tokens are read, not what those "
        "pass on.",
        "W_gate": "The feed-forward has three matrices: LLaMA calls them gate_proj, up_proj (W_in) "
        "and down_proj (W_out).",
        "activated": "φ is SiLU, and what it gives are gates for the other product: SwiGLU.",
        "residual": "The next layer's X.",
    },
)  # fmt: skip
BERT = Example(
    name="bert",
    title=f"{' '.join(MARKED)}, a layer of BERT: every token sees all, norms after, GELU",
    source=f"Devlin et al. 2019 (BERT), section 3; Vaswani et al. 2017, figure 1; {DRAWN}",
    sentence=" ".join(MARKED), run=run_bert, labels=token_labels(MARKED),
    notes={
        "wpe": "BERT adds a third row for the segment, which is the same for all tokens of one "
        "sentence and is left out here.",
        "x": "The normalised embeddings, X'.",
        "added_normed": "BERT normalises after the residual connection, as the first transformer "
        "did; GPT-2 and LLaMA before attention and feed-forward.",
        "activated": "φ is GELU, with the normal distribution itself.",
        "post_residual_normed": "What leaves the layer, and enters the next one as its X. The row "
        "of [CLS] stands for the sentence.",
    },
)  # fmt: skip
