"""Compute attention with any set of deviations, in float64, and bound its rounding errors.

The equations are those of ``minimha.equations.dense``, with a branch wherever implementations go
wrong. Deviations of different stages compose. The scores are those of ``wrong_scores``.

If the deviations leave a number open, any number is accepted. This holds in rows that see no key
only because of a deviation, and where a NaN in a hidden key may leak.

The bounds follow from rounding, as in the tests of the kernels. Let u be half an eps of the dtype.
A score is a sum of D products, with an error up to 2⁻²⁴ (D + 8) |scale| Σ |q_d k_d| plus a few u
of the score. An error δ of the scores changes a weight by a factor of at most exp(2δ). Weights and
output are rounded to the dtype. In exp(s - L) the log-sum-exp L has an error of 2⁻²³ |L|, by which
the output o moves 2⁻²³ |L| |o|. A mean that moves from key to key, m + (v - m) w, has errors of the
largest value that it met: 2⁻²¹ max |v|.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check import visible
from minimha.check.altered import confused, order_by_lengths
from minimha.check.catalogue import AXES, DEVIATIONS, EMPTY_TOO, GROUPS
from minimha.check.expanded import Place
from minimha.check.prepared import FLOAT32, SMALLEST, Impossible, Prepared, spread
from minimha.check.rounding import OF_FLOAT8, accumulated, rounded
from minimha.check.wrong_scores import HIDDEN_FINITELY, Scores

Array = NDArray[Any]

OVERFLOW = {"float32": 88.0, "float64": 709.0}  # exp of a larger number is infinite
MOST_ADDED = 1 << 20  # products that are added up in few bits
TOLERATED = 8 * np.log(2)  # growth of a maximum that lazy kernels leave alone
NEARLY = 1e-5  # below 1
UNDERFLOW = -746.0  # exp of a smaller number is 0, even in float64

MAXIMA = {
    "softmax_no_maximum", "softmax_global_maximum", "first_maximum_0", "maximum_of_hidden",
}  # fmt: skip
SOFTMAX_AXES = {
    "softmax_over_queries": (-2,),
    "softmax_over_heads": (1,),
    "softmax_over_all": (-2, -1),
}
HIDDEN_ROWS = (
    "lse_of_dead_rows", "dead_rows_nan", "dead_rows_mean", "dead_rows_first_value",
    "dead_rows_numbers",
)  # fmt: skip
HIDE_ALL = (  # bugs that hide all keys of some rows, whose output is 0 or NaN then
    "online_last_block_dropped", "lengths_hide_queries", "whole_lengths_hide_all",
    "window_left_wraps", "sequences_end_at_empty",
)  # fmt: skip
LEAKS = ("nan_leaks", "nan_becomes_number")


@dataclass(frozen=True, eq=False)
class Deviated:
    """The answer of attention with known bugs (deviations), and the bounds of its errors."""

    output: Array  # (B, H, Lq, Dv), float64
    bound: Array  # the largest rounding error of each number of the output
    lse: Array  # (B, H, Lq), float64
    lse_bound: Array
    others: tuple[Array, ...]  # other outputs that are accepted, number by number
    is_free: Array  # where any number is accepted, (B, H, Lq, Dv)
    is_lse_free: Array  # (B, H, Lq)


def attend(
    arguments: Mapping[str, Any], deviations: Iterable[str] | Mapping[str, Any] = ()
) -> tuple[Array, Array]:
    """Return output (B, H, Lq, Dv) and log-sum-exp (B, H, Lq) of attention with bugs, in float64.

    ``arguments`` are those of ``minimha.attention``, with 4-D arrays. ``deviations`` are
    identifiers of bugs, which may be mapped to values (``{"online_sum_not_rescaled": 16}``).
    Without any, this is dense attention. Raises ``Impossible`` if a bug does not fit the shapes:
    swapped Q and K need Lq = Lk.

    >>> x = np.eye(2)[None, None]
    >>> attend({"q": x, "k": x, "v": x}, ["scale_missing"])[0].round(3)[0, 0]
    array([[0.731, 0.269],
           [0.269, 0.731]])
    """
    result = deviate(Prepared(arguments), values_of(deviations))
    return result.output, result.lse


def values_of(deviations: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Map each deviation to its value, by default the usual value."""
    if isinstance(deviations, Mapping):
        return dict(deviations)
    return {name: DEVIATIONS[name].values[0] for name in deviations}


def deviate(prepared: Prepared, deviations: Mapping[str, Any]) -> Deviated:
    """Return the answer of attention with ``deviations``, which maps identifiers to values."""
    with np.errstate(all="ignore"):
        try:
            return _Deviation(prepared, deviations).result()
        except (ValueError, IndexError) as error:
            if prepared.arguments is prepared.given:
                raise
            raise Impossible(f"bugs that change shapes, together: {error}") from error


class _Deviation(Scores):
    """One whole computation; each stage reads the attributes that earlier stages set."""

    def __init__(self, prepared: Prepared, deviations: Mapping[str, Any]) -> None:
        super().__init__(prepared, deviations)
        self.others: list[Array] = []
        self.lost: Array | None = None  # rows that see keys but whose sum is 0
        self.looseness = 0.0  # relative error of weights from lost precision
        self.L: Array  # the log-sum-exp, (B, H, Lq)
        self.W_stale: Array  # the weights of columns that are not rescaled
        self.is_shared: bool  # whether rows share their sums

    def result(self) -> Deviated:
        self.multiply()
        self.look()
        self.score()
        self.normalise()
        self.weigh()
        self.take_logarithm()
        if "state_of_earlier_heads" in self.d:
            self.add_earlier_heads()
        self.settle_rows()
        return self.finish()

    # Products.

    def normalise(self) -> None:
        """Set the weights W and the total of each row, with and without the sink."""
        d = self.d
        name = next((n for n in SOFTMAX_AXES if n in d), "")
        axis = SOFTMAX_AXES.get(name, (-1,))
        if name == "softmax_over_all" and self.x.Lq == 1:
            name = ""  # rows share nothing
        self.is_shared = bool(name) or "sums_over_queries" in d
        exp: Any = np.exp2 if "softmax_base_2" in d else np.exp
        if "exponential_approximated" in d:
            exp = partial(_approximated, d["exponential_approximated"])
        sinks = self.sinks_used()
        keys_top = self.S.max(axis=axis, keepdims=True, initial=-np.inf)
        top = keys_top
        is_of_keys = "sink_not_in_maximum" in d or d.get("sink_unshifted") == "of keys"
        if sinks is not None and not is_of_keys:
            top = np.maximum(top, sinks)
        unseen = None  # the number of parts without keys, each with a log-sum-exp of 0
        if "part_without_keys_counts" in d:
            kind, n = split = d["part_without_keys_counts"]
            seen = self.seen_in_parts(split)
            parts = n if kind.endswith(EMPTY_TOO) else seen.shape[-1]
            unseen = parts - seen.sum(-1, keepdims=True)
            top = np.where(unseen > 0, np.maximum(top, 0), top)
        top = self.deviated_maximum(top)
        top = np.where(top == -np.inf, 0, top)
        E = exp(self.S - top)
        numerators, terms = self.online(E, exp, exp(keys_top - top))
        if "sums_over_queries" in d:
            axis, self.is_lse_free = (-2,), self.is_lse_free | True
        plain = self.total(terms, axis)
        total = plain
        if sinks is not None:
            starts, _ = visible.parts(self.x, d.get("sink_in_each_part", ("parts", 1)))
            sinks_sum = exp(sinks - (0 if "sink_unshifted" in d else top))
            if "sink_not_rescaled" in d:
                first = self.S[..., : d["sink_not_rescaled"]].max(-1, keepdims=True)
                sinks_sum = exp(np.maximum(sinks, first) - top)
            total = plain + len(starts) * (sinks if "sink_not_exponentiated" in d else sinks_sum)
        if unseen is not None:
            total = total + unseen * exp(-top)
        more = d.get("denominator_enlarged", 0)
        total = total + (exp(-top) if more == "exp(-m)" else more)
        divisor = plain if "sink_in_lse_alone" in d else total
        W = (
            numerators
            if "softmax_not_normalised" in d
            else numerators / np.where(divisor == 0, 1, divisor)
        )
        if "columns_not_rescaled" in d:
            stale = self.stale(d["columns_not_rescaled"][1], exp, exp(keys_top - top))
            self.W_stale = stale / np.where(total == 0, 1, total)
        W = W * self.factor
        if self.soft is not None:
            W = np.where(self.soft, W, 0)
        self.W, self.top, self.plain, self.total_used = W, top, plain, total
        self.settle_softmax(name, keys_top, total)
        self.round_weights()
        self.relative = np.expm1(np.minimum(np.where(self.has_score, self.delta, 0), 50))
        self.drift = (abs(W) * self.relative).sum(axis, keepdims=True)
        self.is_mean = not self.is_shared and "softmax_not_normalised" not in d

    def sinks_used(self) -> Array | None:
        sinks = self.x.problem.sinks
        if sinks is None:
            return None
        sinks = sinks.astype(np.float64)[:, None, None] * self.unit_of("sinks")
        c = self.x.problem.softcap
        if "sink_capped" in self.d and c is not None:
            sinks = c * np.tanh(sinks / c)
        return np.asarray(sinks * self.scale_used() if "sink_scaled" in self.d else sinks)

    def deviated_maximum(self, top: Array) -> Array:
        if "softmax_no_maximum" in self.d:
            return np.zeros_like(top)
        if "maximum_of_hidden" in self.d:
            return np.asarray(np.maximum(top, self.unhidden.max(-1, keepdims=True)))
        if "first_maximum_0" in self.d:
            return np.maximum(top, 0)
        if "softmax_global_maximum" in self.d:
            axes = {"row": None, "head": (-2, -1), "batch": (1, 2, 3), "all": (0, 1, 2, 3)}
            axis = axes[self.d["softmax_global_maximum"]]
            return spread(top.max(axis=axis, keepdims=True), top.shape)
        return top

    def online(self, E: Array, exp: Any, last: Array) -> tuple[Array, Array]:
        """Return numerators and terms of the denominator, which a bug may leave without rescaling.

        ``last`` is the factor by which a sink, added at the end, shrinks both.
        """
        blocks = self.d.get("online_output_not_rescaled"), self.d.get("online_sum_not_rescaled")
        if "rescaling_skipped" in self.d:
            return self.rescaled_lazily(E, *self.d["rescaling_skipped"])
        if blocks == (None, None):
            return E, E
        output, sums = (E if B_c is None else self.stale(B_c, exp, last) for B_c in blocks)
        return output, sums

    def stale(self, B_c: int, exp: Any, last: Array) -> Array:
        """Return exponentials that stay as they were when their block of keys was added."""
        running = self.running_maxima(B_c)
        return np.where(running == -np.inf, 0, exp(self.S - running) * last)

    def running_maxima(self, B_c: int) -> Array:
        """Return the largest score up to the end of each key's block of ``B_c`` keys."""
        ends = np.minimum((self.x.j // B_c + 1) * B_c, self.x.Lk) - 1
        return np.asarray(np.maximum.accumulate(self.S, -1)[..., ends])

    def rescaled_lazily(self, E: Array, of: str, B_c: int) -> tuple[Array, Array]:
        """Return what ``online`` does if growth up to ``TOLERATED`` is made up for only in part.

        The output, and the sum if it is one ``of`` them, are not rescaled then, but the maximum
        grows. If only the output is not rescaled, the maximum stays, and the sum is rescaled.
        """
        stays = of == "output"
        tops = np.maximum.reduceat(self.S, self.x.j[::B_c], axis=-1)
        tops = np.maximum.accumulate(tops, -1)
        base, small = tops[..., 0], np.zeros_like(tops)  # growth that follows each block
        for n in range(1, tops.shape[-1]):
            growth = np.where(base == -np.inf, np.inf, tops[..., n] - base)
            is_small = growth <= TOLERATED
            small[..., n - 1] = np.where(is_small, growth, 0)
            base = np.where(is_small & stays, base, tops[..., n])
        later = small[..., ::-1].cumsum(-1)[..., ::-1]
        changed = E * np.exp(-later if stays else later)[..., self.x.j // B_c]
        return (E, changed) if stays else (changed, changed)

    def total(self, terms: Array, axis: tuple[int, ...]) -> Array:
        if "denominator_of_first_keys" in self.d:
            terms = np.where(self.x.j < self.d["denominator_of_first_keys"], terms, 0)
        if "denominator_of_half_tiles" in self.d:
            tile, n = self.d["denominator_of_half_tiles"]
            terms = np.where(self.x.j % tile < n, terms, 0)
        for name, bits in (("sum_in_float16", 11), ("sum_in_bfloat16", 8)):
            if name in self.d:
                self.loosen(2.0**-bits * min(self.x.Lk, 16))
                if self.d[name] == "accumulated":
                    return accumulated(terms, bits)[..., None]
                return rounded(terms.sum(axis=axis, keepdims=True), bits)
        return np.asarray(terms.sum(axis=axis, keepdims=True))

    def round_weights(self) -> None:
        for name, bits, exponent in (
            ("weights_in_float16", 11, 16), ("weights_in_bfloat16", 8, 128),
        ):  # fmt: skip
            if name in self.d:
                self.W = rounded(self.W, bits, exponent)
                self.loosen(2.0**-bits * 4)
        if "weights_in_dtype_of_values" in self.d and self.x.arguments.get("v_scale") is not None:
            self.W = self.W * self.kept_in_8_bits(self.d["weights_in_dtype_of_values"])

    def kept_in_8_bits(self, B_c: int) -> Array:
        """Return what a cast to the values' dtype leaves of each exponential, as a factor.

        Exponentials are those of blocks of ``B_c`` keys, by the maximum so far.
        """
        running = self.running_maxima(B_c)
        P = np.where(running == -np.inf, 0, np.exp(self.S - running))
        is_integer = self.x.arguments["v"].dtype.kind == "i"
        if is_integer:  # float32 may find 1 where float64 finds less
            self.is_free = self.is_free | ((P < 1) & (P > 1 - NEARLY)).any(-1)
        cast = np.trunc(P) if is_integer else rounded(P, *OF_FLOAT8)
        return np.where(P == 0, 0, cast / np.where(P == 0, 1, P))

    def loosen(self, relative: float) -> None:
        """Widen the bounds of weights, except in problems that show exactly this rounding."""
        self.looseness += 0 if self.x.is_exact else relative

    def settle_softmax(self, name: str, keys_top: Array, total: Array) -> None:
        """Accept any number in rows where float32, float64 or a guard against 0/0 would differ."""
        if MAXIMA & set(self.d):
            distance = spread(keys_top - self.top, self.top.shape)
            unsure = (distance > OVERFLOW["float32"]) & (distance <= OVERFLOW["float64"])
            unsure |= (distance < 10 - OVERFLOW["float32"]) & (distance >= UNDERFLOW)
            lost = (distance < UNDERFLOW) & np.isfinite(distance)  # 0/0, or 0 with a guard
            if lost.any():
                self.lost = np.full((1, 1, 1, 1), True) if name else lost
            free = np.asarray(unsure.any() if name else unsure[..., 0])
            self.is_free = self.is_free | free
            self.is_lse_free = self.is_lse_free | free | lost.any()
        if name:
            self.is_lse_free = self.is_lse_free | True
            if (total == 0).any():
                self.others.append(np.full((*self.x.shape[:3], self.V.shape[-1]), np.nan))

    # Output and log-sum-exp.

    def weigh(self) -> None:
        """Set O = W V; a NaN in a hidden value adds nothing."""
        x, W, V = self.x, self.W, self.V
        if not x.has_nan:
            self.O = W @ V
        else:
            is_bad = np.asarray(~np.isfinite(V).all(-1))
            self.O = W @ np.where(is_bad[..., None], 0, V)
            visible = self.has_score if self.soft is None else self.has_score & self.soft
            sees_bad = np.asarray((visible & is_bad[:, :, None, :]).any(-1))
            self.O = np.where(sees_bad[..., None], np.nan, self.O)
        if "columns_not_rescaled" in self.d:
            first, _ = self.d["columns_not_rescaled"]
            first = x.D if first == "D" else first
            self.O = np.concatenate([self.O[..., :first], self.W_stale @ V[..., first:]], axis=-1)
        sizes = np.where(np.isfinite(V), abs(V), 0)
        for name, bits in (("output_in_float16", 11), ("output_in_bfloat16", 8)):
            if name in self.d:
                self.O = self.added_up(bits)
        relative = self.looseness + x.extra + 2 * x.unit + x.summed(x.Lk, 32)
        self.bound = relative * (abs(W) @ sizes) + self.moved_by_scores()
        self.bound = self.bound + x.smallest * (1 + sizes.sum(-2, keepdims=True))
        if not x.is_likely:  # the mean of a right kernel may move from key to key
            seen = sizes * np.asarray((W != 0).any(-2))[..., None]
            self.bound = self.bound + 8 * FLOAT32 * seen.max(-2, keepdims=True, initial=0)
        if "weights_in_float16" in self.d and not x.is_exact:
            self.bound = self.bound + SMALLEST["float16"] * sizes.sum(-2, keepdims=True)

    def added_up(self, bits: int) -> Array:
        """O in few bits, added up key after key if it is small."""
        self.loosen(2.0**-bits * min(self.x.Lk, 64))
        if self.W.size * self.V.shape[-1] > MOST_ADDED:
            return rounded(self.O, bits)
        terms = self.W[..., None, :] * self.V.swapaxes(-1, -2)[:, :, None]
        return accumulated(rounded(terms, bits), bits)

    def moved_by_scores(self) -> Array:
        """Bound how far rounded scores move the output.

        If weights sum to 1, a weight that is too large by a factor 1 + ε moves the output by
        W ε (V - O). This is small if one key has nearly all the weight.
        """
        V = np.where(np.isfinite(self.V), self.V, 0)
        if not self.is_mean:
            return np.asarray((abs(self.W) * (self.relative + self.drift)) @ abs(V))
        changes, O = abs(self.W) * self.relative, np.where(np.isfinite(self.O), self.O, 0)
        total = changes.sum(-1, keepdims=True)
        squares = changes @ V**2 - 2 * O * (changes @ V) + O**2 * total
        moved = np.sqrt(total * np.maximum(squares, 0))  # Cauchy-Schwarz
        return np.asarray(moved / (1 - np.minimum(self.drift, 0.5)))

    def take_logarithm(self) -> None:
        d = self.d
        total = self.plain if "lse_without_sink" in d else self.total_used
        logarithm = np.log2(total) if d.get("softmax_base_2") == "log2" else np.log(total)
        top = self.top * (np.log(2) if d.get("softmax_base_2") == "consistent" else 1)
        L = logarithm + top
        if self.is_mean:
            rounding = FLOAT32 * 2 * np.where(np.isfinite(L), abs(L), 0)  # of L in exp(s - L)
            self.bound = self.bound + rounding * np.where(np.isfinite(self.O), abs(self.O), 0)
        if "lse_without_sink" in d:
            sees, keys = self.has_score.any(-1, keepdims=True), _log_sum_exp(self.S)
            L = np.where((total == 0) & sees, keys, L)
            is_lost = sees & (self.top - keys > OVERFLOW["float32"])  # beside a large sink
            self.is_lse_free = self.is_lse_free | is_lost[..., 0]
            sinks = self.sinks_used()
            if d["lse_without_sink"] == "where a key is seen" and sinks is not None:
                L = np.where(sees, L, sinks)
        L = logarithm if "lse_without_maximum" in d else L
        if "lse_unscaled" in d:
            L = _log_sum_exp(np.where(self.visible, self.raw, -np.inf))
        if "lse_uncapped" in d and self.x.given.get("softcap") is not None:
            uncapped = _Deviation(self.x, {"softcap_ignored": 1})
            uncapped.result()
            L = uncapped.L[..., None]
        if "lse_mixes_bases" in d:
            is_of_maximum = d["lse_mixes_bases"] == "maximum"
            L = logarithm + top / np.log(2) if is_of_maximum else logarithm / np.log(2) + top
        if "lse_of_sink_alone" in d and self.x.problem.sinks is not None:
            L = np.where(self.has_score.any(-1, keepdims=True), L, d["lse_of_sink_alone"])
        if "lse_of_unscaled_maximum" in d:
            if scale := self.scale_used():
                unscaled = top / scale
            else:
                unscaled = np.where(self.visible, self.raw, -np.inf).max(-1, keepdims=True)
            L = logarithm + unscaled
        if "lse_of_last_maximum" in d:
            first = (self.x.Lk - 1) // d["lse_of_last_maximum"] * d["lse_of_last_maximum"]
            L = logarithm + self.S[..., first:].max(-1, keepdims=True, initial=-np.inf)
        if "lse_base_2" in d:
            L = L / np.log(2)
        if "lse_of_largest_part" in d:
            self.returned = self.sums_of_parts(d["lse_of_largest_part"])[1].max(-1, keepdims=True)
        if self.returned is not None and self.x.problem.sinks is None:
            L = self.returned
        if "lse_rows_permuted" in d and not self.is_shared:
            B, H, Lq = self.x.shape[:3]
            G, follow = H // self.x.Hkv, d["lse_rows_permuted"] == "heads follow each other"
            shape = (B, self.x.Hkv, Lq, G) if follow else (B, self.x.Hkv, G, Lq)
            packed = spread(L, (B, H, Lq, 1)).reshape(shape)
            L = packed.swapaxes(2, 3).reshape(B, H, Lq, 1)
        if "lse_heads_swapped" in d and not self.is_shared:
            heads = np.arange(self.x.H).reshape(self.x.Hkv, -1).T.ravel()
            L = spread(L, (*self.x.shape[:3], 1))[:, heads]
        if "lse_negated" in d:
            L = -L
        if "lse_scaled" in d:
            L = L * self.scale_used()
        if "lse_is_no_logarithm" in d:
            L = {"m": top, "l": total, "m + l": top + total}[d["lse_is_no_logarithm"]]
        rows, drift = self.x.shape[:3], self.drift
        if self.is_shared:  # rows share their sums
            L, drift = np.zeros((*rows, 1)), np.zeros((*rows, 1))
        self.L = L = spread(L[..., 0], rows)
        drift = spread(drift[..., 0], rows)
        sizes = np.where(np.isfinite(L), abs(L), 0)
        factor = 1 if self.x.is_likely else 4
        self.lse_bound = factor * (drift + self.looseness + self.x.unit * (sizes + 1))
        self.lse_bound = self.lse_bound + self.x.summed(self.x.Lk, 32)

    def add_earlier_heads(self) -> None:
        """Let each head's sums begin with those of the heads before it."""
        top = self.L.max(1, keepdims=True)
        top = np.where(np.isneginf(top), 0, top)
        sums = np.exp(self.L - top)[..., None]
        whole = np.cumsum(sums, 1)
        self.O = np.cumsum(sums * self.O, 1) / np.where(whole == 0, 1, whole)
        self.L = np.log(whole[..., 0]) + top
        self.bound = 2 * np.maximum.accumulate(spread(self.bound, self.O.shape), 1)
        self.lse_bound = 2 * np.maximum.accumulate(self.lse_bound, 1)

    def settle_rows(self) -> None:
        """Set the accepted numbers in rows that see no key, or that a hidden NaN may reach."""
        x, d = self.x, self.d
        if self.lost is not None:
            self.others.append(np.where(self.lost, np.nan, self.O))
        is_hidden = np.asarray(~self.has_score.any(-1))
        if self.sinks_used() is not None:
            is_hidden = np.zeros_like(is_hidden)
        only_here = np.asarray(is_hidden & ~x.sees_nothing)
        if set(HIDE_ALL) & set(d) and only_here.any():
            self.others.append(np.where(only_here[..., None], np.nan, self.O))
            self.is_lse_free = self.is_lse_free | only_here
            only_here = np.zeros_like(only_here)
        self.is_free, self.is_lse_free = self.is_free | only_here, self.is_lse_free | only_here
        rows = np.asarray(is_hidden & x.sees_nothing)[..., None]
        if "dead_rows_numbers" in d:
            self.is_free = self.is_free | rows[..., 0]
            self.is_lse_free = self.is_lse_free | rows[..., 0]
        if rows.any() and set(HIDDEN_ROWS) & set(d):
            self.others += [np.where(rows, o, self.O) for o in self.values_of_hidden_rows()]
            sizes = np.where(np.isfinite(self.V), abs(self.V), 0).max(-2, keepdims=True)
            rounding = (8 * x.unit + FLOAT32 * (x.Lk + 32)) * sizes
            self.bound = np.where(rows, rounding, self.bound)
            self.is_lse_free = self.is_lse_free | rows[..., 0]
        for name, number in (("part_without_keys_nan", np.nan), ("part_without_keys_zero", 0.0)):
            if name in d:
                kind, size = d[name]
                self.lose_rows(kind, size, number)
        if x.has_nan:
            self.settle_nan()

    def lose_rows(self, kind: str, size: Any, number: float) -> None:
        """Set rows to ``number`` if they see no key in some part, or in the "first" one.

        "first of a tile" is the block of keys where a tile of rows starts, with a window or none.
        """
        if kind == "first of a tile":
            is_first = visible.first_of_tile(self.x, size)
            has_sinks = self.x.problem.sinks is not None  # at which the maximum starts
            is_lost = ~(self.visible & is_first).any(-1) & (not has_sinks)
        else:
            seen = self.seen_in_parts((kind, size))
            is_lost = np.asarray(~(seen[..., 0] if kind == "first" else seen.all(-1)))
        self.others.append(np.where(is_lost[..., None], number, self.O))
        self.O = np.where((is_lost & ~self.x.sees_nothing)[..., None], number, self.O)
        self.is_lse_free = self.is_lse_free | is_lost

    def settle_nan(self) -> None:
        is_bad = ~(np.isfinite(self.V).all(-1) & np.isfinite(self.x.k[:, self.x.heads]).all(-1))
        leaks = (is_bad[:, :, None, :] & ~self.visible).any(-1)
        if "nan_becomes_number" in self.d:
            self.is_free = self.is_free | is_bad.any(-1)[..., None]
            self.is_lse_free = self.is_lse_free | is_bad.any(-1)[..., None]
        if "nan_leaks" in self.d:
            self.others.append(np.where(leaks[..., None], np.nan, self.O))
        if set(HIDDEN_FINITELY) & set(self.d):
            reached = (is_bad[:, :, None, :] & ~self.softly).any(-1)
            self.is_free, self.is_lse_free = self.is_free | reached, self.is_lse_free | reached

    def values_of_hidden_rows(self) -> list[Array]:
        """Return the outputs of bugs in rows that see no key, (B, H, 1 or Lq, Dv) each."""
        d, V = self.d, self.V
        values: list[Array] = []
        if "dead_rows_nan" in d:
            values.append(np.full((1, 1, 1, 1), np.nan))
        if "dead_rows_first_value" in d:
            values.append(V[:, :, :1])
        if "dead_rows_mean" in d:
            S = np.where(np.isfinite(self.unhidden), self.unhidden, -np.inf)
            flat = np.zeros_like(S)
            for scores in (flat, S):
                for keys in (np.ones_like(self.by_lengths), self.by_lengths, self.by_positions):
                    mean = _softmax(np.where(keys, scores, -np.inf)) @ V
                    values.append(np.where(np.isnan(mean), self.O, mean))
        return values

    def leave_out(self, axis: str, N: int) -> None:
        """Set the part of the output that is not computed to 0."""
        if axis == GROUPS:  # whose heads are filled up to a power of 2, but whose rows are not
            x, G = self.x, self.x.H // self.x.Hkv
            row = (x.i << (G - 1).bit_length()) + np.arange(x.H)[:, None, None] % G
            is_out = spread(row >= x.Lq * G, self.O.shape)
        else:
            size = self.O.shape[AXES[axis]]
            end = size // N * N if axis == "whole blocks of rows" else visible.first_of(size, N)
            is_out = np.indices(self.O.shape)[AXES[axis]] >= end
        self.O, *self.others = (np.where(is_out, 0, o) for o in (self.O, *self.others))
        self.is_free = self.is_free & ~is_out.all(-1)
        self.is_lse_free = self.is_lse_free | is_out.all(-1)

    def finish(self) -> Deviated:
        if self.d.get("only_first_computed", ("", 0))[0] in (*AXES, GROUPS):
            self.leave_out(*self.d["only_first_computed"])
        if "written_as_far_as_inputs" in self.d:
            axis, block = self.d["written_as_far_as_inputs"]
            size = self.x.D if axis == "columns" else self.x.Lk
            self.leave_out(axis, -(-size // block) * block)
        arrays = [self.O, self.bound, *self.others]
        is_free = spread(self.is_free[..., None], self.O.shape)
        way = self.d.get("heads_not_moved_back")
        if way is not None:
            arrays = [confused(spread(a, self.O.shape), way) for a in arrays]
            is_free = confused(is_free, way)
        if "output_rows_permuted" in self.d:
            arrays = [self.in_other_order(spread(a, self.O.shape)) for a in arrays]
            is_free = self.in_other_order(is_free)
        if "output_columns_repeat" in self.d:
            columns = np.arange(self.O.shape[-1]) % self.d["output_columns_repeat"]
            arrays, is_free = [a[..., columns] for a in arrays], is_free[..., columns]
        if "entries_put_back_wrongly" in self.d and self.x.given.get("kv_lengths") is not None:
            order = order_by_lengths(self.x, self.d["entries_put_back_wrongly"])
            order = order[order]
            arrays = [spread(a, self.O.shape)[order] for a in arrays]
            is_free, self.L = is_free[order], self.L[order]
            self.lse_bound = spread(self.lse_bound, self.L.shape)[order]
            self.is_lse_free = spread(self.is_lse_free, self.L.shape)[order]
        output, bound, *others = arrays
        if "residual_added" in self.d:
            if self.q.shape != output.shape:
                raise Impossible("the input is added but Dv is not D")
            output, others = output + self.x.q, [o + self.x.q for o in others]
        bound = bound + 2 * self.x.unit * np.where(np.isfinite(output), abs(output), 0)
        found = Deviated(
            output, bound, self.L, self.lse_bound, tuple(others), is_free, self.is_lse_free
        )
        return found if self.x.place is None else _packed(found, self.x.place)

    def in_other_order(self, a: Array) -> Array:
        """Return the rows of each group, (B, H, Lq, Dv), as if their order were the other one."""
        (B, H, Lq, Dv), Hkv = a.shape, self.x.Hkv
        grouped = a.reshape(B, Hkv, H // Hkv, Lq, Dv)
        if self.d["output_rows_permuted"] == "heads alternate":
            return grouped.swapaxes(2, 3).reshape(a.shape)
        other = grouped.reshape(B, Hkv, Lq, H // Hkv, Dv).swapaxes(2, 3)
        return np.asarray(other.reshape(a.shape))


def _packed(found: Deviated, place: Place) -> Deviated:
    """Put the queries of all sequences one after another, as they were given."""
    sequence, row = place

    def packed(a: Array, like: Array) -> Array:
        return spread(a, like.shape)[sequence, :, row].swapaxes(0, 1)[None]

    O, L = found.output, found.lse
    return Deviated(
        packed(O, O), packed(found.bound, O), packed(L, L), packed(found.lse_bound, L),
        tuple(packed(other, O) for other in found.others), packed(found.is_free, O),
        packed(found.is_lse_free, L),
    )  # fmt: skip


def _softmax(S: Array) -> Array:
    E = np.exp(S - S.max(-1, keepdims=True))
    return np.asarray(E / E.sum(-1, keepdims=True))


def _approximated(mantissa: str, x: Array) -> Array:
    """Return e^x as 2^n, times 1 + f if ``mantissa`` is "linear", where x / ln 2 is n + f."""
    y = np.maximum(np.asarray(x, np.float64) / np.log(2), -2000)
    n = np.floor(y)
    return np.asarray(np.exp2(n) * (1 + y - n if mantissa == "linear" else 1))


def _log_sum_exp(S: Array) -> Array:
    m = S.max(-1, keepdims=True)
    return np.asarray(m + np.log(np.exp(S - m).sum(-1, keepdims=True)))
