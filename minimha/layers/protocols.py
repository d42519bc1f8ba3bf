"""Protocols for the rotations and caches that a ``MultiHeadAttention`` accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.option_types import Masks, Scores
from minimha.equations.tap import Tap

if TYPE_CHECKING:
    from typing_extensions import Unpack


@runtime_checkable
class Rotation(Protocol):
    """An object that rotates queries and keys, such as ``minimha.layers.rope.RoPE``."""

    @property
    def head_dim(self) -> int:
        """D, the width of the queries and keys."""

    @property
    def is_dynamic(self) -> bool:
        """True if the angles depend on the length of the sequence."""

    def rotate(self, x: NDArray[Any], positions: ArrayLike, tap: Tap) -> NDArray[Any]:
        """Return ``x`` (..., H, L, D), with each vector rotated by the angles of its position."""


class CacheOptions(Masks, Scores, total=False):
    """Types of the options that a cache passes to ``minimha.attention``."""

    return_lse: bool


class Cache(Protocol):
    """An object that stores keys and values of earlier tokens, such as a ``KVCache``."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens appended so far, which is the position of the next token.

        The shape is (B,), or (1,) if it is the same for all batch entries.
        """

    def append(self, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Append the keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) of L tokens, a chunk."""

    def attend(self, q: NDArray[Any], *, tap: Tap, **options: Unpack[CacheOptions]) -> Any:
        """Return attention of the last chunk's queries (B, H, L, D) over all cached keys."""

    def undo(self) -> None:
        """Remove the last chunk. A layer calls this if ``attend`` raised an error."""
