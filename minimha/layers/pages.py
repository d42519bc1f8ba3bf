"""Paged key/value caches: sequences allocate pages from one pool and can share them.

If each sequence had one array, long enough for the longest sequence, most of the memory would be
wasted, and sequences could not share it. Here, a sequence takes a page only when it needs one.
Sequences with the same prefix can share its pages. A write to a shared page copies it first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from minimha.equations.arguments import as_integers, counted, integer
from minimha.equations.eight_bits import SCALES
from minimha.layers.cache import Array, CausalCache, Integers, cached_dtype, new_arrays


class PagePool:
    """A pool of pages that store the keys and values of many sequences.

    Parameters
    ----------
    num_pages, num_kv_heads, page_size, head_dim : int
        The number of pages, Hkv, the number of tokens per page, and D. Decoding with pages of 256
        tokens is as fast as with one array. With pages of 16 tokens, it takes about twice as long.
    value_dim : int, optional
        Dv. Default is D.
    dtype : float16, bfloat16, float32, float64, int8 or float8_e4m3fn, default float32
        With 8 bits, tokens are quantised as in ``KVCache``.

    Attributes
    ----------
    k : ndarray of shape (num_pages, Hkv, page_size, D)
    v : ndarray of shape (num_pages, Hkv, page_size, Dv)
    scales : tuple of ndarray of shape (num_pages, Hkv, page_size), float32
        k_scale and v_scale if the numbers have 8 bits, else empty.

    Raises
    ------
    TypeError, ValueError
        A size is not a positive integer, or the dtype is not listed above.
    """

    def __init__(
        self,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        sizes = {
            "num_pages": num_pages, "num_kv_heads": num_kv_heads, "page_size": page_size,
            "head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim,
        }  # fmt: skip
        *shape, D, Dv = (integer(name, size) for name, size in sizes.items())
        self.k, self.v, *scales = new_arrays(shape, D, Dv, cached_dtype(dtype))
        self.scales = tuple(scales)
        self._users = np.zeros(num_pages, np.int64)  # the number of sequences that use each page
        self._free = list(range(num_pages))[::-1]

    @property
    def num_free(self) -> int:
        """The number of pages that no sequence uses."""
        return len(self._free)

    @property
    def page_size(self) -> int:
        """The number of tokens per page."""
        return int(self.k.shape[2])

    def take(self) -> int:
        """Take a free page and return its index; raise IndexError if there is none."""
        page = self._free.pop()
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a sequence to the users of ``page``."""
        self._users[page] += 1

    def num_users(self, page: int) -> int:
        """Return the number of sequences that use ``page``."""
        return int(self._users[page])

    def give_back(self, page: int) -> None:
        """Remove a sequence from the users of ``page``; a page without users becomes free."""
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)


class PagedKVCache(CausalCache):
    """A key/value cache for causal attention that is stored in pages of a ``PagePool``.

    It can replace a ``KVCache``, also as the ``cache`` of a layer, but has no window.

    Parameters
    ----------
    pool : PagePool
    batch : int, default 1
        B, the number of sequences.

    Attributes
    ----------
    lengths : ndarray of shape (B,), int64
        A copy of the number of tokens of each sequence, which is the position of its next token.
    block_table : ndarray of shape (B, pages), int64
        A copy of the page numbers of each sequence, padded with -1.

    References
    ----------
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023, sections 4.2 to 4.4.

    Examples
    --------
    Two sequences share a prompt of three tokens, and thus the page that the prompt fills.

    >>> pool = PagePool(num_pages=4, num_kv_heads=1, page_size=2, head_dim=1)
    >>> prompt, x = np.ones((1, 1, 3, 1), np.float32), np.ones((1, 1, 1, 1), np.float32)
    >>> cache = PagedKVCache(pool)
    >>> cache.append(prompt, prompt)
    >>> other = cache.fork()
    >>> other.append(x, 5 * x)
    >>> cache.block_table.tolist(), other.block_table.tolist(), pool.num_free
    ([[0, 1]], [[0, 2]], 1)
    >>> other.attend(x).item()
    2.0
    """

    def __init__(self, pool: PagePool, batch: int = 1) -> None:
        super().__init__(integer("batch", batch))
        self.pool = pool
        self._pages: list[list[int]] = [[] for _ in range(batch)]

    @property
    def block_table(self) -> Integers:
        """The page numbers of each sequence, (B, pages), padded with -1."""
        table = np.full((len(self._pages), max(map(len, self._pages), default=0)), -1)
        for row, pages in zip(table, self._pages, strict=True):
            row[: len(pages)] = pages
        return table

    def undo(self) -> None:
        """Remove the last chunk and free its pages, so that another chunk can replace it."""
        super().undo()
        self._give_back(self._lengths)

    def fork(
        self, length: ArrayLike | None = None, entries: ArrayLike | None = None
    ) -> PagedKVCache:
        """Return a cache of n new sequences, which start as copies of sequences of this cache.

        They share its pages. A write to a shared page copies it first.

        Parameters
        ----------
        length : int or array_like of shape (n,), int, optional
            The number of tokens that each new sequence keeps. Default is all.
        entries : array_like of shape (n,), int, optional
            For each of the n new sequences, the index of the sequence to copy. ``[0, 0, 0]``
            starts three answers to one prompt. Default is every sequence once.

        Raises
        ------
        TypeError, ValueError
            ``length`` or ``entries`` has a value that is not an integer in range.
        """
        B = len(self._pages)
        sources = np.arange(B) if entries is None else as_integers("entries", entries)
        if sources.ndim != 1 or not sources.size or ((sources < 0) | (sources >= B)).any():
            raise ValueError(f"entries is {entries!r}: expected integers from 0 to {B - 1}")
        whole = self._lengths[sources]
        lengths = whole if length is None else as_integers("length", length)
        if lengths.shape not in ((), whole.shape):
            raise ValueError(
                f"length has shape {lengths.shape}: expected one integer, or (n,) = {whole.shape}"
            )
        if ((lengths < 0) | (lengths > whole)).any():
            raise ValueError(
                f"length is {length!r}: expected integers from 0 to the lengths of the sequences, "
                f"{whole.tolist()}"
            )
        other = PagedKVCache(self.pool, len(sources))
        other._lengths = np.broadcast_to(lengths, whole.shape).copy()
        other._chunk = other._lengths, 0
        needed = self._needed(other._lengths).tolist()
        for b, (source, number) in enumerate(zip(sources.tolist(), needed, strict=True)):
            other._pages[b] = self._pages[source][:number]
            for page in other._pages[b]:
                self.pool.share(page)
        return other

    def free(self) -> None:
        """Free all pages; the sequences then have no tokens."""
        self._lengths = np.zeros_like(self._lengths)
        self._chunk = self._lengths, 0
        self._give_back(self._lengths)

    def _stored(self) -> tuple[Array, Array]:
        return self.pool.k, self.pool.v

    def _write(self, *chunk: Array, added: Integers) -> None:
        stops = self._lengths + added
        self._check_free(stops)
        for b, (start, stop) in enumerate(zip(self._lengths.tolist(), stops.tolist(), strict=True)):
            self._make_writable(b, start, stop)
            pages, rows = np.divmod(np.arange(start, stop), self.pool.page_size)
            at = np.array(self._pages[b], np.int64)[pages]
            for array, new in zip(self._arrays(), chunk, strict=True):
                array[at, :, rows] = new[b, :, : stop - start].swapaxes(0, 1)

    def _visible(self) -> tuple[Array, Array, dict[str, Any]]:
        return self.pool.k, self.pool.v, {
            "q_offset": self._chunk[0], "kv_lengths": self._lengths,
            "block_table": self.block_table,
            **dict(zip(SCALES.values(), self.pool.scales, strict=False)),
        }  # fmt: skip

    def _arrays(self) -> tuple[Array, ...]:
        return self.pool.k, self.pool.v, *self.pool.scales

    def _needed(self, lengths: Integers) -> Integers:
        """Return the number of pages for each of ``lengths``, (B,)."""
        return -(-lengths // self.pool.page_size)

    def _make_writable(self, b: int, start: int, stop: int) -> None:
        """Give sequence b unshared pages for the tokens from ``start`` to ``stop``."""
        pages, pool = self._pages[b], self.pool
        first = start // pool.page_size
        if start < stop and first < len(pages) and pool.num_users(pages[first]) > 1:
            copy = pool.take()
            for array in self._arrays():
                array[copy] = array[pages[first]]
            pool.give_back(pages[first])
            pages[first] = copy
        while len(pages) * pool.page_size < stop:
            pages.append(pool.take())

    def _check_free(self, stops: Integers) -> None:
        """Raise ValueError if new pages and copies of shared pages exceed the free pages."""
        needed = 0
        users: dict[int, int] = {}  # page → its users without those that copy it
        for pages, start, stop in zip(self._pages, self._lengths, stops, strict=True):
            needed += max(0, int(self._needed(stop)) - len(pages))
            first = start // self.pool.page_size
            if start < stop and first < len(pages):
                page = pages[first]
                users[page] = users.get(page, self.pool.num_users(page)) - 1
                needed += users[page] > 0
        if needed > self.pool.num_free:
            raise ValueError(
                f"the chunk needs {counted(needed, 'page')} but the pool has "
                f"{self.pool.num_free} free of {len(self.pool.k)}: free a cache first; nothing was "
                f"written"
            )

    def _give_back(self, lengths: Integers) -> None:
        for pages, number in zip(self._pages, self._needed(lengths).tolist(), strict=True):
            for page in pages[number:]:
                self.pool.give_back(page)
            del pages[number:]
