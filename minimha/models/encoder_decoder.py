"""Generate a target text from a source text, with an encoder and a decoder.

source → encoder → memory;  target → decoder, which attends to the memory → logits of the next token

Axes: ``Ls`` tokens of the source, ``L`` of the target, ``E`` model width, ``V`` vocabulary. Inside,
arrays have a batch axis of 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import Backend
from minimha.equations.arguments import as_floating, integer, name_of
from minimha.equations.tap import Steps, Tap, no_tap, prefixed, replacing, safe_tap, staged
from minimha.layers.biases import t5_bias
from minimha.layers.cache import KVCache
from minimha.layers.feed_forward import FeedForward
from minimha.layers.linear import product
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import LayerNorm, Norm
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings, sinusoidal
from minimha.models.layer import Layer
from minimha.models.sampling import generated, sampler
from minimha.models.tokens import Tokenizer, check_length, ends, numbers

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A learned bias of T5 for the distance of a key from its query.

    ``table`` is (buckets, H); other attributes are as in ``minimha.layers.biases.t5_bias``.
    """

    table: Array
    max_distance: int
    bidirectional: bool

    def __call__(self, start: int, stop: int) -> Array:
        """Return the bias (1, H, stop - start, stop) of queries ``start`` to ``stop`` - 1."""
        q, k = np.arange(start, stop), np.arange(stop)
        return np.asarray(t5_bias(self.table, q, k, self.max_distance, self.bidirectional)[None])


@dataclass(frozen=True, eq=False)
class DecoderCache:
    """The keys and values that a decoder keeps for its next token.

    Attributes
    ----------
    own : list of KVCache
        One per layer: the target's keys and values so far.
    memory : list of (k, v)
        One pair per layer, (1, H, Ls, D): the memory's keys and values.
    """

    own: list[KVCache]
    memory: list[tuple[Array, Array]]


@dataclass(frozen=True, eq=False)
class EncoderDecoder:
    """A model unembedding(decoder(target, encoder(source))): the first transformer, and T5.

    Parameters
    ----------
    config : Config
    source, target : Embeddings
        The embeddings of both texts.
    encoder, decoder : sequence of Layer
    W_vocab : ndarray of shape (E, V)
    encoder_norm, decoder_norm : Norm, optional
        Norms after the last layer. Default is none.
    encoder_bias, decoder_bias : RelativeBias, optional
        Biases of the scores of self-attention in every layer. Default is none.
    output_scale : float, default 1.0
        The factor of rows before the unembedding: 1/√E in T5 with a tied unembedding.
    start : int, default 0
        The first token of every target.
    tokenizer : Tokenizer, optional

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, figure 1; Raffel et al., "Exploring the
    Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020, section 2.1.
    """

    config: Config
    source: Embeddings
    target: Embeddings
    encoder: Sequence[Layer]
    decoder: Sequence[Layer]
    W_vocab: Array
    encoder_norm: Norm | None = None
    decoder_norm: Norm | None = None
    encoder_bias: RelativeBias | None = None
    decoder_bias: RelativeBias | None = None
    output_scale: float = 1.0
    start: int = 0
    tokenizer: Tokenizer | None = None

    def memory(
        self, ids: str | ArrayLike, *, backend: Backend = "auto", tap: Tap = no_tap,
        replace: Steps = None,
    ) -> Array:  # fmt: skip
        """Return the encoder's output: one row for each token of the source.

        Parameters
        ----------
        ids : str, or array_like of shape (Ls,), int
            The source's tokens, or text for the tokenizer.
        backend, tap, replace
            As in ``Transformer.logits``; steps of layer n are named like ``weights[encoder n]``.

        Returns
        -------
        ndarray of shape (Ls, E), float32

        Raises
        ------
        TypeError, ValueError
            Text without a tokenizer, a token outside the vocabulary, more tokens than positions, a
            ``replace`` that does not fit.
        """
        tokens = self.encode(ids)
        self._check_length("ids", len(tokens), 0)
        bias = None if self.encoder_bias is None else self.encoder_bias(0, len(tokens))
        with replacing(tap, replace) as tap:
            staged_tap = staged(tap, "source")
            x = self.source(tokens, 0, staged_tap)[None]
            for n, layer in enumerate(self.encoder):
                x = layer(x, staged(tap, f"encoder {n}"), attn_bias=bias, backend=backend)
            if self.encoder_norm is not None:
                x = self.encoder_norm(x, prefixed(staged_tap, "final_"))
        return np.asarray(x[0])

    def logits(
        self, memory: ArrayLike, target: str | ArrayLike, *, cache: DecoderCache | None = None,
        backend: Backend = "auto", tap: Tap = no_tap, replace: Steps = None,
    ) -> Array:  # fmt: skip
        """Return for each token of the target the logits of the next token.

        Parameters
        ----------
        memory : array_like of shape (Ls, E)
            The result of ``memory`` for the source.
        target : str, or array_like of shape (L,), int
            The tokens so far; the first should be ``start``.
        cache : DecoderCache, optional
            The earlier tokens, from ``new_cache`` of this memory; ``target`` is appended.
        backend, tap, replace
            As in ``Transformer.logits``; steps of layer n are named like ``weights[decoder n]`` or,
            in cross-attention, ``weights[cross n]``.

        Returns
        -------
        ndarray of shape (L, V), float32

        Raises
        ------
        TypeError, ValueError
            As ``memory``, or a memory of another shape.
        """
        rows = self._checked_memory(memory)
        tokens = numbers("target", target, self.config.vocabulary, self.tokenizer)
        with replacing(tap, replace) as tap:
            x = self._decoded(rows, tokens, cache, backend, tap)
            return np.asarray(self.unembed(x, tap)[0])

    def unembed(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return the logits (..., L, V) of the decoder's rows x (..., L, E)."""
        tap = safe_tap(tap)
        if self.decoder_norm is not None:
            x = self.decoder_norm(x, prefixed(tap, "final_"))
        if self.output_scale != 1:
            x = x * x.dtype.type(self.output_scale)
        return np.asarray(tap("logits", product(x, tap("W_vocab", self.W_vocab))))

    def new_cache(self, memory: ArrayLike, capacity: int | None = None) -> DecoderCache:
        """Return a cache for one target, with the memory's keys and values of every layer.

        Parameters
        ----------
        memory : array_like of shape (Ls, E)
        capacity : int, optional
            The number of tokens that fit. Default is ``config.max_length``.

        Raises
        ------
        TypeError, ValueError
            A memory of another shape, a capacity that is not a positive integer.
        """
        rows, config = self._checked_memory(memory), self.config
        size = integer("capacity", config.max_length if capacity is None else capacity)
        own, kept = [], []
        for layer in self.decoder:
            own.append(KVCache(1, config.num_kv_heads, size, config.head_dim))
            kept.append(layer.keys_and_values(rows))
        return DecoderCache(own, kept)

    def generate(
        self, ids: str | ArrayLike, num_tokens: int, *, temperature: float = 1.0,
        top_k: int | None = None, top_p: float | None = None, seed: int = 0,
        eos: int | Sequence[int] | None = None, backend: Backend = "auto", replace: Steps = None,
    ) -> Iterator[int]:  # fmt: skip
        """Yield up to ``num_tokens`` tokens of a target, each drawn given those before it.

        Parameters are those of ``Transformer.generate``; ``ids`` are the source, and ``replace`` is
        that of ``memory``.

        Raises
        ------
        TypeError, ValueError
            As ``memory``, or an option outside its range; raised by the call, not by a draw.
        """
        count = integer("num_tokens", num_tokens)
        sample = sampler(temperature, top_k, top_p, seed)
        last = ends("eos", eos, self.config.eos)
        if self.target.positions is not None and count > self.config.max_length:
            raise ValueError(
                f"{name_of('num_tokens')} is {count}: the model has only {self.config.max_length} "
                f"positions"
            )
        memory = self._checked_memory(self.memory(ids, backend=backend, replace=replace))
        cache = self.new_cache(memory[0], count)

        def logits(new: NDArray[np.int64]) -> Array:
            return self.unembed(self._decoded(memory, new, cache, backend)[0])

        return generated(logits, np.array([self.start]), count, sample, last)

    def encode(self, ids: str | ArrayLike) -> NDArray[np.int64]:
        """Return the ids (L,) of a text's tokens; ids that are given are checked and returned."""
        return numbers("ids", ids, self.config.vocabulary, self.tokenizer)

    def _decoded(
        self, memory: Array, tokens: NDArray[np.int64], cache: DecoderCache | None,
        backend: Backend, tap: Tap = no_tap,
    ) -> Array:  # fmt: skip
        """Return the target's rows after the last layer, (1, L, E)."""
        start = 0 if cache is None else int(cache.own[0].lengths[0])
        self._check_length("target", len(tokens), start)
        x = self.target(tokens, start, tap)[None]
        options: dict[str, Any] = {"is_causal": True, "backend": backend}
        if self.decoder_bias is not None:
            options["attn_bias"] = self.decoder_bias(start, start + len(tokens))
        for n, layer in enumerate(self.decoder):
            own, kept = (None, None) if cache is None else (cache.own[n], cache.memory[n])
            staged_tap = staged(tap, f"decoder {n}")
            x = layer.attend(x, staged_tap, cache=own, **options)
            x = layer.attend_across(x, memory, kept, staged(tap, f"cross {n}"), backend=backend)
            x = layer.feed(x, staged_tap)
        return x

    def _check_length(self, name: str, num_tokens: int, start: int) -> None:
        """Raise ValueError if tokens exceed a table of positions; relative ones have no limit."""
        if self.target.positions is not None:
            check_length(name, num_tokens, start, self.config.max_length)

    def _checked_memory(self, memory: ArrayLike) -> Array:
        rows, E = as_floating("memory", memory), self.config.d_model
        if rows.ndim != 2 or rows.shape[1] != E:
            raise ValueError(
                f"{name_of('memory')} has shape {rows.shape}: expected (Ls, E) with E={E}"
            )
        return rows[None]


def original(config: Config, seed: int = 0) -> EncoderDecoder:
    """Return the first transformer, with random weights.

    Norms follow the sums, positions are sinusoidal, and the activation is the configuration's (the
    paper's is ReLU). Both texts and the unembedding share one matrix; embeddings are multiplied by
    √E. Encoder and decoder have ``config.num_layers`` layers each.

    Vaswani et al., "Attention Is All You Need", 2017, sections 3.1 to 3.5.
    """
    rng, E = np.random.default_rng(integer("seed", seed, low=0)), config.d_model

    def matrix(rows: int, columns: int) -> Array:
        return rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)

    def norm() -> LayerNorm:
        return LayerNorm(np.ones(E, np.float32), np.zeros(E, np.float32), config.epsilon)

    def heads() -> MultiHeadAttention:
        return MultiHeadAttention(E, config.num_heads, seed=int(rng.integers(1 << 31)))

    def layer() -> Layer:
        F = config.d_ff
        feed_forward = FeedForward(
            matrix(E, F), matrix(F, E), config.activation,
            b_in=np.zeros(F, np.float32), b_out=np.zeros(E, np.float32),
        )  # fmt: skip
        return Layer(norm(), heads(), norm(), feed_forward, norm_first=False)

    tokens = rng.normal(0, E**-0.5, (config.vocabulary, E)).astype(np.float32)
    positions = sinusoidal(config.max_length, E).astype(np.float32)
    embeddings = Embeddings(tokens, positions, scale=math.sqrt(E))
    return EncoderDecoder(
        config, embeddings, embeddings,
        [layer() for _ in range(config.num_layers)],
        [replace(layer(), cross=heads(), cross_norm=norm()) for _ in range(config.num_layers)],
        np.asarray(tokens.T),
    )  # fmt: skip
