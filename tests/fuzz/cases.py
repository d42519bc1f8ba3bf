"""What a seed and a number draw: arrays, their layouts, options, and the caller's errstate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from problems import MASK_MODS, SCORE_MODS, by_distance, hiding, of_parity, visible

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Quiet and signalling NaNs of both signs, all bits set, and R's NA and what float32 makes of it.
NANS = {
    "float16": (np.uint16, [0x7E00, 0xFE00, 0x7C01, 0xFFFF, 0x7FFF]),
    "bfloat16": (np.uint16, [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0x7FFF]),
    "float32": (np.uint32, [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF,
                            0x7FC007A2]),
    "float64": (np.uint64, [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF0000000000001,
                            0xFFFFFFFFFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0x7FF00000000007A2]),
}  # fmt: skip
TILES = (8, 16, 48, 64, 96, 128, 160, 256)
WIDTHS = (1, 2, 3, 5, 8, 9, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 80, 128, 129)
MOST_SCORES, MOST_PRODUCTS = 40_000, 500_000  # a few milliseconds, most of them for the reference
FAR = 2**31 - 1  # the largest q_offset
ERRSTATES = ("ignore", "warn", "raise")


@dataclass(frozen=True)
class Layout:
    """Where the items of an array lie.

    Attributes
    ----------
    order : tuple of int
        Axes from the outermost in memory to the innermost.
    steps : tuple of int
        For each axis, how many items apart its entries are; 0 if all of them are one, below 0 if
        they lie backwards.
    shift : int
        Bytes by which the array is off its alignment.
    is_last : bool
        Whether the page after the array must not be read, rather than the page before it.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    shift: int = 0
    is_last: bool = True


def plain(ndim: int) -> Layout:
    """A contiguous array that ends where a page does."""
    return Layout(tuple(range(ndim)), (1,) * ndim)


@dataclass(frozen=True)
class Case:
    """A problem: q, k and v are 4-D, and lose their leading axes down to ``rank``.

    ``form`` says how a backend gets the batch; see ``forms``.
    """

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    layouts: dict[str, Layout] = field(default_factory=dict)
    rank: int = 4
    errstate: str = "ignore"
    form: str = "batch"

    def __str__(self) -> str:
        return "\n".join(
            [
                *(self._described(name) for name in self.arrays),
                *(f"{n}={getattr(x, '__name__', repr(x))}" for n, x in self.options.items()),
                f"rank={self.rank}, errstate={self.errstate!r}, form={self.form!r}",
            ]
        )

    def _described(self, name: str) -> str:
        array = self.arrays[name]
        text = f"{name}: {array.dtype} {array.shape}"
        if array.size <= 8:
            text += f" = {array.tolist()}"
        if array.dtype.kind not in "bi":
            with np.errstate(all="ignore"):
                wide = array.astype(float)
            finite = abs(wide[np.isfinite(wide)])
            text += f", up to {finite.max(initial=0):.3g}, {np.isinf(wide).sum()} infinite"
            bits = array[np.isnan(wide)].view(f"u{array.itemsize}")
            text += f", {bits.size} NaN {[f'{x:#x}' for x in sorted(set(bits.tolist()))]}"
        return f"{text}, {self.layouts[name]}" if name in self.layouts else text


def draw(seed: int, number: int) -> Case:
    """Problem ``number`` of ``seed``."""
    rng = np.random.default_rng([seed, number])
    name = str(rng.choice(list(DTYPES), p=[0.4, 0.25, 0.15, 0.2]))
    B, Hkv, group, Lq, Lk, D, Dv = _sizes(rng)
    H = Hkv * group
    arrays = {
        "q": _numbers(rng, (B, H, Lq, D), name),
        "k": _numbers(rng, (B, Hkv, Lk, D), name),
        "v": _numbers(rng, (B, Hkv, Lk, Dv), name),
    }
    options = _options(rng, B, H, Lq, Lk, arrays, "float64" if name == "float64" else "float32")
    if rng.random() < 0.3:
        _spoil_hidden(rng, arrays, options)
    if rng.random() < 0.04 and name in ("float32", "float16"):  # a common dtype must be found
        x = str(rng.choice(["q", "k", "v"]))
        arrays[x] = arrays[x].astype(np.float64)
    _add_functions(np.random.default_rng([seed, number, 1]), arrays, options)
    later = np.random.default_rng([seed, number, 2])
    if later.random() < 0.25:
        arrays["key_indices"] = _selection(later, B, Hkv, Lq, Lk)
        if later.random() < 0.5:
            _spoil_hidden(later, arrays, options)
    layouts = {}
    for x, array in arrays.items():
        if rng.random() < 0.5:
            layouts[x], arrays[x] = _layout(rng, array)
        if rng.random() < 0.03 and array.dtype.kind == "f":
            arrays[x] = arrays[x].astype(array.dtype.newbyteorder())
    rank = 4
    if B == 1 and rng.random() < 0.4:
        rank = 2 if H == 1 else 3
    _store_in_eight_bits(np.random.default_rng([seed, number, 2]), arrays, options, layouts)
    errstate, form = str(rng.choice(ERRSTATES)), "batch"
    if {"attn_mask", "attn_bias"} & set(arrays):
        form = "paged" if later.random() < 0.3 else "batch"
    elif rng.random() < 0.4:
        form = str(rng.choice(["packed", "paged"]))
    if {by_distance, hiding, of_parity} & {options.get("score_mod"), options.get("mask_mod")}:
        form = "batch"  # their b is the number of the entry, of which ``forms`` makes many
    return Case(arrays, options, layouts, rank, errstate, form)


def _length(rng: np.random.Generator) -> int:
    kind = rng.random()
    if kind < 0.15:
        return int(rng.integers(0, 4))
    if kind < 0.4:
        return int(rng.integers(0, 80))
    return max(0, int(rng.choice(TILES) * rng.choice([1, 1, 1, 2, 3]) + rng.integers(-1, 2)))


def _sizes(rng: np.random.Generator) -> tuple[int, ...]:
    """B, Hkv, H / Hkv, Lq, Lk, D and Dv, so small that a thousand problems take some seconds."""
    B, Hkv, group = (int(rng.integers(1, n + 1)) for n in (2, 3, 4))
    Lk, Lq = _length(rng), _length(rng)
    if rng.random() < 0.4:
        Lq = int(rng.integers(0, 10))
        Lk += int(rng.choice([0, 0, 512, 768]))
    elif rng.random() < 0.3:
        Lk = Lq
    D, Dv = (int(rng.choice(WIDTHS)) for _ in range(2))
    if rng.random() < 0.5:
        Dv = D
    heads = [B, Hkv, group]
    while (scores := int(np.prod(heads)) * Lq * Lk) > MOST_SCORES:
        if max(heads) > 1:
            heads[int(np.argmax(heads))] -= 1
        else:
            Lq //= 2
    while scores * (D + Dv) > MOST_PRODUCTS:
        D, Dv = (D + 1) // 2, (Dv + 1) // 2
    return *heads, Lq, Lk, D, Dv


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> np.ndarray:
    """An array of dtype ``name``: in half of all cases normal numbers, else special ones."""
    dtype, info = DTYPES[name], ml_dtypes.finfo(DTYPES[name])
    largest, tiny = float(info.max), float(info.tiny)
    x = rng.normal(size=shape)
    kind = rng.choice(["normal", "constant", "wide", "denormal", "tiny", "huge", "mixed"],
                      p=[0.58, 0.06, 0.08, 0.06, 0.06, 0.1, 0.06])  # fmt: skip
    if kind == "normal":
        x *= rng.choice([0.1, 1, 1, 1, 4, 20])
    elif kind == "constant":
        x = np.full(shape, rng.choice([0.0, -0.0, 0.1, 1.0, -2.0]))
    elif kind == "wide":
        x *= 10.0 ** rng.uniform(np.log10(tiny), np.log10(largest) - 1, shape)
    elif kind == "denormal":
        x = rng.integers(-9, 10, shape) * float(info.smallest_subnormal)
    elif kind == "tiny":
        x *= tiny
    else:
        signs = rng.choice([-1, 1], shape) if rng.random() < 0.5 else 1
        huge = largest * rng.uniform(0.3, 1, shape) * signs
        x = huge if kind == "huge" else np.where(rng.random(shape) < 0.9, x, huge)
    array = np.clip(x, -largest, largest).astype(dtype)
    if rng.random() < 0.3:
        _sprinkle(rng, array, name)
    return array


def _sprinkle(rng: np.random.Generator, array: np.ndarray, name: str) -> None:
    """Write something special into a few places."""
    if not array.size:
        return
    uint, nans = NANS[name]
    info = ml_dtypes.finfo(DTYPES[name])
    for _ in range(rng.integers(1, 4)):
        at: Any = tuple(int(rng.integers(n)) for n in array.shape)
        if rng.random() < 0.2:
            at = at[:-1]  # the whole row
        if rng.random() < 0.5:
            array.view(uint)[at] = rng.choice(np.array(nans, uint))
        else:
            numbers = [np.inf, -np.inf, -0.0, info.max, -info.max, info.smallest_subnormal]
            array[at] = numbers[rng.integers(len(numbers))]


def _options(
    rng: np.random.Generator, B: int, H: int, Lq: int, Lk: int, arrays: dict[str, np.ndarray],
    compute: str,
) -> dict[str, Any]:  # fmt: skip
    """Options that are no arrays; those that are go into ``arrays``."""

    def maybe(chance: float) -> bool:
        return bool(rng.random() < chance)

    options: dict[str, Any] = {}
    if maybe(0.35):
        options["is_causal"] = True
    if maybe(0.2):
        sides = [None, 0, 1, 3, 17, 64, 200]
        options["window_size"] = tuple(sides[rng.integers(len(sides))] for _ in range(2))
    if maybe(0.2):
        slopes = rng.choice([0.0, 0.5, 0.01, -0.1, 3.0], H)
        arrays["alibi_slopes"] = slopes.astype(compute)
    is_positional = options or "alibi_slopes" in arrays
    if maybe(0.3) or (is_positional and Lq != Lk):
        if maybe(0.3):
            arrays["q_offset"] = rng.integers(-9, max(10, Lk - Lq + 9), B)
        else:
            options["q_offset"] = int(rng.choice([0, Lk - Lq, Lk - Lq, -3, 5, 70, FAR, -FAR]))
    if maybe(0.25):
        if maybe(0.5):
            arrays["kv_lengths"] = rng.integers(0, Lk + 1, B).astype(rng.choice(["i4", "i8"]))
        else:
            options["kv_lengths"] = int(rng.integers(0, Lk + 1))
    if maybe(0.25):
        density = rng.choice([0, 0.02, 0.5, 0.9, 1])
        arrays["attn_mask"] = rng.random(_over_scores(rng, B, H, Lq, Lk)) < density
    if maybe(0.25):
        arrays["attn_bias"] = _bias(rng, _over_scores(rng, B, H, Lq, Lk), compute)
    if maybe(0.2):
        sinks = rng.normal(size=H) * rng.choice([1, 10, 1000])
        arrays["sinks"] = np.where(rng.random(H) < 0.3, -np.inf, sinks).astype(compute)
    if maybe(0.3):
        options["scale"] = float(rng.choice([0, 1, -0.7, 1e-3, 30]))
    if maybe(0.2):
        options["softcap"] = float(rng.choice([0.5, 5, 50, 1e-3, 1e30]))
    return options


def _add_functions(
    rng: np.random.Generator, arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> None:
    """Functions of scores and of pairs; drawn last, so that all else is as it was without them."""
    for name, functions in (("score_mod", SCORE_MODS), ("mask_mod", MASK_MODS)):
        if rng.random() < 0.1:
            options[name] = functions[rng.integers(len(functions))]
            if "q_offset" not in arrays:
                options.setdefault("q_offset", 0)


def _store_in_eight_bits(
    rng: np.random.Generator, arrays: dict[str, np.ndarray], options: dict[str, Any],
    layouts: dict[str, Layout],
) -> None:  # fmt: skip
    """Now and then, keys and values of 8 bits: any bits of float8_e4m3fn, or any int8, and scales.

    Drawn last, as functions are.
    """
    if rng.random() >= 0.12:
        return
    dtype = np.dtype(rng.choice(["int8", "float8_e4m3fn"]))
    for name in "kv":
        bits = rng.integers(0, 256, arrays[name].shape, np.uint8)
        if rng.random() < 0.8:
            bits[bits & 0x7F == 0x7F] = 0  # of float8_e4m3fn, the NaNs
        arrays[name] = bits.view(dtype)
        layouts.pop(name, None)
        if rng.random() < 0.5:
            layouts[name], arrays[name] = _layout(rng, arrays[name])
        scale = f"{name}_scale"
        if rng.random() < 0.3:
            options[scale] = float(rng.choice([1e-3, 1.0, 0.02]))
        else:
            spread = rng.choice([0.0, 1.0, 3.0])
            numbers = 0.01 * np.exp(spread * rng.normal(size=bits.shape[:3]))
            arrays[scale] = numbers.astype(rng.choice(["float32", "float64"]))


def _selection(rng: np.random.Generator, B: int, Hkv: int, Lq: int, Lk: int) -> np.ndarray:
    """Keys that the queries pick: some twice, in any order, and -1."""
    shape = (
        (Lq,) if rng.random() < 0.2 else tuple(n if rng.random() < 0.7 else 1 for n in (B, Hkv, Lq))
    )
    K = int(rng.choice([0, 1, 3, max(1, Lk // 8), max(1, Lk // 2), Lk]))
    K = min(K, MOST_SCORES // max(1, int(np.prod(shape))))
    first = int(rng.choice([0, 0, Lk // 2])) if Lk else 0
    indices = rng.integers(first if Lk else -1, max(1, Lk) if Lk else 0, (*shape, K))
    indices[rng.random(indices.shape) < rng.choice([0, 0.1, 0.9])] = -1
    return indices.astype(rng.choice(["i4", "i8"]))


def _over_scores(rng: np.random.Generator, B: int, H: int, Lq: int, Lk: int) -> tuple[int, ...]:
    """A shape that a mask or a bias may have."""
    if rng.random() < 0.4:
        return Lq, Lk
    return tuple(n if rng.random() < 0.7 else 1 for n in (B, H, Lq, Lk))


def _bias(rng: np.random.Generator, shape: tuple[int, ...], compute: str) -> np.ndarray:
    name = str(rng.choice([compute, compute, "float16", "bfloat16"]))
    bias = (rng.normal(size=shape) * rng.choice([0.1, 1, 5])).astype(DTYPES[name])
    lowest = rng.choice([-np.inf, float(ml_dtypes.finfo(DTYPES[name]).min)])
    bias[rng.random(shape) < rng.choice([0, 0.3, 0.95])] = lowest
    if rng.random() < 0.1:
        _sprinkle(rng, bias, name)
    return bias


def _spoil_hidden(
    rng: np.random.Generator, arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> None:
    """Write garbage into the keys and values that no query sees, as a cache may hold."""
    q, k, v = (arrays[name] for name in "qkv")
    seen = visible(q, k, arrays | options).any(axis=2)
    group = q.shape[1] // k.shape[1]
    seen = seen.reshape(*k.shape[:2], group, k.shape[2]).any(axis=2)
    garbage = rng.choice([np.nan, np.inf, -np.inf])
    k[~seen], v[~seen] = garbage, garbage


def _layout(rng: np.random.Generator, array: np.ndarray) -> tuple[Layout, np.ndarray]:
    """A layout, and the array as it can have it: the same along an axis that has one item."""
    order = list(range(array.ndim))
    if rng.random() < 0.6:
        rng.shuffle(order)
    steps = [1] * array.ndim
    for axis, n in enumerate(array.shape):
        if rng.random() < 0.3:
            steps[axis] = int(rng.choice([2, 3, -1, -2, 0]))
        if steps[axis] == 0 and n:
            array = np.repeat(array.take([0], axis), n, axis)
    shift = int(rng.integers(array.itemsize)) if rng.random() < 0.15 else 0
    return Layout(tuple(order), tuple(steps), shift, bool(rng.random() < 0.6)), array
