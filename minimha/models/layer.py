"""Compute one layer of a transformer: attention and a feed-forward, each with norm and residual.

A part f, such as attention, computes x + f(norm(x)) if norms come first, else norm(x + f(x)). Of
the norms of f's input and output, x + norm(f(norm(x))), each may be missing.

Axes: ``B`` batch, ``L`` tokens, ``Ls`` tokens of an encoder's output, ``E`` model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention
from minimha.equations.tap import Tap, no_tap, prefixed, renamed
from minimha.layers.cache import KVCache
from minimha.layers.feed_forward import FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import Norm
from minimha.models.experts import Experts

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of attention, cross-attention if ``cross`` is given, and a feed-forward.

    Parameters
    ----------
    attention_norm, feed_forward_norm : Norm or None
        Norms of each part's input x, or of the sum x + f(x) if ``norm_first`` is False. None is
        for OLMo 2, which normalises outputs only.
    attention : MultiHeadAttention
    feed_forward : FeedForward or Experts
    attention_output_norm, feed_forward_output_norm : Norm, optional
        Norms of each part's output, before it is added to the input.
    window : int, optional
        The largest number of tokens that a causal query sees, itself included. Default is all.
    sinks : ndarray of shape (H,), optional
    scale, softcap : float, optional
        Options of ``minimha.attention``.
    norm_first : bool, default True
        Whether norms come first; False in the first transformer and in BERT.
    is_parallel : bool, default False
        Whether the feed-forward reads the layer's input x, beside attention: x + f(x) + g(x).
    cross : MultiHeadAttention, optional
        Attention from a decoder's rows to the encoder's.
    cross_norm : Norm, optional
        The norm of ``cross``.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.1; Radford et al., 2019 (GPT-2),
    section 2.3, where the norm moved to the input; Gemma Team, 2024 (Gemma 2), section 2, which
    normalises the output too; Team OLMo, 2024 (OLMo 2), section 3.3.1, which normalises it alone.
    """

    attention_norm: Norm | None
    attention: MultiHeadAttention
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

        ``tap`` receives x, the steps of the parts, added, and residual, or post_residual if norms
        follow. The norms' steps are named after their inputs: normed (of x), output_normed,
        added_normed, feed_forward_normed and post_residual_normed; of the feed-forward's own input
        x, parallel_normed.
        """
        added = self.attend(x, tap, **options)
        return self.feed(added, tap, x if self.is_parallel else None)

    def attend(
        self, x: Array, tap: Tap = no_tap, *, is_causal: bool = False,
        cache: KVCache | None = None, **options: Any,
    ) -> Array:  # fmt: skip
        """Return x + f(norm(x)), or norm(x + f(x)) if norms come last, where f is attention.

        A ``cache`` makes the attention causal.
        """
        options |= {"scale": self.scale, "softcap": self.softcap, "cache": cache}
        options["sinks"] = self.sinks
        if is_causal and cache is None:
            window = None if self.window is None else (self.window - 1, 0)
            options |= {"is_causal": True, "window_size": window}

        def output(y: Array) -> Array:
            y = self.attention(y, tap=renamed(tap, x=None), **options)
            norm = self.attention_output_norm
            return y if norm is None else norm(y, prefixed(tap, "output_"))

        return self._plus(x, output, self.attention_norm, tap)

    def attend_across(
        self, x: Array, memory: Array, kept: tuple[Array, Array] | None, tap: Tap, **options: Any
    ) -> Array:
        """Return x + f(norm(x)) or norm(x + f(x)), where f attends to ``memory`` (B, Ls, E).

        ``kept`` has the memory's keys and values, from ``keys_and_values``, or is None.
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
        """Return the keys and values (B, H, Ls, D) that ``cross`` computes from ``memory``."""
        assert self.cross is not None
        return self.cross.project(memory[:, :0], memory, memory)[1:]

    def feed(self, x: Array, tap: Tap = no_tap, source: Array | None = None) -> Array:
        """Return x + f(norm(x)), or norm(x + f(x)) if norms come last; f is the feed-forward.

        A ``source`` (B, L, E) is read by f instead of x.
        """
        norm = self.feed_forward_norm
        if not self.norm_first:
            assert norm is not None  # a layer whose norms come last has them
            summed = tap("post_residual", x + self.feed_forward(x, tap))
            return norm(summed, prefixed(tap, "post_residual_"))
        y, prefix = (x, "added_") if source is None else (source, "parallel_")
        y = self.feed_forward(y if norm is None else norm(y, prefixed(tap, prefix)), tap)
        if self.feed_forward_output_norm is not None:
            y = self.feed_forward_output_norm(y, prefixed(tap, "feed_forward_"))
        return np.asarray(tap("residual", x + y))

    def _plus(
        self, x: Array, output: Callable[[Array], Array], norm: Norm | None, tap: Tap
    ) -> Array:
        """Return x + output(norm(x)), or norm(x + output(x)) if norms follow."""
        y = tap("x", x)
        if norm is not None and self.norm_first:
            y = norm(y, tap)
        added = tap("added", x + output(y))
        if norm is None or self.norm_first:
            return np.asarray(added)
        return np.asarray(norm(added, prefixed(tap, "added_")))
