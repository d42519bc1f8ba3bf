"""Compute encoders, in which every token sees all tokens, before and after it.

tokens → embedded → layers → one row per token → logits of the masked tokens

Axes: ``L`` tokens, ``E`` model width, ``V`` vocabulary. Inside, arrays have a batch axis of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import Backend
from minimha.equations.arguments import as_integers, name_of
from minimha.equations.tap import Steps, Tap, no_tap, prefixed, replacing, staged
from minimha.layers.feed_forward import ACTIVATIONS
from minimha.layers.linear import product
from minimha.layers.norms import LayerNorm, Norm
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer, check_length, numbers

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class MaskedHead:
    """The output layer norm(activation(x W + b)) W_vocab + b_vocab: a masked token's logits.

    Parameters
    ----------
    W : ndarray of shape (E, E)
    b : ndarray of shape (E,)
    norm : LayerNorm
    W_vocab : ndarray of shape (E, V)
    b_vocab : ndarray of shape (V,)
    """

    W: Array
    b: Array
    norm: LayerNorm
    W_vocab: Array
    b_vocab: Array


@dataclass(frozen=True, eq=False)
class Encoder:
    """An encoder like BERT: layers(norm(embedded tokens)).

    Parameters
    ----------
    config : Config
    embeddings : Embeddings
    embedding_norm : Norm
    layers : sequence of Layer
    head : MaskedHead, optional
        The head of a masked language model.
    tokenizer : Tokenizer, optional

    References
    ----------
    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019.
    """

    config: Config
    embeddings: Embeddings
    embedding_norm: Norm
    layers: Sequence[Layer]
    head: MaskedHead | None = None
    tokenizer: Tokenizer | None = None

    def hidden(
        self, ids: str | ArrayLike, types: ArrayLike | None = None, *, backend: Backend = "auto",
        tap: Tap = no_tap, replace: Steps = None,
    ) -> Array:  # fmt: skip
        """Return each token's row after the last layer.

        Parameters
        ----------
        ids : str, or array_like of shape (L,), int
            The tokens' numbers, or text for the tokenizer. There is no padding.
        types : array_like of shape (L,), int, optional
            Each token's sentence: 0, the default, or 1.
        backend, tap, replace
            As in ``Transformer.logits``.

        Returns
        -------
        ndarray of shape (L, E), float32

        Raises
        ------
        TypeError, ValueError
            Text without a tokenizer, a token outside the vocabulary, more tokens than positions,
            or types or a ``replace`` that do not fit.
        """
        tokens = self.encode(ids)
        check_length("ids", len(tokens), 0, self.config.max_length)
        with replacing(tap, replace) as tap:
            rows = self.embeddings(tokens, 0, tap, self._types(types, len(tokens)))
            x = self.embedding_norm(rows, prefixed(tap, "embedded_"))[None]
            for n, layer in enumerate(self.layers):
                x = layer(x, staged(tap, f"layer {n}"), backend=backend)
        return np.asarray(x[0])

    def logits(
        self, ids: str | ArrayLike, types: ArrayLike | None = None, *, backend: Backend = "auto",
        tap: Tap = no_tap, replace: Steps = None,
    ) -> Array:  # fmt: skip
        """Return the logits (L, V) of the original token at each position, which may be masked.

        Parameters are those of ``hidden``.

        Raises
        ------
        TypeError, ValueError
            As ``hidden``; or the checkpoint has no head.
        """
        if self.head is None:
            raise ValueError(
                "the checkpoint has no head of a masked language model (cls.predictions), so there "
                "are no logits: hidden(ids) gives each token's row"
            )
        head, activate = self.head, ACTIVATIONS[self.config.activation]
        with replacing(tap, replace) as tap:
            x = activate(
                product(self.hidden(ids, types, backend=backend, tap=tap), head.W) + head.b
            )
            x = head.norm(x, prefixed(tap, "final_"))
            logits = product(x, tap("W_vocab", head.W_vocab)) + head.b_vocab
            return np.asarray(tap("logits", logits))

    def encode(self, ids: str | ArrayLike) -> NDArray[np.int64]:
        """Return the ids (L,) of a text's tokens; ids that are given are checked and returned."""
        return numbers("ids", ids, self.config.vocabulary, self.tokenizer)

    def _types(self, types: ArrayLike | None, L: int) -> NDArray[np.int64] | None:
        if types is None or self.embeddings.types is None:
            return None
        given, T = as_integers("types", types), len(self.embeddings.types)
        if given.shape != (L,) or (given < 0).any() or (given >= T).any():
            raise ValueError(
                f"{name_of('types')} is {types!r}: expected one number from 0 to {T - 1} for each "
                f"of {L} tokens"
            )
        return given
