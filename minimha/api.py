"""``attention``: check the arguments once, choose a backend, return its result."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from numpy.typing import ArrayLike

from minimha.equations.arguments import flag
from minimha.equations.problem import Problem
from minimha.equations.tap import Tap, no_tap
from minimha.kernels.cuda.availability import is_device_array, reason_without_cuda

# Imported when used: importing numba, for the kernels, takes longer than solving a toy problem.
BACKENDS = {
    "dense": "minimha.equations.dense",
    "tiled": "minimha.equations.tiled",
    "cpu": "minimha.kernels.cpu.backend",
    "cuda": "minimha.kernels.cuda.backend",
}
TAPPED = ("dense", "tiled")  # the backends whose steps can be tapped
WORTH_COMPILING = 1 << 26  # products, for which the dense backend needs some milliseconds


class BackendUnavailable(RuntimeError):  # noqa: N818  (it states a fact about the machine)
    """The requested backend cannot run here, or does not support this problem."""


def backends() -> dict[str, str | None]:
    """Return for each backend the reason why it cannot run here, or None if it can.

    >>> backends()["dense"] is None
    True
    """
    return {name: _reason(name) for name in BACKENDS}


def _reason(backend: str) -> str | None:
    """Why a backend cannot run here, or None; NVIDIA's driver is initialized only for "cuda"."""
    if backend == "cuda":
        return reason_without_cuda()
    if backend == "cpu" and not find_spec("numba"):
        return "numba, which compiles the kernels, is not installed"
    return None


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    is_causal: bool = False,
    q_offset: ArrayLike | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    attn_mask: ArrayLike | None = None,
    attn_bias: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    tap: Tap = no_tap,
) -> Any:
    """softmax(scale · Q Kᵀ) V: for each query, the mean of the values with softmax weights.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` head width, ``Dv`` value width. 2-D arrays (L, D) and 3-D arrays (H, L, D) are a batch of
    one, and the output has the same number of dimensions.

    With arrays of torch, CuPy, JAX or numba on an NVIDIA GPU the backend "cuda" computes there, on
    their library's current stream, and returns arrays of that library. q, k, v must then have one
    floating dtype, and ``attn_mask`` and ``attn_bias`` must be on the same GPU.

    The options are applied in this order: scale → softcap → bias → mask → softmax.

    Parameters
    ----------
    q : array_like of shape (B, H, Lq, D)
        Queries. Integers are computed in float64, float16 and bfloat16 in float32.
    k : array_like of shape (B, Hkv, Lk, D)
        Keys. H must be a multiple of Hkv: query head h uses key/value head h // (H // Hkv).
    v : array_like of shape (B, Hkv, Lk, Dv)
        Values.
    is_causal : bool, default False
        Query i, which is at key position i + q_offset, sees no key after that position.
    q_offset : int or array_like of shape (B,), int, optional
        Position of query 0 among the keys; any integer. Default is 0 if Lq = Lk; otherwise it is
        required with ``is_causal``, ``window_size`` or ``alibi_slopes``, which depend on positions.
    window_size : pair of int or None, optional
        (left, right), both inclusive: query i sees the keys from i + q_offset - left to
        i + q_offset + right. None is a side without a limit. Default is no window.
    attn_mask : array_like of shape (Lq, Lk) or 4-D broadcastable to (B, H, Lq, Lk), bool, optional
        True = may attend.
    attn_bias : array_like of shape (Lq, Lk) or 4-D broadcastable to (B, H, Lq, Lk), optional
        Added to the scores; -inf hides a key as False in ``attn_mask`` does. A finite number
        outside the compute dtype's range is clipped to it.
    kv_lengths : int or array_like of shape (B,), int, optional
        Only keys j < length exist. Default is Lk.
    alibi_slopes : array_like of shape (H,), optional
        Adds -slope · abs(i + q_offset - j) to the scores. Finite.
    scale : float, optional
        Multiplies the scores; may be 0 or negative. Default is 1/sqrt(D).
    softcap : float, optional
        Positive c: scores become c · tanh(score / c).
    sinks : array_like of shape (H,), optional
        Extra scores in the denominator and the log-sum-exp that have no value. Finite, or -inf for
        none.
    return_lse : bool, default False
        Return the log-sum-exp too.
    backend : {"auto", "dense", "tiled", "cpu", "cuda"}, default "auto"
        A backend that is named computes or raises. "auto" chooses "cpu" from 2^26 products on
        (B · H · Lq · Lk · (D + Dv)), and "dense" below and with a tap; it never chooses "cuda",
        which computes if it is named or if the arrays are on a GPU.
    tap : callable ``tap(name, value) -> value``, optional
        Receives every intermediate; see ``minimha.explain.Trace``.

    Returns
    -------
    output : ndarray of shape (B, H, Lq, Dv), the inputs' common dtype, float64 for integers
        0 for a query that sees no key.
    lse : ndarray of shape (B, H, Lq), float32 or float64, if ``return_lse``
        Natural logarithm of the sum of the exponentials of a row's final scores, sinks included;
        -inf for a query that sees no key and has no sink.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type, shape or range; the message names it. No array is ever
        written to.
    BackendUnavailable
        The named backend cannot run here or does not support this problem.
    MemoryError
        The problem does not fit into the memory of the machine or the GPU.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1.

    Examples
    --------
    >>> q, k, v = [[1, 0], [0, 1], [1, 1]], [[1, 0], [1, 1], [0, 1]], [[1, 0], [0, 2], [3, 1]]
    >>> attention(q, k, v).round(6)
    array([[0.99444 , 1.      ],
           [1.401112, 1.203336],
           [0.99302 , 1.255235]])
    """
    given = {
        "q": q,
        "k": k,
        "v": v,
        "q_offset": q_offset,
        "attn_mask": attn_mask,
        "attn_bias": attn_bias,
        "kv_lengths": kv_lengths,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    options = {
        "is_causal": is_causal,
        "window_size": window_size,
        "scale": scale,
        "softcap": softcap,
    }
    has_lse = flag("return_lse", return_lse)
    for name, value in given.items():
        if value is not None and is_device_array(value):
            _check_backend(backend)
            return _device_module(backend, name, tap).attend(given, options, has_lse)
    problem = Problem.of(**given, **options)  # type: ignore[arg-type]
    if not callable(tap):
        raise TypeError(f"tap is {tap!r}: expected a callable tap(name, value) that returns value")
    chosen = _chosen(backend, problem, tap is not no_tap)
    O, L = chosen.forward(problem) if tap is no_tap else chosen.forward(problem, tap)
    if has_lse:
        return problem.as_given(O, tap("lse", L))
    return problem.as_given(O, L)[0]


def _device_module(backend: str, name: str, tap: Tap) -> Any:
    """Return the module that computes on the GPU, where argument ``name`` is."""
    if backend not in ("auto", "cuda"):
        raise BackendUnavailable(
            f"backend {backend!r} cannot run: {name} is on a GPU; copy it to the host first, or "
            f"use backend 'cuda'"
        )
    reason = _untapped() if tap is not no_tap else _reason("cuda")
    if reason:
        raise BackendUnavailable(f"backend 'cuda' cannot run: {reason}")
    return import_module(BACKENDS["cuda"])


def _chosen(backend: str, problem: Problem, is_tapped: bool) -> Any:
    """Return the module that computes ``problem``."""
    _check_backend(backend)
    if backend == "auto":
        backend = "dense" if is_tapped or _is_small(problem) or _reason("cpu") else "cpu"
    reason = _untapped() if is_tapped and backend not in TAPPED else _reason(backend)
    module: Any = None if reason else import_module(BACKENDS[backend])
    reason = reason or module.unsupported(problem)
    if reason:
        raise BackendUnavailable(f"backend {backend!r} cannot run: {reason}")
    return module


def _check_backend(backend: str) -> None:
    if not isinstance(backend, str) or backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend is {backend!r}: expected auto, {', '.join(BACKENDS)}")


def _untapped() -> str:
    return f"it keeps no steps to tap; {' and '.join(TAPPED)} do"


def _is_small(problem: Problem) -> bool:
    B, H, Lq, D = problem.q.shape
    Lk, Dv = problem.v.shape[2:]
    return bool(B * H * Lq * Lk * (D + Dv) < WORTH_COMPILING)
