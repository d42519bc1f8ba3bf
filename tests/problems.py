"""Problems to test with, ways to solve them outside the library, and the error that is allowed.

The oracle is ``naive``, in Python floats. ``plain`` is what one would write in NumPy without
further thought; its error against the oracle in the same dtype is the price of float arithmetic,
and a backend's error may be twice as large (the rule of flash-attention's tests). Where that error
is small by chance, what the number of operations allows remains (``rounding``).
"""

from __future__ import annotations

import math
from importlib import import_module

import naive
import numpy as np
from hypothesis import strategies as st

from minimha.equations.problem import Problem

FULL = ("attn_mask", "attn_bias")
TABLE = np.cos(np.arange(300.0))


def by_distance(s, b, h, i, j):
    return s - 0.25 * (h + 1) * abs(i - j) + b


def bounded(s, b, h, i, j):
    return 2.0 * math.tanh(0.5 * s) if (i + j) % 3 else s


def hiding(s, b, h, i, j):
    return s if j <= i + 1 and (b + j) % 4 else -math.inf


def from_table(s, b, h, i, j):
    return 0.5 * s + TABLE[abs(i - j) % 300]


def earlier(b, h, i, j):
    return i >= j


def near(b, h, i, j):
    return (abs(i - j) <= 2) | (j == 0)


def of_parity(b, h, i, j):
    return (i + j + b) % 2 == h % 2


# Functions of every kind, and no more of them than are quickly compiled: all change a score by no
# more than their argument changes, and which scores are -inf depends on the indices alone.
SCORE_MODS = (by_distance, bounded, hiding, from_table)
MASK_MODS = (earlier, near, of_parity)


def everywhere(s, b, h, i, j):
    return s + 0.5 * b - 0.25 * h + math.sin(i) * math.cos(j)


def in_part(function, place):
    """``function`` with the indices of a part that begins at ``place`` in the whole."""
    first_b, first_h, key = place

    def of_part(*arguments):
        *score, b, h, i, j = arguments
        return function(*score, b + first_b, h + first_h, i + key, j + key)

    return of_part


def run(name, q, k, v, **options):
    """Output and log-sum-exp from the equations or the rung ``name``."""
    room = "equations" if name in ("dense", "tiled") else "kernels"
    problem = Problem.of(q, k, v, **options)
    return problem.as_given(*import_module(f"minimha.{room}.{name}").forward(problem))


def naive_attention(q, k, v, **options):
    """The oracle on arrays: float64 output and log-sum-exp."""
    given = {name: value for name, value in options.items() if value is not None}
    shape = (*q.shape[:3], k.shape[2])
    for name in FULL:
        if name in given:
            given[name] = np.broadcast_to(given[name], shape).tolist()
    if "key_indices" in given:
        K = np.shape(given["key_indices"])[-1]
        whole = np.broadcast_to(given["key_indices"], (*k.shape[:2], q.shape[2], K))
        given["key_indices"] = whole.tolist()
    lists = {n: x.tolist() if isinstance(x, np.ndarray) else x for n, x in given.items()}
    as_lists = (np.asarray(x, np.float64).tolist() for x in (q, k, v))
    output, lse = naive.attention(*as_lists, value_width=v.shape[3], **lists)
    B, H, Lq, _ = q.shape
    return np.reshape(output, (B, H, Lq, v.shape[3])), np.reshape(lse, (B, H, Lq))


def spoiling(name):
    """A tap that makes one step NaN and returns the others unchanged."""
    return lambda heard, value: value * np.nan if heard == name else value


def naive_merge(parts):
    """Output and log-sum-exp over all keys, from those over disjoint sets of keys."""
    output, lse = naive.merge([(o.tolist(), l.tolist()) for o, l in parts])
    return np.array(output), np.array(lse)


def visible(q, k, o):
    """Which query sees which key, from the options as given."""
    (B, H, Lq, _), Lk = q.shape, k.shape[2]
    p = np.arange(Lq)[:, None] + np.reshape(o.get("q_offset", 0), (-1, 1, 1, 1))
    j = np.arange(Lk)
    seen = np.ones((B, H, Lq, Lk), bool)
    if o.get("is_causal"):
        seen &= j <= p
    left, right = o.get("window_size") or (None, None)
    if left is not None:
        seen &= j >= p - left
    if right is not None:
        seen &= j <= p + right
    if o.get("kv_lengths") is not None:
        seen &= j < np.reshape(o["kv_lengths"], (-1, 1, 1, 1))
    if o.get("attn_mask") is not None:
        seen &= o["attn_mask"]
    if o.get("attn_bias") is not None:
        seen &= o["attn_bias"] != -np.inf
    if o.get("key_indices") is not None:
        seen &= chosen(o["key_indices"], seen.shape, k.shape[1])
    if o.get("mask_mod") is not None:
        seen &= over_pairs(o["mask_mod"], seen.shape, o, bool)
    if o.get("score_mod") is not None:
        seen &= ~np.isneginf(modified(np.zeros(seen.shape), o))
    return seen


def chosen(indices, shape, num_kv_heads):
    """The pairs of which the query names the key."""
    B, H, Lq, Lk = shape
    indices = np.broadcast_to(indices, (B, num_kv_heads, Lq, np.shape(indices)[-1]))
    pairs = np.zeros((B, num_kv_heads, Lq, Lk), bool)
    for b, h, i, x in np.argwhere(indices >= 0):
        pairs[b, h, i, indices[b, h, i, x]] = True
    return pairs.repeat(H // num_kv_heads, axis=1)


def over_pairs(function, shape, o, dtype):
    """What a function of b, h, a query's position and j returns for every pair."""
    offset = np.broadcast_to(o.get("q_offset", 0), shape[0]).tolist()
    values = [function(b, h, i + offset[b], j) for b, h, i, j in np.ndindex(shape)]
    return np.array(values, dtype).reshape(shape)


def modified(scores, o):
    """The option ``score_mod`` of every score."""
    numbers = iter(scores.ravel().tolist())
    function = lambda *pair: float(o["score_mod"](next(numbers), *pair))  # noqa: E731
    return over_pairs(function, scores.shape, o, scores.dtype)


def plain(q, k, v, **o):
    """Attention in plain NumPy in the dtype of q, and the largest sum of magnitudes in a score."""
    group, seen = q.shape[1] // k.shape[1], visible(q, k, o)
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    dtype = q.dtype.type
    scale = dtype(1 / np.sqrt(q.shape[3]) if o.get("scale") is None else o["scale"])
    s = q @ k.transpose(0, 1, 3, 2) * scale
    size = abs(q) @ abs(k).transpose(0, 1, 3, 2) * abs(scale)
    if o.get("softcap") is not None:
        s = dtype(o["softcap"]) * np.tanh(s / dtype(o["softcap"]))
    p = np.arange(q.shape[2])[:, None] + np.reshape(o.get("q_offset", 0), (-1, 1, 1, 1))
    distance = abs(p - np.arange(k.shape[2])).astype(dtype)
    added = [] if o.get("attn_bias") is None else [o["attn_bias"].astype(dtype)]
    if o.get("alibi_slopes") is not None:
        added.append(-o["alibi_slopes"].astype(dtype)[:, None, None] * distance)
    for bias in added:
        s = s + bias
        size = size + np.where(np.isfinite(bias), abs(bias), 0)
    if o.get("score_mod") is not None:
        s = modified(s, o)
        added = modified(np.zeros(s.shape), o)
        size = size + np.where(np.isfinite(added), abs(added), 0)
    s = np.where(seen, s, dtype(-np.inf))
    sink = np.full(q.shape[1], -np.inf) if o.get("sinks") is None else o["sinks"]
    sink = sink.astype(dtype)[:, None, None]
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(m == -np.inf, dtype(0), m)
    e = np.exp(s - m)
    l = e.sum(-1, keepdims=True) + np.exp(sink - m)
    values = np.where(seen.any((1, 2))[:, None, :, None], v, 0)
    output = (e / np.where(l == 0, dtype(1), l)) @ values
    with np.errstate(divide="ignore"):
        lse = (m + np.log(l))[..., 0]
    return output, lse, float(np.where(seen, size, 0).max(initial=0))


def rounding(q, k, v, options, lse, merges=0):
    """How far rounding alone may move an output and a log-sum-exp, as two numbers.

    Let u be half an eps. A score, D products and a few sums of magnitude s, moves by u (D + 8) s. A
    weight moves relatively by twice as much, and a sum of n numbers by u n. A merge is eight more.
    """
    return _rounding(q, k, v, plain(q, k, v, **options)[2], lse, merges)


def _rounding(q, k, v, size, lse, merges):
    u = float(np.finfo(q.dtype).eps) / 2
    score = u * (q.shape[3] + 8) * size
    sums = u * (k.shape[2] + 32 + 8 * merges)
    largest = float(abs(v[np.isfinite(v)]).max(initial=0))
    lowest = float(abs(lse[np.isfinite(lse)]).max(initial=0))
    return (2 * score + sums) * largest, score + sums + u * (8 + 4 * merges) * lowest


def assert_as_good_as_plain(q, k, v, options, output, lse, merges=0):
    """Output and log-sum-exp are within twice plain NumPy's error of the oracle."""
    exact = naive_attention(q, k, v, **options)
    _assert_as_good_as_plain(q, k, v, options, output, lse, exact, merges)


def assert_close_to_exact(q, k, v, options, output, lse, merges=0):
    """The same with dense float64 in place of the oracle, which would take too long."""
    wide = [x.astype(np.float64) for x in (q, k, v)]
    exact = run("dense", *wide, **options)
    _assert_as_good_as_plain(q, k, v, options, output, lse, exact, merges)


def _assert_as_good_as_plain(q, k, v, options, output, lse, exact, merges):
    plain_output, plain_lse, size = plain(q, k, v, **options)
    hidden = np.isneginf(exact[1])
    np.testing.assert_array_equal(np.isneginf(lse), hidden)
    np.testing.assert_array_equal(output[hidden], 0)
    pairs = zip(
        (output, lse[~hidden]),
        (plain_output, plain_lse[~hidden]),
        (exact[0], exact[1][~hidden]),
        _rounding(q, k, v, size, exact[1], merges),
        strict=True,
    )
    for ours, theirs, wanted, rounded in pairs:
        allowed = 2 * abs(theirs - wanted).max(initial=0) + rounded
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=allowed)


@st.composite
def random_problems(draw, dtype=np.float32, has_functions=True):
    """Any legal combination of options, on small ragged shapes and over a wide range of values.

    Stripes take no functions: then ``has_functions`` is False.
    """
    score_mods, mask_mods = (SCORE_MODS, MASK_MODS) if has_functions else ((), ())
    B, Hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    H, D, Dv = Hkv * group, draw(st.integers(1, 5)), draw(st.integers(1, 4))
    Lq, Lk = draw(st.integers(0, 7)), draw(st.integers(0, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.1, 1, 1, 10, 100]))
    q, k = (rng.normal(size=(B, h, n, D), scale=spread) for h, n in ((H, Lq), (Hkv, Lk)))
    v = rng.normal(size=(B, Hkv, Lk, Dv))

    def maybe(value):
        return value if draw(st.booleans()) else None

    mask_shape = draw(st.sampled_from([(Lq, Lk), (B, H, Lq, Lk), (1, H, 1, Lk), (B, 1, Lq, 1)]))
    bias_shape = draw(st.sampled_from([(Lq, Lk), (B, H, Lq, Lk), (B, 1, 1, Lk), (1, 1, Lq, Lk)]))
    bias = rng.normal(size=bias_shape)
    bias[rng.random(bias_shape) < draw(st.sampled_from([0, 0.3]))] = -np.inf
    picks_shape = draw(st.sampled_from([(Lq,), (B, Hkv, Lq), (B, 1, Lq), (1, Hkv, 1)]))
    picks = rng.integers(-1, Lk, (*picks_shape, draw(st.integers(0, 12))))
    side = st.none() | st.integers(0, 4)
    offsets = st.integers(-4, 9)
    options = {
        "is_causal": draw(st.booleans()),
        "window_size": maybe((draw(side), draw(side))),
        "q_offset": draw(offsets) if draw(st.booleans()) else rng.integers(-4, 9, B),
        "attn_mask": maybe(rng.random(mask_shape) < draw(st.sampled_from([0.2, 0.6, 0.9]))),
        "attn_bias": maybe(bias.astype(dtype)),
        "kv_lengths": maybe(rng.integers(0, Lk + 1, B)),
        "key_indices": draw(st.sampled_from([None, None, picks])),
        "alibi_slopes": maybe(rng.random(H).astype(dtype)),
        "scale": maybe(draw(st.sampled_from([0.0, 1.0, -0.5, 2.0]))),
        "softcap": maybe(draw(st.sampled_from([0.5, 5.0, 50.0]))),
        "sinks": maybe(rng.normal(size=H).astype(dtype)),
        "score_mod": draw(st.sampled_from([None, None, *score_mods])),
        "mask_mod": draw(st.sampled_from([None, None, *mask_mods])),
    }
    return *(x.astype(dtype) for x in (q, k, v)), options
