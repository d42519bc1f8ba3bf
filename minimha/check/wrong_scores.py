"""Compute scores with any set of deviations: products, scale, cap, bias and hidden keys.

The order of operations on the scores is data (``ORDER``), so "the cap before the scale" is another
order, not another formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check import visible
from minimha.check.altered import altered, heads_by, scales_by_head
from minimha.check.catalogue import STEPS, WHATEVER_HIDES
from minimha.check.expanded import INDICES, indices, laid_out
from minimha.check.prepared import Impossible, Prepared, spread
from minimha.check.rounding import FORMATS, accumulated, rounded

Array = NDArray[Any]

# The place of each operation on the scores, and the places where deviations move it.
ORDER = {"scale": 1.0, "cap": 2.0, "bias": 3.0, "alibi": 3.1, "modify": 3.2, "hide": 4.0}
MOVED = {
    "softcap_before_scale": ("cap", 0.5),
    "bias_before_scale": ("bias", 0.7),
    "alibi_before_scale": ("alibi", 0.8),
    "score_mod_before_scale": ("modify", 0.6),
    "score_mod_before_bias": ("modify", 2.9),
    "score_mod_before_cap": ("modify", 1.5),
    "softcap_after_bias": ("cap", 3.5),
    "softcap_after_alibi": ("alibi", 1.9),
    "softcap_after_mask": ("cap", 4.5),
    "score_mod_after_mask": ("modify", 4.5),
}
MULTIPLIED_OTHERWISE = {
    "q_k_swapped", "k_reshaped_not_transposed", "only_first_computed", "last_columns_count_twice",
}  # fmt: skip
HIDDEN_FINITELY = (
    "hidden_after_softmax", "hidden_score_zero", "hidden_score_small", "hidden_read_as_zeros",
    "softcap_after_mask", "score_mod_after_mask", "mask_added_as_number",
)  # fmt: skip


class Scores:
    """The first stages of one computation; each reads the attributes that earlier ones set."""

    def __init__(self, prepared: Prepared, deviations: Mapping[str, Any]) -> None:
        self.x, self.d, self.right = altered(prepared, deviations), deviations, prepared
        self.is_free = np.zeros(self.x.shape[:3], bool)
        self.is_lse_free = np.zeros(self.x.shape[:3], bool)
        self.factor: Array | float = 1.0  # of all weights
        self.is_twice: Array | None = None  # keys that an index of -1 names once more
        self.returned: Array | None = None  # log-sum-exp, if it is not that of the weights' sums

    def multiply(self) -> None:
        """Set the products S, the sums of their magnitudes, and the values of each query head."""
        x, d = self.x, self.d
        k_heads, v_heads = x.heads, x.heads
        for name, way in (
            ("kv_heads_tiled", "h mod Hkv"), ("kv_head_0_for_all", "0"), ("kv_heads_misread", ""),
        ):  # fmt: skip
            if name in d:
                which, way = (d[name], way) if way else d[name]
                heads = heads_by(x, way)
                k_heads = heads if "k" in which else k_heads
                v_heads = heads if "v" in which else v_heads
        q, K, V = x.q, x.k[:, k_heads], x.v[:, v_heads]
        rows, columns = q, K.swapaxes(-1, -2)
        if "q_k_swapped" in d:
            if x.Lq != x.Lk:
                raise Impossible("Q and K are swapped but Lq is not Lk")
            rows, columns = K, q.swapaxes(-1, -2)
        if "k_reshaped_not_transposed" in d:
            columns = columns.swapaxes(-1, -2).reshape(columns.shape)
        axis, N = d.get("only_first_computed", ("", 0))
        if "columns" in axis:
            end = visible.first_of(x.D, N)
            if axis.startswith("whole"):  # a block may be narrower than a step
                N = N if axis in STEPS else min(N, x.D)
                end = x.D // N * N
            rows, columns = rows[..., :end], columns[..., :end, :]
        if "last_columns_count_twice" in d:
            N, width = d["last_columns_count_twice"], rows.shape[-1]
            if width > N and width % N:
                again = [*range(width), *range(width - N, width // N * N)]
                rows, columns = rows[..., again], columns[..., again, :]
        if k_heads is x.heads and not MULTIPLIED_OTHERWISE & set(d):
            self.S, self.size = x.products
        else:
            self.S, self.size = rows @ columns, abs(rows) @ abs(columns)
        self.q, self.V = q, (K if "v_is_k" in d else V)
        if "k_scale_late" in d:
            self.k_scale = scales_of_keys(self.right)
            self.S, self.size = self.S / self.k_scale, self.size / self.k_scale
        self.delta = (x.summed(x.D, 8) + 2 * x.extra) * self.size
        self.round_products(rows, columns)

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
        """Set three masks: the keys left visible by positions, by lengths and by the mask."""
        x, of_lengths, read = visible.from_window(self.x, self.right, self.d)
        self.by_positions = visible.by_positions(x, self.d) & read
        self.by_lengths = visible.by_lengths(of_lengths, self.d)
        mask = self.x.problem.attn_mask
        self.by_mask = visible.ALL if mask is None else mask
        if self.d.get("key_indices_pick_by_minus_1", "").startswith(WHATEVER_HIDES):
            shown = visible.last_for_none(self.x, laid_out(self.right.arguments)[0][INDICES])
            if self.d["key_indices_pick_by_minus_1"] != WHATEVER_HIDES:
                self.is_twice = shown & self.by_positions & self.by_lengths & self.by_mask
            self.by_positions, self.by_lengths = self.by_positions | shown, self.by_lengths | shown
            self.by_mask = self.by_mask | shown
        if "mask_ignored_before_diagonal" in self.d:
            whole = visible.before_diagonal(self.x, self.d["mask_ignored_before_diagonal"])
            self.by_mask = self.by_mask | whole

    # Scores.

    def score(self) -> None:
        """Scale, cap, bias and mask the scores, in the order that the deviations set."""
        order = dict(ORDER)
        for deviation, (operation, turn) in MOVED.items():
            if deviation in self.d:
                order[operation] = turn
        if "k_scale_late" in self.d:
            order["rescale"] = order[self.d["k_scale_late"]] + 0.05
        if self.d.get("softcap_after_mask") == "bias last":
            order["bias"], order["alibi"] = 4.7, 4.8
        self.raw = self.S
        self.soft: Array | None = None  # keys that keep their weight, if hidden after the softmax
        for operation in sorted(order, key=order.__getitem__):
            getattr(self, operation)()
        self.has_score = spread(~np.isneginf(self.S), self.x.shape)
        if "scores_clipped" in self.d:
            most = self.d["scores_clipped"]
            self.S = np.where(self.has_score, np.clip(self.S, -most, most), -np.inf)
        if "lse_base_2_merged" in self.d:
            self.weigh_parts("lse", self.d["lse_base_2_merged"])
        if "parts_merged_wrongly" in self.d:
            self.weigh_parts(*self.d["parts_merged_wrongly"])
        if "last_block_moved_back" in self.d:  # to be whole, so that it has keys of another, too
            x, block = self.x, self.d["last_block_moved_back"]
            end = x.Lk // block * block
            self.count_twice((x.j >= x.Lk - block) & (x.j < end) & (end < x.Lk))
        if self.is_twice is not None:
            self.count_twice(self.is_twice)

    def count_twice(self, keys: Array) -> None:
        """Double the weight of some keys."""
        self.S = np.where(keys, self.S + np.log(2), self.S)

    def seen_in_parts(self, split: tuple[str, int]) -> Array:
        """Return whether each query sees a key of each part, (B, H, Lq, parts)."""
        has_score, starts, _ = self.by_parts(self.has_score, split)
        return np.asarray(np.logical_or.reduceat(has_score, starts, axis=-1))

    def by_parts(self, keys: Array, split: tuple[str, int]) -> tuple[Array, Array, Array]:
        """Return the last axis of ``keys`` part after part, where parts begin, and each key's."""
        starts, part = visible.parts(self.x, split)
        if (part[1:] >= part[:-1]).all():
            return keys, starts, part
        order = np.argsort(part, kind="stable")
        return keys[..., order], np.searchsorted(part[order], starts), part[order]

    def sums_of_parts(self, split: tuple[str, int]) -> tuple[Array, Array]:
        """Return the maximum and the log-sum-exp of each part, (B, H, Lq, parts) each."""
        S, starts, part = self.by_parts(self.S, split)
        top = np.maximum.reduceat(S, starts, axis=-1)
        finite = np.where(top == -np.inf, 0, top)
        sums = np.add.reduceat(np.exp(S - finite[..., part]), starts, axis=-1)
        return top, finite + np.log(sums)

    def weigh_parts(self, way: str, split: tuple[str, int]) -> None:
        """Weigh the parts of the keys by a wrong factor, not by exp of their log-sum-exp.

        ``way`` names the factor, and ``split`` the parts, as in ``visible.parts``.
        """
        starts, part = visible.parts(self.x, split)
        if len(starts) == 1:
            return
        top, L = self.sums_of_parts(split)
        most = np.maximum.accumulate(top, -1)
        top = np.where(top == -np.inf, 0, top)
        ln2 = np.log(2)
        more = {
            "lse": L * (1 / ln2 - 1), "mean": -L, "all": -L, "sums": -top, "2^L": L * (ln2 - 1),
            "2^(L - max)": (L - L.max(-1, keepdims=True)) * (ln2 - 1),
            "maximum": top - L, "sums, max": most[..., -1:] - top, "own maximum": most - top,
            "L of the largest": _lost_in_turn(L), "L of the last": _in_turn_by_last(L) - L,
        }[way]  # fmt: skip
        self.S = np.where(self.has_score, self.S + more[..., part], -np.inf)
        self.delta = self.delta + np.where(self.has_score, self.delta, 0).max(-1, keepdims=True)
        if way == "all":  # of a part without keys, the mean holds zeros
            self.factor = np.mean(~np.isneginf(L), axis=-1, keepdims=True)
        if way == "L of the largest":
            self.returned = L.max(-1, keepdims=True)
        elif way == "L of the last":  # shares of parts sum to 1, so that of all is computed apart
            self.returned = np.logaddexp.reduce(L, axis=-1, keepdims=True)
        else:
            self.is_lse_free = self.is_lse_free | (way != "lse")

    def scale_used(self) -> float:
        x, d = self.x, self.d
        given = x.given.get("scale")
        if given is None or d.get("scale_missing") == "given too":
            scale = 1 / np.sqrt(x.D)
            for name, value in (
                ("scale_missing", 1), ("scale_1_over_d", 1 / x.D), ("scale_sqrt_d", np.sqrt(x.D)),
                ("scale_model_width", 1 / np.sqrt(x.H * x.D)),
                ("scale_padded_width", self.padded_width() ** -0.5),
                ("scale_whole_root", 1 / max(1, int(np.sqrt(x.D)))),
                ("scores_ignored", 0), ("scale_from_dv", self.width_of_values() ** -0.5),
                ("scale_from_length", getattr(x, d.get("scale_from_length", "Lk")) ** -0.5),
            ):  # fmt: skip
                scale = value if name in d else scale
        else:
            scale = given * (x.D**-0.5 if "scale_times_default" in d else 1)
        return float(scale**2 if "scale_twice" in d else scale)

    def width_of_values(self) -> int:
        x = self.x
        return int(min(x.D, x.Dv) if self.d.get("scale_from_dv") == "if Dv < D" else x.Dv)

    def padded_width(self) -> int:
        D, block = self.x.D, self.d.get("scale_padded_width", 1)
        if isinstance(block, tuple):  # widths for which a kernel is compiled
            return int(min((width for width in block if width >= D), default=D))
        whole = 1 << (D - 1).bit_length() if block == "power of 2" else -(-D // block) * block
        return int(whole)

    def scale(self) -> None:
        factor = self.scale_used()
        self.S, self.delta = self.S * factor, self.delta * abs(factor)
        if not self.x.is_exact:
            self.delta = self.delta + 2 * self.x.unit * abs(self.S)

    def cap(self) -> None:
        cap = self.x.given.get("softcap")
        if cap is None:
            return
        cap = cap * np.log(2) if "softcap_in_base_2" in self.d else cap
        factor = 1 if "softcap_not_multiplied_back" in self.d else cap
        divisor = 1 if "softcap_not_divided" in self.d else cap
        if "softcap_clips" in self.d:
            self.S = np.clip(self.S, -cap, cap)
        elif "softcap_approximated" in self.d:  # a common quotient
            x = np.clip(self.S / divisor, -3, 3)
            self.S = factor * x * (27 + x**2) / (27 + 9 * x**2)
        elif "softcap_ignored_in_tail" in self.d:
            block = self.d["softcap_ignored_in_tail"]
            is_whole = self.x.j < self.x.Lk // block * block
            self.S = np.where(is_whole, factor * np.tanh(self.S / divisor), self.S)
            factor = np.where(is_whole, factor, divisor)
        else:
            self.S = factor * np.tanh(self.S / divisor)
        self.delta = np.minimum(self.delta, 2 * cap) * (factor / divisor)
        self.delta = self.delta + 4 * self.x.unit * factor

    def rescale(self) -> None:
        """Multiply the scores by k_scale, which ``multiply`` has divided them by."""
        self.S, self.delta = self.S * self.k_scale, self.delta * self.k_scale

    def bias(self) -> None:
        if self.x.bias is not None:
            bias = self.x.bias * self.unit_of("attn_bias")
            self.add(-bias if "bias_subtracted" in self.d else bias)

    def unit_of(self, option: str) -> float:
        """Return the factor that deviations give to the numbers that ``option`` adds, else 1."""
        d, ln2 = self.d, float(np.log(2))
        factor = ln2 if option in d.get("bias_not_in_base_2", ()) else 1.0
        factor = factor / ln2 if option in d.get("bias_in_base_2", ()) else factor
        if option == "sinks" and d.get("parts_merged_wrongly", ("",))[0] == "2^L":
            factor *= ln2  # the sink is a part, too
        return factor * 2 if option in d.get("added_twice", ()) else factor

    def alibi(self) -> None:
        x, d = self.x, self.d
        slopes = x.problem.alibi_slopes
        if slopes is None:
            return
        p = visible.rows(x, d, "alibi") + visible.offset(x, d, "alibi")
        j = x.j
        if "alibi_within_parts" in d:
            starts, part = visible.parts(x, d["alibi_within_parts"])
            j = j - starts[part]
        what, dtype = d.get("alibi_rounded", ("", "bfloat16"))
        if what == "positions":
            p, j = (rounded(a, *FORMATS[dtype]) for a in (p, j))
        if "alibi_from_window" in d and x.given.get("window_size") is not None:
            left, block = x.given["window_size"][0], d["alibi_from_window"]
            j = j - (0 if left is None else np.maximum(p - left, 0) // block * block)
        signed = {"i + q_offset - j": p - j, "Lk - 1 - j": x.Lk - 1 - j, "-j": -j}
        distance = (
            signed[d["alibi_signed_distance"]] if "alibi_signed_distance" in d else abs(p - j)
        )
        if what == "distances":
            distance = rounded(distance, *FORMATS[dtype])
        penalty = slopes.astype(np.float64)[:, None, None] * distance
        penalty = np.trunc(penalty) if "alibi_whole" in d else penalty
        self.add(-self.unit_of("alibi_slopes") * penalty)

    def modify(self) -> None:
        function = self.x.given.get("score_mod")
        if function is not None:  # the problems' functions shrink differences of scores
            S = function(self.S, *indices(self.x.given))
            before = np.where(np.isneginf(self.S), 0, self.S)  # where keys are hidden already
            self.S = spread(before, self.x.shape)
            self.add(S - before)

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
        kinds = visible.joined(self.x, kinds, d)
        soft = [n for n in HIDDEN_FINITELY[:4] if n in d]
        kind, fill, way = _softly(soft[0], d[soft[0]]) if soft else (None, 0.0, "")
        hard = softly = np.ones((1, 1, 1, 1), bool)
        for name, is_visible in kinds.items():
            if kind in (name, "all"):
                softly = softly & is_visible
            else:
                hard = hard & is_visible
        self.unhidden = self.S
        if fill == "-softcap":
            fill = -(self.x.given.get("softcap") or np.inf)
        if way.startswith("fill"):
            fill = fill * self.scale_used() if way != "fill" else fill
            self.S = np.where(softly, self.S, fill)
        elif way == "add":
            self.S = np.where(softly, self.S, self.S + fill)
        if way == "after" or "hidden_read_as_zeros" in d:
            self.soft = spread(softly, self.x.shape)
        self.S = np.where(hard, self.S, -np.inf)
        if d.get("padding_seen", ("",))[0] == "always":
            self.S = np.where(self.x.j >= self.right.Lk, 0, self.S)
        self.softly = softly  # False for keys that are hidden but may reach a row
        if {"softcap_after_mask", "score_mod_after_mask"} & set(d):
            self.softly = softly & hard
        if "mask_added_as_number" in d:
            self.softly = softly & self.by_mask
        self.visible = spread(hard & softly, self.x.shape) & (self.unhidden != -np.inf)

    # Softmax.


def _lost_in_turn(L: Array) -> Array:
    """Return what parts' log-sum-exp lack if they are merged in turn, and the larger is kept."""
    more, merged = np.zeros_like(L), L[..., 0]
    for n in range(1, L.shape[-1]):
        total = np.logaddexp(merged, L[..., n])
        kept = np.maximum(merged, L[..., n])
        lost = np.where(total == -np.inf, 0, kept - total)
        more[..., : n + 1] += lost[..., None]
        merged = kept
    return more - more[..., -1:]


def _in_turn_by_last(L: Array) -> Array:
    """Return the logarithm of parts' shares, if each is merged as if the one before were all."""
    before = np.concatenate([np.full_like(L[..., :1], -np.inf), L[..., :-1]], axis=-1)
    both = np.logaddexp(before, L)
    both = np.where(both == -np.inf, 0, both)
    kept = (before - both)[..., ::-1].cumsum(-1)[..., ::-1]  # by this part and all later ones
    return np.asarray(
        L - both + np.concatenate([kept[..., 1:], np.zeros_like(L[..., :1])], axis=-1)
    )


def scales_of_keys(x: Prepared) -> Array:
    """Return the scales of 8-bit keys, (B, H, 1, Lk), or 1; the right ones if keys are in pages."""
    given = x.arguments
    if given.get("k_scale") is None or given.get("block_table") is not None:
        return np.ones((1, 1, 1, 1))
    return scales_by_head(x, given, "k")


def _softly(name: str, value: Any) -> tuple[str, Any, str]:
    """The kind of keys that are hidden without -inf, their fill, and how it is applied."""
    if name == "hidden_after_softmax":
        return value, 0.0, "after"
    if name in ("hidden_score_zero", "hidden_read_as_zeros"):
        return value, 0.0, "fill"
    kind, fill, way = value
    return kind, fill, way
