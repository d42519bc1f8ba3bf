"""Split an attention problem into blocks of queries and keys, and merge the blocks' results.

Each part is a separate call of ``minimha.attention``. Shapes and options alone determine the
options of a part, and whether any of its queries sees any of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import as_floating, cast, common_dtype, name_of, rectangular
from minimha.equations.arrays import check_file, is_stored, library_of
from minimha.equations.eight_bits import SCALES, is_scaled
from minimha.equations.functions import Corner, Placed
from minimha.equations.merge import Pair, merge
from minimha.equations.problem import MAX_OFFSET, Problem, Relative, stand_in
from minimha.equations.selection import NONE, within
from minimha.equations.visibility import UNBOUNDED, key_range

PER_SCORE = ("attn_mask", "attn_bias")
IN_PARTS = {  # arguments of ``attention`` that a part can have
    "q", "k", "v", "is_causal", "q_offset", "window_size", *PER_SCORE, "key_indices", "kv_lengths",
    "alibi_slopes", "scale", "softcap", "sinks", "score_mod", "mask_mod", "k_scale", "v_scale",
}  # fmt: skip
BLOCK = 1 << 25  # bytes of k and v, in the compute dtype, that are read at once
SCORES = 1 << 22  # scores per block, for a backend that keeps all scores in memory


class Part(NamedTuple):
    """A part of a problem, as slices of the axes B, H, Lq and Lk.

    ``rows`` and ``keys`` have explicit starts and the same step. A striped part has every n-th
    query and key, and the step n. In other parts the step is None.
    """

    batch: slice
    heads: slice
    rows: slice
    keys: slice


def outline(arguments: Mapping[str, Any]) -> Problem:
    """Check the arguments of ``attention``, and return the problem with zeros as q, k and v.

    Only shapes and dtypes of q, k and v are read. Zeros also replace a mask or bias that is a dask
    array. Raises the errors of ``Problem.of``, and TypeError for an option outside ``IN_PARTS``.
    """
    for name, value in arguments.items():
        if name not in IN_PARTS and value is not None:
            raise TypeError(
                f"{name_of(name)} is no option for keys in files or on clusters: expected one of "
                f"{', '.join(sorted(IN_PARTS))}"
            )
    for name in "qkv":
        check_file(name_of(name), arguments[name])
    dtypes = {name: arguments[name].dtype for name in "qkv"}
    if not is_scaled(arguments):
        common = common_dtype({name: _floating(name, arguments[name]) for name in "qkv"})
        dtypes = dict.fromkeys("qkv", common)
    zeros = {name: stand_in(arguments[name].shape, dtypes[name]) for name in "qkv"}
    for name in PER_SCORE:
        x: Any = arguments.get(name)
        if library_of(x) == "dask":
            zeros[name] = stand_in(x.shape, x.dtype)
    return Problem.of(**{**arguments, **zeros})


def arrays_in_memory(arguments: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return those of q, k and v that are not stored as arrays: floating, or 8-bit with scales."""
    names = [name for name in "qkv" if not is_stored(arguments[name])]
    arrays = {name: rectangular(name, arguments[name]) for name in names}
    if is_scaled({**arguments, **arrays}):
        return arrays
    return {name: as_floating(name, array) for name, array in arrays.items()}


def options_of(problem: Problem, given: Mapping[str, Any], part: Part) -> dict[str, Any] | None:
    """Return the options of ``attention`` for a part, or None if no query sees any key of the part.

    ``given`` has ``attn_mask`` and ``attn_bias`` as the caller passed them. The result has no sinks
    (see ``without_keys``) and no functions (see ``placed``). What ``mask_mod`` hides is not
    considered.
    """
    Lq, Lk = problem.q.shape[2], problem.k.shape[2]
    num_rows, num_keys = len(range(Lq)[part.rows]), len(range(Lk)[part.keys])
    step = part.keys.step or 1
    q_offset = problem.q_offset[part.batch] + part.rows.start - part.keys.start
    left, right = problem.left, problem.right
    if step > 1:
        q_offset, left, right = _striped(q_offset, left, right, step)
    lengths = -((part.keys.start - problem.kv_lengths[part.batch]) // step)
    lengths = np.clip(lengths, 0, num_keys)
    ranges = [
        key_range(0, num_rows, int(o), left, right, int(n))
        for o, n in zip(q_offset, lengths, strict=True)
    ]
    if left < 0 or not any(start < stop for start, stop in ranges):
        return None
    options: dict[str, Any] = {"scale": problem.scale, "softcap": problem.softcap}
    if left < UNBOUNDED or right < UNBOUNDED:
        sides = (None if side >= UNBOUNDED else side for side in (left, right))
        options["window_size"] = tuple(sides)
    if problem.alibi_slopes is not None:
        options["alibi_slopes"] = problem.alibi_slopes[part.heads] * step
    if "window_size" in options or "alibi_slopes" in options or problem.functions:
        is_one = (q_offset == q_offset[0]).all()
        options["q_offset"] = int(q_offset[0]) if is_one else q_offset
        if (abs(q_offset) >= MAX_OFFSET).any():
            options["q_offset"] = Relative(q_offset)
    if (lengths < num_keys).any():
        options["kv_lengths"] = lengths
    if problem.key_indices is not None:
        picks = options["key_indices"] = within(_picks(problem, part), part.keys)
        if not (picks > NONE).any():
            return None
    return options | {
        name: _of_scores(given[name], part) for name in PER_SCORE if given.get(name) is not None
    }


def placed(functions: Mapping[str, Callable[..., Any]], part: Part) -> dict[str, Placed]:
    """Return ``functions`` as options of ``attention`` for ``part``, which has no stripes."""
    corner = Corner(part.batch.start, part.heads.start, part.keys.start)
    return {name: Placed(function, corner) for name, function in functions.items()}


def alibi_left_out(problem: Problem, part: Part) -> NDArray[Any] | None:
    """Return the ALiBi term (H,) to subtract from a striped part's log-sum-exp.

    Returns None if there are no slopes, or if the part has no stripes. In a causal part, query n
    and key m are step · (offset + n - m) + rest apart. The part's slopes express only the first
    term. The rest is the same for all keys and does not change the output.
    """
    if problem.alibi_slopes is None or part.keys.step is None:
        return None
    rest = (problem.q_offset[:1] + part.rows.start - part.keys.start) % part.keys.step
    return np.asarray(problem.alibi_slopes[part.heads] * rest.astype(problem.compute))


def without_keys(shape: tuple[int, ...], sinks: NDArray[Any] | None) -> Pair:
    """Return the result of queries that see no key, for an output of ``shape`` (B, H, Lq, Dv).

    The output is 0, and the log-sum-exp is ``sinks``, or -inf without sinks.
    """
    L = np.full(shape[:3], -np.inf)
    if sinks is not None:
        L[:] = sinks[:, None]
    return np.zeros(shape), L


def in_blocks(
    attend: Callable[..., Pair], problem: Problem, arguments: Mapping[str, Any], holds_scores: bool
) -> Pair:
    """Return output O and log-sum-exp L for stored keys and values, read block by block.

    ``arguments`` are those of ``attention``, and ``problem`` is their ``outline``. ``attend(q, k,
    v, **options)`` returns O and L of a block. If ``holds_scores``, ``attend`` keeps all scores in
    memory, and blocks have fewer queries.
    """
    Q = cast(as_floating("q", arguments["q"]), problem.compute)  # so that O is rounded once
    k, v = arguments["k"], arguments["v"]
    given = {n: rectangular(n, arguments[n]) for n in PER_SCORE if arguments.get(n) is not None}
    (B, H, Lq, _), Lk = problem.q.shape, problem.k.shape[2]
    num_keys = _num_keys(problem, k, v)
    num_rows = max(1, SCORES // (B * H * num_keys)) if holds_scores else max(1, Lq)
    O, L = without_keys((B, H, Lq, problem.v.shape[3]), problem.sinks)
    for keys in _slices(Lk, num_keys):
        shares = []
        for rows in _slices(Lq, num_rows):
            part = Part(slice(0, B), slice(0, H), rows, keys)
            of_part = options_of(problem, given, part)
            if of_part is not None:
                of_part |= _scales(problem, keys) | placed(problem.functions, part)
                shares.append((rows, of_part))
        K, V = (read(name_of(n), x, keys) if shares else None for n, x in (("k", k), ("v", v)))
        for rows, of_part in shares:
            o, l = attend(Q[..., rows, :], K, V, **of_part)
            shape = (B, H, *o.shape[-2:])
            parts = (O[:, :, rows], L[:, :, rows]), (o.reshape(shape), l.reshape(shape[:3]))
            O[:, :, rows], L[:, :, rows] = merge(parts)
    return O, L


def _scales(problem: Problem, keys: slice) -> dict[str, NDArray[Any]]:
    """Return k_scale and v_scale of some keys, with the caller's axes, if k and v are 8-bit."""
    if problem.k_scale is None:
        return {}
    index = (0,) * (4 - problem.rank) + (..., keys)
    return {scale: getattr(problem, scale)[index] for scale in SCALES.values()}


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _num_keys(problem: Problem, k: Any, v: Any) -> int:
    """Return how many keys to read at once, a multiple of a store's chunks."""
    B, Hkv, _, D = problem.k.shape
    per_key: int = B * Hkv * (D + problem.v.shape[3]) * problem.compute.itemsize
    chunk: int = max(x.chunks[-2] if hasattr(x, "chunks") else 1 for x in (k, v))
    return max(1, BLOCK // max(1, per_key * chunk)) * max(1, chunk)


def read(name: str, x: Any, keys: slice | None = None) -> NDArray[Any]:
    """Read rows of a stored k or v: those that ``keys`` selects, or all if it is None.

    Returns a view if ``x`` is a memory map. Raises MemoryError or ValueError that names the array.
    """
    which = "" if keys is None else f", keys {keys.start} to {keys.stop}"
    try:
        return np.asarray(x[...] if keys is None else x[..., keys, :])
    except MemoryError as error:
        why = str(error) or "its chunks are decoded whole"
        raise MemoryError(f"{name} does not fit into memory{which}: {why}") from error
    except Exception as error:  # codecs and file systems of stores raise errors of any type
        raise ValueError(
            f"{name} cannot be read{which}: {type(error).__name__}: {error}"
        ) from error


def _striped(
    q_offset: NDArray[np.int64], left: int, right: int, step: int
) -> tuple[NDArray[np.int64], int, int]:
    """Return q_offset, left and right of a striped part, counted in steps.

    Query n is at x + step · n and key m at step · m; the whole batch has one x. Query n sees key m
    if x - left ≤ step · (m - n) ≤ x + right. If no multiple of ``step`` is in that range, left < 0.
    """
    if right < UNBOUNDED:
        last = (q_offset + right) // step
        if left < UNBOUNDED:
            left = int((last + (left - q_offset) // step).min(initial=UNBOUNDED))
        return last, left, 0
    if left < UNBOUNDED:
        return -((left - q_offset) // step), 0, right
    return q_offset * 0, left, right


def _picks(problem: Problem, part: Part) -> NDArray[np.int32]:
    """Return the ``key_indices`` of a part's queries, which still count all keys."""
    assert problem.key_indices is not None
    group, heads = problem.q.shape[1] // problem.k.shape[1], slice(None)
    if problem.key_indices.shape[1] > 1:
        heads = slice(part.heads.start // group, part.heads.stop // group)
    return problem.key_indices[part.batch, heads, part.rows]


def _of_scores(x: Any, part: Part) -> Any:
    """Return the slice for ``part`` of a mask or bias ``x``; axes of size 1 are kept."""
    if x.ndim == 2:
        return x[part.rows, part.keys]
    whole = slice(None)
    return x[tuple(whole if n == 1 else s for n, s in zip(x.shape, part, strict=True))]


def _floating(name: str, x: Any) -> np.dtype[Any]:
    """Return the dtype of ``as_floating(name, x)`` without reading ``x``."""
    return as_floating(name, np.empty(0, x.dtype)).dtype
