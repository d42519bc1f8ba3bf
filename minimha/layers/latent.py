"""Multi-head latent attention: the keys and values of all heads come from one vector per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from minimha.api import attention
from minimha.equations.arguments import (
    as_floating,
    common_dtype,
    compute_dtype,
    flag,
    integer,
    name_of,
    number,
)
from minimha.equations.arrays import like
from minimha.equations.option_types import AttentionOptions
from minimha.equations.tap import Tap, no_tap, renamed, safe_tap
from minimha.layers.cache import cached_dtype
from minimha.layers.indexer import LightningIndexer, Visibility
from minimha.layers.linear import product
from minimha.layers.norms import rms_norm
from minimha.layers.projections import as_weights
from minimha.layers.rope import RoPE

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]

REQUIRED = ("W_dkv", "g_kv", "W_ukv", "W_o")
WEIGHTS = (*REQUIRED, "W_q", "W_dq", "g_q", "W_uq", "b_dq", "b_dkv", "b_o")


class LatentCache:
    """A cache for ``LatentAttention``: a latent of width C and a rotated key of width R per token.

    If the layer has an indexer, its key of width Di follows in each token's row.

    Parameters
    ----------
    batch, capacity, width : int
        B, the largest number of tokens, and the layer's ``cached_width``.
    dtype : float16, bfloat16, float32 or float64, default float32
        The dtype of the latents and keys.

    Raises
    ------
    TypeError, ValueError
        A size is not a positive integer, or the dtype is not listed above.
    """

    def __init__(
        self, batch: int, capacity: int, width: int, dtype: DTypeLike = np.float32
    ) -> None:
        shape = [integer(*size) for size in (("batch", batch), ("capacity", capacity))]
        self._rows = np.zeros((*shape, integer("width", width)), cached_dtype(dtype))
        self.length = 0

    @property
    def rows(self) -> Array:
        """The cached latents and keys, a read-only view of shape (B, length, width)."""
        rows = self._rows[:, : self.length]
        rows.flags.writeable = False
        return rows

    def append(self, rows: Array) -> None:
        """Append the rows (B, L, width) of L tokens; raise ValueError if they do not fit."""
        B, capacity, width = self._rows.shape
        if rows.ndim != 3 or (rows.shape[0], rows.shape[2]) != (B, width):
            raise ValueError(f"rows have shape {rows.shape}: expected ({B}, L, {width})")
        if rows.dtype != self._rows.dtype:
            raise TypeError(f"rows have dtype {rows.dtype} but the cache has {self._rows.dtype}")
        stop = self.length + rows.shape[1]
        if stop > capacity:
            raise ValueError(
                f"{rows.shape[1]} tokens after {self.length} exceed capacity={capacity}; nothing "
                f"was written"
            )
        self._rows[:, self.length : stop] = rows
        self.length = stop

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each batch entry so far, (B,): the position of the next one."""
        return np.full(len(self._rows), self.length)


class LatentAttention:
    """A multi-head latent attention layer: keys and values come from one latent c per token.

    The latent c = norm(x W_dkv) and a rotated key k_R are shared by all heads; a cache stores only
    these two. Head h has the keys [c W_uk[h], k_R] and the values c W_uv[h]. The output is
    concat(head_0, …) W_o.

    The unrotated part of a score is q · (c W_uk[h]) = (q W_uk[h]ᵀ) · c. The *absorbed* form
    therefore multiplies queries by W_ukᵀ, and the means of latents by W_uv. It has one key/value
    head of width C + R, and does not compute the keys and values of the heads.

    Axes: ``B`` batch, ``L`` tokens, ``E`` model width, ``H`` heads, ``C`` width of a latent, ``Cq``
    width of a query's latent, ``D`` unrotated width, ``R`` rotated width, ``Dv`` value width.

    Parameters
    ----------
    parameters : mapping of str to array_like
        W_dkv (E, C + R); g_kv (C,); W_ukv (C, H · (D + Dv)), the columns of each head's key, then
        its value; W_o (H · Dv, E); and either W_q (E, H · (D + R)) or W_dq (E, Cq), g_q (Cq,) and
        W_uq (Cq, H · (D + R)). Biases b_dq, b_dkv and b_o are optional. All are used as x @ W + b.
    num_heads : int
        H.
    rope : RoPE
        The rotation of the shared key, and of the last R numbers of each query.
    scale : float, optional
        The factor of the scores. Default is 1/√(D + R).
    epsilon : float, default 1e-6
        The ε that the RMS norms add to the mean square.
    indexer : LightningIndexer, optional
        Picks the keys to which each query attends, from x and the query's latent, as in
        DeepSeek-V3.2. It needs W_dq. Default is to attend to all keys.

    Attributes
    ----------
    cached_width : int
        C + R, and with an indexer Di more.

    Raises
    ------
    TypeError, ValueError
        A weight is missing, unknown or of a wrong shape.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 (absorbed form: after equation 13), appendix C.

    Examples
    --------
    >>> weights = {"W_q": np.ones((2, 4)), "W_dkv": np.ones((2, 3)), "g_kv": np.ones(1),
    ...            "W_ukv": np.ones((1, 4)), "W_o": np.ones((2, 2))}
    >>> layer = LatentAttention(weights, num_heads=1, rope=RoPE(2))
    >>> layer([[1.0, 0.0], [0.0, 1.0]], is_causal=True).round(4)
    array([[2., 2.],
           [2., 2.]])
    """

    def __init__(
        self,
        parameters: Mapping[str, ArrayLike],
        *,
        num_heads: int,
        rope: RoPE,
        scale: float | None = None,
        epsilon: float = 1e-6,
        indexer: LightningIndexer | None = None,
    ) -> None:
        self.weights = {name: as_weights(name, value) for name, value in parameters.items()}
        self.num_heads, self.rope = integer("num_heads", num_heads), rope
        self.epsilon = number("epsilon", epsilon, low=0)
        self._check_names()
        W_dkv, W_o = self._matrix("W_dkv"), self._matrix("W_o")
        W_q = self._matrix("W_q" if "W_q" in self.weights else "W_uq")
        self.d_model, kept_width = W_dkv.shape
        self.latent_dim, self.indexer = kept_width - rope.head_dim, indexer
        self.cached_width = kept_width + (indexer.rope.head_dim if indexer else 0)
        self.head_dim = W_q.shape[1] // self.num_heads - rope.head_dim
        self.value_dim = W_o.shape[0] // self.num_heads
        for name, expected in self._shapes(W_o.shape[1]).items():
            if name in self.weights and self.weights[name].shape != expected:
                raise ValueError(
                    f"{name_of(name)} has shape {self.weights[name].shape}: expected {expected} "
                    f"with H={num_heads}, R={rope.head_dim} and the other weights"
                )
        if indexer is not None:
            self._check_indexer(indexer)
        self.dtype = common_dtype({name: array.dtype for name, array in self.weights.items()})
        width = self.head_dim + rope.head_dim
        self.scale = float(width**-0.5) if scale is None else number("scale", scale)

    def __call__(
        self,
        x: ArrayLike,
        *,
        positions: ArrayLike | None = None,
        cache: LatentCache | None = None,
        is_absorbed: bool | None = None,
        return_key_indices: bool = False,
        tap: Tap = no_tap,
        **options: Unpack[AttentionOptions],
    ) -> Any:
        """Return the layer's output for the tokens ``x``, which follow the cached tokens.

        Parameters
        ----------
        x : array_like of shape (L, E) or (B, L, E)
        positions : array_like of shape (L,) or (B, L), int, optional
            The tokens' positions. Default is 0, 1, …, or with a cache its length, length + 1, ….
        cache : LatentCache, optional
            Earlier tokens; the call appends those of x. Attention is then causal.
        is_absorbed : bool, optional
            Whether to use the absorbed form. Default is the form with fewer multiplications. Per
            head, for Lq queries and Lk keys, the absorbed form needs Lq · Lk · (2 C - D - Dv) more
            multiplications in the attention, and (Lk - Lq) · C · (D + Dv) fewer in projections.
            With DeepSeek's sizes, it is the default if a call has at most 170 tokens after a long
            prompt.
        return_key_indices : bool, default False
            Whether to return the indices of the picked keys too, which other layers may use.
        tap : callable ``tap(name, value) -> value``, optional
            Receives x, the steps of the indexer, the latents, every intermediate of the attention,
            concat, W_o, b_o and output.
        **options
            The options of ``minimha.attention``, except scale and return_lse. With a cache,
            is_causal and q_offset are not options either. ``key_indices``, such as those of another
            layer, replace the indexer's.

        Returns
        -------
        output : array of shape (L, E) or (B, L, E)
        key_indices : ndarray of shape (B, 1, L, K), int32, or None; if ``return_key_indices``
            The indices that the attention used, as ``LightningIndexer`` returns them. None if it
            used all keys.

        Raises
        ------
        TypeError, ValueError
            An array does not fit the layer or the cache, or an option does not fit the arrays.
        """
        if "return_lse" in options:
            raise TypeError("return_lse is no option of a layer: its heads are mixed")
        tokens = as_floating("x", x)
        if tokens.ndim not in (2, 3) or tokens.shape[-1] != self.d_model:
            raise ValueError(
                f"{name_of('x')} has shape {tokens.shape}: expected (L, E) or (B, L, E) with "
                f"E={self.d_model}"
            )
        dtype = common_dtype({"x": tokens.dtype, "the layer": self.dtype})
        tap = safe_tap(tap)
        y = tap("x", tokens.astype(compute_dtype(dtype), copy=False))
        rows = y if y.ndim == 3 else y[None]
        seen = 0 if cache is None else cache.length
        at = np.arange(seen, seen + rows.shape[1]) if positions is None else positions
        (q, latents), kept = self._queries(rows, at), self._kept(rows, at)
        if cache is not None:
            if "is_causal" in options or "q_offset" in options:
                raise TypeError("is_causal and q_offset are no options with a cache: it sets both")
            cache.append(kept.astype(dtype, copy=False))
            kept = cache.rows.astype(y.dtype, copy=False)
            options["is_causal"], options["q_offset"] = True, seen
        if is_absorbed is None:
            is_absorbed = self._is_cheaper_absorbed(q.shape[2], kept.shape[1])
        attend = self._absorbed if flag("is_absorbed", is_absorbed) else self._expanded
        has_indices = flag("return_key_indices", return_key_indices)
        try:
            kept = self._picking(rows, latents, kept, at, tap, options)
            heads = attend(q, kept, tap, options)
        except Exception:
            if cache is not None:
                cache.length = seen
            raise
        width = self.num_heads * self.value_dim
        concat = tap("concat", heads.swapaxes(1, 2).reshape(*rows.shape[:2], width))
        output = tap("output", self._linear("W_o", "b_o", concat, tap))
        output = output if y.ndim == 3 else output[0]
        result = like(x, output.astype(dtype, copy=False))
        return (result, options.get("key_indices")) if has_indices else result

    def _picking(
        self, x: Array, latents: Array, kept: Array, at: ArrayLike, tap: Tap, options: Any
    ) -> Array:
        """Add ``key_indices`` to ``options`` if absent; return ``kept`` without indexer's keys."""
        kept, keys = np.split(kept, [self.latent_dim + self.rope.head_dim], axis=-1)
        if self.indexer is not None and options.get("key_indices") is None:
            hiding = {name: y for name, y in options.items() if name in Visibility.__annotations__}
            given: Any = {"keys": keys, "positions": at, "tap": tap, **hiding}
            options["key_indices"] = self.indexer(x, latents, **given)
        return kept

    def _is_cheaper_absorbed(self, Lq: int, Lk: int) -> bool:
        """Return whether the absorbed form needs fewer products for Lq queries and Lk keys."""
        expanded, absorbed = self.head_dim + self.value_dim, 2 * self.latent_dim
        return bool(Lq * Lk * (absorbed - expanded) < (Lk - Lq) * self.latent_dim * expanded)

    def _queries(self, x: Array, at: ArrayLike) -> tuple[Array, Array]:
        """Return queries (B, H, L, D + R), whose last R numbers are rotated, and their latents."""
        latents = x
        if "W_dq" in self.weights:
            latents = self._normed(self._linear("W_dq", "b_dq", x), "g_q")
            q = self._linear("W_uq", None, latents)
        else:
            q = self._linear("W_q", None, x)
        q = q.reshape(*q.shape[:2], self.num_heads, self.head_dim + self.rope.head_dim)
        q = q.swapaxes(1, 2)
        parts = q[..., : self.head_dim], self.rope.rotate(q[..., self.head_dim :], at)
        return np.concatenate(parts, axis=-1), latents

    def _kept(self, x: Array, at: ArrayLike) -> Array:
        """Return latents, rotated key and the indexer's key, (B, L, width), for a cache."""
        y = self._linear("W_dkv", "b_dkv", x)
        latents = self._normed(y[..., : self.latent_dim], "g_kv")
        rotated = self.rope.rotate(y[:, None, :, self.latent_dim :], at)[:, 0]
        keys = [] if self.indexer is None else [self.indexer.keys(x, at)]
        return np.concatenate([latents, rotated, *keys], axis=-1)

    def _expanded(self, q: Array, kept: Array, tap: Tap, options: Any) -> Array:
        """Return the heads' outputs (B, H, L, Dv), from the keys and values of every head."""
        c, k_R = np.split(tap("latents_and_key", kept), [self.latent_dim], axis=-1)
        width = self.head_dim + self.value_dim
        both = self._linear("W_ukv", None, c).reshape(*c.shape[:2], self.num_heads, width)
        k, v = np.split(both.swapaxes(1, 2), [self.head_dim], axis=-1)
        shared = np.broadcast_to(k_R[:, None], (*k.shape[:3], k_R.shape[-1]))
        k = np.concatenate([k, shared], axis=-1)
        inner = renamed(tap, q="q_rotated", k="k_rotated", output="head_output")
        return np.asarray(attention(q, k, v, scale=self.scale, tap=inner, **options))

    def _absorbed(self, q: Array, kept: Array, tap: Tap, options: Any) -> Array:
        """Return the heads' outputs (B, H, L, Dv), in the absorbed form."""
        W = self.weights["W_ukv"].astype(kept.dtype, copy=False)
        width = self.head_dim + self.value_dim
        of_heads = [W[:, h * width : (h + 1) * width] for h in range(self.num_heads)]
        parts_of_W = slice(None, self.head_dim), slice(self.head_dim, None)
        W_uk, W_uv = ([X[:, part] for X in of_heads] for part in parts_of_W)
        absorbed = _by_head(q[..., : self.head_dim], [X.T for X in W_uk])
        parts = absorbed, q[..., self.head_dim :]
        k = kept[:, None]
        inner = renamed(
            tap, q="q_absorbed", k="latents_and_key", v="latents", output="mean_latents"
        )
        means = attention(
            np.concatenate(parts, axis=-1), k, k[..., : self.latent_dim], scale=self.scale,
            tap=inner, **options,
        )  # fmt: skip
        return np.asarray(tap("head_output", _by_head(means, W_uv)))

    def _normed(self, x: Array, gain: str) -> Array:
        return rms_norm(x, self.weights[gain].astype(x.dtype, copy=False), self.epsilon)

    def _linear(self, W: str, b: str | None, x: Array, tap: Tap = no_tap) -> Array:
        y = product(x, tap(W, self.weights[W].astype(x.dtype, copy=False)))
        bias = None if b is None else self.weights.get(b)
        return np.asarray(y if bias is None else y + tap(str(b), bias.astype(x.dtype, copy=False)))

    def _shapes(self, output_dim: int) -> dict[str, tuple[int, ...]]:
        E, H, C, R = self.d_model, self.num_heads, self.latent_dim, self.rope.head_dim
        Cq = self._matrix("W_dq").shape[1] if "W_dq" in self.weights else 0
        q, v = H * (self.head_dim + R), H * self.value_dim
        if C < 1 or self.head_dim < 1:
            raise ValueError(f"rope has R={R}, which leaves no width for latents or queries")
        return {
            "W_dkv": (E, C + R), "b_dkv": (C + R,), "g_kv": (C,),
            "W_ukv": (C, H * self.head_dim + v), "W_q": (E, q), "W_dq": (E, Cq), "b_dq": (Cq,),
            "g_q": (Cq,), "W_uq": (Cq, q), "W_o": (v, output_dim), "b_o": (output_dim,),
        }  # fmt: skip

    def _matrix(self, name: str) -> Array:
        array: Array = self.weights[name]
        if array.ndim != 2:
            raise ValueError(f"{name_of(name)} has shape {array.shape}: expected 2 axes")
        return array

    def _check_indexer(self, indexer: LightningIndexer) -> None:
        if "W_dq" not in self.weights:
            raise ValueError(
                "indexer is given with W_q: expected W_dq, g_q and W_uq, from whose "
                "latents it computes its queries"
            )
        for name, width in (("W_iq", self._matrix("W_dq").shape[1]), ("W_ik", self.d_model)):
            if len(indexer.weights[name]) != width:
                raise ValueError(
                    f"the indexer's {name} has {len(indexer.weights[name])} rows: expected "
                    f"{width}, as the layer's other weights"
                )

    def _check_names(self) -> None:
        queries = ("W_q",) if "W_q" in self.weights else ("W_dq", "g_q", "W_uq")
        for name in (*REQUIRED, *queries):
            if name not in self.weights:
                raise ValueError(f"{name_of(name)} is missing")
        for name in self.weights:
            if name not in WEIGHTS or (queries == ("W_q",) and name in ("W_dq", "g_q", "W_uq")):
                raise ValueError(
                    f"{name} is no weight of this layer, which has "
                    f"{', '.join((*REQUIRED, *queries))} and biases"
                )


def _by_head(x: Array, matrices: Sequence[Any]) -> Array:
    """Multiply x (B, H, L, ·) by one matrix for each head."""
    return np.stack([product(x[:, h], W) for h, W in enumerate(matrices)], axis=1)
