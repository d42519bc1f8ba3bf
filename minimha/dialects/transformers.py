"""Whole attention modules of Hugging Face's transformers, version 5, from their weights and config.

A module becomes a ``MultiHeadAttention`` whose every step can be tapped. The table ``CONVENTIONS``
says how the classes differ: in the names of their weights, in how these are fused, in rotation,
scale and cap.

``latent_attention`` makes DeepSeek's, and ``register`` lets whole models of the library call
minimha.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import Backend, attention
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
from minimha.equations.arguments import argument_names, as_floating, flag, integer, rectangular
from minimha.equations.arrays import bfloat16, like
from minimha.equations.tap import Tap, no_tap
from minimha.layers.biases import alibi_slopes, t5_bias
from minimha.layers.multihead import MultiHeadAttention, attention_weights
from minimha.layers.rope import RoPE, rotate_by_table

__all__ = [
    "CLASSES", "CONVENTIONS", "AttentionModule", "Convention", "DynamicCache", "Rotary",
    "latent_attention", "register",
]  # fmt: skip

Array = NDArray[Any]
Linear = tuple[Array, Array | None]  # weight (out, in) and bias (out,)

BUCKETS = "relative_attention_bias.weight"  # T5's bias for each bucket of distances and head
LOWEST = np.finfo(np.float32).min
REQUIRED = ("position_embeddings", "position_ids", "alibi", "residual")  # if the class takes them


class DynamicCache:
    """Keys and values of one module's tokens so far, as one layer of transformers' DynamicCache.

    Unlike ``minimha.layers.cache.KVCache`` it knows no positions: what a query sees, the mask says.

    Attributes
    ----------
    keys, values : ndarray of shape (B, Hkv, L, D) and (B, Hkv, L, Dv), or None before any token
    """

    def __init__(self) -> None:
        self.keys: Array | None = None
        self.values: Array | None = None
        self._before: tuple[Array | None, Array | None] = (None, None)

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens so far, (1,): they are as many in every batch entry."""
        return np.array([self.get_seq_length()])

    def append(self, k: Array, v: Array) -> None:
        """Add the keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) of the next tokens.

        Raises
        ------
        ValueError
            Another size than L differs from that of the earlier tokens.
        """
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
        """Remove what was appended last."""
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
        """Attention of the queries ``q`` over the keys, as far as ``options`` show them.

        Parameters
        ----------
        q : ndarray of shape (B, H, L, D)
        columns : int, optional
            How many of the keys, the latest, the options are about, as those of a sliding window
            are. Default is all.
        weights : list, optional
            The weights (B, H, L, columns) are appended to it.
        tap : callable ``tap(name, value) -> value``, optional
            Hears every step of the attention.
        **options
            Those of ``minimha.attention``.

        Returns
        -------
        ndarray of shape (B, H, L, Dv)

        Raises
        ------
        ValueError
            No token was appended.
        """
        if self.keys is None or self.values is None:
            raise ValueError("past_key_values is empty: append keys and values before attending")
        first = 0 if columns is None else max(self.get_seq_length() - columns, 0)
        k, v = self.keys[:, :, first:], self.values[:, :, first:]
        if weights is not None:
            weights.append(attention_weights(q, k, **options).astype(k.dtype, copy=False))
        return attention(q, k, v, tap=tap, **options)


class AttentionModule:
    """One attention module: ``module(hidden_states, …)`` is its forward in transformers.

    Where it differs from ``minimha.attention``:

    - A mask is added to the scores, so 0 hides nothing. In a boolean mask True = may attend, but in
      MPT's True = hidden. Without a mask several tokens are causal if ``is_causal``, as with
      every attn_implementation but "eager", whose models always make a mask. Windows are in the
      mask alone.
    - transformers' masks hide with the lowest finite number of their dtype. A query whose keys are
      all hidden gets the mean of all values, as in transformers (minimha: 0).
    - ``position_embeddings`` are tables of cos and sin, most of which hold each angle twice.
    - T5 does not scale; Gemma's scale is 1/√query_pre_attn_scalar, Granite's attention_multiplier.
    - Gemma's gains are 1 + w.

    Where it differs from transformers:

    - It computes what ``attn_implementation="eager"`` does in inference, but 16 bits in float32,
      rounded once at the end and not after every step, and float64 all in float64, where many
      classes compute the softmax in float32.
    - ``past_key_values`` holds the tokens of this module alone, not those of every layer, and
      cross-attention projects its context again in every call.
    - A call always returns (output, weights), also where T5 returns its bias between them;
      ``compute_bias`` gives that.

    Axes: ``B`` batch, ``L`` tokens, ``E`` model width, ``H`` heads, ``Hkv`` key/value heads, ``D``
    head width, ``R`` rotated width, ``Lk`` keys, ``Lc`` and ``Ec`` tokens and width of a context.

    Parameters
    ----------
    cls : str
        The class's name, such as "LlamaAttention"; ``CLASSES`` has all of them.
    params : mapping of str to array_like
        The module's ``state_dict()`` as arrays.
    config : mapping of str to Any
        The module's ``config.to_dict()``. An entry that is missing has transformers' default,
        except the number of heads. ``is_decoder`` decides T5's buckets, and the number of heads
        where a config has one for the encoder and one for the decoder.
    layer_idx : int, default 0
        The layer that the module is in, from 0; GPT-2 may scale by it.
    is_causal : bool, optional
        Whether a token sees no later one where there is no mask: ``module.is_causal`` in
        transformers. Default is what the class and ``is_decoder`` say, if they do: modules of
        BART's family, Whisper and CLIP may be either.

    Attributes
    ----------
    is_causal : bool or None
        As given, or found; None if that is unknown, and then every call needs a mask.
    layer : MultiHeadAttention
        The module's projections and norms. Its ``rope`` is None, as the angles come with each call:
        set it to use the layer by itself. ``W_o`` is the identity if the class, such as BERT's,
        leaves the output projection to another module.
    options : dict
        What ``layer`` must be called with: scale, softcap and sinks, if the class has them.

    Raises
    ------
    TypeError, ValueError
        An unknown class; a weight that is missing, does not fit or belongs to something that is
        not computed here (StableLM's norms of each head); a config without a number of heads.

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
        weights = _Weights(self.convention, params)
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
        """Run the module.

        Parameters
        ----------
        hidden_states : array_like of shape (B, L, E)
        past_key_values : DynamicCache, optional
            Earlier tokens. The keys and values of these are appended, unless the call fails.
        output_attentions : bool, default False
            Return the weights too; the output stays the same, bit for bit.
        backend : str, default "auto"
            As in ``minimha.attention``.
        tap : callable ``tap(name, value) -> value``, optional
            Hears every step; see ``MultiHeadAttention``.
        **given
            Those of the following that the class's forward takes; optional unless required.
        attention_mask, mask : array_like broadcastable to (B, H, L, Lk), floating or bool
            T5 calls it mask. With a cache Lk counts the earlier tokens too; a mask with fewer
            columns is about the latest keys, as that of a sliding window is.
        position_ids : array_like of shape (1, L) or (B, L), int
            Required by GPT-J. Every class takes them, because models pass them on, but no other
            uses them.
        position_embeddings : pair of array_like of shape (1, L, R) or (B, L, R)
            cos and sin of these tokens; (…, R/2) for GPT-OSS. Required.
        encoder_hidden_states, key_value_states : array_like of shape (B, Lc, Ec)
            The context of cross-attention, which T5's and BART's families call key_value_states.
            Required by classes that attend to nothing else.
        encoder_attention_mask : array_like broadcastable to (B, H, L, Lc), floating or bool
            GPT-2's mask in cross-attention.
        position_bias : array_like broadcastable to (B, H, L, Lk)
            T5's, for a layer that has none of its own. Default is ``compute_bias``. MPT's is
            (H, 1, at least Lk), of which the last Lk columns count.
        alibi : array_like of shape (B · H, 1, Lk) or, as Falcon's model gives it, (B, H, 1, Lk)
            BLOOM's and Falcon's slope · position, which Falcon scales like the scores. Required;
            ``compute_alibi`` makes it.
        residual : array_like of shape (B, L, E)
            BLOOM adds it to the output. Required.

        Returns
        -------
        output : array of hidden_states' library, shape (B, L, E), dtype of the inputs
        weights : array of shape (B, H, L, Lk), or None unless ``output_attentions``

        Raises
        ------
        TypeError, ValueError
            An argument that the class does not take, that is missing, or that does not fit. The
            cache is then as it was before.
        """
        given = self._checked(given)
        x = _three_axes("hidden_states", hidden_states, "(B, L, E)")
        c, context = self.convention, None
        if c.context in given:
            context = _three_axes(c.context, given[c.context], "(B, Lc, Ec)")
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
        heard: list[Array] = []
        cache = copy(past_key_values)  # the caller's stays as it is if the call fails
        if cache is not None:
            options["columns"] = None if mask is None else mask.shape[-1]
            options["weights"] = heard if wants_weights else None
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
            weights = heard[0] if wants_weights else None
        return output, weights

    def compute_bias(self, query_length: int, key_length: int, past_seen_tokens: int = 0) -> Any:
        """T5's bias for queries that follow the first ``past_seen_tokens`` tokens.

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
            raise ValueError(f"params has no {BUCKETS}: this {self.cls} has no bias of its own")
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
        """BLOOM's or Falcon's slope · position, as the model gives it to every module.

        Positions count from the first token that is not padding. Falcon rounds slopes, positions
        and products to bfloat16. Its model also adds the result, scaled, to the mask, so that
        attn_implementation="eager" adds it twice and "sdpa" once.

        Parameters
        ----------
        attention_mask : array_like of shape (B, Lk), int or bool
            The tokenizer's, 1 = may attend.

        Returns
        -------
        array of attention_mask's library, shape (B · H, 1, Lk), float32

        Raises
        ------
        TypeError, ValueError
            The class takes no alibi; a mask of another shape; ml_dtypes, which knows bfloat16, is
            not installed.
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
        """The arguments that are given, which must be those that the class takes."""
        given = {name: value for name, value in given.items() if value is not None}
        takes = self.convention.takes
        if "position_ids" not in takes:
            given.pop("position_ids", None)  # every model passes them on; here the tables decide
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
                raise TypeError(f"{name} is missing: {self.cls} cannot do without it")
        if "position_ids" in given:
            ids = rectangular("position_ids", given["position_ids"])  # a layer expects (L,), (B, L)
            given["position_ids"] = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
        return given

    def _mask(self, value: ArrayLike) -> Array:
        name = self.convention.mask
        mask = rectangular(name, value)
        if mask.ndim != 4 or mask.dtype.kind in "iu":
            raise ValueError(
                f"{name} has shape {mask.shape} and dtype {mask.dtype}: expected (B, H, L, Lk), of "
                f"sizes that may be 1, floating or bool, as the model makes it from the tokenizer's"
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
        """What is added to the scores besides the mask."""
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
        """The layer, with the angles of this call if it rotates."""
        rotary = self.convention.rotary
        if rotary is None or not self.is_rotated:
            return self.layer
        layer = copy(self.layer)
        layer.rope = _Tables(layer.head_dim, rotary, *_tables(rotary, given["position_embeddings"]))
        return layer


@dataclass(frozen=True)
class _Tables:
    """A ``Rotation`` by the angles of one call's tokens."""

    head_dim: int
    rotary: Rotary
    cos: Array
    sin: Array
    is_dynamic: ClassVar[bool] = False

    def rotate(self, x: Array, positions: ArrayLike, tap: Tap) -> Array:
        """Return ``x`` rotated. The rows of the tables are tokens, so positions are not needed."""
        with argument_names(**{name: f"{name} in position_embeddings" for name in ("cos", "sin")}):
            interleaved, repeated = self.rotary.is_interleaved, self.rotary.stored != "once"
            return rotate_by_table(
                x, self.cos, self.sin, interleaved=interleaved, repeated=repeated, tap=tap
            )


class _Weights:
    """A state_dict from which a layer is made; a weight that nothing uses is noticed."""

    def __init__(self, convention: Convention, params: Mapping[str, ArrayLike]) -> None:
        self._convention = convention
        self._left = {name: as_floating(name, value) for name, value in params.items()}

    def pop(self, name: str) -> Array | None:
        """The weight of that name, None if there is none."""
        return self._left.pop(name, None)

    def check_all_popped(self, cls: str) -> None:
        """Raise if a weight is left, without which the result would differ."""
        if self._left:
            raise ValueError(
                f"params has {', '.join(self._left)}, which {cls} is not computed with here: "
                f"leaving it out would change the result"
            )

    def layer(self, config: Config) -> MultiHeadAttention:
        """The layer with these weights, for the number of heads that ``config`` gives."""
        c, H = self._convention, _num_heads(config)
        o = None if c.o is None else self._linear(c.o)
        parts = dict(zip("qkv", self._queries_keys_values(config, H, o), strict=True))
        width = len(parts["q"][0])
        if width % (2 * H if c.is_gated else H):
            gates = " and their gates" if c.is_gated else ""
            raise ValueError(f"queries{gates} have width {width}: expected {H} heads of one width")
        if c.is_gated:
            parts |= zip("qg", _split(parts["q"], lambda x: _halves_of_heads(x, H)), strict=True)
        D = len(parts["q"][0]) // H
        kv_heads, rest = divmod(len(parts["k"][0]), D)
        if rest or not kv_heads:
            raise ValueError(
                f"keys have width {len(parts['k'][0])}: expected a multiple of the head width {D}"
            )
        parts["o"] = o or (np.eye(H * D, dtype=parts["q"][0].dtype), None)
        weights = {f"W_{name}": W.T for name, (W, _) in parts.items()}
        weights |= {f"b_{name}": b for name, (_, b) in parts.items() if b is not None}
        qk_norm, epsilon = c.qk_norm, config.get("rms_norm_eps", c.epsilon)
        if c.qk_norm is not None:
            for name in "qk":
                gain = self._required(f"{name}_norm.weight")
                weights[f"g_{name}"] = gain + gain.dtype.type(c.has_unit_offset)
        if c.layer_norm is not None and f"{c.layer_norm.format('q')}.weight" in self._left:
            qk_norm, epsilon = "layer", config.get("layer_norm_eps", 1e-5)
            weights |= self._layer_norm("q", H) | self._layer_norm("k", kv_heads)
        with argument_names(**_names(c)):
            return MultiHeadAttention.from_combined(
                **weights, num_heads=H, num_kv_heads=kv_heads, qk_norm=qk_norm, epsilon=epsilon,
                clip=_clip(config), gate="elementwise" if c.is_gated else None,
            )  # fmt: skip

    def _layer_norm(self, name: str, heads: int) -> dict[str, Array]:
        """Gains and shifts of every head, which may have its own or share one row."""
        named = str(self._convention.layer_norm).format(name)
        gain, shift = self._required(f"{named}.weight"), self.pop(f"{named}.bias")
        rows = {f"g_{name}": gain} | ({} if shift is None else {f"s_{name}": shift})
        return {key: np.tile(x, heads) if x.ndim == 1 else x.ravel() for key, x in rows.items()}

    def _required(self, name: str) -> Array:
        array = self.pop(name)
        if array is None:
            raise ValueError(f"params has no {name}: it has {', '.join(self._left) or 'nothing'}")
        return array

    def _linear(self, name: str) -> Linear:
        W = self._required(f"{name}.weight")
        if W.ndim != 2:
            raise ValueError(f"{name}.weight has shape {W.shape}: expected 2 axes")
        return W.T if self._convention.is_conv1d else W, self.pop(f"{name}.bias")

    def _queries_keys_values(self, config: Config, H: int, o: Linear | None) -> list[Linear]:
        c = self._convention
        if c.qkv is None:
            return [self._linear(name) for name in (c.q, c.k, c.v)]
        fused, groups = c.qkv, None if c.groups is None else c.groups(config, H)
        width = 0 if o is None or c.is_cross else o[0].shape[1]  # H · D, which o projects
        parts = _split(self._linear(fused), lambda x: _rows(fused, x, H, groups, width))
        return [self._linear(c.q), *parts[1:]] if c.is_cross else parts


def _names(c: Convention) -> dict[str, str]:
    """What the module calls the arguments of its layer, whose matrices are (in, out)."""
    fused = dict.fromkeys("qkv", c.qkv) if c.qkv else {}
    linears = {"q": c.q, "k": c.k, "v": c.v, "o": c.o} | fused | ({"q": c.q} if c.is_cross else {})
    axes = "" if c.is_conv1d else ".T"
    names = {
        "epsilon": "rms_norm_eps",
        "clip": "clip_qkv",
        "g_q": "q_norm.weight",
        "g_k": "k_norm.weight",
    }
    for letter, linear in linears.items():
        names |= {f"W_{letter}": f"{linear}.weight{axes}", f"b_{letter}": f"{linear}.bias"}
    return names


def _split(linear: Linear, rows: Callable[[Array], list[Array]]) -> list[Linear]:
    """Several linear maps of one: those whose weight and bias are the parts that ``rows`` gives."""
    weight, bias = linear
    weights = rows(weight)
    biases = [None] * len(weights) if bias is None else rows(bias)
    return list(zip(weights, biases, strict=True))


def _rows(name: str, fused: Array, H: int, groups: int | None, width: int) -> list[Array]:
    """The rows of queries, keys and values.

    Without ``groups`` all queries, which have ``width`` rows, then all keys, then all values. With
    them each group has the queries of H / groups heads, then their key, then their value.
    """
    rows, others = len(fused), fused.shape[1:]
    if groups is None:
        if rows > width and (rows - width) % 2 == 0:
            return np.split(fused, [width, (rows + width) // 2])
    elif H % groups == 0 and rows % (H + 2 * groups) == 0:
        apart = fused.reshape(groups, H // groups + 2, -1, *others)
        return [x.reshape(-1, *others) for x in (apart[:, :-2], apart[:, -2], apart[:, -1])]
    raise ValueError(
        f"{name} projects to {rows} numbers: expected queries, keys, values of {H} heads"
    )


def _halves_of_heads(x: Array, H: int) -> list[Array]:
    """The first and the second halves of every head's rows."""
    halves = x.reshape(H, 2, -1, *x.shape[1:])
    return [halves[:, half].reshape(-1, *x.shape[1:]) for half in (0, 1)]


def _three_axes(name: str, value: ArrayLike, expected: str) -> Array:
    array = as_floating(name, value)
    if array.ndim != 3:
        raise ValueError(f"{name} has shape {array.shape}: expected {expected}")
    return array


def _clip(config: Config) -> float | None:
    """clip_qkv, which MPT and DBRX have in attn_config."""
    clip = {**config, **(config.get("attn_config") or {})}.get("clip_qkv")
    return None if clip is None else float(clip)


def _num_heads(config: Config) -> int:
    side = "decoder" if config.get("is_decoder") else "encoder"
    names = ("num_attention_heads", "n_head", "num_heads", "n_heads", f"{side}_attention_heads")
    for name in names:
        if config.get(name) is not None:
            return integer(name, config[name])
    raise ValueError(f"config has no number of heads: expected one of {', '.join(names)}")


def _tables(rotary: Rotary, position_embeddings: Any) -> list[Array]:
    """cos and sin, (L, R) or (B, L, R), each angle where the numbers of its pair are."""
    if len(position_embeddings) != 2:
        raise ValueError(
            f"position_embeddings has {len(position_embeddings)} parts: expected cos and sin"
        )
    tables = []
    for name, value in zip(("cos", "sin"), position_embeddings, strict=True):
        table = _three_axes(f"{name} in position_embeddings", value, "(1, L, R) or (B, L, R)")
        if rotary.is_interleaved and rotary.stored == "halves":
            table = table[..., : table.shape[-1] // 2].repeat(2, axis=-1)
        tables.append(table[0] if len(table) == 1 else table)
    return tables
