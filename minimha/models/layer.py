"""Compute one layer of a transformer: attention and a feed-forward, each with norm and residual.

With a sublayer f, such as attention, a pre-norm layer computes x + f(norm(x)), and a post-norm
layer norm(x + f(x)). A pre-norm layer may normalise the output of f too, x + norm(f(norm(x))), or
only that output, x + norm(f(x)).

Axes: ``B`` batch, ``L`` tokens, ``Ls`` tokens of an encoder's output, ``E`` model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention
from minimha.equations.tap import Tap, no_tap, prefixed, renamed
from minimha.layers import decoding
from minimha.layers.cache import KVCache
from minimha.layers.delta import DeltaCache, GatedDeltaNet
from minimha.layers.feed_forward import FeedForward
from minimha.layers.latent import LatentAttention, LatentCache
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import Norm
from minimha.models.experts import Experts

Array = NDArray[Any]
LayerCache: TypeAlias = KVCache | LatentCache | DeltaCache
# The backend of a gated delta net for one of ``attention``, and its steps that attention has, too.
DELTA_BACKENDS = {"dense": "recurrent", "tiled": "chunked"}
DELTA_STEPS = {name: f"delta_{name}" for name in ("q", "k", "v", "head_output", "gate", "gated")}


@dataclass(frozen=True, eq=False)
class Layer:
    """A transformer layer: self-attention, optional cross-attention, and a feed-forward.

    Parameters
    ----------
    attention_norm, feed_forward_norm : Norm or None
        Norms of the input of each sublayer f, or of the sum x + f(x) if ``norm_first`` is False.
        None in OLMo 2, which normalises only the outputs of sublayers.
    attention : MultiHeadAttention, LatentAttention or GatedDeltaNet
        A ``GatedDeltaNet`` uses its backend "recurrent" if the layer's is "dense", and "chunked"
        if it is "tiled". A tap receives its q, k, v, head_output, gate and gated with the prefix
        ``delta_``.
    feed_forward : FeedForward or Experts
    attention_output_norm, feed_forward_output_norm : Norm, optional
        Norms of f's output, before it is added to the residual x.
    window : int, optional
        The largest number of tokens that a causal query attends to, its own included. If attention
        is not causal, a query attends to ``window // 2`` tokens on each side and its own. Default
        is all.
    sinks : ndarray of shape (H,), optional
        As in ``minimha.attention``.
    scale, softcap : float, optional
        As in ``minimha.attention``. ``sinks``, ``scale``, ``softcap`` and ``window`` affect only a
        ``MultiHeadAttention``.
    norm_first : bool, default True
        True for pre-norm; False for post-norm, as in the original transformer and in BERT.
    is_parallel : bool, default False
        Whether attention f and feed-forward g both read the layer's input x, each through its norm:
        x + f(norm(x)) + g(norm(x)).
    cross : MultiHeadAttention, optional
        Attention from a decoder's tokens to the encoder's output.
    cross_norm : Norm, optional
        The norm of ``cross``.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.1; Radford et al., 2019 (GPT-2),
    section 2.3, where the norm moved to the input; Gemma Team, 2024 (Gemma 2), section 2, which
    normalises the output too; Team OLMo, 2024 (OLMo 2), section 3.3.1, which normalises it alone.
    """

    attention_norm: Norm | None
    attention: MultiHeadAttention | LatentAttention | GatedDeltaNet
    feed_forward_norm: Norm | None
    feed_forward: FeedForward | Experts
    attention_output_norm: Norm | None = None
    feed_forward_output_norm: Norm | None = None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    norm_first: bool = True
    is_parallel: bool = False
    sinks: Array | None = None
    cross: MultiHeadAttention | None = None
    cross_norm: Norm | None = None

    def __call__(self, x: Array, tap: Tap = no_tap, **options: Any) -> Array:
        """Return the layer's output (B, L, E) for x (B, L, E); ``options`` are those of ``attend``.

        ``tap`` receives x, the steps of the parts, added, and residual (post_residual in a
        post-norm layer). The norms' steps are named after their inputs: normed (of x),
        output_normed, added_normed, feed_forward_normed and post_residual_normed. If
        ``is_parallel``, parallel_normed is the norm of x that the feed-forward reads.
        """
        added = self.attend(x, tap, **options)
        return self.feed(added, tap, x if self.is_parallel else None)

    def attend(
        self, x: Array, tap: Tap = no_tap, *, is_causal: bool = False,
        cache: LayerCache | None = None, **options: Any,
    ) -> Array:  # fmt: skip
        """Apply self-attention f to x (B, L, E): x + f(norm(x)), or norm(x + f(x)) if post-norm.

        Attention with a ``cache`` is always causal. ``options`` are passed to
        ``self.attention``.
        """
        if (
            tap is no_tap
            and cache is not None
            and self.norm_first
            and options.keys() <= {"backend"}
        ):
            norms = self.attention_norm, self.attention_output_norm
            scores = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
            backend = options.get("backend", "auto")
            attended = decoding.attended(self.attention, norms, x, cache, backend, **scores)
            if attended is not None:
                return attended
        inner, options["cache"] = renamed(tap, x=None), cache
        if isinstance(self.attention, GatedDeltaNet):
            backend, inner = options.get("backend", "auto"), renamed(inner, **DELTA_STEPS)
            options["backend"] = DELTA_BACKENDS.get(backend, backend)
        elif is_causal and cache is None:
            options["is_causal"] = True
        if isinstance(self.attention, MultiHeadAttention):  # others have a scale, and no window
            options |= {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
            if cache is None and self.window is not None:
                sides = (self.window - 1, 0) if is_causal else (self.window // 2,) * 2
                options["window_size"] = sides

        def output(y: Array) -> Array:
            y = self.attention(y, tap=inner, **options)
            norm = self.attention_output_norm
            return y if norm is None else norm(y, prefixed(tap, "output_"))

        return self._plus(x, output, self.attention_norm, tap)

    def attend_across(
        self, x: Array, memory: Array, kept: tuple[Array, Array] | None, tap: Tap, **options: Any
    ) -> Array:
        """Apply cross-attention f to x (B, L, E): x + f(norm(x)), or norm(x + f(x)) if post-norm.

        ``kept`` is the result of ``keys_and_values``. If it is None, the keys and values are
        computed from ``memory`` (B, Ls, E). ``options`` are those of ``self.cross``.
        """
        cross, tap_inside = self.cross, renamed(tap, x=None)
        assert cross is not None  # every decoder's layer has both
        assert self.cross_norm is not None
        options["scale"] = self.scale

        def output(y: Array) -> Any:
            if kept is None:
                return cross(y, memory, tap=tap_inside, **options)
            q, _, _ = cross.project(y, y[:, :0], y[:, :0])  # no keys or values
            heads = attention(q, *kept, tap=renamed(tap_inside, output="head_output"), **options)
            return cross.combine(heads, y, tap_inside)

        return self._plus(x, output, self.cross_norm, tap)

    def keys_and_values(self, memory: Array) -> tuple[Array, Array]:
        """Return the keys and values (B, H, Ls, D) of ``memory`` (B, Ls, E) for cross-attention."""
        assert self.cross is not None
        return self.cross.project(memory[:, :0], memory, memory)[1:]

    def feed(self, x: Array, tap: Tap = no_tap, source: Array | None = None) -> Array:
        """Apply the feed-forward f to x (B, L, E): x + f(norm(x)), or norm(x + f(x)) if post-norm.

        If ``source`` (B, L, E) is given, a pre-norm layer returns x + f(norm(source)).
        """
        norm = self.feed_forward_norm
        if tap is no_tap and self.norm_first:
            norms = norm, self.feed_forward_output_norm
            fed = decoding.fed(self.feed_forward, norms, x, source)
            if fed is not None:
                return fed
        if not self.norm_first:
            assert norm is not None  # a layer whose norms come last has them
            summed = tap("post_residual", x + self.feed_forward(x, tap))
            return norm(summed, prefixed(tap, "post_residual_"))
        y, prefix = (x, "added_") if source is None else (source, "parallel_")
        y = self.feed_forward(y if norm is None else norm(y, prefixed(tap, prefix)), tap)
        if self.feed_forward_output_norm is not None:
            y = self.feed_forward_output_norm(y, prefixed(tap, "feed_forward_"))
        return np.asarray(tap("residual", x + y))

    def new_cache(self, batch: int, capacity: int) -> LayerCache:
        """Return a cache for ``capacity`` tokens of each of ``batch`` texts."""
        layer = self.attention
        if isinstance(layer, GatedDeltaNet):
            return layer.new_cache(batch, capacity)
        if isinstance(layer, LatentAttention):
            return LatentCache(batch, capacity, layer.cached_width)
        window = None if self.window is None else min(self.window, capacity)
        return KVCache(batch, layer.num_kv_heads, capacity, layer.head_dim, window=window)

    def _plus(
        self, x: Array, output: Callable[[Array], Array], norm: Norm | None, tap: Tap
    ) -> Array:
        """Return x + output(norm(x)), or norm(x + output(x)) in a post-norm layer."""
        y = tap("x", x)
        if norm is not None and self.norm_first:
            y = norm(y, tap)
        added = tap("added", x + output(y))
        if norm is None or self.norm_first:
            return np.asarray(added)
        return np.asarray(norm(added, prefixed(tap, "added_")))
