"""Convert arrays to dask arrays, and check that their chunks fit each other."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from minimha.equations.arguments import name_of, rectangular
from minimha.equations.arrays import library_of
from minimha.equations.problem import Problem


def as_dask(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Convert q, k and v to dask arrays; arrays of other libraries get chunks like those of k."""
    k, v, q = (_readable(name, x) for name, x in (("k", k), ("v", v), ("q", q)))
    if library_of(k) != "dask":
        k = da.from_array(k, chunks=(*getattr(k, "chunks", k.shape)[:-1], -1))
    if library_of(v) != "dask":
        v = da.from_array(v, chunks=_like(v, k, (0, 1, 2)))
    if library_of(q) != "dask":
        q = da.from_array(q, chunks=_like(q, k, (0, 1)))
    return q, k, v


def check(arrays: dict[str, Any]) -> None:
    """Raise ValueError if the chunks of the 4-D arrays q, k and v do not fit each other."""
    q, k, v = (arrays[name] for name in "qkv")
    Q, K, V = map(name_of, "qkv")
    for name, x in arrays.items():
        if x.numblocks[3] > 1:
            raise ValueError(
                f"{name_of(name)} is chunked along its last axis, {x.chunks[3]}: expected one "
                f"chunk, since a score is a product over this axis; use .rechunk({{-1: -1}})"
            )
    for axis, title in ((0, "B"), (1, "Hkv"), (2, "Lk")):
        if v.chunks[axis] != k.chunks[axis]:
            raise ValueError(
                f"{V} is chunked along {title} as {v.chunks[axis]}, but {K} as {k.chunks[axis]}: "
                f"every chunk of keys needs the chunk of its values"
            )
    if q.chunks[0] != k.chunks[0]:
        raise ValueError(
            f"{Q} is chunked along B as {q.chunks[0]}, but {K} as {k.chunks[0]}: rechunk one as "
            f"the other"
        )
    group = q.shape[1] // k.shape[1]
    expected = tuple(group * n for n in k.chunks[1])
    if q.chunks[1] != expected:
        raise ValueError(
            f"{Q} is chunked along H as {q.chunks[1]}, but {K} along Hkv as {k.chunks[1]}: "
            f"expected {expected}, the query heads of each chunk of key/value heads"
        )


def check_striped(problem: Problem) -> None:
    """Raise ValueError for options that cannot be combined with stripes."""
    for name in problem.functions:
        raise ValueError(
            f"{name_of(name)} is given with stripes: expected tokens in their original order, "
            f"since functions are called for neighbouring queries and keys"
        )
    if problem.alibi_slopes is not None and problem.right != 0:
        raise ValueError(
            f"{name_of('alibi_slopes')} with stripes needs is_causal=True: among keys on both "
            f"sides of a query the distances in a pair of stripes are not those of any q_offset; "
            f"leave the tokens in their order"
        )
    if (problem.q_offset != problem.q_offset[:1]).any():
        raise ValueError(
            f"{name_of('q_offset')} is {problem.q_offset.tolist()}: with stripes, expected one "
            f"integer for the whole batch"
        )


def over_scores(name: str, mask: Any, q: Any, k: Any) -> Any:
    """Convert a mask or bias to a 4-D dask array whose chunks fit those of the scores."""
    mask = mask if library_of(mask) == "dask" else rectangular(name, mask)
    mask = mask[(None,) * (4 - mask.ndim)]
    sizes = (*q.chunks[:3], k.chunks[2])
    fitting = [(1,) if n == 1 else size for n, size in zip(mask.shape, sizes, strict=True)]
    if isinstance(mask, np.ndarray):
        return da.from_array(mask, chunks=tuple(fitting))
    return mask.rechunk(tuple(fitting))


def spans(name: str, sizes: tuple[int, ...], stripes: int = 1) -> list[slice]:
    """Return, for each chunk of an axis, the slice of its tokens' positions before ``striped``.

    Raises ValueError if a chunk is in two stripes.

    >>> spans("k", (2, 3))
    [slice(0, 2, None), slice(2, 5, None)]
    >>> spans("k", (2, 1, 2), stripes=2)  # 0 2, 4 and 1 3
    [slice(0, 4, 2), slice(4, 6, 2), slice(1, 5, 2)]
    """
    total, found, stripe, start = sum(sizes), [], 0, 0
    for size in sizes:
        while stripe < stripes - 1 and start == len(range(stripe, total, stripes)):
            stripe, start = stripe + 1, 0
        length = len(range(stripe, total, stripes))
        if start + size > length:
            raise ValueError(
                f"{name_of(name)} has chunks {sizes} of {stripes} stripes: expected chunks that "
                f"are in one stripe each, and the stripe {stripe} has {length} tokens; see striped"
            )
        first, stop = (stripe + stripes * n for n in (start, start + size))
        found.append(slice(first, stop, stripes if stripes > 1 else None))
        start += size
    return found


def _readable(name: str, x: Any) -> Any:
    """Return ``x`` as a dask, zarr or NumPy array; raise ValueError if chunk sizes are unknown."""
    if library_of(x) == "zarr":
        return x
    if library_of(x) != "dask":
        return rectangular(name, x)
    if any(np.isnan(size) for axis in x.chunks for size in axis):
        raise ValueError(
            f"{name_of(name)} has chunks of unknown sizes: call its compute_chunk_sizes() first"
        )
    return x


def _like(x: Any, k: Any, axes: tuple[int, ...]) -> Any:
    """Return chunks for ``x``: like k along ``axes`` (of 4) if the sizes match, else one chunk."""
    sizes = [(n,) for n in x.shape]
    for axis in axes:
        at = axis - 4
        if x.ndim != k.ndim or -at > x.ndim:
            continue
        group, rest = divmod(x.shape[at], max(1, k.shape[at]))
        if rest == 0 and (group == 1 or axis == 1):
            sizes[at] = tuple(group * n for n in k.chunks[at])
    return tuple(sizes)
