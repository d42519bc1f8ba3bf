"""The lightning indexer: a small attention without values that picks keys for each query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, compute_dtype, integer, name_of, number
from minimha.equations.functions import uses
from minimha.equations.problem import Problem, stand_in
from minimha.equations.selection import NONE
from minimha.equations.tap import Tap, no_tap, safe_tap
from minimha.layers.linear import product
from minimha.layers.norms import layer_norm
from minimha.layers.projections import as_weights
from minimha.layers.rope import RoPE

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]
WEIGHTS = ("W_iq", "W_ik", "g_ik", "b_ik", "W_iw")


class Visibility(TypedDict, total=False):
    """Types of the options of ``attention`` that hide keys before an indexer picks some."""

    is_causal: bool
    q_offset: Any
    window_size: tuple[int | None, int | None] | None
    kv_lengths: Any
    attn_mask: Any
    attn_bias: Any
    mask_mod: Any


class LightningIndexer:
    """An indexer that picks ``top_k`` keys for each query, for ``attention``'s ``key_indices``.

    Query i scores key j by I_ij = Σ_h w_ih · relu(q_ih · k_j / √Di) / √Hi, and picks the keys with
    the largest scores among those that it may see. Of keys with equal scores, those with lower
    indices are picked. Such ties are common, because relu makes many scores exactly 0.

    Axes: ``B`` batch, ``L`` tokens, ``E`` model width, ``Cq`` width of a query's latent, ``Hi``
    heads and ``Di`` width of the indexer.

    Parameters
    ----------
    parameters : mapping of str to array_like
        W_iq (Cq, Hi · Di) for queries; W_ik (E, Di) for keys, one per token for all heads; g_ik and
        b_ik (Di,), gain and bias of their layer norm; W_iw (E, Hi) for the weights w of the heads.
        All are applied as x @ W.
    num_heads, top_k : int
        Hi, and how many keys a query picks at most.
    rope : RoPE
        Rotates the first R numbers of the indexer's queries and keys. It is
        ``RoPE(Di, rotary_dim=R)`` (half-split) in DeepSeek-V3.2, and has ``interleaved=True`` in
        GLM-5. The attention of both models rotates the last numbers, in interleaved pairs.
    epsilon : float, default 1e-6
        Added to the variance under the root of the layer norm.

    Raises
    ------
    TypeError, ValueError
        A weight is missing, is unknown or does not fit the others.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1, equation 1.

    Examples
    --------
    >>> weights = {"W_iq": np.eye(2), "W_ik": np.eye(2), "g_ik": np.ones(2), "b_ik": np.zeros(2),
    ...            "W_iw": np.ones((2, 1))}
    >>> indexer = LightningIndexer(weights, num_heads=1, top_k=2, rope=RoPE(2))
    >>> x = [[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]
    >>> indexer(x, x, is_causal=True)[0, 0]
    array([[ 0, -1],
           [ 1,  0],
           [ 1,  2]], dtype=int32)
    """

    def __init__(
        self, parameters: Mapping[str, ArrayLike], *, num_heads: int, top_k: int, rope: RoPE,
        epsilon: float = 1e-6,
    ) -> None:  # fmt: skip
        self.weights = {name: as_weights(name, value) for name, value in parameters.items()}
        self.num_heads, self.top_k = integer("num_heads", num_heads), integer("top_k", top_k)
        self.rope, self.epsilon = rope, number("epsilon", epsilon, low=0)
        for name in {**dict.fromkeys(WEIGHTS), **self.weights}:
            if name not in self.weights:
                raise ValueError(f"{name_of(name)} is missing")
            if name not in WEIGHTS:
                raise ValueError(
                    f"{name} is no weight of this layer, which has {', '.join(WEIGHTS)}"
                )
        Cq, E = (len(self.weights[name]) for name in ("W_iq", "W_ik"))
        Hi, Di = self.num_heads, rope.head_dim
        shapes = {"W_iq": (Cq, Hi * Di), "W_ik": (E, Di), "g_ik": (Di,), "b_ik": (Di,),
                  "W_iw": (E, Hi)}  # fmt: skip
        for name, expected in shapes.items():
            if self.weights[name].shape != expected:
                raise ValueError(
                    f"{name_of(name)} has shape {self.weights[name].shape}: expected {expected} "
                    f"with Hi={Hi}, Di={Di} and the other weights"
                )

    def keys(self, x: ArrayLike, positions: ArrayLike | None = None) -> Array:
        """Return the indexer's keys (..., L, Di) of the tokens ``x`` (..., L, E), for a cache.

        ``positions`` (L,) or (B, L) default to 0, 1, …
        """
        rows = as_floating("x", x)
        rows = rows.astype(compute_dtype(rows.dtype), copy=False)
        gain, bias = (self._weight(name, rows) for name in ("g_ik", "b_ik"))
        k = layer_norm(product(rows, self._weight("W_ik", rows)), gain, bias, self.epsilon)
        at = np.arange(rows.shape[-2]) if positions is None else positions
        return np.asarray(self.rope.rotate(k[..., None, :, :], at)[..., 0, :, :])

    def __call__(
        self, x: ArrayLike, latents: ArrayLike, *, keys: ArrayLike | None = None,
        positions: ArrayLike | None = None, tap: Tap = no_tap, **visibility: Unpack[Visibility],
    ) -> NDArray[np.int32]:  # fmt: skip
        """Return the keys that each query picks, best first.

        Parameters
        ----------
        x : array_like of shape (L, E) or (B, L, E)
            The tokens of the queries, from which the heads' weights are computed.
        latents : array_like of shape (L, Cq) or (B, L, Cq)
            The queries' latents, after their norm.
        keys : array_like of shape (Lk, Di) or (B, Lk, Di), optional
            The indexer's keys of earlier tokens and of x, as the method ``keys`` returns them.
            Default is the keys of x.
        positions : array_like of shape (L,) or (B, L), int, optional
            Positions of x. Default is 0, 1, …
        tap : callable ``tap(name, value) -> value``, optional
            Receives index_queries, index_keys, index_weights, index_products, index_relu,
            index_scores, index_visible and key_indices.
        **visibility
            The options of ``minimha.attention`` that hide keys, the same for all heads: is_causal,
            q_offset, window_size, kv_lengths, attn_mask, attn_bias (where -inf) and mask_mod.

        Returns
        -------
        ndarray of shape (B, 1, L, min(top_k, Lk)), int32
            The indices of the picked keys; -1 fills a row whose query sees fewer keys. A score of
            NaN counts as the largest.

        Raises
        ------
        TypeError, ValueError
            An array does not fit the indexer, or an option does not fit the arrays.
        """
        tap = safe_tap(tap)
        tokens, C = as_floating("x", x), as_floating("latents", latents)
        rows = tokens.astype(compute_dtype(tokens.dtype), copy=False)
        k = self.keys(tokens, positions) if keys is None else as_floating("keys", keys)
        rows, C, k = (y if y.ndim == 3 else y[None] for y in (rows, C, k))
        C, k = C.astype(rows.dtype, copy=False), tap("index_keys", k.astype(rows.dtype, copy=False))
        at = np.arange(rows.shape[1]) if positions is None else positions
        I = self._scores(rows, C, k, at, tap)
        seen = _visible(I.shape, visibility)
        I = tap("index_visible", np.where(seen, I, I.dtype.type(-np.inf)))
        return np.asarray(tap("key_indices", largest(I, seen, self.top_k)[:, None]))

    def _scores(self, x: Array, latents: Array, k: Array, at: ArrayLike, tap: Tap) -> Array:
        """Return the index scores (B, Lq, Lk) of all pairs."""
        Hi, Di = self.num_heads, self.rope.head_dim
        q = product(latents, self._weight("W_iq", x)).reshape(*x.shape[:2], Hi, Di)
        q = tap("index_queries", self.rope.rotate(q.swapaxes(1, 2), at))
        w = product(x, self._weight("W_iw", x)) * x.dtype.type(Hi**-0.5)
        w = tap("index_weights", w)
        with np.errstate(all="ignore"):
            S = tap("index_products", q @ k[:, None].swapaxes(-1, -2) * x.dtype.type(Di**-0.5))
            S = tap("index_relu", np.maximum(S, 0))
            each = w.swapaxes(1, 2)[..., None] * S
        return np.asarray(tap("index_scores", each.sum(axis=1)))

    def _weight(self, name: str, x: Array) -> Array:
        weight: Array = self.weights[name].astype(x.dtype, copy=False)
        return weight


def largest(I: Array, seen: Array, top_k: int) -> NDArray[np.int32]:
    """Return the indices of the ``top_k`` largest scores of each row, best first.

    ``I`` (..., Lk) are the scores; where ``seen`` (..., Lk) is False, a key is not chosen. Of equal
    scores, the lower index comes first. -1 fills rows with fewer keys.

    >>> largest(np.array([0.0, 5.0, 0.0, 7.0]), np.array([True, True, True, False]), 3)
    array([1, 0, 2], dtype=int32)
    """
    scores = np.where(np.isnan(I), np.inf, np.maximum(I, np.finfo(I.dtype).min))
    order = np.argsort(np.where(seen, -scores, np.inf), axis=-1, kind="stable")[..., :top_k]
    is_seen = np.take_along_axis(np.broadcast_to(seen, I.shape), order, axis=-1)
    return np.where(is_seen, order, NONE).astype(np.int32)


def _visible(shape: tuple[int, ...], visibility: Any) -> NDArray[np.bool_]:
    """Return the mask (B, Lq, Lk) that is True where the options hide no key."""
    if uses(visibility.get("mask_mod"), 1) and visibility.get("mask_mod") is not None:
        raise ValueError(
            f"{name_of('mask_mod')} uses h, but an indexer picks the same keys for all heads"
        )
    B, Lq, Lk = shape
    q, k = (stand_in((B, 1, L, 1), np.float32) for L in (Lq, Lk))
    problem = Problem.of(q, k, k, **visibility)
    seen = problem.visible(slice(0, Lq), slice(0, Lk))
    return np.broadcast_to(seen, (B, 1, Lq, Lk))[:, 0]
