"""Compute parameters, FLOPs and key/value caches of known models from their sizes.

All arithmetic is with integers. Letters: ``E`` = d_model, ``H`` = num_heads, ``Hkv`` =
num_kv_heads, ``D`` = head_dim, ``F`` = d_ff, ``V`` = vocabulary, ``L`` = tokens.
"""

from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from minimha.equations.arguments import choice, flag, integer

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes


@dataclass(frozen=True)
class Preset:
    """The sizes of one model.

    Attributes
    ----------
    name : str
    layers : int
    d_model : int
        E, the model width.
    num_heads, num_kv_heads : int
        H and Hkv; H must be a multiple of Hkv.
    head_dim : int
        D, the width of queries, keys and values.
    d_ff : int
        F, the width inside the feed-forward.
    vocabulary : int
        V, the rows of the token embedding.
    max_length : int
        The largest number of tokens that the model can read.
    is_gated : bool
        Whether the feed-forward has three matrices (a gate, as in SwiGLU) instead of two.
    has_biases : bool
        Whether projections have a bias and norms are LayerNorms. If False, projections have no
        bias, and norms are RMSNorms, which have only a gain.
    is_tied : bool
        Whether the token embedding is also the unembedding.
    has_learned_positions : bool
        Whether there is a position embedding of max_length rows. If False, positions have no
        parameters (RoPE).
    source : str
    is_causal : bool, default True
        True for a decoder. An encoder sees every token at once. It ends in BERT's pooler, an (E, E)
        matrix on the first token, instead of an unembedding.
    num_segments : int, default 0
        The number of rows of the segment embedding.
    window : int, optional
        The largest number of keys that a decoder's query sees, its own included. Older keys are not
        cached. Default is all.

    Raises
    ------
    TypeError, ValueError
        A size that is not an integer, or below 1 (num_segments: below 0), a flag that is neither
        True nor False, an H that is no multiple of Hkv, or an encoder with a window.
    """

    name: str
    layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    vocabulary: int
    max_length: int
    is_gated: bool
    has_biases: bool
    is_tied: bool
    has_learned_positions: bool
    source: str
    is_causal: bool = True
    num_segments: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if each.type is bool:
                object.__setattr__(self, name, flag(name, value))
            elif each.type is int or (name == "window" and value is not None):
                low = 0 if name == "num_segments" else 1
                object.__setattr__(self, name, integer(name, value, low))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads} but num_heads is {self.num_heads}: H must be "
                f"a multiple of Hkv"
            )
        if self.window is not None and not self.is_causal:
            raise ValueError(
                f"window is {self.window} but is_causal is False: only a decoder has a window, "
                f"whose queries see the latest keys"
            )


@dataclass(frozen=True)
class Parameters:
    """The numbers of parameters in the parts of a model."""

    attention: int
    feed_forward: int
    norms: int
    embeddings: int
    head: int

    @property
    def total(self) -> int:
        """Return the number of all parameters."""
        return sum(astuple(self))


@dataclass(frozen=True)
class Flops:
    """The floating-point operations of a model's matrix products; a multiply-add counts as two.

    Biases, norms, softmax and activations are not counted, as is usual.
    """

    projections: int
    feed_forward: int
    attention: int
    head: int

    @property
    def total(self) -> int:
        """Return the number of all operations."""
        return sum(astuple(self))


@dataclass(frozen=True)
class Savings:
    """What a model saves compared with the same model with num_kv_heads = num_heads."""

    parameters: int
    prefill_flops: int
    decode_flops: int
    kv_cache_bytes: int


_BERT: dict[str, Any] = {
    "vocabulary": 30522, "max_length": 512, "is_gated": False, "has_biases": True,
    "is_tied": True, "has_learned_positions": True, "is_causal": False, "num_segments": 2,
    "source": "Devlin et al., BERT, 2018, section 3",
}  # fmt: skip
# GPT-2's paper prints 117M and 762M; the weights released with it hold 124M and 774M.
_GPT2: dict[str, Any] = {
    "vocabulary": 50257, "max_length": 1024, "is_gated": False, "has_biases": True,
    "is_tied": True, "has_learned_positions": True,
    "source": "Radford et al., 2019, table 2, and its released weights",
}  # fmt: skip
# Every second layer of GPT-3 sees a band of unpublished width: counted as if dense.
_GPT3 = _GPT2 | {"max_length": 2048, "source": "Brown et al., 2020, table 2.1"}
_LLAMA3: dict[str, Any] = {
    "vocabulary": 128256, "max_length": 8192, "is_gated": True, "has_biases": False,
    "is_tied": False, "has_learned_positions": False,
    "source": "Llama Team, 2024, table 3, and its first release",
}  # fmt: skip
_MISTRAL = _LLAMA3 | {"vocabulary": 32000, "window": 4096, "source": "Jiang et al., 2023, table 1"}
PRESETS = {
    name: Preset(name, *sizes, **family)
    for name, sizes, family in (  # layers, E, H, Hkv, D, F
        ("BERT-Base", (12, 768, 12, 12, 64, 3072), _BERT),
        ("BERT-Large", (24, 1024, 16, 16, 64, 4096), _BERT),
        ("GPT-2 Small", (12, 768, 12, 12, 64, 3072), _GPT2),
        ("GPT-2 Large", (36, 1280, 20, 20, 64, 5120), _GPT2),
        ("GPT-3", (96, 12288, 96, 96, 128, 49152), _GPT3),
        ("Llama-3-8B", (32, 4096, 32, 8, 128, 14336), _LLAMA3),
        ("Llama-3-70B", (80, 8192, 64, 8, 128, 28672), _LLAMA3),
        ("Mistral-7B", (32, 4096, 32, 8, 128, 14336), _MISTRAL),
    )
}


def find(name: str) -> Preset:
    """Return the preset called ``name``; case, spaces and punctuation do not matter.

    >>> find("gpt3").name, find("llama 3 8b").num_kv_heads
    ('GPT-3', 8)
    """
    if not isinstance(name, str):
        raise TypeError(f"preset is {name!r}: expected a name, one of {', '.join(PRESETS)}")
    for preset in PRESETS.values():
        if _letters(preset.name) == _letters(name):
            return preset
    raise ValueError(f"preset is {name!r}: expected one of {', '.join(PRESETS)}")


def check_length(preset: Preset, length: int) -> int:
    """Return ``length`` if it is an integer from 1 to the preset's max_length; raise if not."""
    _check_preset(preset)
    tokens = integer("length", length, 1)
    if tokens > preset.max_length:
        raise ValueError(
            f"length is {length} but {preset.name} was made for at most {preset.max_length} "
            f"tokens: expected 1 to {preset.max_length}"
        )
    return tokens


def parameters(preset: Preset) -> Parameters:
    """Return the numbers of weights and biases in each part of a model.

    - attention: layers · (W_q, W_o: 2 · E · H · D; W_k, W_v: 2 · E · Hkv · D; biases:
      H · D + 2 · Hkv · D + E)
    - feed_forward: layers · (2 · E · F, gated 3 · E · F; biases: F + E, gated 2 · F + E)
    - norms: (2 · layers + 1) · E, twice that with biases
    - embeddings: (V + learned positions + segments) · E
    - head: V · E if it is not tied; an encoder's pooler E · E + E

    >>> parameters(PRESETS["GPT-2 Small"]).total
    124439808
    """
    _check_preset(preset)
    E, F = preset.d_model, preset.d_ff
    joined = preset.num_heads * preset.head_dim
    joined_kv = preset.num_kv_heads * preset.head_dim
    inner = 2 if preset.is_gated else 1
    biases = int(preset.has_biases)
    rows = preset.vocabulary + preset.num_segments
    rows += preset.max_length if preset.has_learned_positions else 0
    if preset.is_causal:
        head = 0 if preset.is_tied else _head_weights(preset)
    else:
        head = _head_weights(preset) + biases * E
    attention = _projection_weights(preset) + biases * (joined + 2 * joined_kv + E)
    feed_forward = _feed_forward_weights(preset) + biases * (inner * F + E)
    norms = (2 * preset.layers + 1) * E * (1 + biases)
    n = preset.layers
    return Parameters(n * attention, n * feed_forward, norms, rows * E, head)


def prefill_flops(preset: Preset, length: int) -> Flops:
    """Return the FLOPs of one pass over a prompt of ``length`` tokens.

    - projections: 2 · L · layers · 2 · E · (H + Hkv) · D
    - feed_forward: 2 · L · layers · 2 · E · F; with a gate, 2 · L · layers · 3 · E · F
    - attention, Q Kᵀ and P V: 4 · layers · H · D · pairs of a query and a visible key. There are
      L² pairs; in a causal model 1 + 2 + … + L = L · (L + 1) / 2; with a window w, Σ min(i, w)
    - head: 2 · E · V for the logits after the last token; 2 · E · E for an encoder's pooler

    Parameters
    ----------
    preset : Preset
    length : int
        L, from 1 to the preset's max_length.

    Raises
    ------
    TypeError, ValueError
        A length outside this range.

    References
    ----------
    Kaplan et al., "Scaling Laws for Neural Language Models", 2020, table 1 (per token, without
    causality).

    Examples
    --------
    >>> prefill_flops(PRESETS["GPT-3"], 2048).attention == 4 * 96 * 12288 * 2048 * 2049 // 2
    True
    """
    length = check_length(preset, length)
    if preset.is_causal:
        full = _seen(preset, length)
        pairs = full * (full + 1) // 2 + (length - full) * full
    else:
        pairs = length * length
    return _flops(preset, length, pairs)


def decode_flops(preset: Preset, length: int) -> Flops:
    """Return the FLOPs of one decode step, for the last of ``length`` tokens.

    The formulas are those of ``prefill_flops``, with one token and L pairs, or min(L, w) with a
    window w. A prefill's attention takes as many FLOPs as its tokens' decode steps together.

    Raises
    ------
    TypeError, ValueError
        As ``prefill_flops``, or the preset is an encoder, which does not decode.
    """
    _check_decoder(preset)
    length = check_length(preset, length)
    return _flops(preset, 1, _seen(preset, length))


def kv_cache_bytes(preset: Preset, length: int, dtype: str = "float16") -> int:
    """Return the bytes of all layers' keys and values for one sequence of ``length`` tokens.

    These are 2 · layers · Hkv · D · L · bytes per number. With a window w, min(L, w) replaces L.
    ``dtype`` is "float32", "float16" or "bfloat16".

    Raises
    ------
    TypeError, ValueError
        As ``decode_flops``, or another dtype.

    References
    ----------
    Ainslie et al., "GQA", 2023, section 2.2; Jiang et al., "Mistral 7B", 2023, figure 2 (the
    rolling buffer).

    Examples
    --------
    128 KiB per token:

    >>> kv_cache_bytes(PRESETS["Llama-3-8B"], 1, "bfloat16") // 1024
    128
    """
    _check_decoder(preset)
    length = check_length(preset, length)
    num_entries = 2 * preset.layers * preset.num_kv_heads * preset.head_dim
    return num_entries * _seen(preset, length) * ITEM_SIZES[choice("dtype", dtype, ITEM_SIZES)]


def weight_bytes(preset: Preset, dtype: str = "float16") -> int:
    """Return the memory of the weights: parameters · bytes per number.

    A decode step reads all weights except the embeddings of other tokens, positions and segments.
    It also reads the whole token embedding if that is the head.
    """
    return parameters(preset).total * ITEM_SIZES[choice("dtype", dtype, ITEM_SIZES)]


def saved_by_groups(preset: Preset, length: int, dtype: str = "float16") -> Savings:
    """Return what a model saves compared with the same model with num_kv_heads = num_heads.

    The cache, W_k and W_v shrink to Hkv / H of their size. The attention's FLOPs stay, since each
    query head still attends to every key. Arguments are those of ``kv_cache_bytes``.

    Ainslie et al., "GQA", 2023, section 2.2.

    >>> saved_by_groups(PRESETS["Llama-3-8B"], 8192).kv_cache_bytes // 2**30
    3
    """
    _check_decoder(preset)
    every = replace(preset, num_kv_heads=preset.num_heads)
    return Savings(
        parameters=parameters(every).total - parameters(preset).total,
        prefill_flops=prefill_flops(every, length).total - prefill_flops(preset, length).total,
        decode_flops=decode_flops(every, length).total - decode_flops(preset, length).total,
        kv_cache_bytes=kv_cache_bytes(every, length, dtype) - kv_cache_bytes(preset, length, dtype),
    )


def _flops(preset: Preset, tokens: int, pairs: int) -> Flops:
    return Flops(
        projections=2 * tokens * preset.layers * _projection_weights(preset),
        feed_forward=2 * tokens * preset.layers * _feed_forward_weights(preset),
        attention=4 * preset.layers * preset.num_heads * preset.head_dim * pairs,
        head=2 * _head_weights(preset),
    )


def _projection_weights(preset: Preset) -> int:
    """Return the number of weights in W_q, W_k, W_v and W_o of one layer."""
    return 2 * preset.d_model * (preset.num_heads + preset.num_kv_heads) * preset.head_dim


def _feed_forward_weights(preset: Preset) -> int:
    """Return the number of weights in the two or three matrices of one layer."""
    return (3 if preset.is_gated else 2) * preset.d_model * preset.d_ff


def _head_weights(preset: Preset) -> int:
    """Return the number of weights in a decoder's unembedding, or in an encoder's pooler."""
    return preset.d_model * (preset.vocabulary if preset.is_causal else preset.d_model)


def _seen(preset: Preset, length: int) -> int:
    """Return the number of keys that the last of ``length`` tokens sees."""
    return length if preset.window is None else min(length, preset.window)


def _letters(name: str) -> str:
    return "".join(sign for sign in name.casefold() if sign.isalnum())


def _check_preset(preset: Preset) -> None:
    if not isinstance(preset, Preset):
        raise TypeError(f"preset is {preset!r}: expected a Preset, as find returns for a name")


def _check_decoder(preset: Preset) -> None:
    _check_preset(preset)
    if not preset.is_causal:
        raise ValueError(
            f"{preset.name} is an encoder, which sees all tokens at once: it has no decode step "
            f"and no cache"
        )
