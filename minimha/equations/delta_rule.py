"""Compute the gated delta rule token by token, as it is defined, or in chunks by matrix products.

A head has a state S (D, Dv), a sum of outer products of keys and values. At token t, S decays. Then
the fraction β_t of the difference between v_t and the prediction Sᵀ k_t is stored under key k_t:

    S ← exp(g_t) S,   u_t = β_t (v_t - Sᵀ k_t),   S ← S + k_t u_tᵀ,   o_t = Sᵀ q_t

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, equation 10. With g per channel, exp(g_t)
multiplies the rows of S: Kimi Team, "Kimi Linear", 2025, equation 1.

In a chunk, S_0 is the state before the first token, E_ij is the product of exp(g) from token j + 1
to i, and F_i the product from the first token to i. The state after token i is then
F_i S_0 + Σ_j≤i E_ij k_j u_jᵀ. The definition of u becomes a triangular system, the WY form:

    (I + A) U = β (V - (F K) S_0),   A_ij = β_i k_iᵀ E_ij k_j for j < i

E and F are running products. Differences of sums of g would lose digits if g is large, and would be
NaN after exp(g) = 0. So g may be -inf, which begins a new sequence. exp(g) is in float64: in
float32, a constant exp(g) would have the same rounding error at each of thousands of tokens.
"""

from collections.abc import Callable

import numpy as np

from minimha.equations.arguments import cast
from minimha.equations.delta_problem import EPSILON, Array, DeltaProblem
from minimha.equations.dense import for_query_heads
from minimha.equations.tap import Tap, no_tap, staged

CHUNK = 64  # tokens
# Takes q, k, v, β and exp(g), (B, H, L, ·) each, and S (B, H, D, Dv); returns O and the last S.
Form = Callable[[list[Array], Array, Tap], tuple[Array, Array]]


def recurrent(problem: DeltaProblem, tap: Tap = no_tap) -> tuple[Array, Array]:
    """Return output (B, H, L, Dv) and final states (n, H, D, Dv), computed token by token.

    Both have the compute dtype. ``tap`` first receives q and k (scaled and normalised), v, beta and
    decay, then for each token ``decayed[t=0]``, ``correction[t=0]`` (u) and ``state[t=0]``, and
    last output. Sequences of different lengths are separate: ``state[t=0][sequence 1]``.
    """
    return _by_sequence(problem, _tokens, tap)


def chunked(problem: DeltaProblem, tap: Tap = no_tap, *, size: int = CHUNK) -> tuple[Array, Array]:
    """Return the result of ``recurrent``, computed in chunks of ``size`` tokens by the WY form.

    ``tap`` first receives the same inputs, then for each chunk ``decays[c=0]`` (E),
    ``triangle[c=0]`` (A), ``corrections[c=0]`` (U) and ``state[c=0]``, and last output. In a matrix
    product, 0 · NaN would reach earlier tokens. So chunks with a nonfinite result are computed
    token by token.
    """

    def chunks(given: list[Array], S: Array, tap: Tap) -> tuple[Array, Array]:
        O = np.empty_like(given[2])
        for c, start in enumerate(range(0, O.shape[2], size)):
            tokens = (slice(None), slice(None), slice(start, start + size))
            chunk = [x[tokens] for x in given]
            O[tokens], after = _chunk(chunk, S, staged(tap, f"c={c}"))
            if not (np.isfinite(O[tokens]).all() and np.isfinite(after).all()):
                O[tokens], after = _tokens(chunk, S, no_tap)
            S = tap(f"state[c={c}]", after)
        return O, S

    return _by_sequence(problem, chunks, tap)


def _by_sequence(problem: DeltaProblem, form: Form, tap: Tap) -> tuple[Array, Array]:
    """Return O and S of all sequences; rows beyond a sequence's length are 0."""
    H, compute = problem.v.shape[1], problem.compute
    O, S = np.zeros(problem.v.shape, compute), np.zeros(problem.state_shape, compute)
    if problem.state is not None:
        S[...] = problem.state
    with np.errstate(all="ignore"):
        for s, (tokens, states) in enumerate(problem.sequences()):
            own_tap = tap if problem.is_even else staged(tap, f"sequence {s}")
            Q, K, V = (x[tokens].astype(compute) for x in (problem.q, problem.k, problem.v))
            if problem.normalize:
                Q, K = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + EPSILON) for x in (Q, K))
            Q, K = for_query_heads(H, Q * compute.type(problem.scale)), for_query_heads(H, K)
            steps = {"q": Q, "k": K, "v": V, "beta": problem.beta[tokens]}
            steps["decay"] = np.exp(problem.g[tokens].astype(np.float64))
            given = [own_tap(name, x) for name, x in steps.items()]
            O[tokens], S[states] = form(given, S[states], own_tap)
    return tap("output", O), S


def _tokens(given: list[Array], S: Array, tap: Tap) -> tuple[Array, Array]:
    """Return O and the last S of a sequence, computed token by token."""
    O = np.empty_like(given[2])
    for t in range(O.shape[2]):
        q, k, v, beta, a = (x[:, :, t, None] for x in given)
        S = tap(f"decayed[t={t}]", cast(a.swapaxes(-1, -2) * S, S.dtype))
        u = tap(f"correction[t={t}]", beta * (v - k @ S))
        S = tap(f"state[t={t}]", S + k.swapaxes(-1, -2) * u)
        O[:, :, t, None] = q @ S
    return O, S


def _chunk(given: list[Array], S: Array, tap: Tap) -> tuple[Array, Array]:
    """Return O and the S after the last token of one chunk, by the WY form."""
    (Q, K, V, beta, a), compute = given, S.dtype
    E, F = tap("decays", cast(_decays(a), compute)), np.cumprod(a, axis=2)
    A = tap("triangle", beta * np.tril(_products(K, K, E), -1))
    U = beta * (V - cast(F * K, compute) @ S)
    for i in range(1, U.shape[2]):  # forward substitution
        U[:, :, i, None] -= A[:, :, i, None, :i] @ U[:, :, :i]
    U = tap("corrections", U)
    O = cast(F * Q, compute) @ S + _products(Q, K, E) @ U
    kept = cast(F[:, :, -1, :, None] * S, compute)
    return O, kept + (E[:, :, -1] * K).swapaxes(-1, -2) @ U


def _decays(a: Array) -> Array:
    """Return E (B, H, C, C, 1 or D) for a = exp(g) (B, H, C, 1 or D): products from j + 1 to i."""
    E = np.zeros((*a.shape[:3], *a.shape[2:]), a.dtype)
    for i in range(a.shape[2]):
        E[:, :, i, :i] = E[:, :, i - 1, :i] * a[:, :, i, None]
        E[:, :, i, i] = 1
    return E


def _products(X: Array, K: Array, E: Array) -> Array:
    """Return x_iᵀ E_ij k_j for all tokens i and j of a chunk, (B, H, C, C)."""
    if E.shape[-1] == 1:
        return np.asarray((X @ K.swapaxes(-1, -2)) * E[..., 0])
    return np.asarray(((E * K[:, :, None]) @ X[..., None])[..., 0])
