"""The cache of ``flash_attn_with_kvcache``: its table of pages, and checks of new tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.dialects.inputs import heads_first, integers
from minimha.equations.arguments import as_integers, rectangular

Array = NDArray[Any]


class Cache(NamedTuple):
    """A table (B, pages) of the pages of each batch entry, and the number of tokens in a page.

    Without paging, each cache entry is one page.
    """

    table: NDArray[np.int64]  # (B, pages)
    page_size: int

    @property
    def room(self) -> int:
        """The largest number of tokens that the pages of a batch entry can hold."""
        return int(self.table.shape[1] * self.page_size)

    def write(self, kept: Array, new: Array, lengths: NDArray[np.int64]) -> None:
        """Write ``new`` (B, Hkv, L, D) to the array ``kept`` of cached keys or values.

        ``lengths`` (B,) is the number of tokens that precede it in each batch entry.
        """
        pages, rows = np.divmod(lengths[:, None] + np.arange(new.shape[2]), max(1, self.page_size))
        kept[np.take_along_axis(self.table, pages, axis=1), :, rows] = new.swapaxes(1, 2)


def cache_of(
    k: Array, B: int, cache_batch_idx: ArrayLike | None, block_table: ArrayLike | None
) -> Cache:
    """Return the page table of the cached keys ``k``, (entries or pages, Hkv, L, D).

    ``B`` is the number of batch entries; the other arguments are those of
    ``flash_attn_with_kvcache``. Raises TypeError or ValueError for an invalid argument.
    """
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx is given with block_table, which already locates the keys"
            )
        table = as_integers("block_table", block_table, 1 << 64)
        if table.ndim != 2 or len(table) != B:
            raise ValueError(f"block_table has shape {table.shape}: expected (B, pages) with B={B}")
        return Cache(table, k.shape[2])
    name = "q" if cache_batch_idx is None else "cache_batch_idx"
    entries = np.arange(B)
    if cache_batch_idx is not None:
        entries = integers(name, cache_batch_idx, {"B": B})
    wrong = entries[(entries < 0) | (entries >= len(k))]
    if wrong.size:
        raise ValueError(
            f"{name} asks for entry {wrong[0]} of k_cache, which has the entries 0 to {len(k) - 1}"
        )
    return Cache(entries[:, None], k.shape[2])


def new_tokens(
    k: ArrayLike | None, v: ArrayLike | None, k_cache: Any, v_cache: Any, B: int
) -> tuple[Array, Array] | None:
    """Return new keys and values as (B, Hkv, L, D), or None if ``k`` and ``v`` are None.

    Raises TypeError or ValueError if they do not fit the cache.
    """
    if k is None and v is None:
        return None
    if k is None or v is None:
        raise ValueError("k and v go together: every new key needs one value")
    new = {"k": heads_first("k", k), "v": heads_first("v", v)}
    L = new["k"].shape[2]
    for (name, array), given in zip(new.items(), (k_cache, v_cache), strict=True):
        kept = rectangular(f"{name}_cache", given)
        if isinstance(given, (list, tuple)) or not kept.flags.writeable:
            raise TypeError(
                f"{name}_cache cannot be written to: expected a writable array, where the new "
                f"tokens go, and got {type(given).__name__}"
            )
        if array.dtype != kept.dtype:
            raise TypeError(
                f"{name} has dtype {array.dtype} but {name}_cache has {kept.dtype}: convert it "
                f"first, so that no rounding goes unnoticed"
            )
        expected = (B, kept.shape[2], L, kept.shape[3])
        if array.shape != expected:
            B_, Hkv, L_, D = expected
            raise ValueError(
                f"{name} has shape {array.swapaxes(1, 2).shape}: expected (B, L, Hkv, D) = "
                f"({B_}, {L_}, {Hkv}, {D})"
            )
    return new["k"], new["v"]


def cache_lengths(
    value: ArrayLike | None, B: int, room: int, num_new: int, is_written: bool
) -> NDArray[np.int64]:
    """Return ``cache_seqlens`` as (B,), the number of cached tokens of each batch entry.

    ``value`` is the argument ``cache_seqlens``. None means a full cache. Raises ValueError if it is
    None although the call writes new tokens (``is_written``), or if ``num_new`` further tokens
    exceed ``room``.
    """
    if value is None:
        if is_written:
            raise ValueError("k needs cache_seqlens, the positions of the new keys")
        return np.full(B, room)
    lengths = as_integers("cache_seqlens", value)
    if lengths.shape not in ((), (B,)):
        raise ValueError(
            f"cache_seqlens has shape {lengths.shape}: expected one integer, or (B,) = ({B},)"
        )
    if ((lengths < 0) | (lengths + num_new > room)).any():
        new = f" with {num_new} new keys" if num_new else ""
        raise ValueError(
            f"cache_seqlens is {value!r}: expected integers from 0 to {room - num_new}, since the "
            f"cache has room for {room} keys{new}"
        )
    return np.broadcast_to(lengths, B)
