"""Key/value caches in pages: sequences take pages from one pool, share them and return them.

A cache with space for the longest sequence wastes most of it, and cannot share a prompt between
sequences. Here a sequence takes a page when it needs one. Several sequences with the same prefix
share pages. A shared page is copied when one of its sequences writes to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from minimha.equations.arguments import as_integers, counted, integer
from minimha.layers.cache import Array, CausalCache, Integers, cached_dtype


class PagePool:
    """A pool of pages with keys and values, for the caches of many sequences.

    Parameters
    ----------
    num_pages, num_kv_heads, page_size, head_dim : int
        ``num_kv_heads`` is Hkv, ``head_dim`` D; ``page_size`` counts tokens. Decoding with pages
        of 256 tokens is as fast as with one array; with pages of 16 it takes about twice as long.
    value_dim : int, optional
        Dv. Default is D.
    dtype : float16, bfloat16, float32 or float64, default float32

    Attributes
    ----------
    k : ndarray of shape (num_pages, Hkv, page_size, D)
    v : ndarray of shape (num_pages, Hkv, page_size, Dv)

    Raises
    ------
    TypeError, ValueError
        A size is not a positive integer, or the dtype is another.
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
        self.k = np.zeros((*shape, D), cached_dtype(dtype))
        self.v = np.zeros((*shape, Dv), self.k.dtype)
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
        """Take a free page and return its number; raise IndexError if there is none."""
        page = self._free.pop()
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add one user of ``page``: a sequence that shares it."""
        self._users[page] += 1

    def num_users(self, page: int) -> int:
        """Return the number of sequences that use ``page``."""
        return int(self._users[page])

    def give_back(self, page: int) -> None:
        """Remove one user of ``page``; a page without users is free."""
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)


class PagedKVCache(CausalCache):
    """A cache of keys and values for causal attention, in pages of a pool.

    It can replace a ``KVCache``, also in a layer, but has no window, and accepts neither
    ``attn_mask`` nor ``attn_bias``.

    Parameters
    ----------
    pool : PagePool
    batch : int, default 1
        B, the number of sequences.

    Attributes
    ----------
    lengths : ndarray of shape (B,), int64
        The number of tokens of each sequence: the position of the next token. A copy.
    block_table : ndarray of shape (B, pages), int64
        The pages of each sequence, filled up with -1. A copy.

    References
    ----------
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023, sections 4.2 to 4.4.

    Examples
    --------
    Two answers share a prompt of three tokens, and the page that the prompt fills.

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
        """The pages of each sequence, (B, pages), filled up with -1."""
        table = np.full((len(self._pages), max(map(len, self._pages), default=0)), -1)
        for row, pages in zip(table, self._pages, strict=True):
            row[: len(pages)] = pages
        return table

    def undo(self) -> None:
        """Remove the last chunk and give back its pages, so that another chunk can replace it."""
        super().undo()
        self._give_back(self._lengths)

    def fork(
        self, length: ArrayLike | None = None, entries: ArrayLike | None = None
    ) -> PagedKVCache:
        """Return a cache of new sequences that share the pages of these sequences.

        A shared page is copied when one of its sequences writes to it.

        Parameters
        ----------
        length : int or array_like of shape (n,), int, optional
            The number of tokens at the start of the new sequences. Default is all.
        entries : array_like of shape (n,), int, optional
            For each of the n new sequences, the sequence that it continues: ``[0, 0, 0]`` are three
            answers to one prompt. Default is every sequence once.

        Raises
        ------
        TypeError, ValueError
            ``length`` or ``entries`` are not integers in range.
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
        """Give back all pages; the sequences are then empty."""
        self._lengths = np.zeros_like(self._lengths)
        self._chunk = self._lengths, 0
        self._give_back(self._lengths)

    def _stored(self) -> tuple[Array, Array]:
        return self.pool.k, self.pool.v

    def _write(self, k: Array, v: Array, added: Integers) -> None:
        stops = self._lengths + added
        self._check_free(stops)
        for b, (start, stop) in enumerate(zip(self._lengths.tolist(), stops.tolist(), strict=True)):
            self._make_writable(b, start, stop)
            pages, rows = np.divmod(np.arange(start, stop), self.pool.page_size)
            at = np.array(self._pages[b], np.int64)[pages]
            self.pool.k[at, :, rows] = k[b, :, : stop - start].swapaxes(0, 1)
            self.pool.v[at, :, rows] = v[b, :, : stop - start].swapaxes(0, 1)

    def _visible(self) -> tuple[Array, Array, dict[str, Any]]:
        return self.pool.k, self.pool.v, {
            "q_offset": self._chunk[0], "kv_lengths": self._lengths,
            "block_table": self.block_table,
        }  # fmt: skip

    def _needed(self, lengths: Integers) -> Integers:
        """Return the number of pages for each of these lengths, (B,)."""
        return -(-lengths // self.pool.page_size)

    def _make_writable(self, b: int, start: int, stop: int) -> None:
        """Give sequence b unshared pages for the tokens from ``start`` to ``stop``."""
        pages, pool = self._pages[b], self.pool
        first = start // pool.page_size
        if start < stop and first < len(pages) and pool.num_users(pages[first]) > 1:
            copy = pool.take()
            pool.k[copy], pool.v[copy] = pool.k[pages[first]], pool.v[pages[first]]
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
