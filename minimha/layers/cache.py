"""Caches of keys and values: a new token costs one row of scores, not a whole forward pass.

A query sees the cached keys that it would see in a full forward pass, at the same positions. A
prompt read at once, a prompt read in chunks and decoding token by token give the same rows.

Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``L`` tokens of a chunk, ``D`` head
width, ``Dv`` value width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from minimha.api import attention
from minimha.equations.arguments import FLOATING, as_floating, as_integers, integer, name_of
from minimha.equations.functions import PARAMETERS
from minimha.equations.tap import Tap, no_tap
from minimha.layers.protocols import CacheOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]
Integers = NDArray[np.int64]

OWN = ("is_causal", "q_offset", "kv_lengths", "window_size")  # options that the cache sets


class CausalCache(ABC):
    """The base class of caches: append a chunk of tokens, then attend with its queries."""

    def __init__(self, batch: int) -> None:
        self._lengths: Integers = np.zeros(batch, np.int64)
        self._chunk = self._lengths, 0  # the last chunk's first positions and L

    @property
    def lengths(self) -> Integers:
        """The number of tokens appended to each batch entry so far, (B,), as a copy."""
        return np.array(self._lengths)

    def append(self, k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Append copies of a chunk's keys and values; an error leaves the cache unchanged.

        Parameters
        ----------
        k : array_like of shape (B, Hkv, L, D), the cache's dtype
        v : array_like of shape (B, Hkv, L, Dv), the cache's dtype
        lengths : array_like of shape (B,), int, optional
            The number of tokens of each batch entry, from 0 to L. Later rows are padding and are
            dropped. Default is L for all.

        Raises
        ------
        TypeError
            A dtype differs from the cache's.
        ValueError
            Shapes do not fit each other or the cache, or the chunk exceeds the free capacity.
        """
        stored = self._stored()
        arrays = {"k": as_floating("k", k), "v": as_floating("v", v)}
        for (name, array), like in zip(arrays.items(), stored, strict=True):
            _check_fits(name, array, len(self._lengths), like)
        L = arrays["k"].shape[2]
        if arrays["v"].shape[2] != L:
            raise ValueError(
                f"{name_of('v')} has L={arrays['v'].shape[2]} but {name_of('k')} has L={L}: every "
                f"key needs one value"
            )
        added = _chunk_lengths(lengths, len(self._lengths), L)
        self._write(**arrays, added=added)
        self._chunk = self._lengths, L
        self._lengths = self._lengths + added

    def undo(self) -> None:
        """Remove the last chunk, so that another chunk can replace it.

        Tokens that a window dropped for this chunk do not return, since no later query sees them.
        Until the next chunk, ``attend`` accepts no queries, and ``undo`` does nothing.
        """
        self._lengths = self._chunk[0]
        self._chunk = self._lengths, 0

    def attend(self, q: ArrayLike, *, tap: Tap = no_tap, **options: Unpack[CacheOptions]) -> Any:
        """Return causal attention of the last chunk's queries over all cached keys.

        Parameters
        ----------
        q : array_like of shape (B, H, L, D)
            Queries of the last chunk. In a ragged chunk, ignore the output of padding rows.
        tap : callable ``tap(name, value) -> value``, optional
            Receives every step of the attention; with pages, names like ``weights[sequence 0]``.
        **options
            Those of ``minimha.attention``, except is_causal, q_offset, kv_lengths and window_size,
            which the cache sets. An ``attn_mask`` or ``attn_bias`` covers the keys at
            ``key_positions``; paged caches accept neither.

        Returns
        -------
        output : array of shape (B, H, L, Dv)
        lse : array of shape (B, H, L), if ``return_lse``

        Raises
        ------
        TypeError, ValueError
            An option is one that the cache sets, queries do not fit the last chunk, or a function
            of positions is given to a cache with a window.
        """
        self._check_options(options)
        L, shape = self._chunk[1], as_floating("q", q).shape
        if len(shape) != 4 or shape[2] != L:
            raise ValueError(
                f"{name_of('q')} has shape {shape}: expected (B, H, L, D) with L={L}, the queries "
                f"of the chunk that was appended last"
            )
        k, v, own = self._visible()
        return attention(q, k, v, tap=tap, is_causal=True, **own, **options)

    @abstractmethod
    def _stored(self) -> tuple[Array, Array]:
        """Return arrays with the dtype, heads and widths of the cached keys and values."""

    @abstractmethod
    def _write(self, k: Array, v: Array, added: Integers) -> None:
        """Store a chunk's keys and values, ``added`` tokens of each batch entry."""

    @abstractmethod
    def _visible(self) -> tuple[Array, Array, dict[str, Any]]:
        """Return keys and values for ``attention``, and the options about their positions."""

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name in OWN:
            if name in options:
                raise TypeError(f"{name} is no option of attend: the cache decides it")


class KVCache(CausalCache):
    """A cache of the keys and values of the tokens so far, for causal attention.

    With ``window`` the oldest tokens are dropped. The results are then those of a full forward pass
    with ``window_size=(window - 1, 0)``, for any number of tokens. A chunk of L tokens fits if
    min(length, window - 1) + L is at most ``capacity``, since its first query needs the window - 1
    tokens before it. A capacity of window + L - 1 is therefore enough, or ``window`` for decoding.
    The arrays have twice the capacity, so that tokens stay contiguous and rarely move.

    Parameters
    ----------
    batch, num_kv_heads, capacity, head_dim : int
        ``capacity`` is the number of tokens that fit; the others are B, Hkv and D.
    value_dim : int, optional
        Dv. Default is D.
    dtype : float16, bfloat16, float32 or float64, default float32
        The dtype of keys and values.
    window : int, optional
        How many tokens a query sees, including its own; at most ``capacity``. Default is all.

    Attributes
    ----------
    lengths : ndarray of shape (B,), int64
        The number of tokens appended so far, including dropped tokens: the position of the next
        token. A copy.

    Raises
    ------
    TypeError, ValueError
        A size is not a positive integer, the dtype is another, or ``window`` exceeds ``capacity``.

    References
    ----------
    Shazeer, "Fast Transformer Decoding", 2019, section 2.4 (incremental attention); Jiang et al.,
    "Mistral 7B", 2023, section 2 (rolling buffer; here it slides).

    Examples
    --------
    >>> x = np.array([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]])
    >>> cache = KVCache(1, 1, capacity=3, head_dim=2, dtype=np.float64)
    >>> cache.append(x[:, :, :2], x[:, :, :2])
    >>> cache.attend(x[:, :, :2]).round(4)
    array([[[[1.    , 0.    ],
             [0.3302, 0.6698]]]])
    >>> cache.append(x[:, :, 2:], x[:, :, 2:])
    >>> bool(np.allclose(cache.attend(x[:, :, 2:]), attention(x, x, x, is_causal=True)[:, :, 2:]))
    True
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: DTypeLike = np.float32,
        window: int | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {
            "batch": batch, "num_kv_heads": num_kv_heads, "capacity": capacity,
            "head_dim": head_dim, "value_dim": value_dim, "window": 1 if window is None else window,
        }  # fmt: skip
        for name, size in sizes.items():
            integer(name, size)
        if window is not None and window > capacity:
            raise ValueError(
                f"window is {window} but capacity is {capacity}: a query sees window tokens, which "
                f"must all be cached"
            )
        super().__init__(batch)
        self.window, self.capacity, self.dtype = window, capacity, cached_dtype(dtype)
        room = capacity if window is None else 2 * capacity
        self._k = np.zeros((batch, num_kv_heads, room, head_dim), self.dtype)
        self._v = np.zeros((batch, num_kv_heads, room, value_dim), self.dtype)
        self._base: Integers = np.zeros(batch, np.int64)  # the position of slot 0
        self._first: Integers = np.zeros(batch, np.int64)  # the oldest token in the cache

    @property
    def key_positions(self) -> Integers:
        """The positions (B, Lk) of the keys that ``attend`` uses, in order; -1 means no key."""
        slots = self._slots()
        positions = self._base[:, None] + np.arange(slots.start, slots.stop)
        is_kept = (self._first[:, None] <= positions) & (positions < self._lengths[:, None])
        return np.asarray(np.where(is_kept, positions, -1), np.int64)

    def _stored(self) -> tuple[Array, Array]:
        return self._k, self._v

    def _write(self, k: Array, v: Array, added: Integers) -> None:
        self._check_capacity(added)
        stops = self._lengths + added
        if (stops - self._base).max() > self._k.shape[2]:
            self._slide()
        for b, (start, count) in enumerate(zip(self._lengths - self._base, added, strict=True)):
            self._k[b, :, start : start + count] = k[b, :, :count]
            self._v[b, :, start : start + count] = v[b, :, :count]
        self._first = np.maximum(self._first, stops - self.capacity)

    def _visible(self) -> tuple[Array, Array, dict[str, Any]]:
        slots = self._slots()
        k, v = self._k[:, :, slots], self._v[:, :, slots]
        for view in (k, v):
            view.flags.writeable = False  # so that a tap cannot change the cache
        first = self._base + slots.start
        return k, v, {
            "window_size": None if self.window is None else (self.window - 1, 0),
            "q_offset": self._chunk[0] - first, "kv_lengths": self._lengths - first,
        }  # fmt: skip

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        for name in PARAMETERS if self.window is not None else ():
            if options.get(name) is not None:  # positions count from the first cached key
                raise ValueError(
                    f"{name} is given to a cache with a window, whose keys are not counted from "
                    f"the first token: expected attn_bias or attn_mask over the cache's "
                    f"key_positions"
                )

    def _slots(self) -> slice:
        """Return the slots from the first to the last cached token of any batch entry."""
        first, stop = (self._first - self._base).min(), (self._lengths - self._base).max()
        return slice(int(first), int(stop))

    def _slide(self) -> None:
        for b, (start, stop) in enumerate(zip(self._first, self._lengths, strict=True)):
            kept = slice(start - self._base[b], stop - self._base[b])
            for array in (self._k, self._v):
                array[b, :, : stop - start] = array[b, :, kept]
        self._base = self._first.copy()

    def _check_capacity(self, added: Integers) -> None:
        """Raise ValueError if a chunk would overwrite keys that its queries see."""
        needed = self._lengths
        if self.window is not None:
            needed = np.minimum(needed, self.window - 1)
        for b in np.flatnonzero(needed + added > self.capacity):
            what = "" if self.window is None else f" that a window of {self.window} still sees"
            held = f", which holds {needed[b]}{what}: together they" if needed[b] else ": they"
            raise ValueError(
                f"{name_of('k')} has {added[b]} tokens for batch entry {b}{held} exceed "
                f"capacity={self.capacity}; nothing was written"
            )


def _check_fits(name: str, array: Array, B: int, stored: Array) -> None:
    _, Hkv, _, width = stored.shape
    axis = "D" if name == "k" else "Dv"
    if array.ndim != 4:
        raise ValueError(f"{name_of(name)} has shape {array.shape}: expected (B, Hkv, L, {axis})")
    given = (array.shape[0], array.shape[1], array.shape[3])
    for letter, got, expected in zip(("B", "Hkv", axis), given, (B, Hkv, width), strict=True):
        if got != expected:
            raise ValueError(
                f"{name_of(name)} has {letter}={got} but the cache has {letter}={expected}: "
                f"expected ({B}, {Hkv}, L, {width}), got {array.shape}"
            )
    if array.dtype != stored.dtype:
        raise TypeError(
            f"{name_of(name)} has dtype {array.dtype} but the cache has {stored.dtype}: convert it "
            f"first, so that no rounding goes unnoticed"
        )


def _chunk_lengths(lengths: ArrayLike | None, B: int, L: int) -> Integers:
    if lengths is None:
        return np.full(B, L, np.int64)
    array, name = as_integers("lengths", lengths), name_of("lengths")
    if array.shape != (B,):
        raise ValueError(f"{name} has shape {array.shape}: expected (B,) = ({B},)")
    if (array < 0).any() or (array > L).any():
        raise ValueError(f"{name} is {lengths!r}: expected integers from 0 to L={L}")
    return array


def cached_dtype(value: DTypeLike) -> np.dtype[Any]:
    """Return ``value`` as a NumPy dtype; TypeError unless it is a floating dtype."""
    try:
        dtype = np.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in FLOATING:
        given = value if dtype is None else dtype
        raise TypeError(f"dtype is {given}: expected one of {', '.join(FLOATING)}")
    return dtype
