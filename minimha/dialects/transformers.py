"""Whole attention modules of Hugging Face's transformers, version 5, from their weights and config.

A module becomes a ``MultiHeadAttention`` whose every step can be tapped. How one class differs from
another, in its weights' names, in how they are fused, in rotation, scale and cap, is the table
``CONVENTIONS``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention
from minimha.dialects.masks import owner_by_values
from minimha.dialects.transformers_classes import (
    CLASSES,
    CONVENTIONS,
    Config,
    Convention,
    Rotary,
    convention_of,
)
from minimha.equations.arguments import argument_names, as_floating, flag, integer, rectangular
from minimha.equations.tap import Tap, no_tap
from minimha.layers.biases import t5_bias
from minimha.layers.multihead import MultiHeadAttention, attention_weights
from minimha.layers.rope import RoPE, rotate_by_table

__all__ = ["CLASSES", "CONVENTIONS", "AttentionModule", "Convention", "DynamicCache", "Rotary"]

Array = NDArray[Any]
Linear = tuple[Array, Array | None]  # weight (out, in) and bias (out,)

BUCKETS = "relative_attention_bias.weight"
CONTEXTS = ("encoder_hidden_states", "key_value_states")
LOWEST = np.finfo(np.float32).min
MASKS = ("attention_mask", "mask", "encoder_attention_mask")
REQUIRED = ("position_embeddings", "position_ids", "alibi", "residual")  # where a class takes them


class DynamicCache:
    """Keys and values of one module's tokens so far, as the layers of transformers' DynamicCache.

    Unlike ``minimha.layers.cache.KVCache`` it knows no positions: what a query sees, the mask says.
    A mask with fewer columns than there are keys is about the latest, as that of a sliding window.

    Attributes
    ----------
    keys, values : ndarray of shape (B, Hkv, L, D) and (B, Hkv, L, Dv), or None before any token
    """

    def __init__(self) -> None:
        self.keys: Array | None = None
        self.values: Array | None = None

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return 0 if self.keys is None else int(self.keys.shape[2])


class AttentionModule:
    """One attention module: ``module(hidden_states, …)`` is its forward in transformers.

    Where it differs from ``minimha.attention``:

    - A mask is added to the scores, and 0 hides nothing; a boolean one says True = may attend, but
      MPT's True = hidden. Without a mask all is seen: a class is causal or windowed by its mask.
    - transformers' masks hide with the lowest finite number of their dtype. A query whose keys are
      all hidden gets the mean of all values, the hidden ones, as there (minimha: 0).
    - ``position_embeddings`` are tables of cos and sin, and mostly hold each angle twice.
    - T5 does not scale; Gemma's scale is 1/√query_pre_attn_scalar, Granite's attention_multiplier.
    - Gemma's gains are 1 + w.

    Where it differs from transformers:

    - It computes what ``attn_implementation="eager"`` does, in inference. 16 bits are computed in
      float32 and rounded to once (there after every step), float64 in float64 (there the softmax of
      many classes in float32).
    - ``past_key_values`` holds the tokens of this module, not those of every layer, and
      cross-attention projects its context anew at every call.
    - What forward returns is always (output, weights), also where T5 returns its bias between them;
      ``compute_bias`` gives that.

    Axes: ``B`` batch, ``L`` tokens, ``E`` model width, ``H`` heads, ``Hkv`` key/value heads, ``D``
    head width, ``R`` rotated width, ``Lk`` keys, ``Lc`` and ``Ec`` tokens and width of a context.

    Parameters
    ----------
    cls : str
        The class's name, such as "LlamaAttention"; ``CLASSES`` has them all.
    params : mapping of str to array_like
        The module's ``state_dict()`` as arrays.
    config : mapping of str to Any
        The module's ``config.to_dict()``. What is left out has transformers' default, but for the
        number of heads. ``is_decoder`` decides T5's buckets, and the number of heads where a config
        has one for encoder and decoder each.
    layer_idx : int
        Which layer it is in, from 0; GPT-2 may scale by it.

    Attributes
    ----------
    layer : MultiHeadAttention
        The module's projections and norms. Its ``rope`` is None, as angles come with each call: to
        use it by itself set it. The identity is its ``W_o`` where a class, such as BERT's, leaves
        the output projection to another module.
    options : dict
        What ``layer`` must be called with: scale, softcap and sinks, where the class has them.

    Raises
    ------
    TypeError, ValueError
        A class that is not known, a weight that is missing, does not fit or belongs to something
        that is not computed here (a layer norm of queries), a config without heads.

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
        self, cls: str, params: Mapping[str, ArrayLike], config: Config, *, layer_idx: int = 0
    ) -> None:
        if cls not in CLASSES:
            raise ValueError(f"cls is {cls!r}: expected one of {', '.join(sorted(CLASSES))}")
        self.cls, self.config = cls, dict(config)
        self.convention = convention_of(cls, params, config)
        integer("layer_idx", layer_idx, low=0)
        _check_not_clipped(config)
        weights = _Weights(self.convention, params)
        self.layer = weights.layer(config)
        if "position_ids" in self.convention.takes:
            rotary_dim = config.get("rotary_dim", 64)
            self.layer.rope = RoPE(self.layer.head_dim, rotary_dim=rotary_dim, interleaved=True)
        self.turns = self.convention.turns(config, layer_idx)
        self.buckets = weights.taken(BUCKETS)
        options = {
            "scale": self.convention.scale(config, self.layer.head_dim, layer_idx),
            "softcap": self.convention.softcap
            and config.get("attn_logit_softcapping", self.convention.softcap),
            "sinks": weights.taken("sinks"),
        }
        self.options = {name: value for name, value in options.items() if value is not None}
        weights.check_all_taken(cls)

    def __call__(
        self,
        hidden_states: ArrayLike,
        *,
        past_key_values: DynamicCache | None = None,
        output_attentions: bool = False,
        backend: str = "auto",
        tap: Tap = no_tap,
        **given: Any,
    ) -> tuple[Array, Array | None]:
        """Run the module.

        Parameters
        ----------
        hidden_states : array_like of shape (B, L, E)
        past_key_values : DynamicCache
            Earlier tokens; keys and values of these are appended, unless the call fails.
        output_attentions : bool
            Return the weights too; the output stays the same bit by bit.
        backend : str
            That of ``minimha.attention``.
        tap : callable ``tap(name, value) -> value``
            Hears every step; see ``MultiHeadAttention``.
        **given
            Those of the following that the class's forward takes.
        attention_mask, mask : array_like broadcastable to (B, H, L, Lk), floating or bool
            T5 calls it mask. With a cache Lk counts the earlier tokens too.
        position_ids : array_like of shape (1, L) or (B, L), int
            GPT-J's, required. Every class takes them, for models hand them on, but no other uses
            them.
        position_embeddings : pair of array_like of shape (1, L, R) or (B, L, R)
            cos and sin of these tokens; (…, R/2) for GPT-OSS. Required.
        encoder_hidden_states, key_value_states : array_like of shape (B, Lc, Ec)
            The context of cross-attention; T5's and BART's family calls it key_value_states.
        encoder_attention_mask : array_like broadcastable to (B, H, L, Lc), floating or bool
            GPT-2's mask in cross-attention.
        position_bias : array_like broadcastable to (B, H, L, Lk)
            T5's, of a layer that has none of its own; ``compute_bias`` if not given. MPT's is
            (H, 1, at least Lk), and the last Lk count.
        alibi : array_like of shape (B · H, 1, Lk)
            BLOOM's and Falcon's slope · position, which Falcon scales as the scores. Required.
        residual : array_like of shape (B, L, E)
            BLOOM adds it to the output. Required.

        Returns
        -------
        output : ndarray of shape (B, L, E), dtype of the inputs
        weights : ndarray of shape (B, H, L, Lk), or None without ``output_attentions``

        Raises
        ------
        TypeError, ValueError
            An argument that the class does not take, that is missing, or that does not fit.
        """
        given = self._checked(given)
        x = as_floating("hidden_states", hidden_states)
        if x.ndim != 3:
            raise ValueError(f"hidden_states has shape {x.shape}: expected (B, L, E)")
        context = _context(given)
        mask = self._mask(given)
        wants_weights = flag("output_attentions", output_attentions)
        step = None
        if past_key_values is not None:
            if context is not None:
                raise ValueError(
                    "past_key_values and a context are both given: keys of a context are not cached"
                )
            step = _Step(past_key_values, None if mask is None else mask.shape[-1], wants_weights)
        bias = self._bias(given, len(x), x.shape[1], context, past_key_values)
        added = next((n for n in (*MASKS, "position_bias", "alibi") if n in given), BUCKETS)
        called = {"x": "hidden_states", "positions": "position_ids"}
        with argument_names(**called, attn_bias=added, attn_mask=added):
            result = self._turned(given)(
                x,
                context,
                positions=given.get("position_ids"),
                cache=step,
                return_weights=wants_weights and step is None,
                backend=backend,
                tap=tap,
                **self.options,
                **_options(mask, bias),
            )
        output, weights = result if isinstance(result, tuple) else (result, None)
        if "residual" in given:
            output = output + _residual(given["residual"], output)
        if step is not None:
            weights = step.committed()
        return output, weights

    def compute_bias(self, query_length: int, key_length: int, past_seen_tokens: int = 0) -> Array:
        """T5's bias, of shape (1, H, query_length, key_length), the queries after those seen.

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
        return bias[None]

    def _checked(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments that are given, which must be those that the class takes."""
        given = {name: value for name, value in given.items() if value is not None}
        takes = self.convention.takes
        if "position_ids" not in takes:
            given.pop("position_ids", None)  # every model hands them on; here the tables know
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
            given["position_ids"] = _position_ids(given["position_ids"])
        return given

    def _mask(self, given: dict[str, Any]) -> Array | None:
        name = next((name for name in MASKS if name in given), None)
        if name is None:
            return None
        mask = rectangular(name, given[name])
        if mask.ndim != 4 or mask.dtype.kind in "iu":
            raise ValueError(
                f"{name} has shape {mask.shape} and dtype {mask.dtype}: expected (B, H, L, Lk), of "
                f"sizes that may be 1, floating or bool, as the model makes it from the tokenizer's"
                f"{owner_by_values(mask)}"
            )
        if mask.dtype == np.bool_ and self.convention.hides_where_true:
            return np.asarray(np.where(mask, LOWEST, np.float32(0)))
        return mask

    def _bias(
        self,
        given: dict[str, Any],
        B: int,
        L: int,
        context: Array | None,
        past: DynamicCache | None,
    ) -> Array | None:
        """What is added to the scores beside the mask."""
        if "alibi" in given:
            alibi = as_floating("alibi", given["alibi"])
            H = self.layer.num_heads
            if alibi.ndim != 3 or alibi.shape[:2] != (B * H, 1):
                raise ValueError(
                    f"alibi has shape {alibi.shape}: expected (B * H, 1, Lk) = ({B * H}, 1, Lk)"
                )
            bias = alibi.reshape(B, H, 1, -1)
            return bias / math.sqrt(self.layer.head_dim) if self.convention.scales_alibi else bias
        seen = 0 if past is None else past.get_seq_length()
        Lk = L + seen if context is None else context.shape[1]
        if "position_bias" in given:
            bias = as_floating("position_bias", given["position_bias"])
            return np.asarray(bias[None, :, :, -Lk:]) if bias.ndim == 3 else bias
        return None if self.buckets is None else self.compute_bias(L, Lk, seen)

    def _turned(self, given: dict[str, Any]) -> MultiHeadAttention:
        """The layer with the angles of this call."""
        rotary = self.convention.rotary
        if rotary is None or not self.turns:
            return self.layer
        layer = copy(self.layer)
        tables = _tables(rotary, given["position_embeddings"])
        layer.rope = _Tables(layer.head_dim, rotary, *tables)
        return layer


@dataclass(frozen=True)
class _Tables:
    """In the place of a ``RoPE``: the angles of one call's tokens."""

    head_dim: int
    rotary: Rotary
    cos: Array
    sin: Array
    is_dynamic: ClassVar[bool] = False

    def rotate(self, x: Array, positions: ArrayLike, tap: Tap) -> Array:
        """Return ``x`` turned; the tables are of the tokens, so positions say no more."""
        return rotate_by_table(
            x,
            self.cos,
            self.sin,
            interleaved=self.rotary.is_interleaved,
            repeated=self.rotary.stored != "once",
            tap=tap,
        )


class _Step:
    """In the place of a ``KVCache``, for one call: the mask alone says what is seen."""

    def __init__(self, past: DynamicCache, columns: int | None, wants_weights: bool) -> None:
        self._past, self._columns, self._wants_weights = past, columns, wants_weights
        self._weights: Array | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([self._past.get_seq_length()])

    def append(self, k: Array, v: Array) -> None:
        past = self._past
        if past.keys is not None and past.values is not None:
            for name, new, old in (("keys", k, past.keys), ("values", v, past.values)):
                if (*new.shape[:2], new.shape[3]) != (*old.shape[:2], old.shape[3]):
                    raise ValueError(
                        f"past_key_values has {name} of shape {old.shape}, these are {new.shape}: "
                        f"only the number of tokens may differ"
                    )
            k = np.concatenate([past.keys, k], axis=2)
            v = np.concatenate([past.values, v], axis=2)
        self._keys, self._values = k, v

    def attend(self, q: Array, *, tap: Tap = no_tap, **options: Any) -> Any:
        first = 0 if self._columns is None else max(self._keys.shape[2] - self._columns, 0)
        k, v = self._keys[:, :, first:], self._values[:, :, first:]
        if self._wants_weights:
            self._weights = attention_weights(q, k, **options).astype(k.dtype, copy=False)
        return attention(q, k, v, tap=tap, **options)

    def undo(self) -> None:
        """Do nothing: the past changes only when it is committed."""

    def committed(self) -> Array | None:
        """Keep the new keys and values, for the call went well, and return the weights."""
        self._past.keys, self._past.values = self._keys, self._values
        return self._weights


class _Weights:
    """A state_dict that is read name by name, so that what nobody reads is noticed."""

    def __init__(self, convention: Convention, params: Mapping[str, ArrayLike]) -> None:
        self._convention = convention
        self._left = {name: as_floating(name, value) for name, value in params.items()}

    def taken(self, name: str) -> Array | None:
        """The weight of that name, None where there is none."""
        return self._left.pop(name, None)

    def check_all_taken(self, cls: str) -> None:
        if self._left:
            raise ValueError(
                f"params has {', '.join(self._left)}, which {cls} is not computed with here: "
                f"leaving it out would change the result"
            )

    def layer(self, config: Config) -> MultiHeadAttention:
        c, H = self._convention, _num_heads(config)
        parts = dict(zip("qkv", self._queries_keys_values(config, H), strict=True))
        width = len(parts["q"][0])
        if width % (2 * H if c.is_gated else H):
            gates = " and their gates" if c.is_gated else ""
            raise ValueError(f"queries{gates} have width {width}: expected {H} heads of one width")
        if c.is_gated:
            parts |= {name: _of_heads(parts["q"], H, half) for half, name in enumerate("qg")}
        D = len(parts["q"][0]) // H
        kv_heads, rest = divmod(len(parts["k"][0]), D)
        if rest or not kv_heads:
            raise ValueError(
                f"keys have width {len(parts['k'][0])}: expected a multiple of the head width {D}"
            )
        if c.o is None:
            parts["o"] = np.eye(H * D, dtype=parts["q"][0].dtype), None
        else:
            parts["o"] = self._linear(c.o)
        weights = {f"W_{name}": W.T for name, (W, _) in parts.items()}
        weights |= {f"b_{name}": b for name, (_, b) in parts.items() if b is not None}
        if c.qk_norm is not None:
            for name in "qk":
                gain = self._required(f"{name}_norm.weight")
                weights[f"g_{name}"] = gain + gain.dtype.type(c.has_unit_offset)
        return MultiHeadAttention.from_combined(
            **weights,
            num_heads=H,
            num_kv_heads=kv_heads,
            qk_norm=c.qk_norm,
            epsilon=config.get("rms_norm_eps", c.epsilon),
            gate="elementwise" if c.is_gated else None,
        )

    def _required(self, name: str) -> Array:
        array = self.taken(name)
        if array is None:
            raise ValueError(f"params has no {name}: it has {', '.join(self._left) or 'nothing'}")
        return array

    def _linear(self, name: str) -> Linear:
        W = self._required(f"{name}.weight")
        if W.ndim != 2:
            raise ValueError(f"{name}.weight has shape {W.shape}: expected 2 axes")
        return W.T if self._convention.is_conv1d else W, self.taken(f"{name}.bias")

    def _queries_keys_values(self, config: Config, H: int) -> list[Linear]:
        c = self._convention
        if c.qkv is None:
            return [self._linear(name) for name in (c.q, c.k, c.v)]
        W, b = self._linear(c.qkv)
        groups = None if c.groups is None else c.groups(config, H)
        width = 0 if c.is_cross else self._heads_width()

        def split(fused: Array) -> list[Array]:
            return _split(str(c.qkv), fused, H, groups, width)

        parts = list(zip(split(W), [None] * 3 if b is None else split(b), strict=True))
        return [self._linear(c.q), *parts[1:]] if c.is_cross else parts

    def _heads_width(self) -> int:
        """H · D, as the output projection takes it."""
        name = f"{self._convention.o}.weight"
        W = self._left.get(name)
        if W is None or W.ndim != 2:
            raise ValueError(f"params has no {name} of 2 axes")
        return int(W.shape[0 if self._convention.is_conv1d else 1])


def _split(name: str, fused: Array, H: int, groups: int | None, width: int) -> list[Array]:
    """Rows of queries, keys and values.

    One below the other; or, with ``groups``, the queries of H / groups heads, their key and their
    value, then those of the next.
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


def _of_heads(linear: Linear, H: int, half: int) -> Linear:
    """The first or the second half of every head's rows."""
    W, b = (
        None if x is None else x.reshape(H, 2, -1, *x.shape[1:])[:, half].reshape(-1, *x.shape[1:])
        for x in linear
    )
    return cast(Array, W), b


def _check_not_clipped(config: Config) -> None:
    settings = {**config, **(config.get("attn_config") or {})}
    if settings.get("clip_qkv") is not None:
        raise ValueError(f"clip_qkv is {settings['clip_qkv']!r}: expected None, nothing is clipped")


def _context(given: dict[str, Any]) -> Array | None:
    name = next((name for name in CONTEXTS if name in given), None)
    if name is None:
        return None
    context = as_floating(name, given[name])
    if context.ndim != 3:
        raise ValueError(f"{name} has shape {context.shape}: expected (B, Lc, Ec)")
    return context


def _position_ids(value: ArrayLike) -> NDArray[Any]:
    """(L,) or (B, L), as a layer takes them."""
    ids = rectangular("position_ids", value)
    return ids[0] if ids.ndim == 2 and len(ids) == 1 else ids


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
        raise ValueError(f"position_embeddings has {len(position_embeddings)} parts: cos and sin")
    tables = []
    for name, value in zip(("cos", "sin"), position_embeddings, strict=True):
        table = as_floating(name, value)
        if table.ndim != 3:
            raise ValueError(f"{name} has shape {table.shape}: expected (1, L, R) or (B, L, R)")
        if rotary.is_interleaved and rotary.stored == "halves":
            table = table[..., : table.shape[-1] // 2].repeat(2, axis=-1)
        tables.append(table[0] if len(table) == 1 else table)
    return tables


def _options(mask: Array | None, bias: Array | None) -> dict[str, Array]:
    """The options of ``attention`` that hide and add."""
    if mask is None:
        return {} if bias is None else {"attn_bias": bias}
    if mask.dtype == np.bool_:
        return {"attn_mask": mask} | _options(None, bias)
    if bias is None:
        return {"attn_bias": mask}
    try:
        np.broadcast_shapes(mask.shape, bias.shape)
    except ValueError:
        raise ValueError(
            f"the mask has shape {mask.shape} but the bias {bias.shape}: both are added to scores "
            f"(B, H, L, Lk)"
        ) from None
    # In 16 bits the lowest number, by which masks hide, would overflow together with a bias.
    wide = np.promote_types(np.promote_types(mask.dtype, bias.dtype), np.float32)
    return {"attn_bias": mask.astype(wide) + bias}


def _residual(value: ArrayLike, output: Array) -> Array:
    residual = as_floating("residual", value)
    if residual.shape != output.shape:
        raise ValueError(f"residual has shape {residual.shape}: expected {output.shape}")
    return residual.astype(output.dtype, copy=False)
