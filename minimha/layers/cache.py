"""Key/value caches: with a cache, a decode step computes scores only for the new tokens.

Whether tokens are appended at once, in chunks or one by one, the results are those of a full
forward pass over all tokens. An 8-bit cache rounds keys and values first.

Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``L`` tokens of a chunk, ``D`` head
width, ``Dv`` value width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from minimha.api import attention
from minimha.equations.arguments import FLOATING, as_floating, as_integers, integer, name_of
from minimha.equations.arrays import FLOAT8, extension
from minimha.equations.eight_bits import LARGEST, SCALES, is_eight_bit, quantized
from minimha.equations.functions import PARAMETERS
from minimha.equations.tap import Tap, no_tap
from minimha.layers.protocols import CacheOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]
Integers = NDArray[np.int64]

OWN = ("is_causal", "q_offset", "kv_lengths", "window_size")  # options that the cache sets


class CausalCache(ABC):
    """The base class of key/value caches for causal attention."""

    def __init__(self, batch: int) -> None:
        self._lengths: Integers = np.zeros(batch, np.int64)
        self._chunk = self._lengths, 0  # the last chunk's first positions and L

    @property
    def lengths(self) -> Integers:
        """A copy of the number of tokens appended so far to each sequence of the batch, (B,)."""
        return np.array(self._lengths)

    def append(self, k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Append a copy of a chunk's keys and values. An error leaves the cache unchanged.

        Parameters
        ----------
        k : array_like of shape (B, Hkv, L, D), the cache's dtype
        v : array_like of shape (B, Hkv, L, Dv), the cache's dtype
            A cache with an 8-bit dtype accepts k and v of any floating dtype and quantises them.
        lengths : array_like of shape (B,), int, optional
            The number of the chunk's tokens in each sequence, from 0 to L. Later rows are padding
            and are not stored. Default is L for all.

        Raises
        ------
        TypeError
            A dtype differs from the cache's.
        ValueError
            Shapes do not fit each other or the cache, the chunk exceeds the free capacity, or a
            number to be quantised is NaN, infinite or above 2^64.
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
        self._write(*stored_as(arrays, stored[0].dtype, added), added=added)
        self.count(added, L)

    def count(self, added: Integers, L: int) -> None:
        """Count ``added`` tokens (B,) of a chunk of L, whose keys and values are stored already."""
        self._chunk = self._lengths, L
        self._lengths = self._lengths + added

    def undo(self) -> None:
        """Remove the last chunk, so that another chunk can replace it.

        A cache with a window does not restore the tokens that the chunk displaced, since no later
        query needs them. Until the next ``append``, ``attend`` raises ValueError, and ``undo`` does
        nothing.
        """
        self._lengths = self._chunk[0]
        self._chunk = self._lengths, 0

    def attend(self, q: ArrayLike, *, tap: Tap = no_tap, **options: Unpack[CacheOptions]) -> Any:
        """Compute causal attention of the last chunk's queries over all cached keys.

        Parameters
        ----------
        q : array_like of shape (B, H, L, D)
            The queries of the last chunk. The output of padding rows is meaningless.
        tap : callable ``tap(name, value) -> value``, optional
            Receives every intermediate array. With a paged cache, names are like
            ``weights[sequence 0]``.
        **options
            The options of ``minimha.attention``, except is_causal, q_offset, kv_lengths and
            window_size, which the cache sets. The keys of ``attn_mask``, ``attn_bias`` and
            ``key_indices`` are those at ``key_positions`` of a ``KVCache``, or all keys of a paged
            cache.

        Returns
        -------
        output : array of shape (B, H, L, Dv)
        lse : array of shape (B, H, L), if ``return_lse``

        Raises
        ------
        TypeError, ValueError
            Queries do not fit the last chunk, or an option is one that the cache sets. A cache with
            a window refuses ``score_mod`` and ``mask_mod`` too.
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
    def _write(self, *chunk: Array, added: Integers) -> None:
        """Store ``added`` tokens of each batch entry; ``chunk`` is a result of ``stored_as``."""

    @abstractmethod
    def _visible(self) -> tuple[Array, Array, dict[str, Any]]:
        """Return keys and values for ``attention``, and options that give their positions."""

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name in OWN:
            if name in options:
                raise TypeError(f"{name} is no option of attend: the cache decides it")


class KVCache(CausalCache):
    """A key/value cache with contiguous arrays, for causal attention.

    A cache with a ``window`` drops the oldest tokens. Its results are those of a full forward pass
    with ``window_size=(window - 1, 0)``, for any number of tokens. The first query of a chunk of L
    tokens needs the window - 1 tokens before it. A capacity of window + L - 1 is therefore enough,
    or ``window`` if tokens come one by one. A chunk fits if min(length, window - 1) + L is at most
    ``capacity``, where length is the number of tokens appended before. The arrays have twice the
    capacity, so that tokens stay contiguous and rarely move.

    Parameters
    ----------
    batch, num_kv_heads, capacity, head_dim : int
        B, Hkv, the largest number of tokens, and D.
    value_dim : int, optional
        Dv. Default is D.
    dtype : float16, bfloat16, float32, float64, int8 or float8_e4m3fn, default float32
        The dtype of keys and values. With 8 bits, each token and head has a scale in float32 for
        its key and one for its value: the largest magnitude over 127 or 448, or 1 for a row of
        zeros. Quotients are rounded to nearest, ties to even.
    window : int, optional
        The number of tokens that a query attends to, its own included; at most ``capacity``.
        Default is all.

    Attributes
    ----------
    lengths : ndarray of shape (B,), int64
        A copy of the number of tokens appended so far, dropped tokens included. It is also the
        position of the next token.

    Raises
    ------
    TypeError, ValueError
        A size is not a positive integer, the dtype is not listed above, or ``window`` exceeds
        ``capacity``.

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
        shape = (batch, num_kv_heads, room)
        self._arrays = new_arrays(shape, head_dim, value_dim, self.dtype)
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
        return self._arrays[0], self._arrays[1]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Keys, values and, with 8 bits, their scales: (B, Hkv, slots, D), …; not copies."""
        return self._arrays

    def make_room(self, added: Integers) -> Integers:
        """Return the slot (B,) of each sequence's next token, with room for ``added`` (B,) tokens.

        Raises ValueError if they exceed the free capacity.
        """
        self._check_capacity(added)
        stops = self._lengths + added
        if (stops - self._base).max() > self._arrays[0].shape[2]:
            self._slide()
        self._first = np.maximum(self._first, stops - self.capacity)
        return np.asarray(self._lengths - self._base)

    def _write(self, *chunk: Array, added: Integers) -> None:
        for b, (start, count) in enumerate(zip(self.make_room(added), added, strict=True)):
            for array, new in zip(self._arrays, chunk, strict=True):
                array[b, :, start : start + count] = new[b, :, :count]

    def _visible(self) -> tuple[Array, Array, dict[str, Any]]:
        slots = self._slots()
        k, v, *scales = (array[:, :, slots] for array in self._arrays)
        for view in (k, v):
            view.flags.writeable = False  # so that a tap cannot change the cache
        first = self._base + slots.start
        offset: Any = self._chunk[0] - first
        lengths: Any = self._lengths - first
        if (lengths == k.shape[2]).all():
            lengths = None
        if (offset == offset[0]).all():  # with numbers, attention finds the plan of another layer
            offset = int(offset[0])
        return k, v, {
            "window_size": None if self.window is None else (self.window - 1, 0),
            "q_offset": offset, "kv_lengths": lengths,
            **dict(zip(SCALES.values(), scales, strict=False)),
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
        """Return the slice of slots from the first to the last cached token of all sequences."""
        first, stop = (self._first - self._base).min(), (self._lengths - self._base).max()
        return slice(int(first), int(stop))

    def _slide(self) -> None:
        for b, (start, stop) in enumerate(zip(self._first, self._lengths, strict=True)):
            kept = slice(start - self._base[b], stop - self._base[b])
            for array in self._arrays:
                array[b, :, : stop - start] = array[b, :, kept]
        self._base = self._first.copy()

    def _check_capacity(self, added: Integers) -> None:
        """Raise ValueError if a chunk would overwrite keys that its queries attend to."""
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
    if array.dtype != stored.dtype and not is_eight_bit(stored.dtype):
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


def new_arrays(shape: Sequence[int], D: int, Dv: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
    """Return arrays of zeros for keys (*shape, D) and values (*shape, Dv).

    If ``dtype`` has 8 bits, the scales of keys and of values, arrays of ones, follow: both have the
    shape ``shape`` and are float32.
    """
    arrays = np.zeros((*shape, D), dtype), np.zeros((*shape, Dv), dtype)
    if not is_eight_bit(dtype):
        return arrays
    return *arrays, np.ones(shape, np.float32), np.ones(shape, np.float32)


def stored_as(
    arrays: Mapping[str, Array], dtype: np.dtype[Any], added: Integers
) -> tuple[Array, ...]:
    """Return k and v as ``new_arrays`` stores them: in ``dtype``, with scales if it has 8 bits.

    ``added`` (B,) is the number of tokens of each sequence. Later rows are padding and may hold any
    numbers.
    """
    if not is_eight_bit(dtype):
        return tuple(arrays.values())
    is_token = np.arange(arrays["k"].shape[2]) < added[:, None, None]
    (k, k_scale), (v, v_scale) = (
        quantized(name, np.where(is_token[..., None], x, x.dtype.type(0)), dtype)
        for name, x in arrays.items()
    )
    return k, v, k_scale, v_scale


def cached_dtype(value: DTypeLike) -> np.dtype[Any]:
    """Return ``value`` as a NumPy dtype; raise TypeError unless a cache may have it."""
    given, choices = value, (*FLOATING, *LARGEST)
    if isinstance(value, str) and value == FLOAT8:
        value = extension("dtype", FLOAT8)
    try:
        dtype = np.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in choices:
        shown = given if dtype is None else dtype
        raise TypeError(f"dtype is {shown}: expected one of {', '.join(choices)}")
    return dtype
