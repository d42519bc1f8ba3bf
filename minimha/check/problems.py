"""Generate graded problems: from one head without options to numbers that 16 bits cannot hold.

Each problem uses as few options as possible, and its sizes are equal only if the problem needs it.
Problems about positions or masks come with a square variant, for functions that require Lq = Lk.
Numbers are small multiples of 1/16, which 16 bits hold exactly, so problems are the same in every
dtype. Only problems about precision have other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import choice
from minimha.equations.problem import Problem

Array = NDArray[Any]

SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
LARGEST = {"float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.4e38}
REQUIRED = (  # not options
    "q", "k", "v", "g", "beta", "x", "W_q", "W_k", "W_v", "W_o", "num_heads",
    "latents", "W_iq", "W_ik", "W_iw", "g_ik", "b_ik", "top_k", "rope_dim",
)  # fmt: skip
EIGHT = {"Lq": 8, "Lk": 8, "D": 8}  # sizes of problems with V = I
TWO_AXES = ("mask of two axes", "bias of two axes")  # problems; in all others they have four
MANY = 301  # keys: not divisible by any usual block size


@dataclass(frozen=True, eq=False)
class Graded:
    """A graded problem: arguments for attention or a layer, and the behaviour that they show.

    ``layer`` has the constructor's arguments of a layer, and ``chunks`` the number of tokens of
    each of its calls with a cache. ``family`` is "" if the numbers are the same in each run.
    """

    name: str  # for example "causal, more keys than queries"
    arguments: Mapping[str, Any]  # those of ``minimha.attention``; arrays are float32
    shows: str  # one phrase: the behaviour that this problem shows
    is_exact: bool = False  # scores, scaled or not, are representable in the dtype
    layer: Mapping[str, Any] | None = None  # the constructor's arguments of a layer
    chunks: tuple[int, ...] = ()  # the number of tokens of each call with a cache
    # "alone", "crossed", "sized", "delta rule" or "indexer" if each run draws new numbers.
    family: str = ""

    @property
    def kind(self) -> str:
        """Return what the problem is for: "attention", "layer", "delta rule" or "indexer"."""
        if self.layer is None:
            return "delta rule" if "beta" in self.arguments else "attention"
        return "indexer" if "top_k" in self.layer else "layer"

    @property
    def options(self) -> dict[str, Any]:
        """Return the optional arguments of the call and the layer; chunks, if any, as ``cache``."""
        given = {**self.arguments, **(self.layer or {})}
        options = {name: x for name, x in given.items() if name not in REQUIRED}
        return {**options, "cache": self.chunks} if self.chunks else options


def is_given(name: str, value: Any) -> bool:
    """Return whether an option is given: not None, and not False unless its default is True."""
    return value is not None and (value is not False or name == "normalize")


def spans(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first token of each call with chunks[0], chunks[1], … tokens, and its end.

    >>> spans((4, 3))
    [(0, 4), (4, 7)]
    """
    ends = np.cumsum(chunks).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def graded(dtype: str = "float32") -> list[Graded]:
    """Return the graded problems, from simple to hard, with numbers that ``dtype`` holds exactly.

    All calls return the same problems. Their arrays are read-only.

    >>> problem = graded()[0]
    >>> problem.name, problem.arguments["q"].shape
    ('one head', (1, 1, 5, 4))
    """
    choice("dtype", dtype, tuple(SIGNIFICANT_BITS))
    return list(_graded(dtype))


@cache
def _graded(dtype: str) -> tuple[Graded, ...]:
    families = (
        _plain, _related, _causal, _windows, _masks, _lengths, _biases, _caps_and_sinks,
        _rows_that_see_nothing, _hidden_nan, _wide_ranges, _many_keys, _tiles, _ragged,
        _options_together, _precision,
    )  # fmt: skip
    problems = [problem for family in families for problem in family()]
    problems = [p if p.name in TWO_AXES else with_four_axes(p) for p in problems]
    return tuple(
        replace(kept(problem), is_exact=problem.is_exact and _has_exact_scores(problem, dtype))
        for problem in problems
        if all(_is_representable(problem.arguments[name], dtype) for name in "qkv")
    )


def with_four_axes(problem: Graded) -> Graded:
    """Return the problem with mask and bias as arrays of four axes, which all functions read."""
    over = {n: x for n, x in problem.arguments.items() if n in ("attn_mask", "attn_bias")}
    over = {n: x.reshape((1,) * (4 - x.ndim) + x.shape) for n, x in over.items()}
    return replace(problem, arguments={**problem.arguments, **over})


def kept(problem: Graded) -> Graded:
    """Make the problem's arrays read-only, because all callers share them."""
    for x in (*problem.arguments.values(), *(problem.layer or {}).values()):
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    return problem


def layer_problems(dtype: str = "float32") -> list[Graded]:
    """Return problems for a whole multi-head layer with weights, the same at each call."""
    choice("dtype", dtype, tuple(SIGNIFICANT_BITS))
    return list(_graded_layers())


@cache
def _graded_layers() -> tuple[Graded, ...]:
    return tuple(map(kept, _layers()))


def _has_exact_scores(problem: Graded, dtype: str) -> bool:
    q, k = (problem.arguments[name].astype(np.float64) for name in "qk")
    S = q @ k.repeat(q.shape[1] // k.shape[1], 1).swapaxes(-1, -2)
    return _is_representable(S, dtype) and _is_representable(S / np.sqrt(q.shape[-1]), dtype)


def _is_representable(x: Array, dtype: str) -> bool:
    """Return whether ``dtype`` represents every finite number of ``x`` exactly."""
    x = x[np.isfinite(x)].astype(np.float64)
    mantissa = np.frexp(x)[0] * 2.0 ** SIGNIFICANT_BITS[dtype]
    return bool((mantissa == np.round(mantissa)).all() and abs(x).max(initial=0) <= LARGEST[dtype])


def visibility(arguments: Mapping[str, Any]) -> Array:
    """Return whether each query sees each key, (B, H, Lq, Lk)."""
    x = Problem.of(**{name: value for name, value in arguments.items() if name != "return_lse"})
    (B, H, Lq, _), Lk = x.q.shape, x.k.shape[2]
    return np.broadcast_to(x.visible(slice(0, Lq), slice(0, Lk)), (B, H, Lq, Lk))


class Draw:
    """Random numbers of one problem, seeded by its name, so that problems are independent."""

    def __init__(self, name: str) -> None:
        self.rng = np.random.default_rng(crc32(name.encode()))

    def numbers(self, *shape: int, spread: float = 1) -> Array:
        """Return normal random numbers, rounded to multiples of 1/16 with 7 bits."""
        x = np.clip(self.rng.normal(size=shape) * spread, -7.9, 7.9)
        return (np.round(x * 16) / 16).astype(np.float32)

    def qkv(
        self, B: int = 1, H: int = 1, Lq: int = 5, Lk: int = 7, D: int = 4, Dv: int | None = None,
        Hkv: int | None = None, spread: float = 1,
    ) -> dict[str, Array]:  # fmt: skip
        """Return random queries, keys and values of the given sizes."""
        Hkv = H if Hkv is None else Hkv
        q, k = self.numbers(B, H, Lq, D, spread=spread), self.numbers(B, Hkv, Lk, D, spread=spread)
        return {"q": q, "k": k, "v": self.numbers(B, Hkv, Lk, D if Dv is None else Dv, spread=1.75)}

    def mask(self, *shape: int) -> Array:
        """Return a random mask in which every query sees a key and misses another."""
        mask = self.rng.random(shape) < 0.6
        Lq, Lk = shape[-2:]
        i = np.arange(Lq)
        mask[..., i, i % Lk], mask[..., i, (i + 1 + i // 3) % Lk] = True, False
        return mask


def _problem(name: str, shows: str, arguments: Mapping[str, Any], **options: Any) -> Graded:
    return Graded(name, {**arguments, **options}, shows)


def _drawn(name: str, shows: str, sizes: Mapping[str, Any], **options: Any) -> Graded:
    """Return a problem with random numbers; ``sizes`` are the arguments of ``qkv``."""
    return _problem(name, shows, Draw(name).qkv(**sizes), **options)


def _chosen(name: str, shows: str, q: Any, k: Any, v: Any, **options: Any) -> Graded:
    """Return a problem of one head; a single query is repeated once per key, if keys are few."""
    if len(q) == 1 and len(k) < 10:
        q = np.repeat(q, len(k), axis=0)
    rows = {n: np.array(x, np.float32)[None, None] for n, x in (("q", q), ("k", k), ("v", v))}
    return Graded(name, {**rows, **options}, shows, is_exact=True)


def _plain() -> Iterator[Graded]:
    yield _drawn("one head", "products, scale and softmax", {})
    yield _drawn("square", "which of two equal sizes is meant", {"Lq": 6, "Lk": 6})
    yield _drawn("heads and batch", "the axes of heads and batch", {"B": 2, "H": 3})
    sizes = {"B": 2, "H": 3, "Lq": 4, "Lk": 4, "D": 5}
    yield _drawn("heads and batch, square", "heads moved to their place and back", sizes)
    yield _drawn("narrow values", "Dv other than D", {"H": 2, "Dv": 3})
    draw, shows = Draw("grouped heads"), "which key/value head is read"
    yield _problem("grouped heads", shows, draw.qkv(H=6, Hkv=3))
    yield _problem("grouped heads, square", shows, draw.qkv(H=4, Hkv=2, Lq=6, Lk=6))
    yield _drawn("scale", "the argument scale", {"H": 2, "Lq": 6, "Lk": 6}, scale=0.3125)
    yield _drawn("scale of 0", "whether 0 is read as absent", {"Lq": 3, "Lk": 5}, scale=0.0)
    yield _drawn("log-sum-exp", "the log-sum-exp", {"H": 2}, return_lse=True)
    yield _drawn("weights", "the weights themselves: V = I", EIGHT, v=_identity(8))
    wide = {"H": 2, "Lq": 6, "Lk": 12, "D": 4}
    shows = "the weights at other sizes: V = I"
    yield _drawn("weights of two heads", shows, wide, v=_identity(12, heads=2))
    yield _drawn("wide heads", "sizes wider than blocks", {"Lq": 3, "Lk": 5, "D": 160})


def _identity(size: int, heads: int = 1) -> Array:
    return np.tile(np.eye(size, dtype=np.float32), (1, heads, 1, 1))


def _related() -> Iterator[Graded]:
    """Yield problems whose answers follow from that of "one head" in all conventions."""
    x = Draw("one head").qkv()
    order = np.random.default_rng(3).permutation(7)
    permuted = {"q": x["q"], "k": x["k"][:, :, order], "v": x["v"][:, :, order]}
    yield _problem("keys permuted", "whether the order of keys matters", permuted)
    shift = np.array([0.5, -1.0, 0.75, 0.25], np.float32)
    shifted = {**x, "k": x["k"] + shift}
    yield _problem("keys shifted", "whether a constant added to a row's scores matters", shifted)
    doubled = {**x, "v": 2 * x["v"]}
    yield _problem("values doubled", "whether the output is linear in V", doubled)
    ones = {**x, "v": np.ones_like(x["v"])}
    yield _problem("values of 1", "whether weights sum to 1", ones)
    for name, part in (("first three keys", slice(0, 3)), ("last four keys", slice(3, 7))):
        some = {"q": x["q"], "k": x["k"][:, :, part], "v": x["v"][:, :, part]}
        yield _problem(name, "whether parts merge into the whole", some, return_lse=True)


def _causal() -> Iterator[Graded]:
    def causal(name: str, shows: str, sizes: Mapping[str, int], **options: Any) -> Graded:
        return _drawn(name, shows, sizes, is_causal=True, **options)

    yield causal("causal", "who sees whom", {"H": 2, "Lq": 6, "Lk": 6})
    yield causal(
        "causal, more keys than queries", "where the first query stands",
        {"H": 2, "Lq": 3, "Lk": 7}, q_offset=4,
    )  # fmt: skip
    yield causal(
        "causal, more keys than queries, none before", "a q_offset of 0",
        {"H": 2, "Lq": 3, "Lk": 7}, q_offset=0,
    )  # fmt: skip
    yield causal("decoding", "one query after all others", {"H": 2, "Lq": 1, "Lk": 6}, q_offset=5)
    yield causal(
        "causal, amid the keys", "whether q_offset is read or guessed", {"Lq": 3, "Lk": 8},
        q_offset=2,
    )  # fmt: skip
    yield causal(
        "causal, an offset for each batch entry", "q_offset of shape (B,)",
        {"B": 2, "Lq": 3, "Lk": 8}, q_offset=np.array([1, 4]),
    )  # fmt: skip
    yield causal("causal, 64 tokens", "sizes that suit tiles", {"Lq": 64, "Lk": 64, "D": 16})
    square = {**Draw("causal weights").qkv(**EIGHT), "v": _identity(8)}
    yield _problem("causal weights", "which keys each query sees: V = I", square, is_causal=True)
    few = {**square, "q": square["q"][:, :, :4]}
    yield _problem(
        "causal weights at an offset", "which keys each query sees: V = I", few, is_causal=True,
        q_offset=3,
    )  # fmt: skip
    shows = "whether future keys are hidden for good"
    lower = np.tril(np.ones((6, 6), bool))
    yield _low_scores("causal, low scores", shows, lower, is_causal=True)
    grouped = {"H": 4, "Hkv": 2, "Lq": 6, "Lk": 6}
    yield causal("causal, grouped heads", "positions of grouped heads", grouped)


def _low_scores(name: str, shows: str, visible: Array, **options: Any) -> Graded:
    """Return a problem whose visible keys have scores of -160 or -162, and hidden keys 0.

    16 bits hold these scores. A fill of -10, or -100 added to the scores, leaves hidden keys far
    above the visible ones.
    """
    rows, keys = np.indices(visible.shape)
    scores = np.where(visible, -160 - 2 * ((rows + keys) % 3 == 0), 0)
    q, k = 16 * np.eye(len(visible), 16), np.zeros((visible.shape[1], 16))
    k[:, : len(visible)] = scores.T / 4  # scale · q is 4
    return _chosen(name, shows, q, k, Draw(name).numbers(visible.shape[1], 16), **options)


def _windows() -> Iterator[Graded]:
    square = {"H": 2, "Lq": 9, "Lk": 9}
    yield _drawn("window", "both sides of a window", square, window_size=(3, 1))
    yield _drawn(
        "window, causal", "a window of the past", square, window_size=(3, 0), is_causal=True
    )
    yield _drawn(
        "window, more keys than queries", "where a window stands", {"Lq": 4, "Lk": 10},
        window_size=(2, 1), q_offset=3,
    )  # fmt: skip
    yield _drawn("window without a past", "a side of 0", square, window_size=(0, 2))
    yield _drawn("window without a future", "a side of 0", square, window_size=(2, 0))
    shows = "a side without a limit"
    yield _drawn("window on the left", shows, square, window_size=(2, None))
    both = {"window_size": (2, None), "is_causal": True}
    yield _drawn("window on the left, causal", shows, square, **both)
    yield _drawn(
        "window on the left, more keys", shows, {"Lq": 4, "Lk": 10}, window_size=(2, None),
        q_offset=3,
    )  # fmt: skip
    yield _drawn("window on the right", shows, square, window_size=(None, 2))
    shows = "which keys each query sees: V = I"
    yield _drawn("window weights", shows, EIGHT, v=_identity(8), window_size=(2, 1))


def _masks() -> Iterator[Graded]:
    draw = Draw("mask")
    yield _problem("mask", "what True means", draw.qkv(Lq=6, Lk=6), attn_mask=draw.mask(6, 6))
    draw = Draw("mask for each head")
    square, each = draw.qkv(2, 2, Lq=6, Lk=6), draw.mask(2, 2, 6, 6)
    yield _problem("mask for each head", "a mask's axes", square, attn_mask=each)
    padding = np.array([[1, 1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]], bool)[:, None, None]
    yield _drawn("mask over keys", "padding as a mask", {"B": 2, "H": 2}, attn_mask=padding)
    both = {"attn_mask": padding, "is_causal": True, "q_offset": 2}
    yield _drawn("mask over keys, causal", "a mask of one row beside causality", {"B": 2}, **both)
    draw = Draw("mask, causal")
    square = draw.qkv(Lq=6, Lk=6)
    mask = draw.mask(6, 6) | np.eye(6, dtype=bool)
    yield _problem("mask, causal", "two that hide", square, attn_mask=mask, is_causal=True)
    draw = Draw("mask weights")
    square = {**draw.qkv(**EIGHT), "v": _identity(8)}
    shows = "which keys each query sees: V = I"
    yield _problem("mask weights", shows, square, attn_mask=draw.mask(8, 8))
    mask = Draw("mask, low scores").mask(6, 6)
    shows = "whether keys are hidden for good"
    yield _low_scores("mask, low scores", shows, mask, attn_mask=mask)
    draw, (name, _) = Draw("two axes"), TWO_AXES
    square = draw.qkv(2, 2, Lq=6, Lk=6)
    yield _problem(name, "a mask without axes of heads", square, attn_mask=draw.mask(6, 6))


def _lengths() -> Iterator[Graded]:
    yield _drawn(
        "lengths", "padded keys", {"B": 3, "H": 2, "Lq": 4, "Lk": 8},
        kv_lengths=np.array([5, 3, 7]),
    )  # fmt: skip
    yield _drawn(
        "lengths, square", "padded keys", {"B": 2, "Lq": 6, "Lk": 6}, kv_lengths=np.array([4, 5])
    )
    yield _drawn(
        "lengths, causal", "two that hide", {"B": 2, "Lq": 6, "Lk": 6},
        kv_lengths=np.array([3, 5]), is_causal=True,
    )  # fmt: skip
    shows = "whether padded keys are hidden for good"
    filled = np.broadcast_to(np.arange(6) < 4, (6, 6))
    yield _low_scores("lengths, low scores", shows, filled, kv_lengths=np.array([4]))


def _biases() -> Iterator[Graded]:
    draw = Draw("bias")
    square = draw.qkv(Lq=6, Lk=6)
    yield _problem("bias", "what is added to scores", square, attn_bias=draw.numbers(6, 6))
    draw = Draw("bias for each head")
    square, each = draw.qkv(2, 2, Lq=6, Lk=6), draw.numbers(2, 2, 6, 6)
    yield _problem("bias for each head", "a bias's axes", square, attn_bias=each)
    draw = Draw("bias for each entry")
    square, each = draw.qkv(2, 3, Lq=6, Lk=6), draw.numbers(2, 1, 6, 6)
    yield _problem("bias for each entry", "a bias's axes", square, attn_bias=each)
    draw, (_, name) = Draw("two axes"), TWO_AXES
    square = draw.qkv(2, 2, Lq=6, Lk=6)
    yield _problem(name, "a bias without axes of heads", square, attn_bias=draw.numbers(6, 6))
    draw = Draw("bias that hides")
    bias = np.where(draw.mask(5, 7), draw.numbers(5, 7), np.float32(-np.inf))
    yield _problem("bias that hides", "-inf in a bias", draw.qkv(H=2), attn_bias=bias)
    slopes = np.array([0.5, 0.25, 0.125], np.float32)
    draw = Draw("ALiBi")
    square = draw.qkv(H=3, Lq=6, Lk=6)
    yield _problem("ALiBi", "distances", square, alibi_slopes=slopes)
    yield _problem("ALiBi, causal", "distances", square, alibi_slopes=slopes, is_causal=True)
    yield _drawn(
        "ALiBi, more keys than queries", "distances from where queries stand",
        {"H": 3, "Lq": 4, "Lk": 7}, alibi_slopes=slopes, q_offset=3,
    )  # fmt: skip


def _caps_and_sinks() -> Iterator[Graded]:
    yield _drawn("softcap", "soft-capped scores", {"H": 2, "spread": 1.75}, softcap=2.0)
    draw = Draw("softcap and bias")
    inputs, bias = draw.qkv(spread=1.75, Lq=6, Lk=6), draw.numbers(6, 6, spread=1.75)
    yield _problem(
        "softcap and bias", "their order", inputs, softcap=1.5, attn_bias=bias
    )  # fmt: skip
    draw = Draw("softcap and mask")
    inputs, mask = draw.qkv(spread=1.75, Lq=6, Lk=6), draw.mask(6, 6)
    yield _problem("softcap and mask", "their order", inputs, softcap=2.5, attn_mask=mask)
    wide = {"spread": 1.75, "Lq": 6, "Lk": 6}
    yield _drawn("softcap, causal", "their order", wide, softcap=2.5, is_causal=True)
    draw = Draw("sinks")
    inputs, sinks = draw.qkv(H=3), np.array([1.5, -1.0, 4.0], np.float32)
    yield _problem("sinks", "scores without a value", inputs, sinks=sinks)
    shows = "what a sink adds to the log-sum-exp"
    yield _problem("sinks, log-sum-exp", shows, inputs, sinks=sinks, return_lse=True)
    draw = Draw("sinks, causal")
    square, sinks = draw.qkv(H=2, Lq=6, Lk=6), np.array([0.5, 2.0], np.float32)
    shows = "scores without a value"
    yield _problem("sinks, causal", shows, square, sinks=sinks, is_causal=True)
    yield _chosen(
        "a sink above all scores", "whether the maximum includes the sink",
        [[1, 0, 0, 0], [0, 2, 0, 0], [1, 1, 0, 0]], [[2, 0, 0, 0], [0, 2, 0, 0], [2, 2, 0, 0]],
        [[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]], sinks=np.array([1024], np.float32),
        return_lse=True,
    )  # fmt: skip


def _rows_that_see_nothing() -> Iterator[Graded]:
    draw = Draw("mask that hides rows")
    inputs, mask = draw.qkv(H=2, Lq=6, Lk=6), draw.mask(6, 6)
    mask[[1, 4]] = False
    yield _problem("mask that hides rows", "rows that see nothing", inputs, attn_mask=mask)
    bias = np.where(mask, draw.numbers(6, 6), np.float32(-np.inf))
    yield _problem("bias that hides rows", "rows that see nothing", inputs, attn_bias=bias)
    sizes = {"B": 3, "H": 2}
    yield _drawn("no keys", "rows that see nothing", sizes, kv_lengths=np.array([3, 0, 4]))
    sink = Draw("no keys but a sink").numbers(2)
    yield _drawn(
        "no keys but a sink", "the log-sum-exp of rows that see nothing", sizes,
        kv_lengths=np.array([3, 0, 4]), sinks=sink, return_lse=True,
    )  # fmt: skip
    draw = Draw("causal, before the keys")
    square = draw.qkv(H=2, Lq=6, Lk=6)
    shows = "rows that see nothing"
    yield _problem("causal, before the keys", shows, square, is_causal=True, q_offset=-2)
    few = {"H": 2, "Lq": 6, "Lk": 4}
    name = "causal, more queries than keys"
    yield _drawn(name, shows, few, is_causal=True, q_offset=-2)
    yield _problem("window beyond the keys", shows, square, window_size=(1, 0), q_offset=3)
    yield _problem("window before the keys", shows, square, window_size=(3, 1), q_offset=-6)
    shows = "the log-sum-exp of rows that see nothing"
    yield _problem(
        "log-sum-exp of hidden rows", shows, inputs, attn_mask=mask, return_lse=True
    )  # fmt: skip
    sinks = np.array([0.5, -0.25], np.float32)
    yield _problem(
        "log-sum-exp of hidden rows, a sink", shows, inputs, attn_mask=mask, sinks=sinks,
        return_lse=True,
    )  # fmt: skip


def _hidden_nan() -> Iterator[Graded]:
    """Yield problems with NaN in keys and values that some or all queries must not see."""

    def spoiled(name: str, at: int, **options: Any) -> Graded:
        x = Draw(name).qkv(H=2, Lq=6, Lk=6)
        x["k"][:, :, at:] = x["v"][:, :, at:] = np.nan
        return _problem(name, "whether a hidden NaN stays hidden", x, **options)

    yield spoiled("NaN behind the length", 4, kv_lengths=np.array([4]))
    mask = Draw("NaN behind the mask").mask(6, 6)
    mask[:, 5], mask[5, 2] = False, True
    yield spoiled("NaN behind the mask", 5, attn_mask=mask)
    yield spoiled("NaN in the future", 4, is_causal=True)


def _wide_ranges() -> Iterator[Graded]:
    v = [[1, 0, 2, 0], [0, 1, 0, 3], [1, 1, -1, 1]]
    yield _chosen(
        "large scores", "exponentials that overflow",
        [[32, 0, 0, 0], [0, 32, 0, 0], [16, 16, 0, 0]],
        [[64, 32, 0, 0], [64, 64, 0, 0], [63.5, 64, 0, 0]], v,
    )  # fmt: skip
    yield _chosen(
        "rows far apart", "a maximum for each row",
        [[32, 0, 0, 0], [0, 32, 0, 0], [0, 0, 1, 0]],
        [[64, -64, 0, 0], [64, -64, 0, 0], [63.5, -63.5, 0, 0]], v,
    )  # fmt: skip
    yield _chosen(
        "scores far below 0", "where the maximum starts",
        [[32, 0, 0, 0], [0, 32, 0, 0], [16, 16, 0, 0]],
        [[-64, -63.75, 0, 0], [-64, -64, 0, 0], [-63.75, -64, 0, 0]], v,
    )  # fmt: skip
    hiding: dict[str, dict[str, Any]] = {
        "mask": {"attn_mask": np.array([[True, True, False]] * 3)},
        "length": {"kv_lengths": np.array([2])},
        "causality": {"is_causal": True},
    }
    for name, given in hiding.items():
        yield _chosen(
            f"a score of 1024 hidden by {name}", "a maximum of visible keys alone",
            [[32, 0, 0, 0], [0, 32, 0, 0], [16, 16, 0, 0]],
            [[0.0625, 0, 0, 0], [0, 0.125, 0, 0], [64, 64, 0, 0]], v, **given,
        )  # fmt: skip


def _many_keys() -> Iterator[Graded]:
    yield _drawn("64 tokens", "sizes that suit tiles", {"Lq": 64, "Lk": 64, "D": 16})
    for name, Dv in ((f"{MANY} keys", 4), (f"weights of {MANY} keys", MANY)):
        draw = Draw(f"{MANY} keys")
        x = draw.qkv(Lq=3, Lk=MANY, Dv=4, spread=1)
        ramp = np.round(np.linspace(-2, 3, MANY) * 16) / 16
        x["k"][..., 0] = ramp  # later blocks hold larger scores
        x["q"][..., 0] = [1.5, 2, 1]
        if Dv == MANY:
            x["v"] = _identity(MANY)
        yield _problem(name, "blocks of keys", x)
    shows, late = "rows whose first blocks of keys are hidden", np.array([[70], [140], [0]])
    seen = np.arange(MANY) >= late
    draw = Draw("hidden blocks")
    x = draw.qkv(Lq=3, Lk=MANY)
    yield _problem(f"mask that hides blocks, {MANY} keys", shows, x, attn_mask=seen)
    hidden = np.where(seen, draw.numbers(3, MANY), np.float32(-np.inf))
    yield _problem(f"bias that hides blocks, {MANY} keys", shows, x, attn_bias=hidden)
    few, shows = {"Lq": 3, "Lk": MANY}, "where blocks of keys begin and end"
    yield _drawn(f"causal, {MANY} keys", shows, few, is_causal=True, q_offset=298)
    yield _drawn(f"causal, amid {MANY} keys", shows, few, is_causal=True, q_offset=127)
    yield _drawn(f"window, {MANY} keys", shows, few, window_size=(70, 0), q_offset=298)
    each = {"B": 3, **few}
    name, offsets = f"causal, an offset for each entry, {MANY} keys", np.array([40, 298, 150])
    yield _drawn(name, shows, each, is_causal=True, q_offset=offsets)
    slopes = np.array([0.25], np.float32)
    yield _drawn(f"ALiBi, {MANY} keys", shows, few, alibi_slopes=slopes, q_offset=298)
    name = f"window, an offset for each entry, {MANY} keys"
    yield _drawn(name, shows, each, window_size=(70, 5), q_offset=offsets)
    lengths = np.array([65, 130, 290])
    yield _drawn(f"lengths, {MANY} keys", shows, {"B": 3, **few}, kv_lengths=lengths)
    shows, whole = "lengths that fill their last page", np.array([64, 128, 48])
    yield _drawn(f"whole pages, {MANY} keys", shows, {"B": 3, **few}, kv_lengths=whole)


def _tiles() -> Iterator[Graded]:
    """Yield one problem per option, at sizes that functions for whole tiles take."""
    sizes: dict[str, Any] = {"Lq": 64, "Lk": 64, "D": 16}
    name = "grouped heads, 64 tokens"
    yield _drawn(name, "which key/value head is read", {"H": 4, "Hkv": 2, **sizes})
    draw = Draw("64 tokens with an option")
    x, shows = draw.qkv(**sizes), "an option at a size that suits tiles"
    lower = np.tril(np.ones((64, 64), bool))
    options: dict[str, dict[str, Any]] = {
        "window": {"window_size": (9, 3)},
        "mask": {"attn_mask": draw.mask(64, 64) | (lower & ~np.tril(lower, -2))},
        "lengths": {"kv_lengths": np.array([37])},
        "bias": {"attn_bias": draw.numbers(64, 64)},
        "ALiBi": {"alibi_slopes": np.array([0.25], np.float32), "is_causal": True},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": np.array([2.5], np.float32)},
        "log-sum-exp": {"return_lse": True},
    }
    for option, given in options.items():
        yield _problem(f"{option}, 64 tokens", shows, x, **given)


def _ragged() -> Iterator[Graded]:
    """Yield problems whose groups, blocks of keys or rows of a bias do not fill a tile."""
    draw = Draw("groups of three, in tiles")
    x, shows = draw.qkv(H=3, Hkv=1, Lq=100, Lk=100, D=8), "rows of a group, in tiles"
    for L in (65, 100):
        given = {**x, "q": x["q"][:, :, :L], "q_offset": 0}
        yield _problem(f"causal, groups of three, {L} queries", shows, given, is_causal=True)
    yield _problem("window, groups of three, 100 tokens", shows, x, window_size=(20, 5))
    both = {"attn_mask": draw.mask(100, 100) | np.eye(100, dtype=bool), "is_causal": True}
    yield _problem("mask, causal, groups of three, 100 tokens", shows, x, **both)
    both = {"kv_lengths": np.array([50]), "is_causal": True}
    yield _problem("lengths, causal, groups of three, 100 tokens", shows, x, **both)
    draw = Draw("70 keys")
    x, shows = draw.qkv(2, 2, Lq=3, Lk=70), "a last block of columns"
    yield _problem("mask, 70 keys", shows, x, attn_mask=draw.mask(3, 70))
    yield _problem("bias, 70 keys", shows, x, attn_bias=draw.numbers(3, 70))
    draw = Draw("bias over keys")
    for Lq, Lk in ((6, 7), (133, 10)):
        x, bias = draw.qkv(2, 2, Lq=Lq, Lk=Lk), draw.numbers(2, 2, 1, Lk)
        yield _problem(f"bias over keys, {Lq} queries", "a bias of one row", x, attn_bias=bias)
    yield _problem(f"mask over keys, {Lq} queries", "a mask of one row", x, attn_mask=bias > -0.5)


def _options_together() -> Iterator[Graded]:
    """Yield problems with options per query head, or with two options in whole tiles."""
    draw = Draw("options by head, grouped heads")
    x, shows = draw.qkv(H=4, Hkv=2, Lq=6, Lk=6), "one for each query head, not for each key head"
    by_head: dict[str, dict[str, Any]] = {
        "ALiBi": {"alibi_slopes": np.array([0.5, 0.125, 0.25, 0.0625], np.float32)},
        "sinks": {"sinks": np.array([1.5, -1.0, 0.5, 3.0], np.float32)},
        "mask for each head": {"attn_mask": draw.mask(1, 4, 6, 6)},
        "bias for each head": {"attn_bias": draw.numbers(1, 4, 6, 6)},
    }
    for option, given in by_head.items():
        yield _problem(f"{option}, grouped heads", shows, x, **given)
    draw = Draw("groups of three")
    x, lengths = draw.qkv(B=3, H=6, Hkv=2, Lq=7, Lk=7), np.array([7, 3, 5])
    shows = "heads and entries, which are both 3 or more"
    yield _problem("log-sum-exp, groups of three", shows, x, return_lse=True)
    yield _problem("lengths, groups of three", shows, x, kv_lengths=lengths)
    yield _problem("bias, groups of three", shows, x, attn_bias=draw.numbers(1, 6, 7, 7))
    yield _problem("mask, groups of three", shows, x, attn_mask=draw.mask(1, 6, 7, 7))
    draw, shows = Draw("lengths by entry"), "which entry a mask or bias is for, beside lengths"
    x, lengths = draw.qkv(3, 2, Lq=4, Lk=8), np.array([3, 8, 5])
    each = draw.numbers(3, 1, 4, 8)
    yield _problem("bias for each entry, lengths", shows, x, attn_bias=each, kv_lengths=lengths)
    seen = draw.mask(3, 1, 4, 8)
    seen[..., 0] = True
    yield _problem("mask for each entry, lengths", shows, x, attn_mask=seen, kv_lengths=lengths)
    draw = Draw("two options, 64 tokens")
    x = draw.qkv(Lq=64, Lk=64, D=16, spread=1.5)
    bias, slopes = draw.numbers(64, 64), np.array([0.25], np.float32)
    sinks = np.array([1.5], np.float32)
    pairs: dict[str, dict[str, Any]] = {
        "softcap and bias": {"softcap": 1.5, "attn_bias": bias},
        "ALiBi and bias": {"alibi_slopes": slopes, "attn_bias": bias},
        "softcap and ALiBi": {"softcap": 1.5, "alibi_slopes": slopes},
        "sinks and softcap": {"sinks": sinks, "softcap": 1.5},
        "window and bias": {"window_size": (9, 3), "attn_bias": bias},
    }
    for options, given in pairs.items():
        yield _problem(f"{options}, 64 tokens", "options that meet, in tiles", x, **given)


def _layers() -> Iterator[Graded]:
    rotary = {"rope_base": 10000.0, "rope_interleaved": False}
    causal = {"is_causal": True}
    yield _layer("one head", "the matrices", D=6)
    yield _layer("three heads", "heads split and joined", B=2, L=5, H=3)
    yield _layer("as many heads as tokens", "heads split and joined", L=4, H=4)
    yield _layer("narrow heads", "heads narrower than E / H", H=2, D=3, E=8)
    yield _layer("causal", "who sees whom", H=2, call=causal)
    mask = Draw("mask of a layer").mask(6, 6)
    yield _layer("mask", "what True means", H=2, call={"attn_mask": mask})
    yield _layer("biases", "what is added to products", H=2, has_biases=True)
    yield _layer("grouped heads", "which key/value head is read", H=4, Hkv=2)
    yield _layer("rotary", "rotated halves", H=2, D=8, more=rotary)
    pairs = {**rotary, "rope_interleaved": True}
    yield _layer("rotary, interleaved", "rotated pairs", H=2, D=8, more=pairs)
    other = {**rotary, "rope_base": 500.0}
    yield _layer("rotary, another base", "the base", H=2, D=8, more=other)
    chunks = (3, 1, 2)
    yield _layer("cache", "what earlier calls leave", H=2, chunks=chunks, call=causal)
    shows = "positions after earlier calls"
    yield _layer("cache, rotary", shows, H=2, D=8, chunks=chunks, call=causal, more=rotary)
    yield _layer(
        "everything", "all of it together", B=2, H=4, Hkv=2, has_biases=True, call=causal,
        more=rotary,
    )  # fmt: skip


def _layer(
    name: str, shows: str, B: int = 1, L: int = 6, H: int = 1, D: int = 4, Hkv: int | None = None,
    E: int | None = None, has_biases: bool = False, chunks: tuple[int, ...] = (),
    call: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None,
) -> Graded:  # fmt: skip
    """Return a problem for a layer of width E, by default H · D."""
    draw, groups, width = Draw(name), H if Hkv is None else Hkv, H * D if E is None else E
    shapes = {"q": (width, H * D), "k": (width, groups * D), "v": (width, groups * D)}
    shapes["o"] = H * D, width
    given: dict[str, Any] = {
        f"W_{n}": draw.numbers(*shape, spread=1 / np.sqrt(shape[0])) for n, shape in shapes.items()
    }
    if has_biases:
        given |= {f"b_{n}": draw.numbers(shape[1], spread=0.5) for n, shape in shapes.items()}
    if Hkv is not None:
        given["num_kv_heads"] = Hkv
    given |= {"num_heads": H, **(more or {})}
    arguments = {"x": draw.numbers(B, L, width), **(call or {})}
    return Graded(name, arguments, shows, layer=given, chunks=chunks)


def _precision() -> Iterator[Graded]:
    two = [[1, 0, 0, 0], [0, 1, 0, 0]]
    yield _chosen(
        "scores of 2049", "scores kept in 16 bits", [[4096, 2, 0, 0]],
        [[1, 1, 0, 0], [1, 0, 0, 0]], two,
    )  # fmt: skip
    yield _chosen(
        "scores of 257", "scores kept in 8 bits", [[512, 2, 0, 0]],
        [[1, 1, 0, 0], [1, 0, 0, 0]], two,
    )  # fmt: skip
    wide = np.ones((3, 4096))
    wide[1, 2048:] = wide[2, 512:] = 0
    yield _chosen(
        "sums of 4096 products", "scores added up in 16 bits", np.ones((1, 4096)), wide,
        np.eye(3, 4096),
    )  # fmt: skip
    for name, extra, size in (
        ("1 + 2^-9", 2.0**-9, 2048), ("1 + 2^-12", 2.0**-12, 8192),
    ):  # fmt: skip
        keys = [[1 + extra, 0, 0, 0], [1, 0, 0, 0]]
        yield _chosen(name, "inputs rounded", [[size, 0, 0, 0]], keys, two)
    small = [[0, 0, 0, 0], [-16, 0, 0, 0]]
    unlike = [[0, 1, 0, 1], [1, 1, 2, 0]]
    yield _chosen("1 + e^-8", "a denominator in 16 bits", [[1, 0, 0, 0]], small, unlike)
    tiny = [[0, 0, 0, 0], [-36, 0, 0, 0]]
    large = [[0, 0, 0, 0], [2.0**24, 0, 2.0**25, 2.0**23]]
    yield _chosen("a weight of e^-18", "weights in 16 bits", [[1, 0, 0, 0]], tiny, large)
    values = np.ones((4096, 2))
    values[:, 1] = np.arange(4096) % 2
    shows = "a denominator added up in 16 bits"
    yield _chosen("4096 equal keys", shows, [[1, 0]], np.zeros((4096, 2)), values)
