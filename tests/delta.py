"""The gated delta rule one number at a time, in float64: the oracle of its forms and kernels."""

from math import fsum, sqrt

import numpy as np

INF = np.inf


def naive(q, k, v, g, beta, state=None, scale=None, normalize=True):
    """Output and last state, by loops over heads and tokens. q is (B, Hk, L, D), as in minimha.

    S[d, e] is a Python float in a list, and every sum a ``math.fsum`` unless a number is nonfinite.
    """
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    (B, Hk, L, D), (H, Dv) = q.shape, v.shape[1::2]
    O, last = np.zeros(v.shape), np.zeros((B, H, D, Dv))
    for b in range(B):
        for h in range(H):
            S = [[0.0] * Dv for _ in range(D)] if state is None else state[b, h].tolist()
            for t in range(L):
                query, key = (x[b, h * Hk // H, t].tolist() for x in (q, k))
                if normalize:
                    query, key = (
                        [x / sqrt(total([y * y for y in row]) + 1e-6) for x in row]
                        for row in (query, key)
                    )
                query = [x * (1 / sqrt(D) if scale is None else scale) for x in query]
                decay = np.exp(np.broadcast_to(g[b, h, t], D)).tolist()
                S = [[decay[d] * x for x in S[d]] for d in range(D)]
                for e in range(Dv):
                    found = total([S[d][e] * key[d] for d in range(D)])
                    u = float(beta[b, h, t]) * (float(v[b, h, t, e]) - found)
                    for d in range(D):
                        S[d][e] += key[d] * u
                    O[b, h, t, e] = total([S[d][e] * query[d] for d in range(D)])
            last[b, h] = S
    return O, last


def total(numbers):
    return fsum(numbers) if np.isfinite(numbers).all() else sum(numbers)


def by_rows(q, k, v, g, beta, state=None):
    """The same by whole rows, in float64, for many tokens; compared with ``naive`` in the tests."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    (B, Hk, L, D), (H, Dv) = q.shape, v.shape[1::2]
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, H // Hk, axis=1) for x in (q / sqrt(D), k))
    a = np.exp(g if g.ndim == 4 else g[..., None])
    S = np.zeros((B, H, D, Dv)) if state is None else np.array(state, np.float64)
    O = np.empty(v.shape)
    for t in range(L):
        S *= a[:, :, t, :, None]
        found = (S * k[:, :, t, :, None]).sum(axis=2)
        S += k[:, :, t, :, None] * (beta[:, :, t, None] * (v[:, :, t] - found))[:, :, None]
        O[:, :, t] = (S * q[:, :, t, :, None]).sum(axis=2)
    return O, S


def drawn(seed, B=2, Hk=2, H=4, L=21, D=6, Dv=5, channels=False, dtype=np.float64):
    """q, k, v, g, beta and a state, as a model has them: g below 0, and beta from 0 to 1."""
    r = np.random.default_rng(seed)
    q, k = r.normal(size=(2, B, Hk, L, D))
    g = -np.log1p(np.exp(r.normal(size=(B, H, L, D) if channels else (B, H, L))))
    beta = 1 / (1 + np.exp(-r.normal(size=(B, H, L))))
    arrays = (q, k, r.normal(size=(B, H, L, Dv)), g, beta, r.normal(size=(B, H, D, Dv)))
    return [x.astype(dtype) for x in arrays]


def error(got, exact):
    """The largest error, relative to the largest number."""
    return abs(np.asarray(got, np.float64) - exact).max() / abs(exact).max()
