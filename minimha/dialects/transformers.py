"""Attention modules of Hugging Face's transformers 5, built from their weights and config.

A module becomes a ``MultiHeadAttention``, whose intermediates can all be recorded. The table
``CONVENTIONS`` lists how the classes differ. ``latent_attention`` builds DeepSeek's modules.
``register`` makes minimha available to whole models of the library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention
from minimha.dialects.inputs import with_axes
from minimha.dialects.masks import boolean_or_floating, owner_by_values, score_options
from minimha.dialects.results import like_argument
from minimha.dialects.transformers_classes import (
    CLASSES,
    CONVENTIONS,
    Config,
    Convention,
    Rotary,
    convention_of,
)
from minimha.dialects.transformers_interface import register
from minimha.dialects.transformers_latent import latent_attention
from minimha.dialects.transformers_weights import Weights
from minimha.equations.arguments import argument_names, as_floating, flag, integer, rectangular
from minimha.equations.arrays import bfloat16, like
from minimha.equations.option_types import Backend
from minimha.equations.tap import Tap, no_tap
from minimha.layers.biases import alibi_slopes, t5_bias
from minimha.layers.multihead import MultiHeadAttention, attention_weights
from minimha.layers.rope import RoPE, rotate_by_table

__all__ = [
    "CLASSES", "CONVENTIONS", "AttentionModule", "Convention", "DynamicCache", "Rotary",
    "latent_attention", "register",
]  # fmt: skip

Array = NDArray[Any]

BUCKETS = "relative_attention_bias.weight"  # T5's bias for each bucket of distances and head
LOWEST = np.finfo(np.float32).min
REQUIRED = ("position_embeddings", "position_ids", "alibi", "residual")  # by classes that take them


class DynamicCache:
    """A cache of one module's keys and values, like one layer of transformers' DynamicCache.

    Unlike ``minimha.layers.cache.KVCache``, it stores no positions; only the mask hides keys.

    Attributes
    ----------
    keys, values : ndarray of shape (B, Hkv, L, D) and (B, Hkv, L, Dv), or None before any token
    """

    def __init__(self) -> None:
        self.keys: Array | None = None
        self.values: Array | None = None
        self._before: tuple[Array | None, Array | None] = (None, None)

    def get_seq_length(self) -> int:
        """Return the number of tokens in the cache."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of cached tokens, (1,), which is the same for all batch entries."""
        return np.array([self.get_seq_length()])

    def append(self, k: Array, v: Array) -> None:
        """Append the keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) of the next L tokens."""
        self._before = self.keys, self.values
        if self.keys is not None and self.values is not None:
            for name, new, old in (("keys", k, self.keys), ("values", v, self.values)):
                if (*new.shape[:2], new.shape[3]) != (*old.shape[:2], old.shape[3]):
                    raise ValueError(
                        f"past_key_values has {name} of shape {old.shape}, these are {new.shape}: "
                        f"only the number of tokens may differ"
                    )
            k = np.concatenate([self.keys, k], axis=2)
            v = np.concatenate([self.values, v], axis=2)
        self.keys, self.values = k, v

    def undo(self) -> None:
        """Undo the last ``append``."""
        self.keys, self.values = self._before

    def attend(
        self,
        q: Array,
        *,
        columns: int | None = None,
        weights: list[Array] | None = None,
        tap: Tap = no_tap,
        **options: Any,
    ) -> Any:
        """Return the heads' outputs (B, H, L, Dv) for the queries ``q`` over the cached keys.

        Only the latest ``columns`` keys are used, by default all. ``options`` are those of
        ``minimha.attention``. If ``weights`` is a list, the attention weights (B, H, L, columns)
        are appended to it. Raises ValueError if the cache is empty.
        """
        if self.keys is None or self.values is None:
            raise ValueError("past_key_values is empty: append keys and values before attending")
        first = 0 if columns is None else max(self.get_seq_length() - columns, 0)
        k, v = self.keys[:, :, first:], self.values[:, :, first:]
        if weights is not None:
            weights.append(attention_weights(q, k, **options).astype(k.dtype, copy=False))
        return attention(q, k, v, tap=tap, **options)


class AttentionModule:
    """An attention module of transformers 5, called with the arguments of its ``forward``.

    Differences from ``minimha.attention``:

    - A mask of numbers is added to the scores, so 0 hides nothing. In a boolean mask, True means
      that a query may attend (in MPT: that the key is hidden). Without a mask, self-attention of
      several tokens is causal if ``is_causal`` is True. Windows must be part of the mask.
    - transformers' masks hide keys by the lowest finite number of their dtype. If all keys of a
      query are hidden, its output is the mean of all values, as in transformers, not 0.
    - ``position_embeddings`` are tables of cos and sin; most contain each angle twice.
    - T5 does not scale. Gemma's scale is 1/√query_pre_attn_scalar, Granite's attention_multiplier.
    - The gains of Gemma's norms are 1 + weight.

    Differences from transformers:

    - The module computes ``attn_implementation="eager"`` in inference. 16-bit inputs are computed
      in float32 and rounded once at the end. float64 stays float64, while many classes compute the
      softmax in float32.
    - ``past_key_values`` has only this module's tokens, and cross-attention projects the context
      again in every call.
    - A call always returns (output, weights). ``compute_bias`` returns T5's bias.

    Axes: ``B`` batch, ``L`` tokens, ``E`` model width, ``H`` heads, ``Hkv`` key/value heads, ``D``
    head width, ``R`` rotated width, ``Lk`` keys, ``Lc`` and ``Ec`` tokens and width of a context.

    Parameters
    ----------
    cls : str
        The name of the class, such as "LlamaAttention"; ``CLASSES`` has all names.
    params : mapping of str to array_like
        The module's ``state_dict()`` as arrays.
    config : mapping of str to Any
        The module's ``config.to_dict()``. Missing entries have transformers' defaults, except the
        number of heads. ``is_decoder`` decides T5's buckets, and whether the encoder's or the
        decoder's number of heads is used.
    layer_idx : int, default 0
        The index of the module's layer, from 0; GPT-2's scale may depend on it.
    is_causal : bool, optional
        Whether attention is causal without a mask: ``module.is_causal`` in transformers. The
        default follows from the class and ``is_decoder``. It is None (unknown) for modules of
        BART's family, Whisper and CLIP.

    Attributes
    ----------
    is_causal : bool or None
        The argument, or its default. If None, self-attention of several tokens needs a mask.
    layer : MultiHeadAttention
        The module's projections and norms. ``layer.rope`` is None, because each call passes the
        angles; to use the layer alone, set ``layer.rope``. ``W_o`` is the identity if another
        module has the output projection, as in BERT.
    options : dict
        Options for calls of ``layer``: scale, softcap and sinks, if the class has them.

    Raises
    ------
    TypeError, ValueError
        The class is unknown, the config has no number of heads, or a weight is missing, unsupported
        or of a wrong shape. StableLM's norms of each head are unsupported.

    References
    ----------
    Wolf et al., "Transformers: State-of-the-Art Natural Language Processing", 2020.

    Examples
    --------
    >>> I = np.eye(2)
    >>> params = {f"{name}.weight": I for name in ("query", "key", "value")}
    >>> module = AttentionModule("BertSelfAttention", params, {"num_attention_heads": 1})
    >>> output, weights = module([[[1.0, 0.0], [0.0, 1.0]]], output_attentions=True)
    >>> weights.round(4)
    array([[[[0.6698, 0.3302],
             [0.3302, 0.6698]]]])
    """

    def __init__(
        self,
        cls: str,
        params: Mapping[str, ArrayLike],
        config: Config,
        *,
        layer_idx: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        if cls not in CLASSES:
            raise ValueError(f"cls is {cls!r}: expected one of {', '.join(sorted(CLASSES))}")
        self.cls, self.config = cls, dict(config)
        self.convention = convention_of(cls, params, config)
        integer("layer_idx", layer_idx, low=0)
        if is_causal is None:
            is_causal = self.convention.is_causal(config)
        self.is_causal = None if is_causal is None else flag("is_causal", is_causal)
        weights = Weights(self.convention, params)
        self.layer = weights.layer(config)
        if "position_ids" in self.convention.takes:
            rotary_dim = config.get("rotary_dim", 64)
            self.layer.rope = RoPE(self.layer.head_dim, rotary_dim=rotary_dim, interleaved=True)
        self.is_rotated = self.convention.is_rotated(config, layer_idx)
        self.buckets, self._given = weights.pop(BUCKETS), params.get(BUCKETS)
        options = {
            "scale": self.convention.scale(config, self.layer.head_dim, layer_idx),
            "softcap": self.convention.softcap
            and config.get("attn_logit_softcapping", self.convention.softcap),
            "sinks": weights.pop("sinks"),
        }
        self.options = {name: value for name, value in options.items() if value is not None}
        weights.check_all_popped(cls)

    @like_argument("hidden_states")
    def __call__(
        self,
        hidden_states: ArrayLike,
        *,
        past_key_values: DynamicCache | None = None,
        output_attentions: bool = False,
        backend: Backend = "auto",
        tap: Tap = no_tap,
        **given: Any,
    ) -> tuple[Any, Any]:
        """Return the output, and the weights if requested, like ``forward`` in transformers.

        Parameters
        ----------
        hidden_states : array_like of shape (B, L, E)
        past_key_values : DynamicCache, optional
            The keys and values of earlier tokens. The call appends those of ``hidden_states``,
            unless it raises an error.
        output_attentions : bool, default False
            Whether to return the attention weights too.
        backend : str, default "auto"
            As in ``minimha.attention``.
        tap : callable ``tap(name, value) -> value``, optional
            Receives every intermediate array, as in ``MultiHeadAttention``.
        **given
            The arguments below that the ``forward`` of the class has. They are optional unless
            marked "Required".
        attention_mask, mask : array_like broadcastable to (B, H, L, Lk), floating or bool
            T5 calls it mask. With a cache, Lk includes the earlier tokens. A mask with fewer
            columns is for the latest keys, as in a sliding window.
        position_ids : array_like of shape (1, L) or (B, L), int
            Required by GPT-J. Other classes ignore them.
        position_embeddings : pair of array_like of shape (1, L, R) or (B, L, R)
            cos and sin for each token; (…, R/2) for GPT-OSS. Required.
        encoder_hidden_states, key_value_states : array_like of shape (B, Lc, Ec)
            The context of cross-attention, named key_value_states in T5's and BART's families.
            Required by cross-attention classes.
        encoder_attention_mask : array_like broadcastable to (B, H, L, Lc), floating or bool
            GPT-2's mask in cross-attention.
        position_bias : array_like broadcastable to (B, H, L, Lk)
            T5's bias, for a module without a table of biases. Default is ``compute_bias``. MPT's
            bias is (H, 1, Lk or more); the last Lk columns are used.
        alibi : array_like of shape (B · H, 1, Lk) or, in Falcon's model, (B, H, 1, Lk)
            BLOOM's and Falcon's slope · position, which Falcon scales like the scores. Required;
            ``compute_alibi`` returns it.
        residual : array_like of shape (B, L, E)
            The residual that BLOOM adds to the output. Required.

        Returns
        -------
        output : array of hidden_states' library, shape (B, L, E), dtype of the inputs
        weights : array of shape (B, H, L, Lk), or None unless ``output_attentions``

        Raises
        ------
        TypeError, ValueError
            An argument is unknown to the class, missing, or of a wrong shape. The cache is then
            unchanged.
        """
        given = self._checked(given)
        x = with_axes("hidden_states", hidden_states, "(B, L, E)")
        c, context = self.convention, None
        if c.context in given:
            context = with_axes(c.context, given[c.context], "(B, Lc, Ec)")
            if past_key_values is not None:
                raise ValueError(
                    f"past_key_values and {c.context} are both given: keys of a context are not "
                    f"cached"
                )
        mask = self._mask(given[c.mask]) if c.mask in given else None
        bias = self._bias(given, len(x), x.shape[1], context, past_key_values)
        options: dict[str, Any] = self.options | score_options(mask, bias)
        if mask is None and context is None and x.shape[1] > 1:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            options |= {"is_causal": self._is_causal(), "q_offset": seen}
        wants_weights = flag("output_attentions", output_attentions)
        kept: list[Array] = []
        cache = copy(past_key_values)  # a failed call must not change the caller's cache
        if cache is not None:
            options["columns"] = None if mask is None else mask.shape[-1]
            options["weights"] = kept if wants_weights else None
        added = next((n for n in (c.mask, "position_bias", "alibi") if n in given), BUCKETS)
        with argument_names(
            x="hidden_states", context=c.context, positions="position_ids", attn_bias=added,
            attn_mask=added, softcap="attn_logit_softcapping",
        ):  # fmt: skip
            result = self._layer_of_call(given)(
                x, context, positions=given.get("position_ids"), cache=cache, backend=backend,
                return_weights=wants_weights and cache is None, tap=tap, **options,
            )  # fmt: skip
        output, weights = result if isinstance(result, tuple) else (result, None)
        if "residual" in given:
            residual = as_floating("residual", given["residual"])
            if residual.shape != output.shape:
                raise ValueError(f"residual has shape {residual.shape}: expected {output.shape}")
            output = output + residual.astype(output.dtype, copy=False)
        if past_key_values is not None and cache is not None:
            past_key_values.keys, past_key_values.values = cache.keys, cache.values
            weights = kept[0] if wants_weights else None
        return output, weights

    def compute_bias(self, query_length: int, key_length: int, past_seen_tokens: int = 0) -> Any:
        """Return T5's bias for queries that follow the first ``past_seen_tokens`` keys.

        Parameters
        ----------
        query_length, key_length : int
        past_seen_tokens : int, default 0

        Returns
        -------
        array of the weights' library, shape (1, H, query_length, key_length)

        Raises
        ------
        ValueError
            The module has no relative_attention_bias.
        """
        if self.buckets is None:
            raise ValueError(f"params has no {BUCKETS}: this {self.cls} has no bias")
        bias = t5_bias(
            self.buckets,
            np.arange(query_length) + past_seen_tokens,
            np.arange(key_length),
            self.config.get("relative_attention_max_distance", 128),
            not self.config.get("is_decoder", False),
        )
        return like(self._given, bias[None])

    @like_argument("attention_mask")
    def compute_alibi(self, attention_mask: ArrayLike) -> Any:
        """Return the ALiBi bias, slope · position, which BLOOM and Falcon pass to each module.

        Positions count from the first token that is not padding. Falcon rounds slopes, positions
        and products to bfloat16. Falcon's model also adds the scaled result to the mask, so
        attn_implementation="eager" adds it twice and "sdpa" once.

        Parameters
        ----------
        attention_mask : array_like of shape (B, Lk), int or bool
            The tokenizer's mask: 1 for tokens, 0 for padding.

        Returns
        -------
        array of attention_mask's library, shape (B · H, 1, Lk), float32

        Raises
        ------
        TypeError, ValueError
            The class takes no alibi, the mask is not a 2-D array of int or bool, or ml_dtypes
            (needed for Falcon's bfloat16) is not installed.
        """
        if "alibi" not in self.convention.takes:
            raise ValueError(f"this {self.cls} takes no alibi")
        mask = rectangular("attention_mask", attention_mask)
        if mask.ndim != 2 or mask.dtype.kind not in "iub":
            raise ValueError(
                f"attention_mask has shape {mask.shape} and dtype {mask.dtype}: expected (B, Lk), "
                f"int or bool"
            )
        positions = (mask.cumsum(axis=-1) - 1) * mask
        rounded = bfloat16("alibi") if self.convention.scales_alibi else np.dtype(np.float32)
        slopes = alibi_slopes(self.layer.num_heads).astype(np.float32).astype(rounded)
        alibi = slopes[:, None] * positions[:, None].astype(rounded)
        return np.asarray(alibi.astype(np.float32).reshape(-1, 1, mask.shape[1]))

    def _is_causal(self) -> bool:
        if self.is_causal is None:
            raise ValueError(
                f"{self.convention.mask} is missing, and the config does not say whether this "
                f"{self.cls} is causal: give a mask, or is_causal to the constructor "
                f"(module.is_causal in transformers)"
            )
        return self.is_causal

    def _checked(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that are not None; raise TypeError for unknown or missing ones."""
        given = {name: value for name, value in given.items() if value is not None}
        takes = self.convention.takes
        if "position_ids" not in takes:
            given.pop("position_ids", None)  # every model passes them; the tables suffice
        for name in given:
            if name not in takes:
                raise TypeError(
                    f"{name} is no argument of {self.cls} with these weights, which takes "
                    f"{', '.join(takes)}"
                )
        required = [name for name in REQUIRED if name in takes]
        if self.convention.is_cross:
            required.append("encoder_hidden_states")
        for name in required:
            if name not in given:
                raise TypeError(f"{name} is missing: {self.cls} requires it")
        if "position_ids" in given:
            ids = rectangular("position_ids", given["position_ids"])  # a layer expects (L,), (B, L)
            given["position_ids"] = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
        return given

    def _mask(self, value: ArrayLike) -> Array:
        name = self.convention.mask
        mask = rectangular(name, value)
        if mask.ndim != 4 or mask.dtype.kind in "iu":
            raise ValueError(
                f"{name} has shape {mask.shape} and dtype {mask.dtype}: expected (B, H, L, Lk), "
                f"where sizes may be 1, floating or bool, as the model makes it of the tokenizer's"
                f"{owner_by_values(mask)}"
            )
        if mask.dtype == np.bool_ and self.convention.hides_where_true:
            return np.asarray(np.where(mask, LOWEST, np.float32(0)))
        return boolean_or_floating(name, mask)

    def _bias(
        self,
        given: dict[str, Any],
        B: int,
        L: int,
        context: Array | None,
        past: DynamicCache | None,
    ) -> Array | None:
        """Return the numbers, besides the mask, that are added to the scores, or None."""
        if "alibi" in given:
            alibi = as_floating("alibi", given["alibi"])
            H = self.layer.num_heads
            if alibi.shape[:-1] not in ((B * H, 1), (B, H, 1)):
                raise ValueError(
                    f"alibi has shape {alibi.shape}: expected (B * H, 1, Lk) = ({B * H}, 1, Lk) or "
                    f"(B, H, 1, Lk) = ({B}, {H}, 1, Lk)"
                )
            bias = alibi.reshape(B, H, 1, -1)
            return bias / math.sqrt(self.layer.head_dim) if self.convention.scales_alibi else bias
        seen = 0 if past is None else past.get_seq_length()
        Lk = L + seen if context is None else context.shape[1]
        if "position_bias" in given:
            bias = as_floating("position_bias", given["position_bias"])
            return np.asarray(bias[None, :, :, -Lk:]) if bias.ndim == 3 else bias
        if self.buckets is None:
            return None
        return as_floating(BUCKETS, self.compute_bias(L, Lk, seen))

    def _layer_of_call(self, given: dict[str, Any]) -> MultiHeadAttention:
        """Return the layer, with the angles of this call if the class rotates."""
        rotary = self.convention.rotary
        if rotary is None or not self.is_rotated:
            return self.layer
        layer = copy(self.layer)
        layer.rope = _Tables(layer.head_dim, rotary, *_tables(rotary, given["position_embeddings"]))
        return layer


@dataclass(frozen=True)
class _Tables:
    """A ``Rotation`` by tables of the angles of one call's tokens."""

    head_dim: int
    rotary: Rotary
    cos: Array
    sin: Array
    is_dynamic: ClassVar[bool] = False

    def rotate(self, x: Array, positions: ArrayLike, tap: Tap) -> Array:
        """Return ``x`` rotated; tables have one row per token, so ``positions`` are ignored."""
        with argument_names(**{name: f"{name} in position_embeddings" for name in ("cos", "sin")}):
            interleaved, repeated = self.rotary.is_interleaved, self.rotary.stored != "once"
            return rotate_by_table(
                x, self.cos, self.sin, interleaved=interleaved, repeated=repeated, tap=tap
            )


def _tables(rotary: Rotary, position_embeddings: Any) -> list[Array]:
    """Return cos and sin, (L, R) or (B, L, R), with the angle at both numbers of a pair."""
    if len(position_embeddings) != 2:
        raise ValueError(
            f"position_embeddings has {len(position_embeddings)} parts: expected cos and sin"
        )
    tables = []
    for name, value in zip(("cos", "sin"), position_embeddings, strict=True):
        table = with_axes(f"{name} in position_embeddings", value, "(B, L, R)")
        if rotary.is_interleaved and rotary.stored == "halves":
            table = table[..., : table.shape[-1] // 2].repeat(2, axis=-1)
        tables.append(table[0] if len(table) == 1 else table)
    return tables
