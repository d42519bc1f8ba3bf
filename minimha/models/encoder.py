"""Compute encoder-only transformers such as BERT, in which every token attends to all tokens.

tokens → embeddings → layers → hidden state of each token → logits of masked tokens

Axes: ``L`` tokens, ``E`` model width, ``V`` vocabulary. Internal arrays begin with a batch axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_integers, name_of
from minimha.equations.option_types import Backend
from minimha.equations.tap import Steps, Tap, no_tap, prefixed, replacing, staged
from minimha.layers.feed_forward import ACTIVATIONS
from minimha.layers.linear import product
from minimha.layers.norms import LayerNorm, Norm
from minimha.models.batch import Batch, Options, Pooling, Several, Texts, batch, pooled
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer, check_length, numbers

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class MaskedHead:
    """The output layer of a masked language model, which predicts masked tokens.

    The logits of hidden states x are norm(activation(x W + b)) W_vocab + b_vocab, with the
    activation of the encoder's ``config``.

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
    """An encoder-only transformer such as BERT: layers(embedding_norm(embeddings(ids))).

    Parameters
    ----------
    config : Config
    embeddings : Embeddings
    embedding_norm : Norm
    layers : sequence of Layer
    head : MaskedHead, optional
        The output layer of a masked language model. Without one, ``logits`` raises ValueError.
    tokenizer : Tokenizer, optional
    final_norm : Norm, optional
        The norm after the last layer, as in ModernBERT. Default is none.

    References
    ----------
    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019; Warner et al.,
    "Smarter, Better, Faster, Longer", 2024 (ModernBERT).
    """

    config: Config
    embeddings: Embeddings
    embedding_norm: Norm
    layers: Sequence[Layer]
    head: MaskedHead | None = None
    tokenizer: Tokenizer | None = None
    final_norm: Norm | None = None

    @overload
    def hidden(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, ids: Several, types: ArrayLike | None = None, **options: Unpack[Options]
    ) -> list[Array]: ...
    @overload
    def hidden(
        self,
        ids: str | ArrayLike | Batch,
        types: ArrayLike | None = None,
        **options: Unpack[Options],
    ) -> Array: ...
    def hidden(
        self, ids: Texts, types: ArrayLike | None = None, *, backend: Backend = "auto",
        tap: Tap = no_tap, replace: Steps = None,
    ) -> Any:  # fmt: skip
        """Return each token's hidden state after the last layer.

        Parameters
        ----------
        ids : str, list of str, or array_like of shape (L,) or (B, L), int
            Token ids, or text for the tokenizer. A list of texts is computed as one batch.
        types : array_like, int, optional
            The sentence type of each token, with the shape of the token ids; 0 or 1 in BERT.
            Default is 0. Ignored by a model without sentence types.
        backend, tap, replace
            As in ``Transformer.logits``.

        Returns
        -------
        ndarray of shape (L, E) or (B, L, E), float32; for a list of texts, a list of (L, E)

        Raises
        ------
        TypeError, ValueError
            Text without a tokenizer, an id outside the vocabulary, more tokens than positions,
            ``types`` of a wrong shape or value, or ``replace`` of a wrong shape or name.
        """
        given = batch("ids", ids, self.config.vocabulary, self.tokenizer)
        with replacing(tap, replace) as tap:
            return given.unpadded(self._rows(given, types, backend, tap))

    def embed(self, ids: Texts, pooling: Pooling = "mean") -> Array:
        """Return one row for each text: (E,) for one text, else (B, E).

        ``ids`` are as in ``hidden``. ``pooling`` chooses among the hidden states of a text's
        tokens: their "mean", the "first" (the token [CLS] in BERT) or the "last".
        """
        given = batch("ids", ids, self.config.vocabulary, self.tokenizer)
        return pooled(given, self._rows(given, None, "auto", no_tap), pooling)

    def _rows(self, given: Batch, types: ArrayLike | None, backend: Backend, tap: Tap) -> Array:
        """Return the hidden states (B, L, E) after the last layer; ignore those of padding."""
        check_length("ids", given.ids.shape[-1], 0, self.config.max_length)
        rows = self.embeddings(given.ids, 0, tap, self._types(types, given.ids.shape))
        x = self.embedding_norm(rows, prefixed(tap, "embedded_"))
        x = x.reshape(-1, *x.shape[-2:])
        lengths = {"kv_lengths": given.lengths} if given.is_padded else {}
        for n, layer in enumerate(self.layers):
            x = layer(x, staged(tap, f"layer {n}"), backend=backend, **lengths)
        return x if self.final_norm is None else self.final_norm(x, prefixed(tap, "final_"))

    @overload
    def logits(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, ids: Several, types: ArrayLike | None = None, **options: Unpack[Options]
    ) -> list[Array]: ...
    @overload
    def logits(
        self,
        ids: str | ArrayLike | Batch,
        types: ArrayLike | None = None,
        **options: Unpack[Options],
    ) -> Array: ...
    def logits(
        self, ids: Texts, types: ArrayLike | None = None, *, backend: Backend = "auto",
        tap: Tap = no_tap, replace: Steps = None,
    ) -> Any:  # fmt: skip
        """Return logits that predict the original token at each position, masked or not.

        Parameters are those of ``hidden``. Shapes are those of ``hidden`` with V in place of E.

        Raises
        ------
        TypeError, ValueError
            As in ``hidden``, or the model has no ``head``.
        """
        if self.head is None:
            raise ValueError(
                "the checkpoint has no head of a masked language model (cls.predictions), so there "
                "are no logits: hidden(ids) gives each token's row"
            )
        head, activate = self.head, ACTIVATIONS[self.config.activation]
        given = batch("ids", ids, self.config.vocabulary, self.tokenizer)
        with replacing(tap, replace) as tap:
            x = activate(product(self._rows(given, types, backend, tap), head.W) + head.b)
            prefix = "final_" if self.final_norm is None else "head_"
            x = head.norm(x, prefixed(tap, prefix))
            logits = product(x, tap("W_vocab", head.W_vocab)) + head.b_vocab
            return given.unpadded(tap("logits", logits))

    def encode(self, ids: str | ArrayLike) -> NDArray[np.int64]:
        """Return token ids (L,), int64: those of a text, or the given ids after a range check."""
        return numbers("ids", ids, self.config.vocabulary, self.tokenizer)

    def _types(self, types: ArrayLike | None, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        if types is None or self.embeddings.types is None:
            return None
        given, T = as_integers("types", types), len(self.embeddings.types)
        if given.shape != shape or (given < 0).any() or (given >= T).any():
            raise ValueError(
                f"{name_of('types')} is {types!r}: expected one number from 0 to {T - 1} for each "
                f"of {' x '.join(map(str, shape))} tokens"
            )
        return given
