"""Generate a target text from a source text, with an encoder and a decoder.

source → encoder → memory;  target → decoder, which attends to the memory → logits of the next token

Axes: ``Ls`` tokens of the source, ``L`` of the target, ``E`` model width, ``V`` vocabulary.
Internal arrays begin with a batch axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, integer, name_of
from minimha.equations.option_types import Backend
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
    """T5's learned bias of attention scores, which depends on the distance from query to key.

    ``table`` (buckets, H), ``max_distance`` and ``bidirectional`` are arguments of
    ``minimha.layers.biases.t5_bias``.
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
    """The cached keys and values of a decoder, for decoding the target token by token.

    Attributes
    ----------
    own : list of KVCache
        For each layer, the keys and values of the target tokens so far.
    memory : list of (k, v)
        For each layer, the keys and values of the encoder's output, (1, H, Ls, D).
    """

    own: list[KVCache]
    memory: list[tuple[Array, Array]]


@dataclass(frozen=True, eq=False)
class EncoderDecoder:
    """An encoder-decoder transformer such as T5: unembedding(decoder(target, encoder(source))).

    Parameters
    ----------
    config : Config
    source, target : Embeddings
        The embeddings of source and target tokens.
    encoder, decoder : sequence of Layer
    W_vocab : ndarray of shape (E, V)
        The unembedding.
    encoder_norm, decoder_norm : Norm, optional
        Norms after the last layer. Default is none.
    encoder_bias, decoder_bias : RelativeBias, optional
        Biases added to the self-attention scores of every layer. Default is none.
    output_scale : float, default 1.0
        The factor of hidden states before the unembedding: 1/√E in T5 with a tied unembedding.
    start : int, default 0
        The id of the first token of every target.
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
        """Return the encoder's output, one hidden state for each source token.

        Parameters
        ----------
        ids : str, or array_like of shape (Ls,), int
            The source's token ids, or text for the tokenizer.
        backend, tap, replace
            As in ``Transformer.logits``; names of layer n's arrays end in ``[encoder n]``.

        Returns
        -------
        ndarray of shape (Ls, E), float32

        Raises
        ------
        TypeError, ValueError
            Text without a tokenizer, an id outside the vocabulary, more tokens than positions, or
            a ``replace`` of an unknown name or a wrong shape.
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
        """Return the logits of the next token after each token of the target.

        Parameters
        ----------
        memory : array_like of shape (Ls, E)
            The encoder's output, as the method ``memory`` returns it.
        target : str, or array_like of shape (L,), int
            The target's token ids, or text. Without a cache, all tokens so far, which should begin
            with ``start``. With a cache, only the tokens that it lacks.
        cache : DecoderCache, optional
            A cache of earlier target tokens, made by ``new_cache`` for this memory. The call
            appends ``target`` to it.
        backend, tap, replace
            As in ``Transformer.logits``; names of layer n's arrays end in ``[decoder n]``, and
            those of its cross-attention in ``[cross n]``.

        Returns
        -------
        ndarray of shape (L, V), float32

        Raises
        ------
        TypeError, ValueError
            As in the method ``memory``, or the argument ``memory`` has another shape.
        """
        rows = self._checked_memory(memory)
        tokens = numbers("target", target, self.config.vocabulary, self.tokenizer)
        with replacing(tap, replace) as tap:
            x = self._decoded(rows, tokens, cache, backend, tap)
            return np.asarray(self.unembed(x, tap)[0])

    def unembed(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return the logits (..., L, V) of x (..., L, E), hidden states after the last layer.

        ``decoder_norm``, ``output_scale`` and ``W_vocab`` are applied to x in this order.
        """
        tap = safe_tap(tap)
        if self.decoder_norm is not None:
            x = self.decoder_norm(x, prefixed(tap, "final_"))
        if self.output_scale != 1:
            x = x * x.dtype.type(self.output_scale)
        return np.asarray(tap("logits", product(x, tap("W_vocab", self.W_vocab))))

    def new_cache(self, memory: ArrayLike, capacity: int | None = None) -> DecoderCache:
        """Return a cache for decoding one target, with the keys and values of the encoder's output.

        Parameters
        ----------
        memory : array_like of shape (Ls, E)
        capacity : int, optional
            The largest number of target tokens, ``start`` included. Default is
            ``config.max_length``.

        Raises
        ------
        TypeError, ValueError
            A memory of another shape, or a capacity that is not a positive integer.
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
        """Yield up to ``num_tokens`` target tokens, sampled one by one for the source ``ids``.

        The result excludes the first token ``start``. Parameters are those of
        ``Transformer.generate``, except ``replace``, which is as in ``memory``.

        Raises
        ------
        TypeError, ValueError
            As in ``memory``, or an option is out of range. The call itself raises these errors,
            before the first token.
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
        """Return token ids (L,), int64: those of a text, or the given ids after a range check."""
        return numbers("ids", ids, self.config.vocabulary, self.tokenizer)

    def _decoded(
        self, memory: Array, tokens: NDArray[np.int64], cache: DecoderCache | None,
        backend: Backend, tap: Tap = no_tap,
    ) -> Array:  # fmt: skip
        """Return the target's hidden states (1, L, E) after the last layer."""
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
        """Raise ValueError if tokens exceed the learned or sinusoidal positions."""
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
    """Return the original transformer of Vaswani et al. (2017), with random weights from ``seed``.

    Layers are post-norm, positions are sinusoidal, and the activation is ``config.activation`` (the
    paper's is ReLU). One matrix gives the source's and target's token embeddings, multiplied by √E,
    and the unembedding. Encoder and decoder have ``config.num_layers`` layers each.

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
