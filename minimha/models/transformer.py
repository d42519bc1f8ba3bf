"""Compute a decoder-only transformer: from tokens to the logits of the next token.

tokens → embedded → blocks → final norm → unembedding → logits

Axes: ``L`` tokens, ``E`` model width, ``V`` vocabulary. Inside, arrays have a batch axis of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import Backend
from minimha.equations.arguments import counted, integer, name_of
from minimha.equations.tap import Steps, Tap, no_tap, prefixed, replacing, safe_tap, staged
from minimha.layers.cache import KVCache
from minimha.layers.linear import product
from minimha.layers.multihead import check_cached_angles
from minimha.layers.norms import Norm
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer
from minimha.models.sampling import generated, sampler
from minimha.models.tokens import Tokenizer, check_length, ends, numbers

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Transformer:
    """A decoder-only language model: logits = unembedding(norm(blocks(embedded tokens))).

    ``minimha.models.load`` returns a Transformer from a checkpoint. ``dataclasses.replace`` returns
    a variant with some fields replaced; it shares the weights in all other fields.

    Parameters
    ----------
    config : Config
    embeddings : Embeddings
    blocks : sequence of Layer
    final_norm : Norm
    W_vocab : ndarray of shape (E, V), optional
        The unembedding; if tied, the token embedding transposed. Without it there are no logits.
    tokenizer : Tokenizer, optional
        Without a tokenizer, text raises ValueError.
    """

    config: Config
    embeddings: Embeddings
    blocks: Sequence[Layer]
    final_norm: Norm
    W_vocab: Array | None
    tokenizer: Tokenizer | None = None

    def logits(
        self, ids: str | ArrayLike, *, cache: Sequence[KVCache] | None = None,
        backend: Backend = "auto", tap: Tap = no_tap, replace: Steps = None,
    ) -> Array:  # fmt: skip
        """Return for each token the logits of the next token.

        Parameters
        ----------
        ids : str, or array_like of shape (L,), int
            The tokens' numbers, or text for the tokenizer.
        cache : sequence of KVCache, optional
            The earlier tokens, one cache per layer, from ``new_cache``; ``ids`` are appended.
        backend : str, default "auto"
            As in ``minimha.attention``.
        tap : callable ``tap(name, value) -> value``, optional
            Receives every step; steps of layer n are named like ``weights[layer n]``.
        replace : mapping from step name to array_like, optional
            Values that replace those of steps, shaped as in a ``Trace``. Later steps use them.

        Returns
        -------
        ndarray of shape (L, V), float32

        Raises
        ------
        TypeError, ValueError
            Text without a tokenizer, a token outside the vocabulary, more tokens than positions, a
            model without a head, a ``replace`` that does not fit.
        """
        self._head()
        with replacing(tap, replace) as tap:
            x = self.residual(ids, cache=cache, backend=backend, tap=tap)
            return np.asarray(self.unembed(x, tap)[0])

    def hidden(
        self, ids: str | ArrayLike, *, tap: Tap = no_tap, replace: Steps = None, **options: Any
    ) -> Array:
        """Return each token's row (L, E) after the final norm. Arguments are as in ``logits``."""
        with replacing(tap, replace) as tap:
            x = self.residual(ids, tap=tap, **options)
            return np.asarray(self.final_norm(x, prefixed(tap, "final_"))[0])

    def residual(
        self, ids: str | ArrayLike, *, cache: Sequence[KVCache] | None = None,
        backend: Backend = "auto", tap: Tap = no_tap,
    ) -> Array:  # fmt: skip
        """Return tokens' rows (1, L, E) after the last block. Arguments are as in ``logits``."""
        tokens = self.encode(ids)
        start = 0 if cache is None else int(cache[0].lengths[0])
        check_length("ids", len(tokens), start, self.config.max_length)
        for rope in filter(None, set(self.config.ropes)):  # before any layer's cache grows
            check_cached_angles(rope, start, len(tokens))
        x = self.embeddings(tokens, start, tap)[None]
        for n, block in enumerate(self.blocks):
            own = None if cache is None else cache[n]
            x = block(x, staged(tap, f"layer {n}"), is_causal=True, cache=own, backend=backend)
        return x

    def unembed(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return the logits (..., L, V) of rows x (..., L, E) of the residual stream.

        If x is the stream after an earlier layer, the logits are that layer's predictions
        (nostalgebraist, "Interpreting GPT: the logit lens", 2020).
        """
        W_vocab, tap = self._head(), safe_tap(tap)
        normed = self.final_norm(x, prefixed(tap, "final_"))
        logits = product(normed, tap("W_vocab", W_vocab))
        cap = self.config.logit_softcap
        if cap is not None:
            logits, cap = tap("uncapped_logits", logits), tap("logit_softcap", np.float32(cap))
            logits = cap * np.tanh(logits / cap)
        return np.asarray(tap("logits", logits))

    def new_cache(self, capacity: int | None = None) -> list[KVCache]:
        """Return an empty cache for each layer.

        Parameters
        ----------
        capacity : int, optional
            The number of tokens that fit. Default is ``config.max_length``.

        Raises
        ------
        TypeError, ValueError
            A capacity that is not a positive integer.
        """
        config = self.config
        size = integer("capacity", config.max_length if capacity is None else capacity)
        return [
            KVCache(
                1, config.num_kv_heads, size, config.head_dim,
                window=None if block.window is None else min(block.window, size),
            )
            for block in self.blocks
        ]  # fmt: skip

    def generate(
        self, ids: str | ArrayLike, num_tokens: int, *, temperature: float = 1.0,
        top_k: int | None = None, top_p: float | None = None, seed: int = 0,
        eos: int | Sequence[int] | None = None, backend: Backend = "auto", replace: Steps = None,
    ) -> Iterator[int]:  # fmt: skip
        """Yield up to ``num_tokens`` tokens, each drawn given all tokens before it.

        Parameters
        ----------
        ids : str, or array_like of shape (L,), int
            The beginning of the text.
        num_tokens : int
        temperature, top_k, top_p
            As in ``minimha.models.sampling.probabilities``; ``top_k=1`` is greedy.
        seed : int, default 0
            Seed of the draws.
        eos : int or sequence of int, optional
            Tokens that end the text. Default is ``config.eos``; () is none.
        backend, replace
            As in ``logits``; steps are replaced only while ``ids`` are read.

        Raises
        ------
        TypeError, ValueError
            As ``logits``, or an option outside its range; raised by the call, not by a draw.
        """
        self._head()
        tokens, count = self.encode(ids), integer("num_tokens", num_tokens)
        sample, last = sampler(temperature, top_k, top_p, seed), ends("eos", eos, self.config.eos)
        needed = len(tokens) + count - 1  # the last one is not read again
        if needed > self.config.max_length:
            raise ValueError(
                f"{name_of('num_tokens')} is {num_tokens} after {counted(len(tokens), 'token')}: "
                f"the model has only {self.config.max_length} positions"
            )
        cache, read = self.new_cache(needed), tokens[:0]
        ropes = set(filter(None, self.config.ropes))

        def logits(new: NDArray[np.int64]) -> Array:
            nonlocal replace, cache, read
            given, replace = replace, None
            start, read = len(read), np.concatenate([read, new])
            if start and not all(rope.has_equal_angles(start, len(read)) for rope in ropes):
                cache, new = self.new_cache(needed), read  # keys that were rotated otherwise
            with replacing(no_tap, given) as tap:
                x = self.residual(new, cache=cache, backend=backend, tap=tap)
                return self.unembed(x[0, -1:] if given is None else x[0], tap)  # steps of all rows

        return generated(logits, tokens, count, sample, last)

    def encode(self, ids: str | ArrayLike) -> NDArray[np.int64]:
        """Return the tokens' numbers (L,), checked. Text is converted by the tokenizer."""
        return numbers("ids", ids, self.config.vocabulary, self.tokenizer)

    def _head(self) -> Array:
        if self.W_vocab is None:
            raise ValueError("the checkpoint has no head, so no logits: hidden(ids) gives the rows")
        return self.W_vocab
