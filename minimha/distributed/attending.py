"""Attention for dask arrays: one task per pair of chunks, followed by tasks that merge."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import dask.array as da
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from numpy.typing import NDArray

from minimha import api
from minimha.distributed import chunks
from minimha.equations.arguments import cast, flag, integer
from minimha.equations.eight_bits import SCALES
from minimha.equations.merge import Pair, merge
from minimha.equations.option_types import AttentionOptions
from minimha.equations.parts import (
    PER_SCORE,
    Part,
    alibi_left_out,
    options_of,
    outline,
    placed,
    without_keys,
)
from minimha.equations.problem import Problem

if TYPE_CHECKING:
    from typing_extensions import Unpack

OPTIONS = (
    "left", "right", "q_offset", "kv_lengths", "alibi_slopes", "sinks", "scale", "softcap", "dtype",
    "key_indices",
)  # fmt: skip
FAN_IN = 4  # partial results that one task merges
Key = tuple[Any, ...]


def attention(
    q: Any, k: Any, v: Any, *, stripes: int = 1, return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """Return softmax(scale · Q Kᵀ) V as a lazy dask array, computed in chunks.

    ``.compute()`` computes the result, on a cluster or on one machine. A task ``attend-to-keys``
    computes attention of one chunk of queries over one chunk of keys. Tasks ``merge-parts`` and
    ``merge-output`` merge the results, four at a time. dask's dashboard and progress bars show
    these names. If position, ``kv_lengths`` or ``key_indices`` hide a whole pair of chunks, there
    is no task for it, and the keys are not read. ``.compute(retries=3)`` repeats failed tasks, and
    dask recomputes the results of lost workers. A worker needs only one thread, because the kernels
    start threads.

    ``score_mod`` and ``mask_mod`` receive the indices b, h, i and j of the whole arrays. dask sends
    each function to each worker once: by name if the worker can import it, otherwise with its
    captured values. Each worker finds the blocks that ``mask_mod`` hides. Only the function of a
    ``BlockMask`` is sent.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` head width, ``Dv`` value width. As in ``minimha.attention``, all arrays may have 2 or 3
    axes instead.

    Parameters
    ----------
    q : dask array of shape (B, H, Lq, D)
        D must be in one chunk. An array of another library gets the chunks of k.
    k : dask array of shape (B, Hkv, Lk, D)
        Chunked like q along B. Each chunk along Hkv must have the heads that a chunk of q along H
        uses. A zarr array keeps its chunks, except along D.
    v : dask array of shape (B, Hkv, Lk, Dv)
        Chunked like k.
    stripes : int, default 1
        The ``count`` of ``striped``, if all axes of queries and keys were reordered by it. Each
        chunk must be in one stripe. Only ``key_indices`` keep the original order. Not allowed with
        functions, with offsets that differ within the batch, or with ``alibi_slopes`` unless
        ``is_causal``.
    return_lse : bool, default False
        Whether to return the log-sum-exp of the scores too.
    **options
        Options of ``minimha.attention``, except packed sequences and pages. ``attn_mask`` and
        ``attn_bias`` may be dask arrays.

    Returns
    -------
    output : dask array of shape (B, H, Lq, Dv), the inputs' common dtype, float64 for integers
        Chunked like q.
    lse : dask array of shape (B, H, Lq), float32 or float64, if ``return_lse``

    Raises
    ------
    TypeError, ValueError
        Shapes or options are invalid for ``minimha.attention``, or chunks do not fit each other.
        Errors inside ``score_mod`` and ``mask_mod`` are raised later, by ``.compute()``.

    References
    ----------
    Dao et al., "Flash-Decoding for long-context inference", 2023; Brandon et al., "Striped
    Attention", 2023.

    Examples
    --------
    >>> import dask.array as da
    >>> q, k, v = da.ones((1, 8)), da.ones((1000, 8), chunks=(100, 8)), da.ones((1000, 2))
    >>> attention(q, k, v.rechunk((100, 2)), is_causal=True, q_offset=499).compute()
    array([[1., 1.]])
    """
    given: dict[str, Any] = {**dict(zip("qkv", chunks.as_dask(q, k, v), strict=True)), **options}
    backend = given.pop("backend", "auto")
    api.check_backend(backend)
    for name in SCALES.values():
        if given.get(name) is not None:
            raise TypeError(f"{name} is no option on clusters: give floating k and v")
    problem = outline(given)
    has_lse = flag("return_lse", return_lse)
    if integer("stripes", stripes) > 1:
        chunks.check_striped(problem)
    leading = (0,) * (4 - problem.rank)
    arrays = {name: given[name][(None,) * len(leading)] for name in "qkv"}
    chunks.check(arrays)
    for name in PER_SCORE:
        if given.get(name) is not None:
            arrays[name] = chunks.over_scores(name, given[name], arrays["q"], arrays["k"])
    output, lse = _Graph(arrays, problem, stripes, backend).results()
    return (output[leading], lse[leading]) if has_lse else output[leading]


def attend_to_keys(
    options: dict[str, Any], part: Part, left_out: NDArray[Any] | None, masks: tuple[str, ...],
    functions: dict[str, Callable[..., Any]], q: NDArray[Any], *arrays: NDArray[Any],
) -> Pair:  # fmt: skip
    """Return the output O and log-sum-exp L of a chunk of queries over a chunk of keys and values.

    ``arrays`` are k, v, and the arrays named by ``masks``. ``functions`` get the indices b,
    h, i and j of the whole arrays; ``part`` is the place of these chunks in them. q, O and L have
    the compute dtype, so 16-bit numbers are rounded only once, at the end. ``left_out`` (H,), an
    ALiBi term that the scores omit, is subtracted from L.
    """
    k, v, *given = arrays
    options = options | dict(zip(masks, given, strict=True)) | placed(functions, part)
    O, L = api.attention(q, k, v, **options, return_lse=True)
    return O, L if left_out is None else L - left_out[:, None]


def merge_parts(*parts: Pair) -> Pair:
    """Merge pairs (output, log-sum-exp) over different keys into one pair."""
    return merge(parts)


def merge_output(
    shape: tuple[int, ...], sinks: NDArray[Any] | None, dtypes: tuple[Any, Any], *parts: Pair
) -> Pair:
    """Merge ``parts`` and ``sinks`` into output (of ``shape``) and log-sum-exp, in ``dtypes``."""
    O, L = merge([without_keys(shape, sinks), *parts])
    return cast(O, dtypes[0]), cast(L, dtypes[1])


class _Graph:
    """The tasks of one call; ``problem`` outlines ``arrays``, which are all 4-D."""

    def __init__(
        self, arrays: dict[str, Any], problem: Problem, stripes: int, backend: str
    ) -> None:
        self.arrays, self.problem, self.backend = arrays, problem, backend
        q, k = arrays["q"], arrays["k"]
        self.rows = chunks.spans("q", q.chunks[2], stripes)
        self.keys = chunks.spans("k", k.chunks[2], stripes)
        self.batch, self.heads = (chunks.spans("q", q.chunks[n]) for n in (0, 1))
        options = [getattr(problem, name) for name in OPTIONS]
        self.functions: Any = problem.functions
        self.token = tokenize(arrays, *options, problem.contents, stripes, backend)
        self.tasks: dict[Key, Any] = {}
        self.used: dict[str, Any] = {}  # dask would also compute unused arrays
        if self.functions:  # in one task, so that each worker receives them once
            key = (f"take-functions-{self.token}",)
            self._add(key, partial(dict, self.functions))
            self.functions = key

    def results(self) -> tuple[Any, Any]:
        """Return the output and the log-sum-exp, dask arrays with 4 and 3 axes."""
        q, v = self.arrays["q"], self.arrays["v"]
        dtypes = self.problem.dtype, self.problem.compute
        sizes = (*q.chunks[:3], v.chunks[3])
        merged = f"merge-output-{self.token}"
        for block in product(*map(range, q.numblocks[:3])):
            parts = self._merging(block, self._attending(block))
            shape = tuple(axis[n] for axis, n in zip(sizes, (*block, 0), strict=True))
            sinks = self.problem.sinks
            sinks = None if sinks is None else sinks[self.heads[block[1]]]
            self._add((merged, *block), partial(merge_output, shape, sinks, dtypes), *parts)
        graph = HighLevelGraph.from_collections(merged, self.tasks, list(self.used.values()))
        output, lse = (f"{name}-{self.token}" for name in ("attention", "log-sum-exp"))
        return (
            _picked(graph, merged, 0, output, sizes, dtypes[0]),
            _picked(graph, merged, 1, lse, sizes[:3], dtypes[1]),
        )

    def _attending(self, block: Key) -> list[Key]:
        """Add a task for each chunk of keys visible to ``block``, and return the tasks."""
        b, h, i = block
        masks = tuple(name for name in PER_SCORE if name in self.arrays)
        q = (f"widen-queries-{self.token}", *block)
        found: list[Key] = []
        for j, keys in enumerate(self.keys):
            part = Part(self.batch[b], self.heads[h], self.rows[i], keys)
            options = options_of(self.problem, {}, part)
            if options is None:
                continue
            options["backend"] = self.backend
            blocks = [self._block(n, b, h, j, 0) for n in "kv"]
            blocks += [self._block(n, b, h, i, j) for n in masks]
            found.append((f"attend-to-keys-{self.token}", *block, j))
            left_out = alibi_left_out(self.problem, part)
            attend = partial(attend_to_keys, options, part, left_out, masks)
            self._add(found[-1], attend, self.functions, q, *blocks)
        if found:
            self._add(q, cast, self._block("q", b, h, i, 0), self.problem.compute)
        return found

    def _merging(self, block: Key, parts: list[Key]) -> list[Key]:
        """Add a tree of tasks that merge neighbours; return the tasks for the last merge."""
        level = 0
        while len(parts) > FAN_IN:
            groups = [parts[n : n + FAN_IN] for n in range(0, len(parts), FAN_IN)]
            parts = [(f"merge-parts-{self.token}", *block, level, n) for n in range(len(groups))]
            for key, group in zip(parts, groups, strict=True):
                self._add(key, merge_parts, *group)
            level += 1
        return parts

    def _add(self, key: Key, function: Any, *arguments: Any) -> None:
        self.tasks[key] = (function, *arguments)

    def _block(self, name: str, *indices: int) -> Key:
        """Return the task of one chunk of an array; an axis with a single chunk has index 0."""
        x = self.used[name] = self.arrays[name]
        at = (n if blocks > 1 else 0 for n, blocks in zip(indices, x.numblocks, strict=True))
        return (x.name, *at)


def _picked(
    graph: HighLevelGraph, merged: str, n: int, name: str, sizes: tuple[Any, ...], dtype: Any
) -> Any:
    index = product(*(range(len(axis)) for axis in sizes))
    tasks = {(name, *at): (operator.getitem, (merged, *at[:3]), n) for at in index}
    layers, dependencies = {**graph.layers, name: tasks}, {**graph.dependencies, name: {merged}}
    return da.Array(HighLevelGraph(layers, dependencies), name, sizes, dtype=dtype)
