"""Compute parameter counts, FLOPs and key/value cache sizes of known models.

All arithmetic is with integers. Letters: ``E`` = d_model, ``H`` = num_heads, ``Hkv`` =
num_kv_heads, ``D`` = head_dim, ``F`` = d_ff, ``V`` = vocabulary, ``L`` = tokens.
"""

from dataclasses import astuple, dataclass, replace

from minimha.equations.arguments import choice, integer
from minimha.models.presets import PRESETS, Preset, find

__all__ = [
    "PRESETS", "Flops", "Parameters", "Preset", "Savings", "cache_bytes_per_token",
    "decode_flops", "find", "kv_cache_bytes", "parameters", "prefill_flops", "saved_by_groups",
    "weight_bytes",
]  # fmt: skip

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes


@dataclass(frozen=True)
class Parameters:
    """The number of parameters in each part of a model."""

    attention: int
    feed_forward: int
    norms: int
    embeddings: int
    head: int

    @property
    def total(self) -> int:
        """Return the total number of parameters."""
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
        """Return the total number of operations."""
        return sum(astuple(self))


@dataclass(frozen=True)
class Savings:
    """The parameters, FLOPs and cache bytes that grouped-query attention saves over Hkv = H."""

    parameters: int
    prefill_flops: int
    decode_flops: int
    kv_cache_bytes: int


def check_length(preset: Preset, length: int) -> int:
    """Return ``length``; raise ValueError unless it is from 1 to ``preset.max_length``."""
    _check_preset(preset)
    tokens = integer("length", length, 1)
    if tokens > preset.max_length:
        raise ValueError(
            f"length is {length} but {preset.name} was made for at most {preset.max_length} "
            f"tokens: expected 1 to {preset.max_length}"
        )
    return tokens


def parameters(preset: Preset) -> Parameters:
    """Count the weights and biases in each part of a model.

    - attention: layers · (W_q and W_o: 2 · E · H · D; W_k and W_v: 2 · E · Hkv · D; biases:
      H · D + 2 · Hkv · D + E). A gate adds E · H · D, and ``Indexer``, sinks and ``qk_norm`` add
      weights too. ``Latent`` and ``Delta`` replace the matrices.
    - feed_forward: layers · (2 · E · F, or 3 · E · F if gated; biases: F + E, or 2 · F + E if
      gated). A mixture counts all its experts, the shared one, and the router (E, experts).
    - norms: (2 · layers + 1) · E, or (4 · layers + 1) · E if outputs are normalised too. With
      biases, twice that.
    - embeddings: (V + learned positions + segments) · E.
    - head: V · E, or 0 if tied. An encoder has a pooler instead: E · E + E.

    >>> parameters(PRESETS["GPT-2 Small"]).total
    124439808
    """
    _check_preset(preset)
    E, biases = preset.d_model, int(preset.has_biases)
    rows = preset.vocabulary + preset.num_segments
    rows += preset.max_length if preset.positions == "learned" else 0
    if preset.is_causal:
        head = 0 if preset.is_tied else _head_weights(preset)
    else:
        head = _head_weights(preset) + biases * E
    feed_forward = _feed_forward_weights(preset) + _feed_forward_vectors(preset)
    norms = (preset.norms_per_layer * preset.layers + 1) * E * (1 + biases)
    attention = _projection_weights(preset) + _attention_vectors(preset)
    return Parameters(attention, feed_forward, norms, rows * E, head)


def prefill_flops(preset: Preset, length: int) -> Flops:
    """Return the FLOPs of one forward pass over a prompt of ``length`` tokens.

    - projections: 2 · L · layers · 2 · E · (H + Hkv) · D
    - feed_forward: 2 · L · layers · 2 · E · F, or 2 · L · layers · 3 · E · F if gated. A mixture
      counts only the experts that compute a token, and the router.
    - attention (Q Kᵀ and P V): 4 · layers · H · D · n, where n is the number of pairs of a query
      and a visible key. It is L² in an encoder and 1 + 2 + … + L = L · (L + 1) / 2 in a decoder, or
      Σ min(i, w) with a window w. An indexer scores all pairs. A delta rule has 3 products with its
      state per token.
    - head: 2 · E · V for the logits after the last token. An encoder's pooler has 2 · E · E.

    Parameters
    ----------
    preset : Preset
    length : int
        L, from 1 to the preset's max_length.

    Raises
    ------
    TypeError, ValueError
        ``preset`` is no Preset, or ``length`` is outside this range.

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
    return _flops(preset, 0, length)


def decode_flops(preset: Preset, length: int) -> Flops:
    """Return the FLOPs of the decode step for the last of ``length`` tokens.

    The formulas are those of ``prefill_flops``, with one token and L pairs, or min(L, w) with a
    window w. The decode steps of L tokens together have as many attention FLOPs as their prefill.

    Raises
    ------
    TypeError, ValueError
        As in ``prefill_flops``, or the preset is an encoder, which does not decode.
    """
    _check_decoder(preset)
    length = check_length(preset, length)
    return _flops(preset, length - 1, length)


def kv_cache_bytes(preset: Preset, length: int, dtype: str = "float16") -> int:
    """Return the size in bytes of all layers' key/value caches for a sequence of ``length`` tokens.

    The size is 2 · layers · Hkv · D · L · bytes per number. In layers with a window w, min(L, w)
    replaces L. Latent attention caches one latent row and one rotated key per token in place of
    2 · Hkv · D numbers. An indexer caches one more key. A layer with the delta rule has a state
    whose size does not depend on L. ``dtype`` is "float32", "float16" or "bfloat16".

    Raises
    ------
    TypeError, ValueError
        As in ``decode_flops``, or ``dtype`` is another one.

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
    per_token = 2 * preset.num_kv_heads * preset.head_dim
    if preset.latent:
        per_token = preset.latent.keys + preset.latent.rotated
    if preset.indexer:
        per_token += preset.indexer.head_dim
    local = preset.local_layers
    tokens = (preset.attention_layers - local) * length
    tokens += local * min(length, preset.window or length)
    entries = per_token * tokens + (preset.layers - preset.attention_layers) * _state(preset)
    return entries * ITEM_SIZES[choice("dtype", dtype, ITEM_SIZES)]


def cache_bytes_per_token(preset: Preset, dtype: str = "float16") -> int:
    """Return the bytes that one more token adds to all layers' caches while no window is full.

    >>> cache_bytes_per_token(PRESETS["DeepSeek-V3"]) == 2 * 61 * (512 + 64)
    True
    """
    return kv_cache_bytes(preset, 2, dtype) - kv_cache_bytes(preset, 1, dtype)


def weight_bytes(preset: Preset, dtype: str = "float16") -> int:
    """Return the size of a model's weights in bytes: number of parameters · bytes per number.

    A decode step reads all these weights, except the rows of the embeddings that belong to other
    tokens, positions and segments. A tied token embedding is read whole, because it is also the
    head. In a mixture, a step reads only the chosen experts and the shared one.
    """
    return parameters(preset).total * ITEM_SIZES[choice("dtype", dtype, ITEM_SIZES)]


def saved_by_groups(preset: Preset, length: int, dtype: str = "float16") -> Savings:
    """Return the savings of grouped-query attention over the same model with Hkv = H.

    The cache, W_k and W_v shrink to Hkv / H of their size. The attention's FLOPs do not change,
    since each query head still attends to all keys. Arguments are those of ``kv_cache_bytes``.

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


def _flops(preset: Preset, start: int, stop: int) -> Flops:
    """Return the FLOPs of the tokens from ``start`` to ``stop`` - 1."""
    return Flops(
        projections=2 * (stop - start) * _projection_weights(preset),
        feed_forward=2 * (stop - start) * _feed_forward_weights(preset, is_computed=True),
        attention=_attention_flops(preset, start, stop),
        head=2 * _head_weights(preset),
    )


def _attention_flops(preset: Preset, start: int, stop: int) -> int:
    """Return the FLOPs of all products of queries and keys, and of weights and values."""

    def pairs(most: int) -> int:
        """Return the number of pairs if a query sees at most ``most`` keys."""
        if not preset.is_causal:
            return (stop - start) * stop
        full = [min(n, most) for n in (start, stop)]
        below, upto = (
            f * (f + 1) // 2 + (n - f) * f for f, n in zip(full, (start, stop), strict=True)
        )
        return upto - below

    values = preset.latent.values if preset.latent else preset.head_dim
    per_pair = 2 * preset.num_heads * (preset.head_dim + values)
    local, indexer = preset.local_layers, preset.indexer
    seen = indexer.keys if indexer else stop
    total = per_pair * (local * pairs(preset.window or stop))
    total += per_pair * ((preset.attention_layers - local) * pairs(seen))
    if indexer:
        total += preset.layers * 2 * indexer.heads * indexer.head_dim * pairs(stop)
    if preset.delta:
        state = preset.delta.value_heads * preset.delta.head_dim**2
        total += (preset.layers - preset.attention_layers) * 2 * 3 * state * (stop - start)
    return total


def _projection_weights(preset: Preset) -> int:
    """Return the number of weights in the projections of all layers' attention."""
    E, H = preset.d_model, preset.num_heads
    plain = (H * (2 + preset.has_gate) + 2 * preset.num_kv_heads) * preset.head_dim * E
    if latent := preset.latent:
        plain = latent.queries * (E + H * preset.head_dim) + E * (latent.keys + latent.rotated)
        plain += latent.keys * H * (latent.plain + latent.values) + H * latent.values * E
    if indexer := preset.indexer:  # its queries from the latent row, one key, a weight per head
        assert preset.latent is not None
        plain += preset.latent.queries * indexer.heads * indexer.head_dim
        plain += E * (indexer.head_dim + indexer.heads)
    total = preset.attention_layers * plain
    if delta := preset.delta:  # q, k, v, an output gate, the output; a decay and a beta per head
        keys, values = (n * delta.head_dim for n in (delta.key_heads, delta.value_heads))
        one = E * (2 * keys + 3 * values + 2 * delta.value_heads)
        total += (preset.layers - preset.attention_layers) * one
    return total


def _attention_vectors(preset: Preset) -> int:
    """Return the number of biases, norms' gains and other numbers in all layers' attention."""
    E, H, D = preset.d_model, preset.num_heads, preset.head_dim
    one = H if preset.has_sinks else 0
    if preset.has_biases or preset.has_attention_biases:
        one += (H + 2 * preset.num_kv_heads) * D + E
    if preset.qk_norm:
        one += 2 * D if preset.qk_norm == "head" else (H + preset.num_kv_heads) * D
    if preset.latent:
        one += preset.latent.queries + preset.latent.keys
    if preset.indexer:
        one += 2 * preset.indexer.head_dim
    total = preset.attention_layers * one
    if delta := preset.delta:  # the convolution, a decay and a shift per head, the output's norm
        channels = (2 * delta.key_heads + delta.value_heads) * delta.head_dim
        one = channels * delta.convolution + 2 * delta.value_heads + delta.head_dim
        total += (preset.layers - preset.attention_layers) * one
    return total


def _state(preset: Preset) -> int:
    """Return the numbers that a layer with the delta rule keeps: its state and last inputs."""
    if preset.delta is None:
        return 0
    delta = preset.delta
    channels = (2 * delta.key_heads + delta.value_heads) * delta.head_dim
    return delta.value_heads * delta.head_dim**2 + channels * (delta.convolution - 1)


def _feed_forward_weights(preset: Preset, is_computed: bool = False) -> int:
    """Return the number of weights in all layers' matrices, or of those that compute one token."""
    E, mixture = preset.d_model, preset.mixture
    dense = (3 if preset.is_gated else 2) * E * preset.d_ff
    if mixture is None:
        return preset.layers * dense
    experts = mixture.chosen if is_computed else mixture.experts
    one = 3 * E * (experts * mixture.d_ff + mixture.shared) + E * mixture.experts
    one += E * mixture.has_shared_gate
    return mixture.dense_layers * dense + (preset.layers - mixture.dense_layers) * one


def _feed_forward_vectors(preset: Preset) -> int:
    """Return the number of biases in all layers' feed-forwards and routers."""
    mixture, inner = preset.mixture, 2 if preset.is_gated else 1
    if mixture is None:
        return preset.layers * preset.has_biases * (inner * preset.d_ff + preset.d_model)
    one = mixture.experts * mixture.has_router_bias
    if mixture.has_biases:
        one += mixture.experts * (2 * mixture.d_ff + preset.d_model + 1)
    return (preset.layers - mixture.dense_layers) * one


def _head_weights(preset: Preset) -> int:
    """Return the number of weights in a decoder's unembedding, or in an encoder's pooler."""
    return preset.d_model * (preset.vocabulary if preset.is_causal else preset.d_model)


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
