"""Define the public functions ``attention``, ``block_mask``, ``compile`` and ``backends``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations import block_mask as blocks
from minimha.equations.arguments import cast, choice, flag, integer
from minimha.equations.arrays import Given, Numbers, kinds_of, like, on_host
from minimha.equations.block_mask import BlockMask
from minimha.equations.eight_bits import LARGEST, SCALES, scales_of
from minimha.equations.functions import PARAMETERS, checked, taken, uses
from minimha.equations.option_types import Array, Backend, Options
from minimha.equations.parts import arrays_in_memory, in_blocks, outline
from minimha.equations.problem import MAX_OFFSET, Problem
from minimha.equations.tap import Tap, no_tap, safe_tap
from minimha.kernels import auto, remembered
from minimha.kernels.cpu.threads import get_num_threads, set_num_threads
from minimha.kernels.cuda.availability import reason_without_cuda
from minimha.kernels.forks import imported

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "BackendUnavailable", "BlockMask", "attention", "backends", "block_mask", "compile",
    "get_num_threads", "set_num_threads",
]  # fmt: skip

DType = str | type | np.dtype[Any]

# Imported on first use, because importing numba takes longer than solving a toy problem.
BACKENDS = {
    "dense": "minimha.equations.dense",
    "tiled": "minimha.equations.tiled",
    "cpu": "minimha.kernels.cpu.backend",
    "cuda": "minimha.kernels.cuda.backend",
}
AHEAD = {"cpu": BACKENDS["cpu"], "cuda": "minimha.kernels.cuda.ahead"}  # compile before a call
DTYPES = ("float32", "float64", "float16", "bfloat16")  # that kernels read in place
ON_CPU = (*DTYPES, *LARGEST)
FLOAT32 = np.dtype(np.float32)  # in which 8-bit keys and values are computed
PACKING = ("cu_seqlens_q", "cu_seqlens_k", "block_table")
# Options for arrays on the host only: what they would need on a GPU, and what to do instead.
ON_HOST = dict.fromkeys(PACKING, ("one launch for each sequence", "call attention for each"))
ON_HOST["key_indices"] = "a kernel that reads only some keys", "give attn_mask"
ON_HOST |= dict.fromkeys(SCALES.values(), ("a kernel that reads 8 bits", "give floating k and v"))
TAPPED = ("dense", "tiled")  # the backends whose steps can be tapped
UNTAPPED = f"it keeps no steps to tap; {' and '.join(TAPPED)} do"


class BackendUnavailable(RuntimeError):  # noqa: N818  (it states a fact about the machine)
    """Raised if a backend cannot run on this machine or does not support the given arguments."""


def backends() -> dict[str, str | None]:
    """Return a dict from each backend to the reason why it cannot run here, or None if it can.

    >>> backends()["dense"] is None
    True
    """
    return {name: reason_without(name) for name in BACKENDS}


def reason_without(backend: str) -> str | None:
    """Return why ``backend`` cannot run here, or None if it can; "cuda" starts NVIDIA's driver."""
    if backend == "cuda":
        return reason_without_cuda()
    if backend == "cpu" and not find_spec("numba"):
        return "numba, which compiles the kernels, is not installed"
    if backend == "cpu" and os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT forbids compiling the kernels"
    return None


def compile(
    dtypes: DType | Sequence[DType] = ("float32",),
    progress: Callable[[str], None] = lambda doing: None, *,
    backend: Literal["cpu", "cuda"] = "cpu",
) -> dict[str, Path | None]:  # fmt: skip
    """Compile kernels ahead of their first use, and store them on disk.

    Parameters
    ----------
    dtypes : dtype or sequence of dtype, default ("float32",)
        Any of "float32", "float64", "float16" and "bfloat16", as strings or NumPy's. Each needs
        three CPU kernels: attention with many queries and with few, and ``gated_delta_rule``.
    progress : callable, optional
        Called with each kernel's name before that kernel is compiled. By default, nothing happens.
    backend : {"cpu", "cuda"}, default "cpu"
        "cuda" compiles for the current GPU: heads 64 and 128 wide, for many queries and for one
        query with 1, 4 and 8 query heads per key/value head. Causal masks, windows, lengths and
        sinks are included; other widths and options are compiled on first use.

    Returns
    -------
    dict of str to Path or None
        Maps each kernel's name to its file, or to None if no folder is writable. A CPU kernel then
        stays in memory, and a GPU kernel is compiled again on first use.

    Raises
    ------
    ValueError
        ``dtypes`` or ``backend`` has another value.
    BackendUnavailable
        The kernels cannot be compiled on this machine, such as GPU kernels without a GPU.
    """
    given = [dtypes] if isinstance(dtypes, (str, type, np.dtype)) else dtypes
    names = [np.dtype(x).name if isinstance(x, (type, np.dtype)) else x for x in given]
    choice("backend", backend, ("cpu", "cuda"))
    for name in names:
        choice("dtypes", name, ON_CPU if backend == "cpu" else DTYPES)
    kernels = f"the {backend.upper()} kernels"
    reason = reason_without(backend)
    if reason:
        raise BackendUnavailable(f"{kernels} cannot be compiled: {reason}")
    ahead = imported(AHEAD[backend])
    try:
        kept: dict[str, Path | None] = ahead.compile_ahead(names, progress)
    except ahead.CompilationFailed as error:
        raise BackendUnavailable(f"{kernels} cannot be compiled: {error}") from error
    return kept


def block_mask(
    mask_mod: Callable[..., Any], Lq: int, Lk: int, *, B: int | None = None, H: int | None = None,
    q_offset: int = 0,
) -> BlockMask:  # fmt: skip
    """Find the blocks of scores that ``mask_mod`` hides entirely, for use in many attention calls.

    The search calls ``mask_mod`` for every pair of a query and a key. To search only once, pass
    the result in place of the function: ``attention(…, mask_mod=block_mask(f, Lq, Lk))``.

    Parameters
    ----------
    mask_mod : callable ``mask_mod(b, h, i, j) -> bool``
        As in ``attention``.
    Lq, Lk : int
        Numbers of queries and keys.
    B, H : int, optional
        Batch entries and query heads; by default any number. Required if ``mask_mod`` uses b or h.
    q_offset : int, default 0
        Position of query 0 among the keys, in all batch entries.

    Returns
    -------
    BlockMask

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type or range. Or ``mask_mod`` takes other parameters, returns no
        bool, or uses b or h without B or H.

    Examples
    --------
    >>> block_mask(lambda b, h, i, j: i >= j, 1024, 1024)
    BlockMask(Lq=1024, Lk=1024, 48% of the blocks hidden)
    """
    if checked("mask_mod", mask_mod) is None:
        raise TypeError("mask_mod is None: expected a function mask_mod(b, h, i, j)")
    if isinstance(mask_mod, BlockMask):  # it may have other sizes
        mask_mod = mask_mod.mask_mod
    for index, (letter, number) in enumerate((("B", B), ("H", H))):
        if number is None and uses(mask_mod, index):
            raise ValueError(
                f"{letter} is None: expected a number, because mask_mod uses {letter.lower()}"
            )
    num_batch, num_heads = (1 if n is None else integer(x, n, 0) for x, n in (("B", B), ("H", H)))
    Lq, Lk = integer("Lq", Lq, 0), integer("Lk", Lk, 0)
    offset = integer("q_offset", q_offset, 1 - MAX_OFFSET)
    find = blocks.states
    if not reason_without("cpu"):
        find = imported("minimha.kernels.cpu.blocks").block_states
    states = find(mask_mod, num_batch, num_heads, Lq, Lk, np.full(num_batch, offset))
    return BlockMask(mask_mod, states, Lq, Lk, (offset,))


@overload
def attention(
    q: Numbers, k: Array, v: Array, *, return_lse: Literal[False] = False, tap: Tap = ...,
    **options: Unpack[Options],
) -> NDArray[Any]: ...  # fmt: skip
@overload
def attention(
    q: Numbers, k: Array, v: Array, *, return_lse: Literal[True], tap: Tap = ...,
    **options: Unpack[Options],
) -> tuple[NDArray[Any], NDArray[Any]]: ...  # fmt: skip
@overload
def attention(
    q: Given, k: Array, v: Array, *, return_lse: Literal[False] = False, tap: Tap = ...,
    **options: Unpack[Options],
) -> Given: ...  # fmt: skip
@overload
def attention(
    q: Given, k: Array, v: Array, *, return_lse: Literal[True], tap: Tap = ...,
    **options: Unpack[Options],
) -> tuple[Given, Given]: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: bool = False, tap: Tap = ...,
    **options: Unpack[Options],
) -> Any: ...  # fmt: skip
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    is_causal: bool = False,
    q_offset: ArrayLike | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    attn_mask: ArrayLike | None = None,
    attn_bias: ArrayLike | None = None,
    key_indices: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    scale: SupportsFloat | None = None,
    softcap: SupportsFloat | None = None,
    sinks: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    tap: Tap = no_tap,
) -> Any:
    """Return softmax(scale · Q Kᵀ) V: for each query, a weighted mean of the values.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` head width, ``Dv`` value width. 2-D arrays (L, D) and 3-D arrays (H, L, D) are read as
    a batch of one, and the output has the same number of dimensions.

    Arrays of torch and JAX on the CPU are read without copying, and the results are arrays of q's
    library. Arrays of torch, CuPy, JAX or numba on an NVIDIA GPU use the backend "cuda", on their
    library's current stream. Then q, k and v must have the same floating dtype, and ``attn_mask``
    and ``attn_bias`` must be on the same GPU.

    On every backend, ``k`` and ``v`` may be larger than memory, as ``np.memmap`` or arrays of zarr.
    They are then read 32 MiB at a time, or by chunks of the store if larger, and results are merged
    as by ``minimha.merge``. ``score_mod`` and ``mask_mod`` get positions in the whole arrays. All
    else must fit into memory; so must ``k`` and ``v`` with packed sequences, pages or a tap.

    The options are applied in this order: scale → softcap → bias → score_mod → mask → softmax.

    Parameters
    ----------
    q : array_like of shape (B, H, Lq, D)
        Queries. Integers are computed in float64; float16 and bfloat16 in float32.
    k : array_like of shape (B, Hkv, Lk, D)
        Keys. H must be a multiple of Hkv: query head h uses key/value head h // (H // Hkv).
    v : array_like of shape (B, Hkv, Lk, Dv)
        Values.
    is_causal : bool, default False
        Query i is at key position i + q_offset and sees no later key.
    q_offset : int or array_like of shape (B,), int, optional
        Position of query 0 among the keys, any integer. Default is 0. Required if Lq ≠ Lk with
        ``is_causal``, ``window_size``, ``alibi_slopes``, ``score_mod`` or ``mask_mod``.
    window_size : pair of int or None, optional
        (left, right), both inclusive: query i sees the keys from i + q_offset - left to
        i + q_offset + right. None means no limit on that side. Default is no window.
    attn_mask : array_like of shape (Lq, Lk) or 4-D broadcastable to (B, H, Lq, Lk), bool, optional
        True = may attend.
    attn_bias : array_like of shape (Lq, Lk) or 4-D broadcastable to (B, H, Lq, Lk), optional
        Added to scores; -inf hides a key. Finite numbers are clipped to the compute dtype's range.
    key_indices : array_like of shape (Lq, K) or 4-D broadcastable to (B, Hkv, Lq, K), int, optional
        Each query attends to these keys only, provided that no other option hides them. -1 is no
        key, and a key named twice counts once. Decoding on the CPU reads no other keys.
    kv_lengths : int or array_like of shape (B,), int, optional
        Only keys j < length exist. Default is Lk.
    alibi_slopes : array_like of shape (H,), optional
        Adds -slope · abs(i + q_offset - j) to the scores. Must be finite.
    scale : float or 0-d array, optional
        Multiplies the scores; may be 0 or negative. Default is 1/sqrt(D).
    softcap : float or 0-d array, optional
        Positive c: scores become c · tanh(score / c).
    sinks : array_like of shape (H,), optional
        One extra score per head that has no value vector, but counts in the softmax's denominator
        and in the log-sum-exp. Finite, or -inf for no sink.
    score_mod : callable ``score_mod(score, b, h, i, j) -> score``, optional
        Returns the new score in batch entry b and query head h, for key j and the query at key
        position i; query 0 is at ``q_offset``. -inf hides the key. See the notes.
    mask_mod : callable ``mask_mod(b, h, i, j) -> bool``, or BlockMask, optional
        Returns True if the query may attend to the key. See ``minimha.block_mask`` for many calls.
    cu_seqlens_q, cu_seqlens_k : array_like of shape (n + 1,), int, optional
        n sequences are packed one after another along Lq and Lk, with B = 1. Sequence s has the
        rows from cu_seqlens[s] to cu_seqlens[s + 1]; the first number is 0, the last is Lq or Lk.
        No sequence sees another. Positions and ``key_indices`` count from a sequence's first query
        and key. ``score_mod`` and ``mask_mod`` get s as b. ``q_offset`` and ``kv_lengths`` are one
        integer, or one per sequence. A BlockMask must have all positions of each sequence.
        ``cu_seqlens_k`` defaults to ``cu_seqlens_q``; giving it excludes ``attn_mask`` and
        ``attn_bias``. Not available with arrays on a GPU.
    block_table : array_like of shape (B, pages), int, optional
        Keys and values are paged: k is (num_pages, Hkv, page_size, D), v likewise. Key j of batch
        entry b is key j % page_size of page block_table[b, j // page_size]. ``kv_lengths`` is
        required, and the table is read only up to these lengths. With ``cu_seqlens_q`` the table
        has one row per sequence. Masks and biases count keys within their sequence, with Lk at
        least the largest of ``kv_lengths``. Not available with arrays on a GPU.
    return_lse : bool, default False
        Also return the log-sum-exp of each query's scores.
    backend : {"auto", "dense", "tiled", "cpu", "cuda"}, default "auto"
        A named backend computes the result or raises an error. "auto" starts with "dense". Once its
        calls have taken as long as a kernel needs to load (0.5 s) or compile (10 s), "auto" uses
        "cpu" for every size; the last digits may then change. With a tap it uses "dense". "cuda" is
        used only if named, or for arrays on a GPU. While NumPy's OpenBLAS multiplies matrices in
        another thread ("dense", "tiled"), a fork may hang: use "cpu", set OPENBLAS_NUM_THREADS to
        1, or spawn processes.
    tap : callable ``tap(name, value) -> value``, optional
        Receives every intermediate array; see ``minimha.explain.Trace``.

    Returns
    -------
    output : array of shape (B, H, Lq, Dv), the inputs' common dtype, float64 for integers
        An ndarray, or an array of q's library (see above). Rows of queries that see no key are 0.
    lse : array of shape (B, H, Lq), float32 or float64, if ``return_lse``
        Natural logarithm of the sum of the exponentials of a query's final scores and its sink;
        -inf if the query sees no key and has no sink.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, shape or range, or a stored array is unreadable or truncated.
        The message names the argument. Arguments are never modified.
    BackendUnavailable
        The named backend cannot run here, does not support this problem, or cannot compile a
        function (the message names the line). "auto" uses "dense" instead.
    MemoryError
        The problem does not fit into the memory of the machine or the GPU.

    Notes
    -----
    ``score_mod`` and ``mask_mod`` are functions of numbers: a score in the compute dtype, and
    integers. They may use ``if`` and ``math``, and must have no side effects: they are called in
    any order, also for hidden pairs. "cpu" compiles them with numba in at most a second, calls them
    once per tile, and skips blocks that ``mask_mod`` hides entirely. "dense" and "tiled" call them
    with arrays of indices that broadcast, or with one number at a time if they take no arrays. On a
    GPU they are compiled into the kernel, which takes seconds. There they must not raise, and may
    use only ``math``.

    They may capture numbers, arrays, and tensors of torch or JAX on the CPU, which are read at each
    call. On the CPU they may call elementwise functions of torch and NumPy: ``where``, ``clamp``,
    ``tanh``, ``log2``, …; the error about an unknown function lists all. New values of captured
    numbers and arrays need no new compilation there, unless numba can compile the function only
    with constants. New values of other types, such as a string, a tuple or a flag, need one; on a
    GPU every new value does. Values that a ``mask_mod`` captures are compared at each call, because
    hidden blocks depend on them. Ctrl-C ends a call at once; a running compilation continues, and
    its result is stored.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1. Dong et al., "Flex Attention",
    2024, for ``score_mod`` and ``mask_mod``.

    Examples
    --------
    >>> q, k, v = [[1, 0], [0, 1], [1, 1]], [[1, 0], [1, 1], [0, 1]], [[1, 0], [0, 2], [3, 1]]
    >>> attention(q, k, v).round(6)
    array([[0.99444 , 1.      ],
           [1.401112, 1.203336],
           [0.99302 , 1.255235]])

    Packed: the first two tokens are one sequence, and the third is another:

    >>> attention(q, k, v, cu_seqlens_q=[0, 2, 3]).round(6)
    array([[0.5     , 1.      ],
           [0.330238, 1.339523],
           [3.      , 1.      ]])

    Each token attends to itself and its neighbours:

    >>> attention(q, k, v, mask_mod=lambda b, h, i, j: abs(i - j) <= 1).round(6)
    array([[0.5     , 1.      ],
           [1.401112, 1.203336],
           [0.990715, 1.669762]])
    """
    key, originals = None, (q, k, v)
    if not type(q) is type(k) is type(v) is np.ndarray:
        q, k, v = on_host(q, k, v)
    if (
        attn_mask is None and attn_bias is None and kv_lengths is None and alibi_slopes is None
        and sinks is None and tap is no_tap and block_table is None and key_indices is None
    ):  # fmt: skip
        window = window_size if type(window_size) is tuple else (window_size,)
        functions = {}
        if score_mod is not None or mask_mod is not None:
            functions = taken(score_mod=score_mod, mask_mod=mask_mod)
            given_mods: Any = map(functions.get, PARAMETERS)
            score_mod, mask_mod = given_mods
        key = remembered.key_of(
            q, k, v, score_mod, mask_mod, backend, is_causal, q_offset, scale, softcap, *window
        )
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            starts = remembered.by_value((cu_seqlens_q, cu_seqlens_k))
            key = key and starts and (*key, starts)
        has_scales = k_scale is not None or v_scale is not None
        if has_scales:
            layouts = remembered.by_layout((k_scale, v_scale))
            key = key and layouts and (*key, layouts)
        plan = remembered.recall(key)
        if plan is not None:
            if has_scales:
                of_k = scales_of("k_scale", k_scale, k, 4, FLOAT32)
                of_v = scales_of("v_scale", v_scale, v, 4, FLOAT32)
                O, L = plan.run(cast(q, FLOAT32), k, v, functions, (of_k, of_v))
            else:
                O, L = plan.run(q, k, v, functions)
            if O.dtype != q.dtype:
                O = cast(O, q.dtype)
            if return_lse is False or not flag("return_lse", return_lse):
                return like(originals[0], O)
            return like(originals[0], O), like(originals[0], L)
    given = {
        "q": q, "k": k, "v": v, "q_offset": q_offset, "attn_mask": attn_mask,
        "attn_bias": attn_bias, "kv_lengths": kv_lengths, "alibi_slopes": alibi_slopes,
        "sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "block_table": block_table, "key_indices": key_indices, "k_scale": k_scale,
        "v_scale": v_scale,
    }  # fmt: skip
    options = {
        "is_causal": is_causal, "window_size": window_size, "scale": scale, "softcap": softcap,
        "score_mod": score_mod, "mask_mod": mask_mod,
    }  # fmt: skip
    has_lse = flag("return_lse", return_lse)
    on_gpu, has_stored_keys = kinds_of(given)
    packing = [name for name in PACKING if given[name] is not None]
    if on_gpu:
        module = _device_module(backend, on_gpu, tap, given)
        given = {name: x for name, x in given.items() if name not in ON_HOST}
        given["q"], given["k"], given["v"] = originals
        try:
            return module.attend(given, options, has_lse)
        except module.functions.Refused as error:
            raise BackendUnavailable(f"backend 'cuda' cannot run: {error}") from None
    if has_stored_keys and tap is no_tap and not packing:
        problem, (O, L) = _in_blocks(backend, given | options)
    else:
        problem = Problem.of(**given, **options)  # type: ignore[arg-type]
        tap = safe_tap(tap)
        O, L = _computed(backend, problem, tap, key, (q, k, v))
    if has_lse:
        output, lse = problem.as_given(O, tap("lse", L))
        return like(originals[0], output), like(originals[0], lse)
    return like(originals[0], problem.as_given(O, L)[0])


def _in_blocks(
    backend: Backend, arguments: dict[str, Any]
) -> tuple[Problem, tuple[NDArray[Any], NDArray[Any]]]:
    """Return the ``outline`` of a problem with stored keys, and its O and L, computed in blocks."""
    check_backend(backend)
    arguments |= arrays_in_memory(arguments)
    problem = outline(arguments)
    chosen: Backend = backend
    if backend == "auto":
        is_dense = auto.choose(problem) == "dense" or reason_without("cpu")
        chosen = "dense" if is_dense else "cpu"

    def attend(*qkv: Any, **options: Any) -> Any:
        return attention(*qkv, **options, return_lse=True, backend=chosen)

    start = time.perf_counter()
    try:
        O, L = in_blocks(attend, problem, arguments, holds_scores=chosen == "dense")
    except BackendUnavailable as error:
        if backend == chosen:
            raise
        auto.give_up(error)
        return _in_blocks("dense", arguments)
    if backend == "auto" and chosen == "dense":
        auto.spent(time.perf_counter() - start)
    return problem, (cast(O, problem.compute), cast(L, problem.compute))


def _computed(
    backend: str, problem: Problem, tap: Tap, key: tuple[Any, ...] | None, given: tuple[Any, ...]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return O and L of ``problem``; store the plan under ``key`` if the plan fits ``given``."""
    check_backend(backend)
    is_auto, is_tapped = backend == "auto", tap is not no_tap
    if is_auto:
        backend = "dense" if is_tapped else auto.choose(problem)
        if backend == "cpu" and reason_without("cpu"):
            backend = "dense"
    module = _module(backend, problem, is_tapped)
    if backend == "cpu":
        try:
            plan = module.plan(problem)
        except module.CompilationFailed as error:
            if not is_auto:
                raise BackendUnavailable(f"backend 'cpu' cannot run: {error}") from error
            auto.give_up(error)
            return _computed("dense", problem, tap, None, given)
        if key is not None and plan.fits(problem, given):
            remembered.remember(key, plan)
        result: tuple[NDArray[Any], NDArray[Any]] = plan(problem)
        return result
    start = time.perf_counter()
    result = module.forward(problem, tap) if is_tapped else module.forward(problem)
    if is_auto and not is_tapped:
        auto.spent(time.perf_counter() - start)
    return result


def _device_module(backend: str, name: str, tap: Tap, given: dict[str, Any]) -> Any:
    """Return the module that computes on the GPU; the argument ``name`` is there."""
    check_backend(backend)
    for option, (need, instead) in ON_HOST.items():
        if given[option] is not None:
            raise BackendUnavailable(
                f"backend 'cuda' cannot run: {option} needs {need}, and {name} is on a GPU: "
                f"{instead}"
            )
    if backend not in ("auto", "cuda"):
        raise BackendUnavailable(
            f"backend {backend!r} cannot run: {name} is on a GPU; copy it to the host first, or "
            f"use backend 'cuda'"
        )
    if tap is not no_tap:
        raise BackendUnavailable(f"backend 'cuda' cannot run: {UNTAPPED}")
    return _cuda()


@cache  # numba and the driver stay available
def _cuda() -> Any:
    """Return the module of the backend "cuda"; raise BackendUnavailable if it cannot run."""
    reason = reason_without("cuda")
    if reason:
        raise BackendUnavailable(f"backend 'cuda' cannot run: {reason}")
    return imported(BACKENDS["cuda"])


def _module(backend: str, problem: Problem, is_tapped: bool) -> Any:
    """Return the module of ``backend``; raise BackendUnavailable if it cannot run ``problem``."""
    reason = UNTAPPED if is_tapped and backend not in TAPPED else reason_without(backend)
    if not reason:
        try:
            module: Any = imported(BACKENDS[backend])
            reason = module.unsupported(problem)
        except Exception as error:  # a numba that is broken may raise anything
            reason = f"{type(error).__name__}: {error}"
    if reason:
        raise BackendUnavailable(f"backend {backend!r} cannot run: {reason}")
    return module


def check_backend(backend: str) -> None:
    """Raise ValueError unless ``backend`` is "auto" or a backend's name."""
    if not isinstance(backend, str) or backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend is {backend!r}: expected auto, {', '.join(BACKENDS)}")
