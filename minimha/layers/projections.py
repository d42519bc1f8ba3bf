"""The weights of a multi-head attention layer: sizes, checks and constructors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from minimha.equations.arguments import (
    as_floating,
    choice,
    common_dtype,
    flag,
    integer,
    name_of,
    number,
)
from minimha.equations.stored import Stored
from minimha.layers.linear import Joined
from minimha.layers.protocols import Rotation

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Array = NDArray[Any]
Norm = Literal["head", "full", "layer"]
Gate = Literal["elementwise", "headwise"]

LETTERS = {
    "W_q": "(E, H · D)", "W_k": "(Ec, Hkv · D)", "W_v": "(Ev, Hkv · Dv)", "W_o": "(H · Dv, Eo)",
}  # fmt: skip
WEIGHTS = (*LETTERS, "b_q", "b_k", "b_v", "b_o", "g_q", "g_k", "s_q", "s_k", "W_g", "b_g")
NORMS = (None, "head", "full", "layer")
GATES = (None, "elementwise", "headwise")


class LayerOptions(TypedDict, total=False):
    """Types of the optional weights and settings of ``MultiHeadAttention``."""

    b_q: ArrayLike
    b_k: ArrayLike
    b_v: ArrayLike
    b_o: ArrayLike
    g_q: ArrayLike
    g_k: ArrayLike
    s_q: ArrayLike
    s_k: ArrayLike
    W_g: ArrayLike
    b_g: ArrayLike
    value_source_dim: int | None
    qk_norm: Norm | None
    epsilon: float
    clip: float | None
    gate: Gate | None
    rope: Rotation | None


class Projections:
    """The base class of ``MultiHeadAttention``, with its sizes, weights and constructors."""

    W_q: Array
    W_k: Array
    W_v: Array
    W_o: Array
    b_o: Array
    dtype: np.dtype[Any]
    _is_combined = True  # False after from_heads
    joined: Joined  # W_q, W_k and W_v

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        *,
        context_dim: int | None = None,
        value_source_dim: int | None = None,
        output_dim: int | None = None,
        qk_norm: Norm | None = None,
        epsilon: float = 1e-6,
        clip: float | None = None,
        gate: Gate | None = None,
        rope: Rotation | None = None,
        parameters: Mapping[str, ArrayLike] | None = None,
        dtype: DTypeLike = np.float32,
        seed: int = 0,
    ) -> None:
        E, H = integer("d_model", d_model), integer("num_heads", num_heads)
        if head_dim is None and E % H:
            raise ValueError(
                f"d_model is {d_model} and num_heads is {num_heads}: d_model must be a multiple of "
                f"num_heads, or head_dim given"
            )
        self.d_model, self.num_heads = E, H
        self.num_kv_heads = _size("num_kv_heads", num_kv_heads, H)
        if H % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {num_kv_heads} but num_heads is {num_heads}: num_heads must be a "
                f"multiple of num_kv_heads"
            )
        self.head_dim = _size("head_dim", head_dim, E // H)
        self.value_dim = _size("value_dim", value_dim, self.head_dim)
        self.context_dim = _size("context_dim", context_dim, E)
        self.value_source_dim = _size("value_source_dim", value_source_dim, self.context_dim)
        self.output_dim = _size("output_dim", output_dim, E)
        self.bias = flag("bias", bias)
        self.qk_norm = choice("qk_norm", qk_norm, NORMS)
        self.epsilon = number("epsilon", epsilon, low=0)
        self.clip = None if clip is None else number("clip", clip, low=0)
        if self.clip == 0:
            raise ValueError(f"{name_of('clip')} is {clip!r}: expected a positive number, or None")
        self.gate = choice("gate", gate, GATES)
        self.rope = _checked_rope(rope, self.head_dim)
        if parameters is None:
            parameters = self._drawn(np.dtype(dtype), integer("seed", seed, low=0))
        self._take(parameters)

    @classmethod
    def from_combined(
        cls,
        W_q: ArrayLike,
        W_k: ArrayLike,
        W_v: ArrayLike,
        W_o: ArrayLike,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        **others: Unpack[LayerOptions],
    ) -> Self:
        """Return a layer from combined matrices, which have the heads' matrices side by side.

        Parameters
        ----------
        W_q, W_k, W_v, W_o : array_like
            Matrices of shape (E, H · D), (Ec, Hkv · D), (Ev, Hkv · Dv) and (H · Dv, Eo).
        num_heads : int
            H.
        num_kv_heads : int, optional
            Hkv. Default is H.
        **others
            Further weights (b_q, b_k, b_v, b_o, g_q, g_k, s_q, s_k, W_g, b_g) and arguments of the
            constructor (qk_norm, gate, rope, …), by name. Without a weight whose name begins with
            b, the layer has no biases.

        Raises
        ------
        TypeError, ValueError
            A weight has a wrong shape, or an argument is invalid for the constructor.

        Examples
        --------
        >>> from minimha.layers.multihead import MultiHeadAttention
        >>> W = np.arange(16.0).reshape(4, 4)
        >>> layer = MultiHeadAttention.from_combined(W, W, W, W, num_heads=2)
        >>> layer.head_dim, layer.bias
        (2, False)
        """
        given = {"W_q": W_q, "W_k": W_k, "W_v": W_v, "W_o": W_o}
        matrices = {name: _matrix(name, value) for name, value in given.items()}
        H = integer("num_heads", num_heads)
        Hkv = H if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
        D, Dv = (_width(name, matrices[name], n) for name, n in (("W_q", H), ("W_v", Hkv)))
        settings: dict[str, Any] = {**others}
        weights = matrices | {name: settings.pop(name) for name in WEIGHTS if name in settings}
        return cls(
            matrices["W_q"].shape[0],
            H,
            Hkv,
            D,
            Dv,
            any(name[0] == "b" for name in weights),
            context_dim=_free(matrices["W_k"], 0, Hkv * D),
            output_dim=_free(matrices["W_o"], 1, H * Dv),
            parameters=weights,
            **settings,
        )

    @classmethod
    def from_heads(
        cls,
        W_q: ArrayLike,
        W_k: ArrayLike,
        W_v: ArrayLike,
        W_o: ArrayLike,
        **others: Unpack[LayerOptions],
    ) -> Self:
        """Return a layer from one matrix per head, the usual form in papers and textbooks.

        Parameters
        ----------
        W_q : array_like of shape (H, E, D)
        W_k : array_like of shape (Hkv, Ec, D)
        W_v : array_like of shape (Hkv, Ev, Dv)
        W_o : array_like of shape (H · Dv, Eo)
        **others
            As for ``from_combined``, but b_q, b_k and b_v may also have the shape (heads, width).

        Raises
        ------
        TypeError, ValueError
            A weight has a wrong shape, or an argument is invalid for the constructor.
        """
        given = {"W_q": W_q, "W_k": W_k, "W_v": W_v}
        heads = {name: as_floating(name, value) for name, value in given.items()}
        for name, W in heads.items():
            if W.ndim != 3:
                raise ValueError(f"{name} has shape {W.shape}: expected one (E, D) matrix per head")
        H, Hkv, Hv = (len(W) for W in heads.values())
        if Hv != Hkv:
            raise ValueError(f"W_v has {Hv} matrices but W_k has {Hkv}: expected one per head")
        weights: dict[str, Any] = others | {name: combined(W) for name, W in heads.items()}
        for name in {"b_q", "b_k", "b_v"} & set(others):
            weights[name] = np.ravel(as_floating(name, weights[name]))
        layer = cls.from_combined(**weights, W_o=W_o, num_heads=H, num_kv_heads=Hkv)
        layer._is_combined = False
        return layer

    def __repr__(self) -> str:
        sizes = ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim", "bias")
        return f"MultiHeadAttention({', '.join(f'{name}={getattr(self, name)}' for name in sizes)})"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and check the array if it is a weight."""
        super().__setattr__(name, self._fitting(name, value) if name in WEIGHTS else value)
        if name in ("W_q", "W_k", "W_v") and hasattr(self, "W_v"):
            self.joined = Joined(self.W_q, self.W_k, self.W_v)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight of the layer, by name."""
        E, Ec, Ev, D = self.d_model, self.context_dim, self.value_source_dim, self.head_dim
        q, k = self.num_heads * D, self.num_kv_heads * D
        v, concat = self.num_kv_heads * self.value_dim, self.num_heads * self.value_dim
        shapes: dict[str, tuple[int, ...]] = {
            "W_q": (E, q), "W_k": (Ec, k), "W_v": (Ev, v), "W_o": (concat, self.output_dim),
        }  # fmt: skip
        if self.qk_norm is not None:
            per_head = self.qk_norm == "head"
            shapes |= {"g_q": (D,) if per_head else (q,), "g_k": (D,) if per_head else (k,)}
        if self.qk_norm == "layer":
            shapes |= {"s_q": (q,), "s_k": (k,)}
        if self.gate is not None:
            shapes["W_g"] = (E, concat if self.gate == "elementwise" else self.num_heads)
        if self.bias:
            shapes |= {f"b_{name[2]}": shapes[name][1:] for name in shapes if name[0] == "W"}
        return shapes

    def _take(self, parameters: Mapping[str, ArrayLike]) -> None:
        """Set every weight; missing biases and shifts are 0, missing gains 1."""
        shapes = self.shapes
        given = {name: self._fitting(name, value) for name, value in parameters.items()}
        missing = [name for name in shapes if name[0] == "W" and name not in given]
        if missing:
            raise ValueError(f"{missing[0]} is missing: expected shape {shapes[missing[0]]}")
        self.dtype = common_dtype({name: array.dtype for name, array in given.items()})
        for name, shape in shapes.items():
            default = np.full(shape, 1 if name[0] == "g" else 0, self.dtype)
            setattr(self, name, given.get(name, default))

    def _drawn(self, dtype: np.dtype[Any], seed: int) -> dict[str, ArrayLike]:
        rng = np.random.default_rng(seed)
        return {
            name: rng.uniform(-1, 1, shape).astype(dtype) * dtype.type(math.sqrt(6 / sum(shape)))
            for name, shape in self.shapes.items()
            if name[0] == "W"
        }

    def _fitting(self, name: str, value: ArrayLike) -> Array:
        array: Array = as_weights(name, value)
        shapes = self.shapes
        if name not in shapes:
            raise ValueError(f"{name} is no weight of this layer, which has {', '.join(shapes)}")
        expected = shapes[name]
        if array.shape != expected:
            letters = f"{LETTERS[name]} = " if name in LETTERS else ""
            hint = "; it looks transposed, weights are applied as x @ W"
            raise ValueError(
                f"{name_of(name)} has shape {array.shape}: expected {letters}{expected}"
                f"{hint if array.shape == expected[::-1] else ''}"
            )
        return array

    def _row(self, name: str, compute: np.dtype[Any]) -> Array:
        row: Array = getattr(self, name).astype(compute, copy=False)
        return row


def _size(name: str, given: Any, default: int) -> int:
    return default if given is None else integer(name, given)


def combined(W: Array) -> Array:
    """Concatenate one matrix per head, (heads, E, width), side by side to (E, heads · width)."""
    return np.asarray(np.moveaxis(W, 0, 1).reshape(W.shape[1], -1))


def as_weights(name: str, value: Any) -> Any:
    """Return ``value`` as a floating array, but a ``Stored`` matrix as it is."""
    return value if isinstance(value, Stored) else as_floating(name, value)


def _matrix(name: str, value: ArrayLike) -> Array:
    W: Array = as_weights(name, value)
    if W.ndim != 2:
        hint = "; from_heads takes one matrix per head" if W.ndim == 3 and name != "W_o" else ""
        raise ValueError(f"{name_of(name)} has shape {W.shape}: expected {LETTERS[name]}{hint}")
    return W


def _width(name: str, W: Array, heads: int) -> int:
    if W.shape[1] % heads:
        raise ValueError(
            f"{name_of(name)} has shape {W.shape}: expected columns for {heads} heads of one width"
        )
    return int(W.shape[1]) // heads


def _free(W: Array, axis: int, other: int) -> int:
    """Return the size of W's ``axis``, or of the other axis if W looks transposed."""
    sizes: tuple[int, ...] = W.shape if axis == 0 else W.shape[::-1]
    return sizes[1] if sizes[0] == other != sizes[1] else sizes[0]


def _checked_rope(rope: Any, head_dim: int) -> Rotation | None:
    if rope is None:
        return None
    if not isinstance(rope, Rotation):
        raise TypeError(f"rope is {rope!r}: expected a minimha.layers.rope.RoPE, or None")
    if rope.head_dim != head_dim:
        raise ValueError(f"rope is for head_dim={rope.head_dim} but the layer has {head_dim}")
    return rope
