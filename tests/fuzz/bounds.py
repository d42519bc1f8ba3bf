"""What any backend must return: dense attention in a wider dtype, and how far from it one may be.

The bounds follow from rounding. Let u be half an eps of the compute dtype. A score is a sum of D
products with an error up to u (D + 9) |scale| Σ |q_d k_d|, and a few u of what is added to it. An
error δ of the scores is one of exp(2δ) - 1 of a weight, and one of δ of the log-sum-exp. A sum of n
weights times values has n roundings; weights below the normal numbers may be 0. For 16-bit dtypes a
matrix unit multiplies weights of 16 binary digits, and numbers below the normal ones may be 0.

Where that says nothing, less is asked:

- Sums that leave the range of the dtype may be NaN, depending on the order of addition: the output
  is then NaN, or within the range of the values.
- So is the output where δ is above 0.1, for scores so large that their differences are noise.
- A value that is not finite makes the output not finite in any case. Which of NaN, inf and -inf it
  is, is compared only where its weight is certainly not 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
from problems import modified, visible

from fuzz.cases import Case
from minimha.equations import dense
from minimha.equations.problem import Problem

NOISE = 0.1  # of a score
WIDER = {np.dtype(np.float32): np.float64, np.dtype(np.float64): np.longdouble}


def native(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)


class Expected:
    """The result for a case, with bounds; arrays are (B, H, Lq, Dv) and (B, H, Lq)."""

    def __init__(self, case: Case) -> None:
        arrays = {name: native(array) for name, array in case.arrays.items()}
        with np.errstate(all="ignore"):
            self._compute(Problem.of(**arrays, **case.options), arrays | case.options)

    def _compute(self, problem: Problem, given: dict[str, Any]) -> None:
        wide = np.dtype(WIDER[problem.compute])
        x = {name: getattr(problem, name).astype(wide) for name in "qkv"}
        stored = x["k"]
        for name in "kv" if problem.k_scale is not None else "":
            x[name] = x[name] * getattr(problem, f"{name}_scale").astype(wide)[..., None]
        steps: dict[str, np.ndarray] = {}
        exact = dataclasses.replace(problem, compute=wide, k_scale=None, v_scale=None, **x)
        O, L = dense.forward(exact, lambda name, value: steps.setdefault(name, value))
        S = next(
            steps[n]
            for n in ("masked", "modified", "biased", "capped", "scaled", "scores")
            if n in steps
        )
        group = problem.q.shape[1] // problem.k.shape[1]
        finite = {n: np.where(np.isfinite(a), abs(a), 0).astype(np.float64) for n, a in x.items()}
        K, V = (finite[n].repeat(group, 1) for n in "kv")
        seen = visible(problem.q, problem.k, given)
        unhidden = seen.copy()  # by options; functions hide by a score of -inf
        if problem.score_mod is not None:
            seen &= ~np.isneginf(S)

        info, D, n = np.finfo(problem.compute), problem.q.shape[3], problem.k.shape[2] + 1
        u, tiny, denormal = (float(y) for y in (info.eps / 2, info.tiny, info.smallest_subnormal))
        largest = float(info.max) * (1 - 1e-3)
        scale = abs(problem.scale)
        raw = finite["q"] @ K.swapaxes(-1, -2)
        added = _magnitude_of_bias(problem)
        delta = u * (D + 9) * scale * raw + D * denormal * (scale + 1)
        if problem.k_scale is not None:
            delta = delta + D * denormal * scale * float(problem.k_scale.max(initial=1))
        is_short = problem.dtype.itemsize == 2
        if is_short:
            sums = finite["q"].sum(-1)[..., None] + K.sum(-1)[..., None, :]
            delta = delta + scale * tiny * (sums + D)
        if problem.softcap is not None:
            cap = problem.softcap
            delta = np.minimum(delta, 2 * cap) + 32 * u * cap + 4 * cap * denormal
        if problem.score_mod is not None:  # none of them makes a difference of scores larger
            moved = modified(np.zeros(S.shape), given)
            added = added + np.where(np.isfinite(moved), abs(moved), 0) + 16
        S64 = np.where(np.isfinite(S), S, 0).astype(np.float64)
        delta = delta + 4 * u * added + 8 * u * abs(S64)

        # Keys that can have a weight at all: no more than ``reach`` below the largest score.
        reach = -np.log(tiny) * 1.3
        sinks = np.full(S.shape[1], -np.inf) if problem.sinks is None else problem.sinks
        sinks = sinks.astype(np.float64)[:, None, None]
        counts = seen & ~np.isneginf(S)
        lowest = np.where(counts & np.isfinite(S), S64 - delta, -np.inf)
        m = np.maximum(lowest.max(-1, keepdims=True, initial=-np.inf), sinks)
        matters = counts & ~(S64 + delta < m - reach)
        overflows = unhidden & ((raw > largest) | (scale * raw > largest))
        overflows |= matters & (scale * raw + added > largest)
        if problem.k_scale is not None:  # a product may be scaled before or after it is summed
            stored = np.where(np.isfinite(stored), abs(stored), 0).astype(np.float64)
            overflows |= seen & (finite["q"] @ stored.repeat(group, 1).swapaxes(-1, -2) > largest)
        noise = np.where(matters, delta, 0).max(-1, initial=0)
        noise += 8 * u * np.where(np.isfinite(m), abs(m), 0)[..., 0]

        self.output, self.lse, self.dtype = O, L, problem.dtype
        self.is_hidden = ~seen.any(-1) & ~overflows.any(-1)
        self.overflows = overflows.any(-1)
        self.is_noise = ~(noise <= NOISE)
        weights = np.nan_to_num(steps["weights"].astype(np.float64))
        mean = weights @ V
        self.largest = _largest_seen(V, seen)
        rounding = 4 * n * n * denormal + n * tiny * self.largest
        relative = np.expm1(2 * np.where(self.is_noise, NOISE, noise))[..., None] + u * (n + 33)
        relative, rounding = relative + is_short * 2.0**-16, rounding + is_short * 2 * tiny
        out = ml_dtypes.finfo(problem.dtype)
        self.bound = relative * mean + rounding
        self.bound = self.bound + float(out.eps) * (abs(np.nan_to_num(O)) + self.bound)
        self.bound = (self.bound + float(out.smallest_subnormal)).astype(np.float64)
        self.most = float(out.max) * (1 - float(out.eps))  # above it, rounding may overflow
        L64 = np.where(np.isfinite(L), L, 0).astype(np.float64)
        self.lse_bound = noise + u * (n + 32) + 8 * u * abs(L64)

        # Values that are not finite, and those of them that have a weight in any arithmetic.
        bad = ~np.isfinite(x["v"]).repeat(group, 1)
        sure = S64 - delta > m + 2 * noise[..., None] - 0.7 * -np.log(tiny)
        self.has_bad = _any_seen(seen, bad)
        # A score that overflows to -inf hides its key, if a function may have hidden it.
        told = seen
        if problem.score_mod is not None:
            told = seen & ~(overflows | (scale * raw + added > largest))
        self.shows_bad = _any_seen(told, bad)
        self.is_unsure = _any_seen(seen & ~np.isneginf(S) & ~sure, bad)

    def faults(self, output: np.ndarray, lse: np.ndarray) -> list[str]:
        """What is wrong with a backend's output and log-sum-exp, one sentence for each kind."""
        with np.errstate(all="ignore"):
            return [*self._faults_of_output(output), *self._faults_of_lse(lse)]

    def _faults_of_output(self, output: np.ndarray) -> list[str]:
        if output.shape != self.output.shape or output.dtype != self.dtype:
            return [f"the output is {output.dtype} {output.shape}, not {self.dtype}"]
        got = output.astype(np.float64)
        wanted = self.output.astype(np.float64)
        vague = (self.overflows | self.is_noise)[..., None] & np.ones(got.shape, bool)
        is_nan = np.isnan(wanted)
        compared = ~vague & np.isfinite(wanted) & ~self.is_hidden[..., None]
        near = (abs(got - wanted) <= self.bound) | (got == wanted)
        near |= np.isinf(got) & (got * wanted > 0) & (abs(wanted) + self.bound >= self.most)
        classed = ~vague & ~np.isfinite(wanted) & ~self.is_unsure
        same = np.where(is_nan, np.isnan(got), got == wanted)
        widest = self.largest * (1 + 1e-2) + self.bound
        within = np.isnan(got) | (abs(got) <= widest) | (np.isinf(got) & (widest >= self.most))
        return _found(
            got, wanted, self.bound,
            {
                "a query that sees no key has an output that is not 0":
                    self.is_hidden[..., None] & (got != 0),
                "too far from the exact output": compared & ~near,
                "NaN or infinity at the wrong place, or none at the right one": classed & ~same,
                "finite although a value that is seen is not":
                    self.shows_bad & np.isfinite(got),
                "beyond all values that are seen": vague & ~self.has_bad & ~within,
                "NaN although no score overflows":
                    (self.is_noise & ~self.overflows)[..., None] & ~is_nan & ~self.has_bad
                    & np.isnan(got),
            },
        )  # fmt: skip

    def _faults_of_lse(self, lse: np.ndarray) -> list[str]:
        got, wanted = lse.astype(np.float64), self.lse.astype(np.float64)
        if got.shape != wanted.shape:
            return [f"the log-sum-exp has shape {got.shape}"]
        near = (got == wanted) | (abs(got - wanted) <= self.lse_bound)
        near |= np.isnan(got) & np.isnan(wanted)
        wrong = ~near & ~self.overflows & ~self.is_noise
        return _found(got, wanted, self.lse_bound, {"wrong log-sum-exp": wrong})


def _magnitude_of_bias(problem: Problem) -> np.ndarray:
    """|attn_bias| + |slope| · distance; 0 for what is not finite."""
    total = np.zeros((1, 1, 1, 1))
    if problem.attn_bias is not None:
        bias = problem.attn_bias.astype(np.float64)
        total = total + np.where(np.isfinite(bias), abs(bias), 0)
    if problem.alibi_slopes is not None:
        i, j = np.arange(problem.q.shape[2])[:, None], np.arange(problem.k.shape[2])
        distance = abs(i + problem.q_offset[:, None, None, None] - j)
        total = total + abs(problem.alibi_slopes.astype(np.float64))[:, None, None] * distance
    return total


def _largest_seen(V: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The largest of the finite values that some query of a head sees, (B, H, 1, Dv)."""
    return np.where(seen.any(2)[..., None], V, 0).max(2, keepdims=True, initial=0)


def _any_seen(seen: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """Whether a query sees a bad value in a column: (B, H, Lq, Dv)."""
    if not bad.any():
        return np.zeros((*seen.shape[:3], bad.shape[3]), bool)
    return seen.astype(np.float32) @ bad.astype(np.float32) > 0


def _found(
    got: np.ndarray, wanted: np.ndarray, bound: np.ndarray, wrong: dict[str, np.ndarray]
) -> list[str]:
    sentences = []
    bound = np.broadcast_to(bound, got.shape)
    for what, where in wrong.items():
        places = np.argwhere(where)
        if len(places):
            at = tuple(map(int, places[0]))
            sentences.append(
                f"{what}: {len(places)} of {got.size}, the first at {at}, where {got[at]!r} is "
                f"and {wanted[at]!r} ± {bound[at]:.2g} was expected"
            )
    return sentences
