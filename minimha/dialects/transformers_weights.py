"""Build a ``MultiHeadAttention`` from the state_dict of a transformers module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.dialects.transformers_classes import Config, Convention
from minimha.equations.arguments import argument_names, as_floating, integer
from minimha.layers.multihead import MultiHeadAttention

Array = NDArray[Any]
Linear = tuple[Array, Array | None]  # weight (out, in) and bias (out,)


class Weights:
    """The weights of a state_dict that have not been used yet."""

    def __init__(self, convention: Convention, params: Mapping[str, ArrayLike]) -> None:
        self._convention = convention
        self._left = {name: as_floating(name, value) for name, value in params.items()}

    def pop(self, name: str) -> Array | None:
        """Remove and return the weight ``name``, or return None if it is missing."""
        return self._left.pop(name, None)

    def check_all_popped(self, cls: str) -> None:
        """Raise ValueError if weights are left, which a layer of the class ``cls`` would ignore."""
        if self._left:
            raise ValueError(
                f"params has {', '.join(self._left)}, which minimha's {cls} does not use: the "
                f"result would differ"
            )

    def layer(self, config: Config) -> MultiHeadAttention:
        """Return a layer with these weights and the numbers of heads in ``config``."""
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
        weights: dict[str, Any] = {f"W_{name}": W.T for name, (W, _) in parts.items()}
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
        """Return gains and shifts of all heads, from one row per head or one row for all heads."""
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
    """Map the layer's arguments to the module's names, with ".T" for transposed matrices."""
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
    """Split a linear map by ``rows``, which splits the weight and the bias."""
    weight, bias = linear
    weights = rows(weight)
    biases = [None] * len(weights) if bias is None else rows(bias)
    return list(zip(weights, biases, strict=True))


def _rows(name: str, fused: Array, H: int, groups: int | None, width: int) -> list[Array]:
    """Split the rows of a fused weight into those of queries, keys and values.

    Without ``groups``, the order is all queries (``width`` rows), all keys, all values. With
    ``groups``, each has the queries of H / groups heads, then one key, then one value.
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
    """Return the first halves of all heads' rows, and the second halves."""
    halves = x.reshape(H, 2, -1, *x.shape[1:])
    return [halves[:, half].reshape(-1, *x.shape[1:]) for half in (0, 1)]


def _clip(config: Config) -> float | None:
    """Return clip_qkv or None; MPT and DBRX store it in attn_config."""
    clip = {**config, **(config.get("attn_config") or {})}.get("clip_qkv")
    return None if clip is None else float(clip)


def _num_heads(config: Config) -> int:
    side = "decoder" if config.get("is_decoder") else "encoder"
    names = ("num_attention_heads", "n_head", "num_heads", "n_heads", f"{side}_attention_heads")
    for name in names:
        if config.get(name) is not None:
            return integer(name, config[name])
    raise ValueError(f"config has no number of heads: expected one of {', '.join(names)}")
