"""Gated DeltaNet: a layer with a state of fixed size per head instead of a key/value cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.delta_rule import gated_delta_rule
from minimha.equations.arguments import (
    as_floating,
    as_integers,
    common_dtype,
    compute_dtype,
    integer,
    name_of,
    number,
)
from minimha.equations.arrays import like
from minimha.equations.option_arrays import per_batch
from minimha.equations.tap import Tap, no_tap, renamed, safe_tap
from minimha.layers.feed_forward import silu
from minimha.layers.linear import product
from minimha.layers.norms import rms_norm
from minimha.layers.projections import as_weights

Array = NDArray[Any]


@dataclass
class DeltaCache:
    """The state of a ``GatedDeltaNet`` after earlier tokens, made by ``layer.new_cache``.

    ``state`` (B, H, D, Dv) is the memory of the delta rule. ``window`` (B, K - 1, channels) has the
    convolution's inputs of the last K - 1 tokens. The sizes of both do not depend on the number of
    tokens. ``lengths`` (B,) is the number of tokens of each batch entry, which is limited to
    ``capacity`` unless that is None.
    """

    state: Array
    window: Array
    lengths: NDArray[np.int64]
    capacity: int | None = None

    def check_room(self, added: NDArray[np.int64]) -> None:
        """Raise ValueError if ``added`` (B,) further tokens exceed ``capacity``."""
        if self.capacity is not None and (self.lengths + added).max() > self.capacity:
            raise ValueError(
                f"{name_of('x')} has {added.max()} tokens after {self.lengths.max()} cached ones: "
                f"together they exceed capacity={self.capacity}"
            )


class GatedDeltaNet:
    """A Gated DeltaNet layer, as in Qwen3-Next: projections, short convolution, memory, gate.

    q, k and v are silu(conv(x W_qkv)). The convolution mixes each channel over a token and the
    K - 1 tokens before it. ``gated_delta_rule`` then computes o from q, k, v, β = sigmoid(x W_b)
    and g = -exp(A_log) · log(1 + exp(x W_a + dt_bias)). A head's output is norm(o) · silu(x W_z),
    and the layer's is concat(head_0, …) W_o.

    Axes: ``B`` batch, ``L`` tokens, ``E`` and ``Eo`` widths of x and of the output, ``Hk`` heads of
    queries and keys, ``H`` heads of values, ``D`` key width, ``Dv`` value width, ``K`` width of the
    convolution.

    Parameters
    ----------
    parameters : mapping of str to array_like
        W_qkv (E, channels) with channels = 2 · Hk · D + H · Dv: queries, then keys, then values;
        conv (channels, K), the last column for the token itself; W_z (E, H · Dv); W_b and W_a
        (E, H); A_log and dt_bias (H,); g_o (Dv,), the gain of the norm; W_o (H · Dv, Eo).
    num_heads, num_key_heads : int
        H and Hk; H must be a multiple of Hk.
    epsilon : float, default 1e-6
        The ε that the RMS norm adds to the mean square.

    Raises
    ------
    TypeError, ValueError
        A weight is missing, unknown or of a wrong shape.

    References
    ----------
    Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, section 3.4.

    Examples
    --------
    >>> weights = {"W_qkv": np.eye(2, 6), "conv": np.ones((6, 2)), "W_z": np.ones((2, 2)),
    ...            "W_b": np.ones((2, 1)), "W_a": np.ones((2, 1)), "A_log": np.zeros(1),
    ...            "dt_bias": np.zeros(1), "g_o": np.ones(2), "W_o": np.eye(2)}
    >>> layer = GatedDeltaNet(weights, num_heads=1, num_key_heads=1)
    >>> cache = layer.new_cache(1)
    >>> x = np.array([[[1.0, 0.0], [0.0, 1.0]]])
    >>> whole = layer(x)
    >>> parts = [layer(x[:, t : t + 1], cache=cache) for t in (0, 1)]
    >>> np.allclose(np.concatenate(parts, axis=1), whole)
    True
    """

    def __init__(
        self, parameters: Mapping[str, ArrayLike], *, num_heads: int, num_key_heads: int,
        epsilon: float = 1e-6,
    ) -> None:  # fmt: skip
        self.weights = {name: as_weights(name, value) for name, value in parameters.items()}
        self.num_heads = H = integer("num_heads", num_heads)
        self.num_key_heads = Hk = integer("num_key_heads", num_key_heads)
        if H % Hk:
            raise ValueError(f"num_heads is {H}: expected a multiple of num_key_heads={Hk}")
        self.epsilon = number("epsilon", epsilon, low=0)
        (E, channels), v, K, Eo = (
            self._sizes("W_qkv"), self._sizes("W_z")[1], self._sizes("conv")[1],
            self._sizes("W_o")[1],
        )  # fmt: skip
        self.d_model, self.value_dim, self.head_dim = E, v // H, (channels - v) // (2 * Hk)
        self.channels, self.width = 2 * Hk * self.head_dim + H * self.value_dim, K
        expected = {
            "W_qkv": (E, self.channels), "conv": (self.channels, K), "W_z": (E, H * self.value_dim),
            "W_b": (E, H), "W_a": (E, H), "A_log": (H,), "dt_bias": (H,), "g_o": (self.value_dim,),
            "W_o": (H * self.value_dim, Eo),
        }  # fmt: skip
        for name in {**expected, **self.weights}:
            shape = self._array(name).shape
            if shape != expected.get(name):
                wanted = expected.get(name, f"one of {', '.join(expected)}")
                raise ValueError(f"{name_of(name)} has shape {shape}: expected {wanted}")
        self.dtype = common_dtype({name: array.dtype for name, array in self.weights.items()})

    def new_cache(self, batch: int, capacity: int | None = None) -> DeltaCache:
        """Return a cache for ``batch`` sequences, before their first token.

        ``capacity`` is the largest number of tokens of a sequence. Default is no limit.
        """
        B, compute = integer("batch", batch), compute_dtype(self.dtype)
        return DeltaCache(
            np.zeros((B, self.num_heads, self.head_dim, self.value_dim), compute),
            np.zeros((B, self.width - 1, self.channels), compute),
            np.zeros(B, np.int64),
            None if capacity is None else integer("capacity", capacity),
        )

    def __call__(
        self, x: ArrayLike, *, cache: DeltaCache | None = None, lengths: ArrayLike | None = None,
        cu_seqlens: ArrayLike | None = None, backend: Any = "auto", tap: Tap = no_tap,
    ) -> Any:  # fmt: skip
        """Return the layer's output for the tokens ``x``, which follow the cached tokens.

        Parameters
        ----------
        x : array_like of shape (L, E) or (B, L, E)
        cache : DeltaCache, optional
            The state after earlier tokens. The call updates it with the tokens of x; an error
            leaves it unchanged.
        lengths : int or array_like of shape (B,), int, optional
            The number of tokens of each sequence. Later tokens are padding: their output is 0,
            and they do not change the cache. Default is L.
        cu_seqlens : array_like of shape (n + 1,), int, optional
            The borders of n packed sequences, as in ``gated_delta_rule``. The sequences are
            independent. Allowed only with B = 1, and without ``cache`` and ``lengths``.
        backend : str, default "auto"
            The backend of ``gated_delta_rule``.
        tap : callable ``tap(name, value) -> value``, optional
            Receives x, qkv, convolved, g, every step of the memory, head_output, gate, gated, W_o
            and output.

        Returns
        -------
        array of shape (L, Eo) or (B, L, Eo)

        Raises
        ------
        TypeError, ValueError
            An array does not fit the layer, the cache or the other arrays.
        """
        tokens = as_floating("x", x)
        if tokens.ndim not in (2, 3) or tokens.shape[-1] != self.d_model:
            raise ValueError(
                f"{name_of('x')} has shape {tokens.shape}: expected (L, E) or (B, L, E) with "
                f"E={self.d_model}"
            )
        if cu_seqlens is not None and not (cache is None and lengths is None):
            raise ValueError(
                "cu_seqlens is given with a cache or lengths: they are for one sequence per entry"
            )
        dtype, tap = common_dtype({"x": tokens.dtype, "the layer": self.dtype}), safe_tap(tap)
        y = tap("x", tokens.astype(compute_dtype(dtype), copy=False))
        rows = y if y.ndim == 3 else y[None]
        (B, L, _), H, Hk = rows.shape, self.num_heads, self.num_key_heads
        if cache is not None and len(cache.state) != B:
            raise ValueError(f"{name_of('x')} has B={B} but the cache has B={len(cache.state)}")
        stops = per_batch("lengths", L if lengths is None else lengths, B, (0, L))
        if cache is not None:
            cache.check_room(stops)
        if lengths is not None:
            rows = np.where(np.arange(L)[:, None] < stops[:, None, None], rows, y.dtype.type(0))
        window = np.zeros((B, self.width - 1, self.channels)) if cache is None else cache.window
        qkv = tap("qkv", self._linear("W_qkv", rows))
        padded = np.concatenate([window.astype(y.dtype, copy=False), qkv], axis=1)
        mixed = tap("convolved", silu(self._convolved(padded, cu_seqlens)))
        ends = np.cumsum([Hk * self.head_dim] * 2)
        q, k, v = (
            part.reshape(B, L, heads, part.shape[2] // heads).swapaxes(1, 2)
            for part, heads in zip(np.split(mixed, ends, axis=2), (Hk, Hk, H), strict=True)
        )
        with np.errstate(all="ignore"):
            beta = 1 / (1 + np.exp(-self._linear("W_b", rows)))
            slow = np.logaddexp(0, self._linear("W_a", rows) + self._array("dt_bias", y.dtype))
            g = tap("g", -np.exp(self._array("A_log", y.dtype)) * slow)
        O, state = gated_delta_rule(
            q, k, v, g.swapaxes(1, 2), beta.swapaxes(1, 2), kv_lengths=lengths,
            initial_state=None if cache is None else cache.state, cu_seqlens=cu_seqlens,
            return_state=True, backend=backend, tap=renamed(tap, output="head_output"),
        )  # fmt: skip
        gate = tap("gate", self._linear("W_z", rows)).reshape(B, L, H, self.value_dim)
        normed = rms_norm(O.swapaxes(1, 2), self._array("g_o", y.dtype), self.epsilon)
        gated = tap("gated", (normed * silu(gate)).reshape(B, L, H * self.value_dim))
        output = tap("output", product(gated, tap("W_o", self._array("W_o", y.dtype))))
        if cache is not None:
            kept = stops[:, None] + np.arange(self.width - 1)
            cache.state, cache.window = state, np.take_along_axis(padded, kept[..., None], axis=1)
            cache.lengths = cache.lengths + stops
        return like(x, (output if y.ndim == 3 else output[0]).astype(dtype, copy=False))

    def _convolved(self, padded: Array, cu_seqlens: ArrayLike | None) -> Array:
        """Return the causal convolution (B, L, channels) of ``padded`` (B, L + K - 1, channels)."""
        K, weights = self.width, self._array("conv", padded.dtype)
        L = padded.shape[1] - K + 1
        total = np.zeros((len(padded), L, self.channels), padded.dtype)
        at = np.arange(L)
        if cu_seqlens is not None:  # gated_delta_rule checks the rest of it
            starts = np.unique(as_integers("cu_seqlens", cu_seqlens))
            at = at - starts[np.searchsorted(starts, at, side="right") - 1]
        for i in range(K):
            is_own = (at >= K - 1 - i) | (cu_seqlens is None)
            total += np.where(is_own[:, None], weights[:, i] * padded[:, i : i + L], 0)
        return total

    def _linear(self, name: str, x: Array) -> Array:
        return product(x, self._array(name, x.dtype))

    def _array(self, name: str, dtype: Any = None) -> Array:
        if name not in self.weights:
            raise ValueError(f"{name_of(name)} is missing")
        weight: Array = self.weights[name]
        return weight.astype(dtype or weight.dtype, copy=False)

    def _sizes(self, name: str) -> tuple[int, int]:
        array = self._array(name)
        if array.ndim != 2:
            raise ValueError(f"{name_of(name)} has shape {array.shape}: expected 2 axes")
        return array.shape[0], array.shape[1]
