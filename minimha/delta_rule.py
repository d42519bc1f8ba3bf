"""Define ``gated_delta_rule``: check its arguments, choose a backend, and return the result."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike

from minimha.api import BackendUnavailable, reason_without
from minimha.equations.arguments import choice, flag, integer
from minimha.equations.arrays import LIBRARIES, as_numpy, library_of, like, ordinal_of
from minimha.equations.delta_problem import DeltaProblem
from minimha.equations.tap import Tap, no_tap, safe_tap
from minimha.kernels import auto, remembered
from minimha.kernels.forks import imported

BACKENDS = ("auto", "recurrent", "chunked", "cpu")
EQUATIONS, KERNEL = "minimha.equations.delta_rule", "minimha.kernels.cpu.delta_rule"


def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    initial_state: ArrayLike | None = None,
    scale: SupportsFloat | None = None,
    normalize: bool = True,
    chunk_size: int | None = None,
    return_state: bool = False,
    kv_lengths: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    backend: Literal["auto", "recurrent", "chunked", "cpu"] = "auto",
    tap: Tap = no_tap,
) -> Any:
    """Compute the gated delta rule: linear attention whose state decays and corrects its errors.

    Each head has a state S (D, Dv). Token t first updates S, then reads S with its query q_t:

        S ← exp(g_t) S,   u_t = β_t (v_t - Sᵀ k_t),   S ← S + k_t u_tᵀ,   o_t = Sᵀ q_t

    Axes: ``B`` batch, ``Hk`` heads of queries and keys, ``H`` heads of values, ``L`` tokens, ``D``
    key width, ``Dv`` value width. As in ``attention``, arrays may lack B, or B and the heads.
    Arrays of torch and JAX on the CPU are read without copying; results are arrays of q's library.

    Parameters
    ----------
    q, k : array_like of shape (B, Hk, L, D)
        Queries and keys. Integers are computed in float64; float16 and bfloat16 in float32.
    v : array_like of shape (B, H, L, Dv)
        Values. H must be a multiple of Hk: head h uses the queries and keys of h // (H // Hk).
    g : array_like of shape (B, H, L) or (B, H, L, D)
        Natural logarithm of the decay: -inf clears S, and 0 keeps S. The last axis D, if given, has
        one number for each row of S (Kimi Delta Attention).
    beta : array_like of shape (B, H, L)
        The fraction of the error v_t - Sᵀ k_t to correct: usually 0 to 1, in some models up to 2.
    initial_state : array_like of shape (B, H, D, Dv), optional
        S before the first token; with ``cu_seqlens``, of shape (n, H, D, Dv). Default is zeros.
    scale : float or 0-d array, optional
        Multiplies the queries. Default is 1/√D.
    normalize : bool, default True
        Divide each query and key x by √(Σ x² + 1e-6).
    chunk_size : int, optional
        Tokens in a chunk of the backend "chunked", which "auto" then uses. Default is 64.
    return_state : bool, default False
        Also return the state after each sequence's last token.
    kv_lengths : int or array_like of shape (B,), int, optional
        Only tokens t < length exist. The output of later tokens is 0. Default is L.
    cu_seqlens : array_like of shape (n + 1,), int, optional
        n sequences are packed one after another along L. Sequence s has the tokens from
        cu_seqlens[s] to cu_seqlens[s + 1] and a separate state. q must be 4-D, with B = 1.
    backend : {"auto", "recurrent", "chunked", "cpu"}, default "auto"
        "recurrent" computes token by token, as the rule is defined. "chunked" uses matrix products,
        and "cpu" a kernel that numba compiles. "auto" starts with "chunked" and later changes to
        "cpu", as in ``attention``; with a tap and no ``chunk_size`` it uses "recurrent".
    tap : callable ``tap(name, value) -> value``, optional
        Receives every intermediate array; see ``minimha.explain.Trace``.

    Returns
    -------
    output : array of shape (B, H, L, Dv), the inputs' common dtype, float64 for integers
    state : array of shape (B, H, D, Dv) or (n, H, D, Dv), float32 or float64, if ``return_state``

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, shape or range. Arguments are never modified.
    BackendUnavailable
        The named backend cannot run here or supports no tap, or an array is on a GPU.

    Notes
    -----
    A NaN in k, g or beta makes all later outputs of its head NaN. A NaN in v does so only in its
    column, and a NaN in q only for its token. Earlier tokens and other heads are not affected.

    References
    ----------
    Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, equation 10; Kimi Team, "Kimi
    Linear", 2025, equation 1.

    Examples
    --------
    The first token stores (3, 4) under one key, the second stores (5, 6) under another. The third
    reads the first key, after the state has decayed by half:

    >>> q = k = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    >>> v, g, beta = [[3.0, 4.0], [5.0, 6.0], [0.0, 0.0]], [0, 0, -0.693147], [1, 1, 0]
    >>> gated_delta_rule(q, k, v, g, beta, scale=1).round(3)
    array([[3. , 4. ],
           [5. , 6. ],
           [1.5, 2. ]])
    """
    choice("backend", backend, BACKENDS)
    has_state = flag("return_state", return_state)
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    on_gpu = next((name for name, x in arrays.items() if ordinal_of(x) is not None), None)
    if on_gpu:
        raise BackendUnavailable(
            f"{on_gpu} is on a GPU, which gated_delta_rule does not use: copy it to the host first"
        )
    arrays = {n: as_numpy(n, x) if library_of(x) in LIBRARIES else x for n, x in arrays.items()}
    key = None
    if tap is no_tap and kv_lengths is None and cu_seqlens is None and chunk_size is None:
        key = _key(backend, arrays, scale, normalize, return_state)
    plan = remembered.recall(key)
    if plan is not None:
        O, S = plan.run(_with_axes(arrays))
    else:
        problem = DeltaProblem.of(
            **arrays, scale=scale, normalize=normalize, kv_lengths=kv_lengths, cu_seqlens=cu_seqlens
        )
        size = None if chunk_size is None else integer("chunk_size", chunk_size)
        chosen = _chosen(backend, problem, size, tap)
        if chosen == "cpu":
            O, S = _on_cpu(backend, problem, has_state, key, arrays)
        else:
            O, S = _in_numpy(chosen, problem, size, safe_tap(tap))
        O, S = problem.as_given(O, S)
    return (like(q, O), like(q, S)) if has_state else like(q, O)


def _key(backend: str, arrays: Mapping[str, Any], *options: Any) -> tuple[Any, ...] | None:
    """Return all that a plan depends on, or None if no plan is stored for such arguments."""
    values = remembered.by_value(options)
    given = [x for x in arrays.values() if x is not None]
    is_plain = all(type(x) is np.ndarray and x.flags.aligned for x in given)
    if backend not in ("auto", "cpu") or values is None or not is_plain or arrays["q"].ndim != 4:
        return None
    return KERNEL, values, len(given), tuple((x.shape, x.strides, x.dtype) for x in given)


def _with_axes(arrays: Mapping[str, Any]) -> list[Any]:
    """Return the arrays in the order of ``DeltaProblem.arrays``, g and beta with four axes."""
    q, k, v, g, beta, state = arrays.values()
    return [q, k, v, g if g.ndim == 4 else g[..., None], beta[..., None], state]


def _chosen(backend: str, problem: DeltaProblem, size: int | None, tap: Tap) -> str:
    """Return the backend that computes ``problem``; raise BackendUnavailable if it cannot run."""
    if size is not None and backend not in ("auto", "chunked"):
        raise ValueError(
            f"chunk_size is given with backend {backend!r}, which has no chunks: expected "
            f"backend 'chunked'"
        )
    reason = reason_without("cpu")
    if backend == "cpu" and (reason or tap is not no_tap):
        untapped = "it keeps no steps to tap; recurrent and chunked do"
        raise BackendUnavailable(f"backend 'cpu' cannot run: {reason or untapped}")
    if backend != "auto":
        return backend
    if size is not None or tap is not no_tap:
        return "recurrent" if size is None else "chunked"
    products = 4 * int(problem.rows[:, 2].sum()) * math.prod(problem.state_shape[1:])
    is_worth = not reason and auto.worthwhile(KERNEL, problem, products / auto.DENSE_RATE)
    return "cpu" if is_worth else "chunked"


def _on_cpu(
    backend: str, problem: DeltaProblem, has_state: bool, key: Any, arrays: Mapping[str, Any]
) -> Any:
    """Return O and the states; store the plan under ``key`` if later calls can use the plan."""
    try:
        kernel = imported(KERNEL)
        plan = kernel.Plan(problem, has_state)
    except Exception as error:  # a numba that is broken may raise anything
        if backend == "cpu":
            raise BackendUnavailable(f"backend 'cpu' cannot run: {error}") from error
        auto.give_up(error)
        return _in_numpy("chunked", problem, None, no_tap)
    if key is not None and plan.fits(problem, _with_axes(arrays)):
        remembered.remember(key, plan)
    return plan(problem)


def _in_numpy(form: str, problem: DeltaProblem, size: int | None, tap: Tap) -> Any:
    """Return O and the states, computed in NumPy by "recurrent" or "chunked"."""
    start, equations = time.perf_counter(), imported(EQUATIONS)
    if form == "recurrent":
        return equations.recurrent(problem, tap)
    result = equations.chunked(problem, tap, **({} if size is None else {"size": size}))
    auto.spent(time.perf_counter() - start if tap is no_tap and size is None else 0.0)
    return result
