"""The function ``gated_delta_rule``: check the arguments, choose a form, and return its result."""

from __future__ import annotations

from typing import Any, Literal, SupportsFloat

from numpy.typing import ArrayLike

from minimha.api import BackendUnavailable
from minimha.equations.arguments import choice, flag, integer
from minimha.equations.arrays import like, ordinal_of
from minimha.equations.delta_problem import DeltaProblem
from minimha.equations.tap import Tap, no_tap, safe_tap
from minimha.kernels.forks import imported

BACKENDS = ("auto", "recurrent", "chunked")
EQUATIONS = "minimha.equations.delta_rule"


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
    backend: Literal["auto", "recurrent", "chunked"] = "auto",
    tap: Tap = no_tap,
) -> Any:
    """Return what a memory that forgets, and that corrects itself, returns for each query.

    Each head has a state S (D, Dv), which every token t changes before its query reads it:

        S ← exp(g_t) S,   u_t = β_t (v_t - Sᵀ k_t),   S ← S + k_t u_tᵀ,   o_t = Sᵀ q_t

    Axes: ``B`` batch, ``Hk`` heads of queries and keys, ``H`` heads of values, ``L`` tokens, ``D``
    key width, ``Dv`` value width. As in ``attention``, arrays may lack B, or B and the heads.
    Arrays of torch and JAX on the CPU are read without copying; the result is of q's library.

    Parameters
    ----------
    q, k : array_like of shape (B, Hk, L, D)
        Queries and keys. Integers are computed in float64; float16 and bfloat16 in float32.
    v : array_like of shape (B, H, L, Dv)
        Values. H must be a multiple of Hk: head h uses the queries and keys of h // (H // Hk).
    g : array_like of shape (B, H, L) or (B, H, L, D)
        The natural logarithm of the decay, from -inf, which forgets all, to 0, which forgets
        nothing. With D numbers, each multiplies a row of S (Kimi Delta Attention).
    beta : array_like of shape (B, H, L)
        How much of the error is corrected: usually from 0 to 1, and up to 2 in some models.
    initial_state : array_like of shape (B, H, D, Dv), optional
        S before the first token; with ``cu_seqlens`` (n, H, D, Dv). Default is zeros.
    scale : float or 0-d array, optional
        Multiplies the queries. Default is 1/√D.
    normalize : bool, default True
        Divide each query and key x by √(Σ x² + 1e-6).
    chunk_size : int, optional
        Tokens in a chunk of the backend "chunked", which "auto" then uses. Default is 64.
    return_state : bool, default False
        Return the state after each sequence's last token, too.
    kv_lengths : int or array_like of shape (B,), int, optional
        Only tokens t < length exist. The output of later tokens is 0. Default is L.
    cu_seqlens : array_like of shape (n + 1,), int, optional
        n sequences are packed one after another along L, with B = 1 and all axes given. Sequence s
        has the tokens from cu_seqlens[s] to cu_seqlens[s + 1], and a state of its own.
    backend : {"auto", "recurrent", "chunked"}, default "auto"
        "recurrent" computes token by token, as the rule is defined, and "chunked" by products of
        matrices. "auto" uses "chunked", or with a tap and no ``chunk_size`` "recurrent".
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
        An array is on a GPU.

    Notes
    -----
    A NaN in k, g or beta makes all later outputs of its head NaN, in v those of its column, in q
    that of its token. Earlier tokens and other heads keep their numbers.

    References
    ----------
    Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, equation 10; Kimi Team, "Kimi
    Linear", 2025, equation 1.

    Examples
    --------
    The first token stores (3, 4) under a key, the second (5, 6) under another. The third asks for
    the first key, after the memory has lost half:

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
    problem = DeltaProblem.of(
        **arrays, scale=scale, normalize=normalize, kv_lengths=kv_lengths, cu_seqlens=cu_seqlens
    )
    tap = safe_tap(tap)
    O, S = problem.as_given(*_computed(backend, problem, chunk_size, tap))
    return (like(q, O), like(q, S)) if has_state else like(q, O)


def _computed(backend: str, problem: DeltaProblem, chunk_size: int | None, tap: Tap) -> Any:
    """Return O and the states of ``problem``."""
    if chunk_size is not None and backend not in ("auto", "chunked"):
        raise ValueError(
            f"chunk_size is given with backend {backend!r}, which has no chunks: expected "
            f"backend 'chunked'"
        )
    if backend == "auto":
        backend = "chunked" if tap is no_tap or chunk_size is not None else "recurrent"
    equations = imported(EQUATIONS)
    if backend == "recurrent":
        return equations.recurrent(problem, tap)
    size = {} if chunk_size is None else {"size": integer("chunk_size", chunk_size)}
    return equations.chunked(problem, tap, **size)
