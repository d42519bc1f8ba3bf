"""Check ``key_indices``, the keys that each query picks, and turn them into masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import name_of, rectangular
from minimha.equations.sequences import Sequences

NONE = -1  # an index that picks no key
MOST = 1 << 31  # indices; an index must also be below, to fit into int32


def selection(
    key_indices: ArrayLike | None, q: tuple[int, ...], k: tuple[int, ...],
    sequences: Sequences | None,
) -> NDArray[np.int32] | None:  # fmt: skip
    """Return ``key_indices`` as int32 (B, 1 or Hkv, Lq, K), checked; None if not given.

    ``q`` and ``k`` are the shapes of these arrays. Indices count the keys of a query's sequence.
    Raises TypeError for a wrong dtype, and ValueError for a wrong shape or index.
    """
    if key_indices is None:
        return None
    array, name = rectangular("key_indices", key_indices), name_of("key_indices")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} has dtype {array.dtype}: expected integers, the keys that each query picks"
        )
    full = (1, 1, *array.shape) if array.ndim == 2 else array.shape
    B, Hkv, Lq = q[0], k[1], q[2]
    if len(full) != 4 or any(n not in (1, m) for n, m in zip(full, (B, Hkv, Lq), strict=False)):
        raise ValueError(
            f"{name} has shape {array.shape}: expected (Lq, K), or 4-D and broadcastable to "
            f"(B, Hkv, Lq, K), here ({Lq}, K) or ({B}, {Hkv}, {Lq}, K)"
        )
    if array.size > MOST:
        raise ValueError(f"{name} has {array.size} indices: expected at most 2^31")
    array, room = array.reshape(full), np.full((1, 1, 1, 1), k[2])
    if sequences is not None:
        room = np.repeat(sequences.room, sequences.queries[:, 2]).reshape(B, 1, Lq, 1)
    _check_range(name, array, np.minimum(room, MOST - 1))
    return np.broadcast_to(array.astype(np.int32, copy=False), (B, full[1], Lq, full[3]))


def _check_range(name: str, array: NDArray[Any], room: NDArray[np.int64]) -> None:
    """Raise ValueError unless all indices are from -1 to ``room`` - 1, which broadcasts."""
    if not array.size or (array.min() >= NONE and array.max() < room.min(initial=MOST)):
        return  # without an array of the indices' size
    wrong = np.argwhere((array < NONE) | (array >= room))
    if wrong.size:
        at = tuple(wrong[0].tolist())
        most = int(np.broadcast_to(room, np.broadcast_shapes(array.shape, room.shape))[at]) - 1
        index = np.broadcast_to(array, np.broadcast_shapes(array.shape, room.shape))[at]
        keys = f"or a key from 0 to {most}" if most >= 0 else "since there are no keys"
        raise ValueError(
            f"{name} has {index} for query {at[2]}: expected {NONE} for no key, {keys}"
        )


def picked(key_indices: NDArray[np.int32], keys: slice) -> NDArray[np.bool_]:
    """Return the mask (B, 1 or Hkv, Lq, n), True for each key of the slice that an index names.

    ``n`` is the number of keys in the slice ``keys``, whose step must be 1 or None.
    """
    size = keys.stop - keys.start
    inside = (key_indices >= keys.start) & (key_indices < keys.stop)
    mask = np.zeros((*key_indices.shape[:3], size + 1), bool)  # the last column is for the others
    np.put_along_axis(mask, np.where(inside, key_indices - keys.start, size), True, axis=-1)
    return mask[..., :size]


def within(key_indices: NDArray[np.int32], keys: slice) -> NDArray[np.int32]:
    """Convert indices of all keys to indices within the slice ``keys``; other keys become -1."""
    step, stop = keys.step or 1, MOST if keys.stop is None else keys.stop
    inside = (key_indices >= keys.start) & (key_indices < stop)
    inside &= (key_indices - keys.start) % step == 0
    return np.where(inside, (key_indices - keys.start) // step, NONE).astype(np.int32)
