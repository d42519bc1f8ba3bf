"""Layers of gpt-oss, DeepSeek-V3.2 and Qwen3-Next, with small numbers.

Routers of experts are left out: gpt-oss has one expert here, DeepSeek-V3.2's layer is dense,
and Qwen3-Next has no feed-forward.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap, prefixed, renamed, staged
from minimha.examples import sentences
from minimha.examples.example import Example
from minimha.explain.trace import token_labels
from minimha.layers.delta import GatedDeltaNet
from minimha.layers.feed_forward import FeedForward
from minimha.layers.indexer import LightningIndexer
from minimha.layers.latent import LatentAttention
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import layer_norm, rms_norm
from minimha.layers.rope import RoPE

SENTENCE, DOCUMENT = sentences.SENTENCES[5]
WORDS = tuple(SENTENCE.split())
THREE = tuple(sentences.SENTENCES[3][0].split())
SEED = 2  # of embeddings
E = 4  # model width
DRAWN = f"embeddings drawn with seed {SEED}, weights with seed"
# Steps of a Gated DeltaNet whose names attention has, too.
DELTA_STEPS = {name: f"delta_{name}" for name in ("q", "k", "v", "head_output", "gate", "gated")}


def run_gpt_oss(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run a gpt-oss layer with one expert: grouped heads, sinks, a window, RoPE, clipped gates."""
    H, H_kv, D, F = 2, 1, 2, 4
    rng = np.random.default_rng([2, E])
    sizes = H * D, H_kv * D, H_kv * D, E, F, F, E
    b_q, b_k, b_v, b_o, b_in, b_gate, b_out = (rng.integers(0, 2, n).astype(float) for n in sizes)
    weights = sentences.draw_weights(E, H, H_kv, 2)
    layer = MultiHeadAttention.from_heads(
        *weights, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o, rope=RoPE(D)
    )
    W_in, W_gate, W_out = (_drawn(rng, *shape) for shape in ((E, F), (E, F), (F, E)))
    x = tap("x", sentences.embeddings(WORDS, E, SEED))
    found = layer(
        _normed(rng, x, "", tap), is_causal=is_causal, window_size=(2, 0 if is_causal else 2),
        sinks=[0.0, 1.0], scale=None if is_scaled else 1.0, tap=renamed(tap, x=None),
    )  # fmt: skip
    added = tap("added", x + found)
    feed = FeedForward(W_in, W_out, "quick_gelu", b_in, b_out, W_gate, b_gate, limit=3.0)
    tap("residual", added + feed(_normed(rng, added, "added_", tap), tap))


def run_deepseek(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run a dense DeepSeek-V3.2 layer: an indexer picks two keys per query; latents, SwiGLU."""
    H, C, D, R, Di, F = 2, 2, 2, 2, 3, 4
    rng = np.random.default_rng([62, E])
    x = tap("x", sentences.embeddings(WORDS, E, SEED))
    normed = _normed(rng, x, "", tap)
    shapes = {"W_dq": (E, C), "W_uq": (H, C, D + R), "W_iq": (H, C, Di), "W_ik": (E, Di),
              "W_iw": (E, H), "W_dkv": (E, C), "W_kr": (E, R), "W_uk": (H, C, D),
              "W_uv": (H, C, D), "W_o": (H * D, E)}  # fmt: skip
    W = {name: _drawn(rng, *shape) for name, shape in shapes.items()}
    W |= {"g_q": np.ones(C), "g_kv": np.ones(C), "g_ik": np.ones(Di), "b_ik": np.zeros(Di)}
    W_in, W_gate, W_out = (_drawn(rng, *shape) for shape in ((E, F), (E, F), (F, E)))
    index_rope = RoPE(Di, rotary_dim=R)
    _show_inside(W, normed, index_rope, tap)
    for_index = {name: W[name] for name in ("W_ik", "W_iw", "g_ik", "b_ik")}
    for_index["W_iq"] = _side_by_side(W["W_iq"])
    indexer = LightningIndexer(for_index, num_heads=H, top_k=2, rope=index_rope)
    joined = {name: W[name] for name in ("W_dq", "g_q", "g_kv", "W_o")}
    joined["W_uq"] = _side_by_side(W["W_uq"])
    joined["W_dkv"] = np.hstack([W["W_dkv"], W["W_kr"]])
    joined["W_ukv"] = _side_by_side(np.concatenate([W["W_uk"], W["W_uv"]], axis=2))
    scale = None if is_scaled else 1.0
    layer = LatentAttention(joined, num_heads=H, rope=RoPE(R), scale=scale, indexer=indexer)
    found = layer(normed, is_causal=is_causal, is_absorbed=False, tap=renamed(tap, x=None))
    added = tap("added", x + found)
    feed = FeedForward(W_in, W_out, "silu", W_gate=W_gate)
    tap("residual", added + feed(_normed(rng, added, "added_", tap), tap))


def _show_inside(W: Mapping[str, NDArray[Any]], x: NDArray[Any], rope: RoPE, tap: Tap) -> None:
    """Tap the products by ``W``, with their norms, that latent attention does not tap."""

    def product(name: str, rows: NDArray[Any], matrix: str) -> NDArray[Any]:
        return np.asarray(tap(name, rows @ tap(matrix, W[matrix])))

    narrow = product("query_down", x, "W_dq")
    latents = rms_norm(narrow, W["g_q"], 1e-6, prefixed(tap, "query_down_"))
    product("query_up", latents, "W_uq")
    rms_norm(product("kv_down", x, "W_dkv"), W["g_kv"], 1e-6, prefixed(tap, "kv_down_"))
    product("shared_key", x, "W_kr")
    for name in ("W_uk", "W_uv", "W_iw"):
        tap(name, W[name])
    product("index_up", latents, "W_iq")
    narrow = product("index_down", x, "W_ik")
    keys = layer_norm(narrow, W["g_ik"], W["b_ik"], 1e-6, prefixed(tap, "index_down_"))
    rope.rotate(keys, np.arange(len(x)), renamed(tap, rotated=None))  # taps cos and sin


def run_qwen3_next(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run two Qwen3-Next layers without their experts: Gated DeltaNet, then gated attention."""
    H, D, K = 2, 2, 2
    rng = np.random.default_rng([54, E])
    channels = 2 * D + H * D
    W = {"W_qkv": _drawn(rng, E, channels), "conv": rng.integers(1, 3, (channels, K)) / 2,
         "W_b": _drawn(rng, H, E, 1), "W_a": _drawn(rng, E, H), "dt_bias": np.zeros(H),
         "A_log": np.array([0.0, -1]), "W_z": _drawn(rng, E, H * D), "g_o": np.ones(D)}  # fmt: skip
    W_o, W_g = _drawn(rng, H * D, E), _drawn(rng, E, D)
    W_q, W_k, W_v = _drawn(rng, 3, E, D)
    x = tap("x", sentences.embeddings(THREE, E, SEED))
    normed = _normed(rng, x, "", tap)
    for name, matrix in W.items():
        tap(name, matrix)
    joined = W | {"W_b": _side_by_side(W["W_b"]), "W_o": W_o}
    memory = GatedDeltaNet(joined, num_heads=H, num_key_heads=1)
    x = tap("added", x + memory(normed, tap=renamed(tap, x=None, **DELTA_STEPS)))

    tap = staged(tap, "full attention")
    parameters = {"W_q": W_q, "W_k": W_k, "W_v": W_v, "W_o": _drawn(rng, D, E), "W_g": W_g}
    layer = MultiHeadAttention(
        E, 1, head_dim=D, bias=False, qk_norm="head", epsilon=0, gate="elementwise", rope=RoPE(D),
        parameters=parameters,
    )  # fmt: skip
    normed = _normed(rng, tap("x", x), "", tap)
    scale = None if is_scaled else 1.0
    found = layer(normed, is_causal=is_causal, scale=scale, tap=renamed(tap, x=None))
    tap("added", x + found)


def _drawn(rng: np.random.Generator, *shape: int) -> NDArray[Any]:
    """Return an array of -1, 0 and 1."""
    return rng.integers(-1, 2, shape).astype(float)


def _normed(rng: np.random.Generator, x: NDArray[Any], prefix: str, tap: Tap) -> NDArray[Any]:
    """Return the RMS norm of ``x``, with a gain of 1 and 2; its steps begin with ``prefix``."""
    gain = rng.integers(1, 3, x.shape[-1]).astype(float)
    return rms_norm(x, gain, 1e-5, prefixed(tap, prefix))


def _side_by_side(heads: NDArray[Any]) -> NDArray[Any]:
    """Return the matrices ``heads`` (H, rows, columns) as one, (rows, H · columns)."""
    return np.hstack(list(heads))


GPT_OSS = Example(
    name="gpt-oss",
    title=f"{SENTENCE}, a layer of gpt-oss with one expert: sinks, a window, clipped gates",
    source="OpenAI 2025 (gpt-oss), and its code; Xiao et al. 2024 (attention sinks); "
    f"a sentence of document {DOCUMENT}; {DRAWN} 2",
    sentence=SENTENCE, run=run_gpt_oss, labels=token_labels(WORDS), is_causal=True,
    notes={
        "k": "One key/value head serves both query heads. In gpt-oss, each of 8 serves 8.",
        "cos[q]": "There is one pair here. gpt-oss has 32, and scales their angles by YaRN, which "
        "is left out.",
        "masked": "A window of 3: each query sees itself and two tokens before it. In gpt-oss "
        "every second layer has a window of 128, and the others have none.",
        "sinks": "A learned number, one per head.",
        "W_gate": "gpt-oss has 32 or 128 such networks, its experts, and a router, which sends "
        "each token to four of them. Here is one expert, without the router.",
        "gate_limited": "The limit is 3 here and 7 in gpt-oss. There is none from below.",
        "activated": "φ(G) = G · sigmoid(1.702 G).",
        "residual": "The next layer's X.",
    },
)  # fmt: skip
DEEPSEEK = Example(
    name="deepseek-v3.2",
    title=f"{SENTENCE}, a layer of DeepSeek-V3.2: an indexer that picks keys, latents, SwiGLU",
    source="DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1; DeepSeek-AI 2024 (DeepSeek-V2), section "
    f"2.1; a sentence of document {DOCUMENT}; {DRAWN} 62",
    sentence=SENTENCE, run=run_deepseek, labels=token_labels(WORDS), is_causal=True,
    notes={
        "query_down_normed": "The indexer's queries are made from it, too.",
        "W_dkv": "A file of the model has W_dkv and W_kr side by side, in one matrix.",
        "W_uk": "A file of the model has W_uk and W_uv side by side, in one matrix.",
        "index_down": "The third number will not be rotated: the indexer rotates the first ones, "
        "the attention the last.",
        "cos": "With one pair, half-split pairs (the indexer's) and interleaved ones (the "
        "attention's) are the same. YaRN's scaling of the angles is left out.",
        "index_weights": "A weight may be negative: then a key that matches scores below one that "
        "does not match at all.",
        "index_scores": "DeepSeek computes these in 8 bits; that is left out.",
        "key_indices": "K is 2 here and 2048 in the model. The last query has three scores of 0, "
        "and picks the first two of these keys.",
        "latents_and_key": "The cache keeps the indexer's key, too.",
        "W_gate": "The first three layers of the model have such a network. The others have 256 "
        "experts, which are left out.",
        "activated": "φ is SiLU.",
        "residual": "The next layer's X.",
    },
)  # fmt: skip
QWEN3_NEXT = Example(
    name="qwen3-next",
    title=f"{' '.join(THREE)}, two layers of Qwen3-Next without experts: a memory, full attention",
    source="Qwen Team 2025 (Qwen3-Next), and its code; Yang et al. 2024 (Gated DeltaNet); a "
    f"sentence of document {sentences.SENTENCES[3][1]}; {DRAWN} 54",
    sentence=" ".join(THREE), run=run_qwen3_next, labels=token_labels(THREE), is_causal=True,
    notes={
        "norm_gain": "A file of the model has the gain minus 1.",
        "W_qkv": "Columns 0 and 1 are the query's, 2 and 3 the key's, 4 to 7 the values' of two "
        "heads, which share query and key.",
        "conv": "Two tokens here, four in the model. Before the first token there are zeros.",
        "beta": "β = sigmoid(X' W_b).",
        "delta_q": "Divided by √(Σ x² + 0.000001), then by √D.",
        "delta_k": "Divided by √(Σ x² + 0.000001).",
        "decayed[t=0]": "It begins empty.",
        "state[t=2]": "A cache keeps this and the last row of qkv, after any number of tokens.",
        "delta_gated": "The norm is an RMS norm with the gain g_o.",
        "added": "In the model a mixture of 512 experts follows, which is left out.",
        "x[full attention]": "Three layers with such a memory are followed by one with full "
        "attention. Here it is the second layer.",
        "q_normed[full attention]": "The ε of 0.000001 is left out here.",
        "cos[q][full attention]": "The model rotates the first quarter of each head.",
        "gate[full attention]": "Each number of the head's output has a gate.",
        "added[full attention]": "Again, a mixture of experts would follow.",
    },
)  # fmt: skip
