"""Compute the gated delta rule with any set of known bugs (deviations), in float64.

Each token is computed in turn, as the rule is defined. Chunks of tokens only matter for bugs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.prepared import FLOAT32, UNITS, Impossible
from minimha.check.problems import Graded, spans
from minimha.check.rounding import FORMATS, rounded
from minimha.check.wrong_attention import Deviated
from minimha.equations.delta_problem import EPSILON, DeltaProblem

Array = NDArray[Any]

IN_INPUTS = 4  # roundings to the inputs' dtype, of the largest state
IN_SUMS = 6  # roundings to float32, at each token
OVERFLOWN = 1e25  # a float32 kernel may have overflown on the way to such a number
MOST_LOSS = 5  # times the root mean square of what a state kept in 16 bits loses
MOST_DECAY = 100.0  # of -g: after more, nothing is left whose rounding matters
APART, DROPPING = "delta_chunks_apart", "delta_last_chunk_dropped"
# These treat what was stored before a chunk, or in it, in another way than the rest of the state.
SPLITTING = (
    "delta_chunk_state_not_decayed", "delta_chunk_prediction_not_decayed",
    "delta_chunk_output_not_decayed", "delta_chunk_scores_not_decayed",
    "delta_chunk_triangle_not_decayed", "delta_chunk_stored_not_decayed",
    "delta_chunk_stored_decays_whole", "delta_chunk_state_kept", "delta_chunk_not_solved",
    "delta_chunk_sums_not_restarted", "delta_chunk_beta_of_column", "delta_chunk_correction_sign",
)  # fmt: skip
OTHER_BASE = "delta_chunk_state_decays_in_other_base"
EXPONENTS = {"e^(1 / ln 2)": 1 / math.log(2), "2": math.log(2)}  # of exp(g), for each base
IN_BLOCKS = "delta_chunk_solved_in_blocks", "delta_chunk_block_decay_lost"
SERIES, SPLIT = "delta_chunk_series_short", "delta_decay_split_clamped"
LARGEST_SUM = 87.0  # of -g in a chunk of 64 tokens: exp of more is infinite in float32


class PreparedDelta:
    """A problem of the gated delta rule, with its arguments in float64."""

    def __init__(self, graded: Graded, dtype: str = "float32") -> None:
        self.graded, self.unit = graded, UNITS[dtype]
        self.problem = x = DeltaProblem.of(**graded.arguments)
        self.q, self.k, self.v = (a.astype(np.float64) for a in (x.q, x.k, x.v))
        self.g, self.beta = x.g.astype(np.float64), x.beta.astype(np.float64)
        self.is_finite = all(
            np.isfinite(a).all() for a in (self.q, self.k, self.v, self.g, self.beta)
        )


def deviate_delta(p: PreparedDelta, d: Mapping[str, Any]) -> Deviated:
    """Return the output (B, H, L, Dv) with deviations; ``d`` maps their names to values."""
    O, bound = np.zeros(p.v.shape), np.zeros(p.v.shape)
    arguments = p.graded.arguments
    with np.errstate(all="ignore"):
        steps = _inputs(p, d)
        S = np.zeros((p.v.shape[1], p.k.shape[-1], p.v.shape[-1]))
        for s, (b, first, count) in enumerate(_rows(p, d)):
            if s == 0 or not ("delta_sequences_run_on" in d and "cu_seqlens" in arguments):
                S = _initial(p, d, s)
            if s and "delta_initial_state_first_only" in d:
                S = np.zeros_like(S)
            there = slice(first, first + count if "cu_seqlens" in arguments else None)
            one = _Tokens(p, d, S, count)
            O[b, :, there], bound[b, :, there] = one.all(*(x[b, :, there] for x in steps))
            S = one.S
        is_free = p.is_finite & ~(abs(O) < OVERFLOWN)
        if "delta_decay_overflows" in d:
            is_free = is_free | (_sums(p.g) > LARGEST_SUM)
    nothing = np.zeros(O.shape[:3])
    return Deviated(
        O, bound, nothing, nothing, _others(p, d, O), is_free, np.ones(nothing.shape, bool)
    )


def _rows(p: PreparedDelta, d: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Return the batch entry, the first token and the number of tokens of each sequence."""
    rows: list[tuple[int, int, int]] = [tuple(row) for row in p.problem.rows.tolist()]
    if "delta_sequences_border_moved" not in d or "cu_seqlens" not in p.graded.arguments:
        return rows
    L, by = p.v.shape[2], d["delta_sequences_border_moved"]
    firsts = [first + by if 0 < first < L else first for _, first, _ in rows]
    return [(0, start, stop - start) for start, stop in pairwise([*firsts, L])]


def _others(p: PreparedDelta, d: Mapping[str, Any], O: Array) -> tuple[Array, ...]:
    """Return what else is accepted: NaN in the heads that a deviation lets have it."""
    causes: dict[str, Callable[[], Array]] = {
        "delta_nan_leaks": lambda: np.isnan(O),
        "delta_clearing_is_nan": lambda: np.isneginf(p.g),
        "delta_decay_overflows": lambda: _sums(p.g) > LARGEST_SUM,
    }
    heads = [cause().any((2, 3), keepdims=True) for name, cause in causes.items() if name in d]
    return tuple(np.where(is_nan, np.nan, O) for is_nan in heads)


def _sums(g: Array) -> Array:
    """Return the largest sum of -g from the start of each token's chunk of 64, (B, H, L, 1)."""
    found = np.zeros((*g.shape[:3], 1))
    for start in range(0, g.shape[2], 64):
        chunk = slice(start, start + 64)
        found[:, :, chunk] = np.cumsum(-g[:, :, chunk], axis=2).max(-1, keepdims=True)
    return found


def _inputs(p: PreparedDelta, d: Mapping[str, Any]) -> list[Array]:
    """Return q, k, v, β and exp(g), (B, H, L, ·) each, as the tokens need them."""
    scale, is_early = _scale(p, d), "delta_scale_before_norm" in d
    x = {"q": p.q * scale if is_early else p.q, "k": p.k}
    for name in x:
        if p.problem.normalize or name in d.get("delta_norm_always", ""):
            x[name] = _normalised(x[name], name, d)
    q, k = x["q"] * (1 if is_early else scale), x["k"]
    k = k * scale if "delta_scale_on_keys" in d else k
    q, k = (a[:, _heads(p, d, name)] for a, name in ((q, "q"), (k, "k")))
    of_keys = d.get("delta_beta_of_key_head", "").split(" and ")
    own = np.arange(p.v.shape[1])
    beta, decay = (
        x[:, _heads(p, {}, name) if name in of_keys else own]
        for x, name in ((_fractions(p, d), "beta"), (_decays(p, d), "g"))
    )
    return [q, k, p.v, beta, decay]


def _scale(p: PreparedDelta, d: Mapping[str, Any]) -> float:
    D, Dv, scale = p.k.shape[-1], p.v.shape[-1], p.problem.scale
    if "scale" in p.graded.arguments:
        scale = D**-0.5 if "delta_scale_ignored" in d else scale
        scale *= D**-0.5 if "delta_scale_times_default" in d else 1
    else:
        for name, value in (
            ("delta_scale_missing", 1), ("delta_scale_over_D", 1 / D),
            ("delta_scale_of_values", Dv**-0.5),
        ):  # fmt: skip
            scale = value if name in d else scale
    return float(scale * scale if "delta_scale_twice" in d else scale)


def _normalised(x: Array, name: str, d: Mapping[str, Any]) -> Array:
    over_heads = name in d.get("delta_norm_over_heads", "")
    squares = np.square(x).sum((1, 3) if over_heads else 3, keepdims=True)
    if name in d.get("delta_norm_missing", ""):
        return x
    if name in d.get("delta_norm_squared", ""):
        return np.asarray(x / (squares + EPSILON))
    if name in d.get("delta_norm_of_mean", ""):
        return np.asarray(x / np.sqrt(squares / x.shape[-1] + EPSILON))
    match d.get("delta_norm_epsilon"):
        case "max":
            return np.asarray(x / np.maximum(np.sqrt(squares), EPSILON))
        case "outside":
            return np.asarray(x / (np.sqrt(squares) + EPSILON))
        case "none":
            return np.asarray(x / np.sqrt(squares))
        case epsilon:
            return np.asarray(x / np.sqrt(squares + (epsilon or EPSILON)))


def _heads(p: PreparedDelta, d: Mapping[str, Any], name: str) -> Array:
    """Return the key head that each value head reads, (H,)."""
    H, Hk = p.v.shape[1], p.k.shape[1]
    if name in d.get("delta_heads_tiled", ""):
        return np.asarray(np.arange(H) % Hk)
    if name in d.get("delta_head_0_for_all", ""):
        return np.zeros(H, int)
    return np.asarray(np.arange(H) // (H // Hk))


def _fractions(p: PreparedDelta, d: Mapping[str, Any]) -> Array:
    if "delta_beta_ignored" in d:
        return np.ones_like(p.beta)
    if "delta_beta_sigmoid" in d:
        return np.asarray(1 / (1 + np.exp(-p.beta)))
    if "delta_beta_at_most_1" in d:
        return np.minimum(p.beta, 1)
    return p.beta**2 if "delta_beta_twice" in d else p.beta


def _decays(p: PreparedDelta, d: Mapping[str, Any]) -> Array:
    """Return exp(g), (B, H, L, 1) or (B, H, L, D)."""
    g = p.g
    if "delta_decay_ignored" in d:
        g = np.zeros_like(g)
    if "delta_decay_of_one_channel" in d:
        is_first = d["delta_decay_of_one_channel"] == "first"
        g = g[..., :1] if is_first else g.mean(-1, keepdims=True)
    if "delta_decay_of_columns" in d and g.shape[-1] not in (1, p.v.shape[-1]):
        raise Impossible("g per channel is as wide as the keys, and the columns are not")
    if "delta_decay_of_next_token" in d:
        g = np.roll(g, -1, axis=2)
        g[:, :, -1] = 0
    if "delta_decay_not_exponential" in d:
        return OTHERWISE[d["delta_decay_not_exponential"]](g)
    g = np.maximum(g, d.get("delta_decay_clamped", -np.inf))
    sign = -1 if "delta_decay_inverse" in d else 1
    return np.asarray(np.exp2(g) if "delta_decay_in_base_2" in d else np.exp(sign * g))


OTHERWISE: dict[str, Callable[[Array], Array]] = {  # in place of exp(g)
    "g": lambda g: g,
    "sigmoid(g)": lambda g: 1 / (1 + np.exp(-g)),
    "exp(-exp(g))": lambda g: np.exp(-np.exp(g)),
    "exp(-softplus(g))": lambda g: 1 / (1 + np.exp(g)),
}


def _initial(p: PreparedDelta, d: Mapping[str, Any], s: int) -> Array:
    """Return the state before the first token of a sequence, (H, D, Dv)."""
    shape = p.v.shape[1], p.k.shape[-1], p.v.shape[-1]
    if p.problem.state is None or "delta_initial_state_ignored" in d:
        return np.zeros(shape)
    S = p.problem.state[0 if "delta_initial_state_of_first" in d else s].astype(np.float64)
    return _transposed(S) if "delta_initial_state_transposed" in d else S


def _transposed(S: Array) -> Array:
    if S.shape[-1] != S.shape[-2]:
        raise Impossible("the state is transposed but not square")
    return np.asarray(S.swapaxes(-1, -2))


class _Tokens:
    """The tokens of one sequence: their states, outputs and bounds."""

    def __init__(self, p: PreparedDelta, d: Mapping[str, Any], S: Array, length: int) -> None:
        self.p, self.d, self.S = p, d, S
        self.length = length  # of the first call's tokens, those that exist
        self.size = next((d[name] for name in (APART, DROPPING, *SPLITTING) if name in d), 0)
        self.block = self.powers = 0
        for name in IN_BLOCKS:
            self.block, self.size = d.get(name, (self.block, self.size))
        self.powers, self.size = d.get(SERIES, (0, self.size))
        self.base, self.size = d.get(OTHER_BASE, ("", self.size))
        self.is_clamped = SPLIT in d and p.g.shape[-1] > 1
        self.size = 64 if self.is_clamped else self.size
        is_treated = any(name in d for name in (*SPLITTING, *IN_BLOCKS, SERIES, OTHER_BASE))
        self.is_split = is_treated or self.is_clamped
        self.before_chunk = S
        self.own = np.zeros_like(S)  # what the chunk has stored, and what of it is left
        self.stored_raw = np.zeros_like(S)  # the same without decay
        self.of_others = np.zeros_like(S)  # what is left of it, times each token's beta
        self.within = self.earlier = np.zeros_like(S)  # what this and earlier blocks have stored
        self.by_split = np.zeros_like(S)  # what the chunk has stored, over a decay up to a bound
        self.series: list[Array] = []  # what it would have stored by fewer powers of the triangle
        self.faded_by = np.ones_like(S)  # the product of the chunk's decays
        self.since_start = np.ones_like(S)  # the product of the call's decays
        self.stored = d.get("delta_state_in_16_bits")
        self.error = self.largest = self.loss = self.decay = np.zeros(len(S))  # of each head

    def all(self, q: Array, k: Array, v: Array, beta: Array, a: Array) -> tuple[Array, Array]:
        """Return the outputs and their bounds; inputs are (H, L, ·)."""
        O, bound = np.zeros(v.shape), np.zeros(v.shape)
        for start, stop in spans(self.p.graded.chunks or (v.shape[1],)):
            before, count, self.since_start = self.S, stop - start, np.ones_like(self.S)
            if DROPPING in self.d:
                count = count // self.size * self.size
            sees_padding = {"delta_lengths_ignored", "delta_state_beyond_length"} & {*self.d}
            if start == 0 and not sees_padding:
                count = min(count, self.length)
            for t in range(start, start + count):
                if self.size and (t - start) % self.size == 0:
                    self._begin_chunk(is_first=t == start)
                if self.block and (t - start) % self.block == 0:
                    self.earlier = self.earlier + self.within
                    self.within = np.zeros_like(self.within)
                before = self.S
                output = self._token(q[:, t], k[:, t], v[:, t], beta[:, t], a[:, t], t == 0)
                if start or t < self.length or "delta_lengths_ignored" in self.d:
                    O[:, t], bound[:, t] = output, self._bound(q[:, t], output)
            self.S = self._passed_on()
            if "delta_padding_decays" in self.d:
                padded = a[:, start + count : stop]
                self.S = np.asarray(_over_rows(padded.prod(1), self.d) * self.S)
            if start == 0 and "delta_output_beyond_length" in self.d:
                beyond = slice(self.length, stop)
                O[:, beyond] = q[:, beyond] @ self.S
                bound[:, beyond] = self._bound(q[:, beyond], O[:, beyond])
            if stop < v.shape[1]:
                self._return(before, a[:, stop - 1])
        return O, bound

    def _begin_chunk(self, *, is_first: bool) -> None:
        self.S = self.S if is_first else self._passed_on()
        if APART in self.d and not is_first:
            self.S = np.zeros_like(self.S)
        self.before_chunk = self.S
        self.own = self.stored_raw = self.of_others = np.zeros_like(self.S)
        self.within = self.earlier = self.by_split = self.own
        self.series = [self.own] * self.powers
        self.faded_by = np.ones_like(self.S)

    @property
    def faded(self) -> Array:
        """What is left of the state before the chunk."""
        is_whole = "delta_chunk_sums_not_restarted" in self.d
        return (self.since_start if is_whole else self.faded_by) * self.before_chunk

    def _passed_on(self) -> Array:
        """Return the state that the next chunk or call gets."""
        if not self.is_split:
            return self.S
        own = self.own
        if "delta_chunk_stored_not_decayed" in self.d:
            own = self.stored_raw
        if "delta_chunk_stored_decays_whole" in self.d:
            own = self.faded_by * self.stored_raw
        return own + (self.before_chunk if "delta_chunk_state_kept" in self.d else self.faded)

    def _return(self, before: Array, a: Array) -> None:
        """Change the state between two calls, as the deviations do."""
        if "delta_state_returned_transposed" in self.d:
            self.S = _transposed(self.S)
        if "delta_state_returned_early" in self.d:
            self.S = before
        if "delta_state_dropped" in self.d:
            self.S = np.zeros_like(self.S)
        if "delta_state_not_decayed" in self.d:
            self.S = self.S + (1 - _over_rows(a, self.d)) * before

    def _token(self, q: Array, k: Array, v: Array, beta: Array, a: Array, is_first: bool) -> Array:
        """Update the state by one token, and return its output (H, Dv)."""
        d, before, decay = self.d, self.S, _over_rows(a, self.d)
        if is_first and "delta_initial_state_not_decayed" in d:
            decay = np.ones_like(decay)
        decayed = read = decay * before
        if "delta_decay_after_error" in d:
            read = before
        if "delta_decay_last" in d:
            decayed = read = before
        if self.is_split:
            decayed, read = self._by_chunks(decay)
        by = q if "delta_prediction_not_by_key" in d else k
        u = self._correction(v, (by[:, None] @ read)[:, 0], beta)
        if "delta_correction_of_itself" in d:
            u = u / (1 + beta * np.square(k).sum(-1, keepdims=True))
        if "delta_chunk_beta_of_column" in d:
            u = u - (k[:, None] @ self.of_others)[:, 0]
        if self.powers:
            u = self._by_powers(k, u, beta)
        stored = k[..., None] * u[:, None]
        self.S, self.own = decayed + stored, self.own + stored
        self.stored_raw = self.stored_raw + stored
        self.of_others = self.of_others + beta[..., None] * stored
        source = self.S
        if self.block:
            self.within = self.within + stored
        if "delta_chunk_block_decay_lost" in d:
            source = self.faded + self.earlier + self.within
        if self.is_clamped:
            over = np.minimum(1 / self.faded_by, np.exp(d[SPLIT]))
            self.by_split = self.by_split + over * stored
            source = self.faded + self.faded_by * self.by_split
        if "delta_chunk_output_not_decayed" in d:
            source = self.own + self.before_chunk
        if "delta_chunk_scores_not_decayed" in d:
            source = self.stored_raw + self.faded
        if "delta_read_before_update" in d:
            source = before if d["delta_read_before_update"] == "not decayed" else decayed
        if "delta_decay_last" in d:
            self.S = decay * self.S
            source = self.S if d["delta_decay_last"] == "read after" else source
        self._grow(k, u, v, beta, decay)
        return np.asarray((q[:, None] @ source)[:, 0])

    def _by_chunks(self, decay: Array) -> tuple[Array, Array]:
        """Return the decayed state, and the state that the error reads."""
        d = self.d
        self.own = decay * self.own
        self.of_others = decay * self.of_others
        self.faded_by, self.since_start = decay * self.faded_by, decay * self.since_start
        there = self.before_chunk if "delta_chunk_state_not_decayed" in d else self.faded
        if self.base:
            there = self.faded_by ** EXPONENTS[self.base] * self.before_chunk
        read = self.own + there
        if "delta_chunk_prediction_not_decayed" in d:
            read = self.own + self.before_chunk
        if "delta_chunk_triangle_not_decayed" in d:
            read = self.stored_raw + self.faded
        if "delta_chunk_correction_sign" in d:
            read = self.faded - self.own
        if self.block:
            self.within = decay * self.within
        if "delta_chunk_solved_in_blocks" in d:
            read = self.faded + self.within
        if "delta_chunk_block_decay_lost" in d:
            read = self.faded + self.earlier + self.within
        if self.is_clamped:
            read = self.faded + self.faded_by * self.by_split
        self.series = [decay * own for own in self.series]
        if self.powers or "delta_chunk_not_solved" in d or "delta_chunk_beta_of_column" in d:
            read = self.faded
        return self.own + there, read

    def _by_powers(self, k: Array, u: Array, beta: Array) -> Array:
        """Correct u by as many powers of the triangle as the series has."""
        corrected = u
        for n, own in enumerate(self.series):
            self.series[n] = own + k[..., None] * corrected[:, None]
            corrected = u - beta * (k[:, None] @ own)[:, 0]
        return np.asarray(corrected)

    def _correction(self, v: Array, predicted: Array, beta: Array) -> Array:
        d = self.d
        if "delta_rule_missing" in d:
            return np.asarray(beta * v)
        if "delta_beta_on_values_only" in d:
            return np.asarray(beta * v - predicted)
        if "delta_beta_on_prediction_only" in d:
            return np.asarray(v - beta * predicted)
        return np.asarray(beta * (v + (predicted if "delta_correction_sign" in d else -predicted)))

    def _grow(self, k: Array, u: Array, v: Array, beta: Array, decay: Array) -> None:
        """Bound the error of the state: its own roundings, and those that the rule passes on."""
        k, u, v = (_finite(x) for x in (k, u, v))
        norm = np.square(k).sum(-1)
        passed = decay.max((1, 2)) * np.maximum(1, abs(1 - beta[:, 0] * norm))
        size = np.sqrt(np.square(_finite(self.S)).sum((1, 2)))
        size += np.sqrt(norm) * np.sqrt(np.square(u).sum(-1) + np.square(v).sum(-1))
        # A difference of sums of g, as chunked forms compute it, is as inexact as these sums.
        self.decay = self.decay + np.minimum(abs(np.log(decay)), MOST_DECAY).max((1, 2))
        self.error = passed * self.error + (IN_SUMS + self.decay) * FLOAT32 * size
        self.largest = np.maximum(passed * self.largest, size)
        if self.stored is not None:
            bits, exponent = FORMATS[self.stored]
            self.S = rounded(self.S, bits, exponent)
            own = 2.0 ** (-bits - 1) * size  # independent at each token
            self.loss = np.sqrt((passed * self.loss) ** 2 + own**2)

    def _bound(self, q: Array, output: Array) -> Array:
        unit = self.p.unit
        state = self.error + MOST_LOSS * self.loss + IN_INPUTS * unit * self.largest
        if q.ndim > state.ndim + 1:  # of several tokens
            state = state[:, None]
        longest = np.sqrt(np.square(q).sum(-1)) * state
        return np.asarray(_finite(longest)[..., None] + unit * abs(_finite(output)))


def _finite(x: Array) -> Array:
    """Return ``np.nan_to_num(x)``, which takes longer than to look whether x needs it."""
    return x if np.isfinite(x).all() else np.nan_to_num(x)


def _over_rows(a: Array, d: Mapping[str, Any]) -> Array:
    """Return a decay (H, 1 or D) so that it multiplies rows of S, or columns with that bug."""
    return np.asarray(a[:, None] if "delta_decay_of_columns" in d else a[:, :, None])
