"""Compute a decoder-only transformer: from tokens to the logits of the next token.

tokens → embeddings → blocks → final norm → unembedding → logits

Axes: ``L`` tokens, ``E`` model width, ``V`` vocabulary. Internal arrays begin with a batch axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import counted, integer, name_of
from minimha.equations.option_types import Backend
from minimha.equations.tap import Steps, Tap, no_tap, prefixed, replacing, safe_tap, staged
from minimha.layers.linear import product
from minimha.layers.multihead import check_cached_angles
from minimha.layers.norms import Norm
from minimha.models.batch import Batch, CachedOptions, Pooling, Several, Texts, batch, pooled
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer, LayerCache
from minimha.models.sampling import generated, sampler
from minimha.models.tokens import MORE, Tokenizer, check_length, ends, numbers

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]


def _start(cache: LayerCache, given: Batch) -> int:
    """Return the position after the cached tokens; raise ValueError if texts differ in length."""
    lengths = cache.lengths
    if len(lengths) != len(given.lengths):
        raise ValueError(
            f"{name_of('cache')} is for {counted(len(lengths), 'text')} but {name_of('ids')} has "
            f"{len(given.lengths)}: new_cache takes their number"
        )
    if given.is_padded:
        raise ValueError(
            f"{name_of('ids')} are texts of {min(given.lengths)} to {max(given.lengths)} tokens: "
            f"with a cache, all must have equally many"
        )
    return int(lengths[0])


@dataclass(frozen=True, eq=False)
class Transformer:
    """A decoder-only language model: logits = unembedding(norm(blocks(embeddings(ids)))).

    ``minimha.models.load`` returns a Transformer from a checkpoint. ``dataclasses.replace`` returns
    a variant with other values of some fields, which shares all other weights.

    Parameters
    ----------
    config : Config
    embeddings : Embeddings
    blocks : sequence of Layer
    final_norm : Norm
    W_vocab : ndarray of shape (E, V), optional
        The unembedding; if tied, the transposed token embedding. If None, ``logits`` raises
        ValueError.
    tokenizer : Tokenizer, optional
        Converts text. Without a tokenizer, text raises ValueError.
    """

    config: Config
    embeddings: Embeddings
    blocks: Sequence[Layer]
    final_norm: Norm
    W_vocab: Array | None
    tokenizer: Tokenizer | None = None

    @overload
    def logits(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, ids: Several, **options: Unpack[CachedOptions]
    ) -> list[Array]: ...
    @overload
    def logits(self, ids: str | ArrayLike | Batch, **options: Unpack[CachedOptions]) -> Array: ...
    def logits(
        self, ids: Texts, *, cache: Sequence[LayerCache] | None = None,
        backend: Backend = "auto", tap: Tap = no_tap, replace: Steps = None,
    ) -> Any:  # fmt: skip
        """Return the logits of the next token after each given token.

        Parameters
        ----------
        ids : str, list of str, or array_like of shape (L,) or (B, L), int
            Token ids, or text for the tokenizer. A list of texts is computed as one batch.
        cache : sequence of KVCache, or of another layer's cache, optional
            The caches of earlier tokens, one per layer, from ``new_cache``. The call appends
            ``ids`` to them. With a cache, all texts must have the same number of tokens.
        backend : str, default "auto"
            As in ``minimha.attention``.
        tap : callable ``tap(name, value) -> value``, optional
            Receives every intermediate array; names of layer n's arrays end in ``[layer n]``.
        replace : mapping of str to array_like, optional
            New values of intermediate arrays, by the names that ``tap`` receives.

        Returns
        -------
        ndarray of shape (L, V) or (B, L, V), float32; for a list of texts, a list of (L, V)

        Raises
        ------
        TypeError, ValueError
            Text without a tokenizer, an id outside the vocabulary, more tokens than positions, a
            model without W_vocab, or a ``cache`` or ``replace`` of a wrong shape or name.
        """
        self.unembedding()
        given = self._batch(ids)
        with replacing(tap, replace) as tap:
            x = self.residual(given, cache=cache, backend=backend, tap=tap)
            return given.unpadded(self.unembed(x, tap))

    @overload
    def hidden(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, ids: Several, **options: Unpack[CachedOptions]
    ) -> list[Array]: ...
    @overload
    def hidden(self, ids: str | ArrayLike | Batch, **options: Unpack[CachedOptions]) -> Array: ...
    def hidden(
        self, ids: Texts, *, tap: Tap = no_tap, replace: Steps = None, **options: Any
    ) -> Any:
        """Return each token's hidden state after the final norm.

        Arguments and shapes are those of ``logits``, with E in place of V. Unlike ``logits``, it
        needs no ``W_vocab``.
        """
        given = self._batch(ids)
        with replacing(tap, replace) as tap:
            x = self.residual(given, tap=tap, **options)
            return given.unpadded(self.final_norm(x, prefixed(tap, "final_")))

    def embed(self, ids: Texts, pooling: Pooling = "last") -> Array:
        """Return one row for each text: (E,) for one text, else (B, E).

        ``ids`` are as in ``logits``. ``pooling`` chooses among the hidden states of a text's
        tokens: the "last", the "first" or their "mean".
        """
        given = self._batch(ids)
        return pooled(given, self.final_norm(self.residual(given), no_tap), pooling)

    def residual(
        self, ids: Texts, *, cache: Sequence[LayerCache] | None = None,
        backend: Backend = "auto", tap: Tap = no_tap,
    ) -> Array:  # fmt: skip
        """Return the residual stream (B, L, E) after the last block, padding included.

        B is 1 for one text. Arguments are those of ``logits``. The final norm is not applied.
        """
        given = self._batch(ids)
        L, start = given.ids.shape[-1], 0 if cache is None else _start(cache[0], given)
        check_length("ids", L, start, self.config.max_length, not self._is_unlimited)
        for rope in filter(None, set(self.config.ropes)):  # before any layer's cache grows
            check_cached_angles(rope, start, L)
        x = self.embeddings(given.ids, start, tap)
        x = x.reshape(-1, *x.shape[-2:])
        for n, block in enumerate(self.blocks):
            own = None if cache is None else cache[n]
            x = block(x, staged(tap, f"layer {n}"), is_causal=True, cache=own, backend=backend)
        return x

    def unembed(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return the logits (..., L, V) of rows x (..., L, E) of the residual stream.

        Rows of the stream after an earlier layer n give the logit lens: the logits if layer n were
        the last (nostalgebraist, "Interpreting GPT: the logit lens", 2020).
        """
        W_vocab, tap = self.unembedding(), safe_tap(tap)
        normed = self.final_norm(x, prefixed(tap, "final_"))
        logits = product(normed, tap("W_vocab", W_vocab))
        cap = self.config.logit_softcap
        if cap is not None:
            logits, cap = tap("uncapped_logits", logits), tap("logit_softcap", np.float32(cap))
            logits = cap * np.tanh(logits / cap)
        return np.asarray(tap("logits", logits))

    def steps(self, ids: str | ArrayLike = (0, 0)) -> dict[str, tuple[int, ...]]:
        """Return the shape of each intermediate array that a ``tap`` receives, by name.

        ``replace`` takes the same names. ``ids`` is a text or tokens (L,), by default two tokens.
        Most arrays begin with a batch axis of length 1.

        >>> from minimha.models import world
        >>> world.load().steps("the cat sat")["weights[layer 0]"]  # texts, heads, queries, keys
        (1, 4, 3, 3)
        """
        found: dict[str, tuple[int, ...]] = {}

        def tap(name: str, value: Any) -> Any:
            found[name] = np.shape(value)
            return value

        read = self.hidden if self.W_vocab is None else self.logits
        read(self.encode(ids), backend="dense", tap=tap)
        return found

    def new_cache(self, capacity: int | None = None, num_texts: int = 1) -> list[LayerCache]:
        """Return a list of empty key/value caches, one per layer.

        Parameters
        ----------
        capacity : int, optional
            The largest number of tokens per text. Default is ``config.max_length``.
        num_texts : int, default 1
            B, the number of texts in the batch.

        Raises
        ------
        TypeError, ValueError
            A capacity or number that is not a positive integer.
        """
        B = integer("num_texts", num_texts)
        size = integer("capacity", self.config.max_length if capacity is None else capacity)
        return [block.new_cache(B, size) for block in self.blocks]

    def generate(
        self, ids: str | ArrayLike, num_tokens: int, *, temperature: float = 1.0,
        top_k: int | None = None, top_p: float | None = None, seed: int = 0,
        eos: int | Sequence[int] | None = None, backend: Backend = "auto", replace: Steps = None,
    ) -> Iterator[int]:  # fmt: skip
        """Yield up to ``num_tokens`` token ids, each sampled given all earlier tokens.

        Parameters
        ----------
        ids : str, or array_like of shape (L,), int
            The prompt: token ids, or text for the tokenizer.
        num_tokens : int
        temperature, top_k, top_p
            As in ``minimha.models.sampling.probabilities``; ``top_k=1`` is greedy decoding.
        seed : int, default 0
            The seed of the random draws.
        eos : int or sequence of int, optional
            Tokens that end the text. Default is ``config.eos``; () disables them.
        backend, replace
            As in ``logits``; ``replace`` applies only to the pass over the prompt.

        Raises
        ------
        TypeError, ValueError
            As in ``logits``, or an option is out of range, or prompt and new tokens exceed the
            model's positions. The call itself raises these errors, before the first token.
        """
        self.unembedding()
        tokens, count = self.encode(ids), integer("num_tokens", num_tokens)
        sample, last = sampler(temperature, top_k, top_p, seed), ends("eos", eos, self.config.eos)
        needed = len(tokens) + count - 1  # the last one is not read again
        if needed > self.config.max_length:
            raise ValueError(
                f"{name_of('num_tokens')} is {num_tokens} after {counted(len(tokens), 'token')}: "
                f"the model has only {self.config.max_length} positions"
                f"{MORE if self._is_unlimited else ''}"
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
        """Return token ids (L,), int64: those of a text, or the given ids after a range check."""
        return numbers("ids", ids, self.config.vocabulary, self.tokenizer)

    def _batch(self, ids: Texts) -> Batch:
        return batch("ids", ids, self.config.vocabulary, self.tokenizer)

    @property
    def _is_unlimited(self) -> bool:
        """Whether there are angles for every position, and no weights for each."""
        return self.embeddings.positions is None

    def unembedding(self) -> Array:
        """Return ``W_vocab`` (E, V); raise ValueError if the model has none."""
        if self.W_vocab is None:
            raise ValueError("the checkpoint has no head, so no logits: hidden(ids) gives the rows")
        return self.W_vocab
