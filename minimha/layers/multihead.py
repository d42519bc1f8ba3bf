"""Multi-head attention: parallel attention heads, each with its own projections.

The steps: x, context → q, k, v → normalised → rotated → attention → concat → gated → output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
from numpy.typing import ArrayLike

from minimha.api import attention
from minimha.equations.arguments import (
    argument_names,
    as_floating,
    common_dtype,
    compute_dtype,
    flag,
    name_of,
)
from minimha.equations.arrays import Given, Numbers, like
from minimha.equations.option_types import AttentionOptions
from minimha.equations.tap import Tap, no_tap, renamed, safe_tap
from minimha.layers.linear import product
from minimha.layers.norms import layer_norm, rms_norm
from minimha.layers.projections import Array, Projections, combined
from minimha.layers.protocols import Cache, CacheOptions, Rotation

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CallOptions(AttentionOptions, total=False):
    """Types of the options of ``MultiHeadAttention.__call__``."""

    positions: ArrayLike | None
    context_positions: ArrayLike | None
    cache: Cache | None
    tap: Tap


class MultiHeadAttention(Projections):
    """A multi-head attention layer: concat(head_0, …, head_H-1) W_o.

    Axes: ``B`` batch, ``L`` tokens, ``E`` model width, ``H`` heads, ``Hkv`` key/value heads,
    ``D`` head width, ``Dv`` value width, ``Lc`` and ``Ec`` tokens and width of a context, ``Ev``
    width of the values' source, ``Eo`` width of the output.

    Head h is attention(x W_q[h], x W_k[h], x W_v[h]). Columns h · D to (h + 1) · D - 1 of the
    combined matrix W_q are W_q[h], so one matrix product computes the queries of all heads. A tap
    receives this product as q_combined before q, unless ``from_heads`` made the layer. Layers made
    by ``from_heads`` and ``from_combined`` have equal outputs.

    Parameters
    ----------
    d_model, num_heads : int
        E and H.
    num_kv_heads : int, optional
        Hkv, a divisor of H. Query head h reads key/value head h // (H // Hkv). Default is H.
    head_dim, value_dim : int, optional
        D and Dv. Defaults are E / H and D.
    bias : bool, default True
        Whether the layer has b_q, b_k, b_v and b_o, and b_g with a gate.
    context_dim : int, optional
        Ec, the width of the context in cross-attention. Default is E.
    value_source_dim : int, optional
        Ev, the width of ``project``'s ``value_source``. Default is Ec.
    output_dim : int, optional
        Eo. Default is E.
    qk_norm : {None, "head", "full", "layer"}, default None
        The normalisation of queries and keys. "head": RMS norm of each head, with gains g_q, g_k
        (D,). "full": RMS norm over all heads, with gains (H · D,) and (Hkv · D,). "layer": layer
        norm of each head, with gains and shifts s_q, s_k of shape (H · D,) and (Hkv · D,).
    epsilon : float, default 1e-6
        The ε that the norms of ``qk_norm`` add to the mean square or variance.
    clip : float, optional
        A positive bound: queries, keys and values are clipped to [-clip, clip] after normalisation.
    gate : {None, "elementwise", "headwise"}, default None
        Multiplies the heads' outputs by sigmoid(x W_g + b_g): each number ("elementwise", with W_g
        (E, H · Dv)), or each head ("headwise", with W_g (E, H)). Default is no gate.
    rope : RoPE or another ``Rotation``, optional
        Rotates queries and keys by their positions, after normalisation and clipping. Default is no
        rotation.
    parameters : mapping of str to array_like, optional
        The weights below by name. A missing bias or shift is 0, a missing gain 1. Default is
        random weights, uniform between ±√(6 / (rows + columns)).
    dtype : float16, bfloat16, float32 or float64, default float32
        The dtype of random weights.
    seed : int, default 0
        The seed of random weights.

    Attributes
    ----------
    W_q : ndarray of shape (E, H · D)
    W_k : ndarray of shape (Ec, Hkv · D)
    W_v : ndarray of shape (Ev, Hkv · Dv)
    W_o : ndarray of shape (H · Dv, Eo)
    b_q, b_k, b_v, b_o, g_q, g_k, s_q, s_k, W_g, b_g : ndarray
        Present only if the layer has them. A projection is x @ W + b. Assigned arrays are checked
        as in the constructor.

    Raises
    ------
    TypeError, ValueError
        Sizes do not divide each other, or a weight is missing or has the wrong shape.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2; Ainslie et al., "GQA", 2023;
    Henry et al., "Query-Key Normalization for Transformers", 2020, with the root mean square of
    Zhang and Sennrich, 2019, or the layer norm of Ba et al., 2016; the MosaicML NLP Team, "MPT-7B",
    2023 (clipping); Qiu et al., "Gated Attention for Large Language Models", 2025; Glorot
    and Bengio, 2010, equation 16 (random weights).

    Examples
    --------
    >>> layer = MultiHeadAttention(512, 8)
    >>> output, weights = layer(np.ones((2, 10, 512)), return_weights=True)
    >>> output.shape, weights.shape
    ((2, 10, 512), (2, 8, 10, 10))

    One token, one head, identity weights: the token attends to itself.

    >>> I = np.eye(2)
    >>> MultiHeadAttention.from_heads([I], [I], [I], I)([[3, 4]])
    array([[3., 4.]])
    """

    @overload
    def __call__(
        self, x: Numbers, context: ArrayLike | None = None, *,
        return_weights: Literal[False] = False, **options: Unpack[CallOptions],
    ) -> Array: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Numbers, context: ArrayLike | None = None, *,
        return_weights: Literal[True], **options: Unpack[CallOptions],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Given, context: ArrayLike | None = None, *,
        return_weights: Literal[False] = False, **options: Unpack[CallOptions],
    ) -> Given: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Given, context: ArrayLike | None = None, *,
        return_weights: Literal[True], **options: Unpack[CallOptions],
    ) -> tuple[Given, Given]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: ArrayLike, context: ArrayLike | None = None, *,
        return_weights: bool = False, **options: Unpack[CallOptions],
    ) -> Any: ...  # fmt: skip
    def __call__(
        self,
        x: Any,
        context: ArrayLike | None = None,
        *,
        positions: ArrayLike | None = None,
        context_positions: ArrayLike | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
        tap: Tap = no_tap,
        **options: Unpack[AttentionOptions],
    ) -> Any:
        """Return attention from ``x`` to itself, or to ``context``.

        Parameters
        ----------
        x : array_like of shape (L, E) or (B, L, E)
            Integers are computed in float64; 16-bit numbers in float32, rounded at the end.
        context : array_like of shape (Lc, Ec) or (B, Lc, Ec), optional
            The source of keys and values in cross-attention. Default is x.
        positions, context_positions : array_like of shape (L,) or (B, L), int, optional
            The positions of x and of context, for ``rope``. Default is 0, 1, …, or with a cache the
            positions after its tokens.
        cache : KVCache or another ``Cache``, optional
            The keys and values of earlier tokens. The call appends those of x, unless it raises an
            error. Attention with a ``KVCache`` or ``PagedKVCache`` is causal.
        return_weights : bool, default False
            Whether to return the attention weights of each head too.
        tap : callable ``tap(name, value) -> value``, optional
            Receives x, context, the weights (split into heads), every intermediate of the
            attention, concat and output.
        **options
            Further options of ``minimha.attention``, except ``return_lse``: masks, biases, windows,
            backend.

        Returns
        -------
        output : array of shape (L, Eo) or (B, L, Eo), common dtype of x, context and the weights
        weights : array of shape (H, L, Lk) or (B, H, L, Lk), if ``return_weights``

        Raises
        ------
        TypeError, ValueError
            Shapes or dtypes do not fit, or an option is invalid.
        """
        if "return_lse" in options:
            raise TypeError("return_lse is no option of a layer: its heads are mixed")
        tokens, others, dtype = self._inputs(x, context)
        if cache is not None:
            _check_cached(tokens, others, flag("return_weights", return_weights))
        _check_one_length(self.rope, others, cache, tokens.shape[-2])
        compute, tap = compute_dtype(dtype), safe_tap(tap)
        tokens = source = tap("x", tokens.astype(compute, copy=False))
        if others is not None:
            source = tap("context", others.astype(compute, copy=False))
        q, k, v = self.project(tokens, source, source, tap)
        stage = value_stage = ""  # a tap receives q, q_normed, q_clipped and q_rotated
        if self.qk_norm is not None:
            q, k = self._normed("q", tap("q", q), tap), self._normed("k", tap("k", k), tap)
            stage = "_layer_normed" if self.qk_norm == "layer" else "_normed"
        if self.clip is not None:
            q, k, v = tap(f"q{stage}", q), tap(f"k{stage}", k), tap("v", v)
            q, k, v = (np.clip(array, -self.clip, self.clip) for array in (q, k, v))
            stage = value_stage = "_clipped"
        if self.rope is not None:
            at = _positions(positions, q, cache)
            at_keys = at if context is None else _positions(context_positions, k)
            q = _rotated("q", tap(f"q{stage}", q), self.rope, at, tap)
            k = _rotated("k", tap(f"k{stage}", k), self.rope, at_keys, tap)
            stage = "_rotated"
        elif positions is not None or context_positions is not None:
            raise ValueError(
                f"{name_of('positions')} are given but the layer has no rope to use them"
            )
        inner = renamed(
            tap, q=f"q{stage}", k=f"k{stage}", v=f"v{value_stage}", output="head_output"
        )
        if cache is None:
            heads = attention(q, k, v, tap=inner, **options)
        else:
            cache.append(k.astype(dtype, copy=False), v.astype(dtype, copy=False))
            try:
                heads = cache.attend(q, tap=inner, **cast("CacheOptions", options))
            except Exception:
                cache.undo()
                raise
        output = self.combine(heads, tokens, tap).astype(dtype, copy=False)
        if not flag("return_weights", return_weights):
            return like(x, output)
        weights = attention_weights(q, k, **options).astype(dtype, copy=False)
        return like(x, output), like(x, weights)

    def project(
        self, x: Array, key_source: Array, value_source: Array, tap: Tap = no_tap
    ) -> tuple[Array, Array, Array]:
        """Project tokens to queries, keys and values, without normalisation, rotation or checks.

        Callers can then compute attention themselves and pass the heads' outputs to ``combine``.

        Parameters
        ----------
        x : ndarray of shape (L, E) or (B, L, E), float32 or float64
        key_source : ndarray of shape (Lc, Ec) or (B, Lc, Ec), x's dtype
        value_source : ndarray of shape (Lc, Ev) or (B, Lc, Ev), x's dtype
        tap : callable ``tap(name, value) -> value``, optional
            Receives the matrices and biases.

        Returns
        -------
        q, k, v : ndarray of shape (..., H, L, D), (..., Hkv, Lc, D) and (..., Hkv, Lc, Dv)
        """
        tap = safe_tap(tap)
        y_q = y_k = y_v = None
        if tap is no_tap and x is key_source is value_source:
            y_q, y_k, y_v = self.joined.products(x)
        return (
            self._project("q", x, self.num_heads, tap, y_q),
            self._project("k", key_source, self.num_kv_heads, tap, y_k),
            self._project("v", value_source, self.num_kv_heads, tap, y_v),
        )

    def combine(self, heads: Array, x: Array, tap: Tap = no_tap) -> Array:
        """Return the layer's output from the heads' outputs: concatenate, gate, multiply by W_o.

        Parameters
        ----------
        heads : ndarray of shape (..., H, L, Dv)
        x : ndarray of shape (..., L, E)
            The layer's input, from which the gates are computed.
        tap : callable ``tap(name, value) -> value``, optional
            Receives concat, the gates, the weights and output.

        Returns
        -------
        ndarray of shape (..., L, Eo), x's dtype
        """
        tap = safe_tap(tap)
        concat = tap("concat", _side_by_side(heads))
        if self.gate is not None:
            concat = tap("gated", concat * self._gates(x, tap))
        output = product(concat, tap("W_o", self._row("W_o", x.dtype)))
        if self.bias:
            output = output + tap("b_o", self._row("b_o", x.dtype))
        return np.asarray(tap("output", output))

    def _inputs(
        self, x: ArrayLike, context: ArrayLike | None
    ) -> tuple[Array, Array | None, np.dtype[Any]]:
        """Return ``x`` and ``context`` as checked arrays, and the dtype of the output."""
        x = as_floating("x", x)
        if x.ndim not in (2, 3) or x.shape[-1] != self.d_model:
            raise ValueError(
                f"{name_of('x')} has shape {x.shape}: expected (L, E) or (B, L, E) with "
                f"E={self.d_model}, the rows of W_q"
            )
        if self.value_source_dim != self.context_dim:
            raise ValueError(
                f"keys are made from width Ec={self.context_dim}, values from "
                f"Ev={self.value_source_dim}: project takes a source for each"
            )
        X, name = name_of("x"), name_of("context")
        if context is None:
            if self.context_dim != self.d_model:
                raise ValueError(
                    f"{name} is missing: keys and values are made from width Ec="
                    f"{self.context_dim}, {X} has E={self.d_model}"
                )
            return x, None, common_dtype({"x": x.dtype, "the layer": self.dtype})
        context = as_floating("context", context)
        if context.ndim != x.ndim or context.shape[-1] != self.context_dim:
            raise ValueError(
                f"{name} has shape {context.shape}, {X} {x.shape}: expected {x.ndim} axes as in "
                f"{X}, with width Ec={self.context_dim}, the rows of W_k and W_v"
            )
        if context.shape[:-2] != x.shape[:-2]:
            raise ValueError(f"{name} has B={len(context)} but {X} has B={len(x)}: expected one B")
        dtypes = {"x": x.dtype, "context": context.dtype, "the layer": self.dtype}
        return x, context, common_dtype(dtypes)

    def _project(self, name: str, x: Array, heads: int, tap: Tap, y: Array | None) -> Array:
        """Return x W + b, split into heads, (..., heads, L, width); ``y`` is x W, if computed."""
        W, b = f"W_{name}", f"b_{name}"
        if y is None:
            matrix = self._row(W, x.dtype)
            if tap is not no_tap:
                matrix = combined(tap(W, _apart(matrix, heads)))
            y = product(x, matrix)
        if self.bias:
            y = y + tap(b, self._row(b, x.dtype).reshape(heads, -1)).ravel()
        if self._is_combined and heads > 1:
            y = tap(f"{name}_combined", y)
        return _heads(y, heads)

    def _normed(self, name: str, x: Array, tap: Tap) -> Array:
        gain = self._row(f"g_{name}", x.dtype)
        if self.qk_norm == "layer":
            shift = self._row(f"s_{name}", x.dtype)
            gain, shift = (_heads(row[None], x.shape[-3]) for row in (gain, shift))
            gain, shift = tap(f"gains_{name}", gain), tap(f"s_{name}", shift)
            return layer_norm(x, gain, shift, self.epsilon)
        gain = tap(f"g_{name}", gain)
        if self.qk_norm == "head":
            return rms_norm(x, gain, self.epsilon)
        return _heads(rms_norm(_side_by_side(x), gain, self.epsilon), x.shape[-3])

    def _gates(self, x: Array, tap: Tap) -> Array:
        """Return sigmoid(x W_g + b_g), (..., L, H · Dv)."""
        z = product(x, tap("W_g", self._row("W_g", x.dtype)))
        if self.bias:
            z = z + tap("b_g", self._row("b_g", x.dtype))
        gates = tap("gate", 0.5 + 0.5 * np.tanh(0.5 * z))  # the sigmoid, without overflow
        return gates if self.gate == "elementwise" else np.repeat(gates, self.value_dim, axis=-1)


@overload
def attention_weights(q: Numbers, k: ArrayLike, **options: Unpack[AttentionOptions]) -> Array: ...
@overload
def attention_weights(q: ArrayLike, k: ArrayLike, **options: Unpack[AttentionOptions]) -> Any: ...
def attention_weights(q: ArrayLike, k: ArrayLike, **options: Unpack[AttentionOptions]) -> Any:
    """Return the attention weights softmax(scale · Q Kᵀ), of shape (B, H, Lq, Lk).

    Any backend can compute the weights: if V is the identity matrix, the output is the weights.

    Parameters
    ----------
    q : array_like of shape (B, H, Lq, D), (H, Lq, D) or (Lq, D)
    k : array_like of shape (B, Hkv, Lk, D), (Hkv, Lk, D) or (Lk, D)
    **options
        Options of ``minimha.attention``, except ``return_lse``.

    Returns
    -------
    array of shape (B, H, Lq, Lk), (H, Lq, Lk) or (Lq, Lk)

    Raises
    ------
    TypeError, ValueError
        As in ``minimha.attention``.

    Examples
    --------
    >>> attention_weights([[1.0], [0.0]], [[0.0], [1.0]], scale=1).round(3)
    array([[0.269, 0.731],
           [0.5  , 0.5  ]])
    """
    k = as_floating("k", k)
    Lk = k.shape[-2] if k.ndim > 1 else 0
    one_hot = np.broadcast_to(np.eye(Lk, dtype=k.dtype), (*k.shape[:-1], Lk))
    return attention(q, k, one_hot, **options)


def _apart(W: Array, heads: int) -> Array:
    """Return a view of ``W`` (E, heads · width) as one matrix per head, (heads, E, width)."""
    return np.moveaxis(W.reshape(len(W), heads, -1), 1, 0)


def _heads(y: Array, heads: int) -> Array:
    """Return a view of ``y`` (..., L, heads · width) as (..., heads, L, width)."""
    return np.swapaxes(y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads), -3, -2)


def _side_by_side(x: Array) -> Array:
    """Return ``x`` (..., heads, L, width) as (..., L, heads · width)."""
    x = x.swapaxes(-3, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _rotated(name: str, x: Array, rope: Rotation, at: ArrayLike, tap: Tap) -> Array:
    inner = renamed(tap, cos=f"cos[{name}]", sin=f"sin[{name}]", rotated=None)
    with argument_names(x=name):
        return rope.rotate(x, at, inner)


def _positions(given: ArrayLike | None, x: Array, cache: Cache | None = None) -> ArrayLike:
    """Return the positions of x (..., H, L, D): ``given``, or those after the cached tokens."""
    if given is not None:
        return given
    counted = np.arange(x.shape[-2])
    return counted if cache is None else cache.lengths[:, None] + counted


def _check_cached(x: Array, context: Array | None, return_weights: bool) -> None:
    cache = name_of("cache")
    if context is not None:
        raise ValueError(
            f"{cache} and {name_of('context')} are both given: a cache holds earlier tokens of "
            f"{name_of('x')}"
        )
    if x.ndim != 3:
        raise ValueError(f"{name_of('x')} has shape {x.shape}: with a cache it must be (B, L, E)")
    if return_weights:
        raise ValueError(
            f"{name_of('return_weights')} with a cache: let a tap receive the weights instead"
        )


def _check_one_length(
    rope: Rotation | None, context: Array | None, cache: Cache | None, L: int
) -> None:
    """Raise ValueError if dynamic scaling would rotate keys and queries by different angles."""
    if rope is None or not rope.is_dynamic:
        return
    why = "the angles of its dynamic scaling depend on the whole length"
    if context is not None:
        raise ValueError(f"rope with a context: {why}, which differs between x and context")
    if cache is not None:
        check_cached_angles(rope, int(cache.lengths.max()), L)


def check_cached_angles(rope: Rotation, cached: int, L: int) -> None:
    """Raise ValueError if L more tokens would change the angles of the keys in a cache.

    ``cached`` is the number of keys in the cache, which are stored after their rotation.
    """
    if not rope.is_dynamic or not cached:
        return
    from minimha.layers.rope import RoPE  # here: only dynamic scaling needs it

    if not isinstance(rope, RoPE) or not rope.has_equal_angles(cached, cached + L):
        raise ValueError(
            f"rope with a cache: the angles of its dynamic scaling change from {cached} tokens to "
            f"{cached + L}, but cached keys keep theirs: read all tokens again with an empty cache"
        )
