"""Compute embeddings: a row of E numbers for each token, from its id and its position.

Axes: ``L`` tokens, ``E`` model width, ``V`` vocabulary, ``P`` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import integer
from minimha.equations.tap import Tap, no_tap, safe_tap

Array = NDArray[Any]


def sinusoidal(num_positions: int, d_model: int) -> NDArray[np.float64]:
    """Return the sinusoidal position embeddings, float64 of shape (P, E). E must be even.

    Row p has sin(p / 10000^(2i/E)) in column 2i, and the cosine in column 2i + 1 (Vaswani et al.,
    "Attention Is All You Need", 2017, section 3.5).

    >>> sinusoidal(2, 4).round(4)
    array([[0.    , 1.    , 0.    , 1.    ],
           [0.8415, 0.5403, 0.01  , 1.    ]])
    """
    P, E = integer("num_positions", num_positions), integer("d_model", d_model)
    if E % 2:
        raise ValueError(f"d_model is {E}: sines and cosines are in pairs, so it must be even")
    angles = np.arange(P)[:, None] / 10000 ** (np.arange(0, E, 2) / E)
    return np.asarray(np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(P, E))


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Embeddings scale · (tokens[id] + types[t]) + positions[p], for sentence type t.

    Parameters
    ----------
    tokens : ndarray of shape (V, E)
    positions : ndarray of shape (P, E), optional
        Learned or ``sinusoidal`` rows. Default is none, as for models with rotary embedding.
    scale : float, default 1.0
        The factor of token and type rows: √E in the original transformer and in Gemma.
    types : ndarray of shape (T, E), optional
        Rows for the T types of sentences; BERT has T = 2, a first and a second sentence.
    """

    tokens: Array
    positions: Array | None = None
    scale: float = 1.0
    types: Array | None = None

    def __call__(
        self, ids: NDArray[np.int64], start: int = 0, tap: Tap = no_tap,
        types: NDArray[np.int64] | None = None,
    ) -> Array:  # fmt: skip
        """Return the embeddings (..., L, E) of ``ids`` (..., L), at positions from ``start`` on.

        ``types`` (..., L) are the tokens' sentence types, by default 0. ``tap`` receives the result
        as "embedded". If the model has position rows, ``tap`` first receives "wte" (token and type
        rows) and "wpe" (position rows).
        """
        x, tap = self.tokens[ids], safe_tap(tap)
        if self.types is not None:
            x = x + self.types[0 if types is None else types]
        if self.scale != 1:
            x = x * x.dtype.type(self.scale)
        if self.positions is not None:
            x = tap("wte", x) + tap("wpe", self.positions[start : start + ids.shape[-1]])
        return np.asarray(tap("embedded", x))
