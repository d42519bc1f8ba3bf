"""Computes attention with any set of deviations, in float64, and bounds its rounding errors.

The equations are those of ``minimha.equations.dense``, with a branch wherever implementations go
wrong. Deviations of different stages compose. The order of operations on the scores is data
(``ORDER``), so "the cap before the scale" is another order, not another formula.

If the deviations leave a number open, any number is accepted. This holds in rows that see no key
only because of a deviation, and where a NaN in a hidden key may leak.

The bounds follow from rounding, as in the tests of the kernels. Let u be half an eps of the dtype.
A score is a sum of D products, with an error up to 2⁻²⁴ (D + 8) |scale| Σ |q_d k_d| plus a few u
of the score. An error δ of the scores changes a weight by a factor of at most exp(2δ). Weights and
output are rounded to the dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check import visible
from minimha.check.catalogue import AXES, DEVIATIONS, HIDING
from minimha.check.prepared import FLOAT32, SMALLEST, Impossible, Prepared
from minimha.check.rounding import accumulated, rounded

Array = NDArray[Any]

OVERFLOW = {"float32": 88.0, "float64": 709.0}  # exp of a larger number is infinite
UNDERFLOW = -746.0  # exp of a smaller number is 0, even in float64

# The place of each operation on the scores, and the places where deviations move it.
ORDER = {"scale": 1.0, "cap": 2.0, "bias": 3.0, "alibi": 3.1, "hide": 4.0}
MOVED = {
    "softcap_before_scale": ("cap", 0.5),
    "bias_before_scale": ("bias", 0.7),
    "alibi_before_scale": ("alibi", 0.8),
    "softcap_after_bias": ("cap", 3.5),
    "softcap_after_mask": ("cap", 4.5),
}
MULTIPLIED_OTHERWISE = {
    "heads_not_split", "q_k_swapped", "k_reshaped_not_transposed", "k_v_swapped",
    "last_block_zeroed", "only_first_computed",
}  # fmt: skip
INPUT_BITS = {
    "inputs_in_bfloat16": (8, 128), "inputs_in_tf32": (11, 128), "inputs_in_float16": (11, 16),
}  # fmt: skip
SOFTMAX_AXES = {
    "softmax_over_queries": (-2,),
    "softmax_over_heads": (1,),
    "softmax_over_all": (-2, -1),
}
HIDDEN_FINITELY = (
    "hidden_after_softmax", "hidden_score_zero", "hidden_score_small", "softcap_after_mask",
    "mask_added_as_number",
)  # fmt: skip
HIDDEN_ROWS = ("dead_rows_nan", "dead_rows_mean", "dead_rows_first_value", "lse_of_dead_rows")


@dataclass(frozen=True, eq=False)
class Deviated:
    """The answer of attention with some known bugs (deviations)."""

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
    """Output (B, H, Lq, Dv) and log-sum-exp (B, H, Lq) with the named deviations, in float64.

    ``arguments`` are those of ``minimha.attention``, with 4-D arrays. ``deviations`` may map names
    to values (``{"online_sum_not_rescaled": 16}``); if empty, this is dense attention. It raises
    ``Impossible`` if a deviation does not fit the shapes: swapped Q and K need Lq = Lk.

    >>> x = np.eye(2)[None, None]
    >>> attend({"q": x, "k": x, "v": x}, ["scale_missing"])[0].round(3)[0, 0]
    array([[0.731, 0.269],
           [0.269, 0.731]])
    """
    result = deviate(Prepared(arguments), values_of(deviations))
    return result.output, result.lse


def values_of(deviations: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Map identifiers to their values, by default the usual ones."""
    if isinstance(deviations, Mapping):
        return dict(deviations)
    return {name: DEVIATIONS[name].values[0] for name in deviations}


def deviate(prepared: Prepared, deviations: Mapping[str, Any]) -> Deviated:
    """The answer under ``deviations``, which maps identifiers to values."""
    with np.errstate(all="ignore"):
        return _Deviation(prepared, deviations).result()


class _Deviation:
    """One computation; each stage reads the attributes that earlier stages set."""

    def __init__(self, prepared: Prepared, deviations: Mapping[str, Any]) -> None:
        self.x, self.d = prepared, deviations
        self.is_free = np.zeros(prepared.shape[:3], bool)
        self.is_lse_free = np.zeros(prepared.shape[:3], bool)
        self.others: list[Array] = []
        self.lost: Array | None = None  # rows that see keys but whose sum is 0
        self.looseness = 0.0  # relative error of weights from lost precision

    def result(self) -> Deviated:
        self.multiply()
        self.look()
        self.score()
        self.normalise()
        self.weigh()
        self.take_logarithm()
        self.settle_rows()
        return self.finish()

    # Products.

    def multiply(self) -> None:
        """Set the products S, the sums of their magnitudes, and the values of each query head."""
        x, d = self.x, self.d
        heads = x.heads
        if "kv_heads_tiled" in d:
            heads = np.arange(x.H) % x.Hkv
        if "kv_head_0_for_all" in d:
            heads = np.zeros(x.H, int)
        q, k, v = self.moved(x.q), self.moved(x.k), self.moved(x.v)
        if "k_v_swapped" in d:
            if x.Dv != x.D:
                raise Impossible("K and V are swapped but D is not Dv")
            k, v = v, k
        if "last_block_zeroed" in d:
            end = x.Lk // d["last_block_zeroed"] * d["last_block_zeroed"]
            k, v = (np.where(x.j[:, None] < end, a, 0) for a in (k, v))
        bits = next((bits for name, bits in INPUT_BITS.items() if name in d), None)
        if bits is not None:
            q, k, v = rounded(q, *bits), rounded(k, *bits), rounded(v, *bits)
        K, V = k[:, heads], v[:, heads]
        rows, columns = q, K.swapaxes(-1, -2)
        if "q_k_swapped" in d:
            if x.Lq != x.Lk:
                raise Impossible("Q and K are swapped but Lq is not Lk")
            rows, columns = K, q.swapaxes(-1, -2)
        if "k_reshaped_not_transposed" in d:
            columns = columns.swapaxes(-1, -2).reshape(columns.shape)
        axis, N = d.get("only_first_computed", ("", 0))
        if "columns" in axis:
            end = x.D // min(N, x.D) * min(N, x.D) if axis.startswith("whole") else N
            rows, columns = rows[..., :end], columns[..., :end, :]
        if heads is x.heads and bits is None and not MULTIPLIED_OTHERWISE & set(d):
            self.S, self.size = x.products
        else:
            self.S, self.size = rows @ columns, abs(rows) @ abs(columns)
        self.q, self.V = q, (K if "v_is_k" in d else V)
        self.delta = (x.summed(x.D, 8) + 2 * x.extra) * self.size
        self.round_products(rows, columns)

    def moved(self, a: Array) -> Array:
        """``a``, with heads and tokens confused if ``heads_not_split`` is set."""
        way = self.d.get("heads_not_split")
        return a if way is None else confused(a, way)

    def round_products(self, rows: Array, columns: Array) -> None:
        for name, bits in (("scores_in_float16", 11), ("scores_in_bfloat16", 8)):
            if name in self.d:
                if self.d[name] == "accumulated":
                    T = columns.swapaxes(-1, -2)
                    self.S = accumulated(rows[..., :, None, :] * T[..., None, :, :], bits)
                self.S = rounded(self.S, bits)
                if not self.x.is_exact:
                    self.delta = self.delta + 2.0**-bits * (self.x.D + 6) * self.size

    # Visibility.

    def look(self) -> None:
        """Set three arrays: the keys that positions, lengths and the mask leave visible."""
        self.by_positions = visible.by_positions(self.x, self.d)
        self.by_lengths = visible.by_lengths(self.x, self.d)
        self.by_mask = visible.by_mask(self.x, self.d)

    # Scores.

    def score(self) -> None:
        """Scale, cap, bias and mask the scores, in the order that the deviations set."""
        order = dict(ORDER)
        for deviation, (operation, turn) in MOVED.items():
            if deviation in self.d:
                order[operation] = turn
        if self.d.get("softcap_after_mask") == "bias last":
            order["bias"], order["alibi"] = 4.7, 4.8
        self.raw = self.S
        self.soft: Array | None = None  # keys that keep their weight, if hidden after the softmax
        for operation in sorted(order, key=order.__getitem__):
            getattr(self, operation)()
        self.has_score = np.broadcast_to(~np.isneginf(self.S), self.x.shape)
        if "lse_base_2_merged" in self.d:
            self.weigh_parts(visible.part_size(self.x, self.d["lse_base_2_merged"]))

    def weigh_parts(self, size: int) -> None:
        """Multiply the weights of each part by exp(L / ln 2 - L), with L its log-sum-exp."""
        top = self.S.max(-1, keepdims=True)
        top = np.where(np.isneginf(top), 0, top)
        sums = np.add.reduceat(np.exp(self.S - top), self.x.j[::size], axis=-1)
        L = (top + np.log(sums))[..., self.x.j // size]
        self.S = self.S + L * (1 / np.log(2) - 1)
        self.delta = self.delta + np.where(self.has_score, self.delta, 0).max(-1, keepdims=True)

    def scale_used(self) -> float:
        x, d = self.x, self.d
        given = x.given.get("scale")
        if given is None or "scale_argument_ignored" in d or d.get("scale_missing") == "given too":
            scale = 1 / np.sqrt(x.D)
            for name, value in (
                ("scale_missing", 1), ("scale_1_over_d", 1 / x.D), ("scale_sqrt_d", np.sqrt(x.D)),
                ("scale_model_width", 1 / np.sqrt(x.H * x.D)),
                ("scale_padded_width", self.padded_width() ** -0.5),
            ):  # fmt: skip
                scale = value if name in d else scale
        else:
            scale = given
        return float(scale**2 if "scale_twice" in d else scale)

    def padded_width(self) -> int:
        D, block = self.x.D, self.d.get("scale_padded_width", 1)
        whole = 1 << (D - 1).bit_length() if block == "power of 2" else -(-D // block) * block
        return int(whole)

    def scale(self) -> None:
        factor = self.scale_used()
        self.S, self.delta = self.S * factor, self.delta * abs(factor)
        if not self.x.is_exact:
            self.delta = self.delta + 2 * self.x.unit * abs(self.S)

    def cap(self) -> None:
        cap = self.x.given.get("softcap")
        if cap is None or "softcap_ignored" in self.d:
            return
        factor = 1 if "softcap_not_multiplied_back" in self.d else cap
        self.S = factor * np.tanh(self.S / cap)
        self.delta = np.minimum(self.delta, 2 * cap) * (factor / cap) + 4 * self.x.unit * factor

    def bias(self) -> None:
        bias, d = self.x.bias, self.d
        if bias is None or "bias_ignored" in d:
            return
        bias = visible.indexed(self.x, d, "bias", bias) * self.unit_of("attn_bias")
        self.add(-bias if "bias_subtracted" in d else bias)

    def unit_of(self, option: str) -> float:
        """ln 2 if what the option adds is not multiplied by log2 e as the scores are, else 1."""
        return float(np.log(2)) if option in self.d.get("bias_not_in_base_2", ()) else 1.0

    def alibi(self) -> None:
        x, d = self.x, self.d
        slopes = x.problem.alibi_slopes
        if slopes is None or "alibi_ignored" in d:
            return
        slopes = slopes.astype(np.float64)[: 1 if "alibi_slope_0_for_all" in d else None]
        slopes = slopes[x.heads] if "alibi_by_kv_head" in d else slopes
        ignores = "alibi_ignores_offset" in d or "alibi" in d.get("causal_top_left", ())
        p = visible.rows(x, d) + (np.zeros_like(x.offset) if ignores else x.offset)
        distance = p - x.j if "alibi_signed_distance" in d else abs(p - x.j)
        sign = 1 if "alibi_sign" in d else -1
        self.add(sign * self.unit_of("alibi_slopes") * slopes[:, None, None] * distance)

    def add(self, term: Array) -> None:
        self.S = self.S + term
        sizes = np.where(np.isfinite(term), abs(term), 0) + abs(self.S)
        self.delta = self.delta + self.x.unit * np.where(np.isfinite(sizes), sizes, 0)

    def hide(self) -> None:
        """Set hidden scores to -inf, or to the number that a deviation gives them."""
        d = self.d
        kinds = {
            "mask": self.by_mask, "positions": self.by_positions, "lengths": self.by_lengths,
        }  # fmt: skip
        if "mask_added_as_number" in d and self.x.problem.attn_mask is not None:
            factor = self.scale_used() if d["mask_added_as_number"] == "before the scale" else 1
            self.S = self.S + factor * kinds["mask"]
            kinds["mask"] = np.ones((1, 1, 1, 1), bool)
        soft = [n for n in HIDDEN_FINITELY[:3] if n in d]
        kind, fill, way = _softly(soft[0], d[soft[0]]) if soft else (None, 0.0, "")
        hard = softly = np.ones((1, 1, 1, 1), bool)
        for name, is_visible in kinds.items():
            if kind in (name, "all"):
                softly = softly & is_visible
            else:
                hard = hard & is_visible
        self.unhidden = self.S
        if way.startswith("fill"):
            fill = fill * self.scale_used() if way != "fill" else fill
            self.S = np.where(softly, self.S, fill)
        elif way == "add":
            self.S = np.where(softly, self.S, self.S + fill)
        elif way == "after":
            self.soft = np.broadcast_to(softly, self.x.shape)
        self.S = np.where(hard, self.S, -np.inf)
        self.softly = softly  # False for keys that are hidden but may reach a row
        if "softcap_after_mask" in d:
            self.softly = softly & hard
        if "mask_added_as_number" in d:
            self.softly = softly & self.by_mask
        self.visible = np.broadcast_to(hard & softly, self.x.shape) & ~np.isneginf(self.unhidden)

    # Softmax.

    def normalise(self) -> None:
        """Set the weights W and the total of each row, with and without the sink."""
        d = self.d
        name = next((n for n in SOFTMAX_AXES if n in d), "")
        axis = SOFTMAX_AXES.get(name, (-1,))
        exp = np.exp2 if "softmax_base_2" in d else np.exp
        sinks = self.sinks_used()
        keys_top = self.S.max(axis=axis, keepdims=True, initial=-np.inf)
        top = keys_top
        if sinks is not None and not {"sink_not_in_maximum", "sink_unshifted"} & set(d):
            top = np.maximum(top, sinks)
        top = self.deviated_maximum(top)
        top = np.where(np.isneginf(top), 0, top)
        E = exp(self.S - top)
        numerators, terms = self.online(E, exp, exp(keys_top - top))
        plain = self.total(terms, axis)
        total = plain
        if sinks is not None:
            size = visible.part_size(self.x, d.get("sink_in_each_part", ("parts", 1)))
            sinks = sinks - (0 if "sink_unshifted" in d else top)
            total = plain + -(-self.x.Lk // size) * exp(sinks)
        if "padding_seen" in d and set(HIDING).isdisjoint(self.x.given):
            total = total + -self.x.Lk % d["padding_seen"] * exp(-top)
        W = (
            numerators
            if "softmax_not_normalised" in d
            else numerators / np.where(total == 0, 1, total)
        )
        if self.soft is not None:
            W = np.where(self.soft, W, 0)
        self.W, self.top, self.plain, self.total_used = W, top, plain, total
        self.settle_softmax(name, keys_top, total)
        self.round_weights()
        self.relative = np.expm1(np.minimum(np.where(self.has_score, self.delta, 0), 50))
        self.drift = (abs(W) * self.relative).sum(axis, keepdims=True)
        self.is_mean = not name and "softmax_not_normalised" not in d

    def sinks_used(self) -> Array | None:
        d, sinks = self.d, self.x.problem.sinks
        if sinks is None or "sinks_ignored" in d:
            return None
        sinks = sinks.astype(np.float64)[: 1 if "sink_0_for_all" in d else None, None, None]
        sinks = sinks * self.unit_of("sinks")
        sinks = sinks[self.x.heads] if "sinks_by_kv_head" in d else sinks
        return np.asarray(sinks * self.scale_used() if "sink_scaled" in d else sinks)

    def deviated_maximum(self, top: Array) -> Array:
        if "softmax_no_maximum" in self.d:
            return np.zeros_like(top)
        if "first_maximum_0" in self.d:
            return np.maximum(top, 0)
        if "softmax_global_maximum" in self.d:
            axes = {"row": None, "head": (-2, -1), "batch": (1, 2, 3), "all": (0, 1, 2, 3)}
            axis = axes[self.d["softmax_global_maximum"]]
            return np.broadcast_to(top.max(axis=axis, keepdims=True), top.shape)
        return top

    def online(self, E: Array, exp: Any, last: Array) -> tuple[Array, Array]:
        """Numerators and terms of the denominator; a deviation may leave them without rescaling.

        ``last`` is the factor by which a sink, added at the end, shrinks both.
        """
        blocks = self.d.get("online_output_not_rescaled"), self.d.get("online_sum_not_rescaled")
        if blocks == (None, None):
            return E, E
        stale = []
        for B_c in blocks:
            if B_c is None:
                stale.append(E)
                continue
            running = np.maximum.accumulate(self.S, -1)
            ends = np.minimum((self.x.j // B_c + 1) * B_c, self.x.Lk) - 1
            running = running[..., ends]
            stale.append(np.where(np.isneginf(running), 0, exp(self.S - running) * last))
        return stale[0], stale[1]

    def total(self, terms: Array, axis: tuple[int, ...]) -> Array:
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

    def loosen(self, relative: float) -> None:
        """Widen the bounds of weights, except in problems that show exactly this rounding."""
        self.looseness += 0 if self.x.is_exact else relative

    def settle_softmax(self, name: str, keys_top: Array, total: Array) -> None:
        """Accept any number in rows where float32, float64 or a guard against 0/0 would differ."""
        if {"softmax_no_maximum", "softmax_global_maximum", "first_maximum_0"} & set(self.d):
            distance = np.broadcast_to(keys_top - self.top, self.top.shape)
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
        sizes = np.where(np.isfinite(V), abs(V), 0)
        relative = self.looseness + x.extra + 2 * x.unit + x.summed(x.Lk, 32)
        self.bound = (abs(W) * relative) @ sizes + self.moved_by_scores()
        self.bound = self.bound + x.smallest * (1 + sizes.sum(-2, keepdims=True))
        if "weights_in_float16" in self.d and not x.is_exact:
            self.bound = self.bound + SMALLEST["float16"] * sizes.sum(-2, keepdims=True)

    def moved_by_scores(self) -> Array:
        """Bound how far rounded scores move the output.

        If weights sum to 1, a weight that is too large by a factor 1 + ε moves the output by
        W ε (V - O). This is small if one key has nearly all the weight.
        """
        V = np.where(np.isfinite(self.V), self.V, 0)
        if not self.is_mean:
            return np.asarray((abs(self.W) * (self.relative + self.drift)) @ abs(V))
        changes, O = abs(self.W) * self.relative, np.nan_to_num(self.O)
        total = changes.sum(-1, keepdims=True)
        squares = changes @ V**2 - 2 * O * (changes @ V) + O**2 * total
        moved = np.sqrt(total * np.maximum(squares, 0))  # Cauchy-Schwarz
        return np.asarray(moved / (1 - np.minimum(self.drift, 0.5)))

    def take_logarithm(self) -> None:
        d = self.d
        total = self.plain if "lse_without_sink" in d else self.total_used
        logarithm = np.log2(total) if d.get("softmax_base_2") == "log2" else np.log(total)
        top = self.top * (np.log(2) if d.get("softmax_base_2") == "consistent" else 1)
        L = logarithm + (0 if "lse_without_maximum" in d else top)
        if "lse_unscaled" in d:
            L = _log_sum_exp(np.where(self.visible, self.raw, -np.inf))
        if "lse_base_2" in d:
            L = L / np.log(2)
        rows, drift = self.x.shape[:3], self.drift
        if set(SOFTMAX_AXES) & set(d):  # rows share their sums
            L, drift = np.zeros((*rows, 1)), np.zeros((*rows, 1))
        self.L = L = np.broadcast_to(L[..., 0], rows)
        drift = np.broadcast_to(drift[..., 0], rows)
        sizes = np.where(np.isfinite(L), abs(L), 0)
        factor = 1 if self.x.is_likely else 4
        self.lse_bound = factor * (drift + self.looseness + self.x.unit * (sizes + 1))
        self.lse_bound = self.lse_bound + self.x.summed(self.x.Lk, 32)

    def settle_rows(self) -> None:
        """Set the accepted numbers in rows that see no key, or that a hidden NaN may reach."""
        x, d = self.x, self.d
        if self.lost is not None:
            self.others.append(np.where(self.lost, np.nan, self.O))
        is_hidden = np.asarray(~self.has_score.any(-1))
        if self.sinks_used() is not None:
            is_hidden = np.zeros_like(is_hidden)
        only_here = np.asarray(is_hidden & ~x.sees_nothing)
        if "online_last_block_dropped" in d and only_here.any():
            self.others.append(np.where(only_here[..., None], np.nan, self.O))
            self.is_lse_free = self.is_lse_free | only_here
            only_here = np.zeros_like(only_here)
        self.is_free, self.is_lse_free = self.is_free | only_here, self.is_lse_free | only_here
        rows = np.asarray(is_hidden & x.sees_nothing)[..., None]
        if rows.any() and set(HIDDEN_ROWS) & set(d):
            self.others += [np.where(rows, o, self.O) for o in self.values_of_hidden_rows()]
            sizes = np.where(np.isfinite(self.V), abs(self.V), 0).max(-2, keepdims=True)
            rounding = (8 * x.unit + FLOAT32 * (x.Lk + 32)) * sizes
            self.bound = np.where(rows, rounding, self.bound)
            self.is_lse_free = self.is_lse_free | rows[..., 0]
        if "part_without_keys_nan" in d:
            self.lose_rows(*d["part_without_keys_nan"])
        if x.has_nan:
            self.settle_nan()

    def lose_rows(self, kind: str, size: int) -> None:
        """Set rows to NaN if they see no key in some part, or in the "first" one."""
        starts = self.x.j[:: visible.part_size(self.x, (kind, size))]
        seen = np.asarray(np.logical_or.reduceat(self.has_score, starts, axis=-1))
        is_lost = np.asarray(~(seen[..., 0] if kind == "first" else seen.all(-1)))
        self.others.append(np.where(is_lost[..., None], np.nan, self.O))
        self.O = np.where((is_lost & ~self.x.sees_nothing)[..., None], np.nan, self.O)
        self.is_lse_free = self.is_lse_free | is_lost

    def settle_nan(self) -> None:
        is_bad = ~(np.isfinite(self.V).all(-1) & np.isfinite(self.x.k[:, self.x.heads]).all(-1))
        leaks = (is_bad[:, :, None, :] & ~self.visible).any(-1)
        if "nan_leaks" in self.d:
            self.others.append(np.where(leaks[..., None], np.nan, self.O))
        if set(HIDDEN_FINITELY) & set(self.d):
            reached = (is_bad[:, :, None, :] & ~self.softly).any(-1)
            self.is_free, self.is_lse_free = self.is_free | reached, self.is_lse_free | reached

    def values_of_hidden_rows(self) -> list[Array]:
        """The values that deviations give to rows that see no key, (B, H, 1 or Lq, Dv) each."""
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
        """Set to 0 what is not computed."""
        end = self.x.Lq // N * N if axis == "whole blocks of rows" else N
        is_out = np.indices(self.O.shape)[AXES[axis]] >= end
        self.O, *self.others = (np.where(is_out, 0, o) for o in (self.O, *self.others))
        self.is_free = self.is_free & ~is_out.all(-1)
        self.is_lse_free = self.is_lse_free | is_out.all(-1)

    def finish(self) -> Deviated:
        if self.d.get("only_first_computed", ("", 0))[0] in AXES:
            self.leave_out(*self.d["only_first_computed"])
        arrays = [self.O, self.bound, *self.others]
        is_free = np.broadcast_to(self.is_free[..., None], self.O.shape)
        way = self.d.get("heads_not_moved_back")
        if way is not None:
            arrays = [confused(np.broadcast_to(a, self.O.shape), way) for a in arrays]
            is_free = confused(is_free, way)
        output, bound, *others = arrays
        if "residual_added" in self.d:
            if self.q.shape != output.shape:
                raise Impossible("the input is added but Dv is not D")
            output, others = output + self.x.q, [o + self.x.q for o in others]
        bound = bound + 2 * self.x.unit * np.where(np.isfinite(output), abs(output), 0)
        return Deviated(
            output, bound, self.L, self.lse_bound, tuple(others), is_free, self.is_lse_free
        )


def confused(a: Array, way: str) -> Array:
    """(B, H, L, D) with heads and tokens confused by a reshape without a transpose.

    "back" reads the memory of (B, L, H, D) as (B, H, L, D), "forth" does the opposite.
    """
    B, H, L, D = a.shape
    if way == "back":
        return np.asarray(a.swapaxes(1, 2).reshape(a.shape))
    return np.asarray(a.reshape(B, L, H, D).swapaxes(1, 2))


def _softly(name: str, value: Any) -> tuple[str, float, str]:
    """The kind of keys that are hidden without -inf, their fill, and how it is applied."""
    if name == "hidden_after_softmax":
        return value, 0.0, "after"
    if name == "hidden_score_zero":
        return value, 0.0, "fill"
    kind, fill, way = value
    return kind, fill, way


def _softmax(S: Array) -> Array:
    E = np.exp(S - S.max(-1, keepdims=True))
    return np.asarray(E / E.sum(-1, keepdims=True))


def _log_sum_exp(S: Array) -> Array:
    m = S.max(-1, keepdims=True)
    return np.asarray(m + np.log(np.exp(S - m).sum(-1, keepdims=True)))
