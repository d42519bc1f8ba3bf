"""Generate problems that combine options and shapes, since some bugs appear only in combinations.

A switch is an option or a shape, which a problem has or lacks. A crossing is one condition or two,
with an option that a function may forget where they hold. A problem covers a crossing if they hold,
and if forgetting the option changes the answer by more than rounding. ``shown`` computes this with
the equations, in bfloat16, the coarsest dtype. ``rows`` chooses problems greedily from the switches
that a function takes. So crossings of these options are covered even if others are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.altered import first_for_all
from minimha.check.conditions import ARRANGED, GROUPED, OPTIONS, POSITIONAL, conditions
from minimha.check.prepared import Prepared
from minimha.check.problems import Draw, Graded, kept, visibility
from minimha.check.wrong_attention import deviate

Array = NDArray[Any]
Switches = frozenset[str]
Crossing = tuple[frozenset[str], str]  # the conditions, and what a function forgets

# A row takes one of each of these; the first is the plain one, and no switch.
HEADS = {
    "one head": (1, 1), "heads": (3, 3), "groups of 2": (4, 2), "groups of 3": (6, 2),
    "groups of 4": (8, 2), "groups of 8": (16, 2),
}  # fmt: skip
QUERIES = ("as many queries", "one query", "fewer queries", "more queries")
# Where queries stand among the keys.
FIRST_QUERY = ("at the end", "at the start", "amid the keys", "at the end of each length")
_, AT_START, AMID, AT_LENGTHS = FIRST_QUERY
OTHERS = ("batch", "many keys", "wide values", "by head", "by entry")
LONG = "several blocks"  # more keys, and mostly queries, than a block of 128 has
SWITCHES = (*list(HEADS)[1:], *QUERIES[1:], *FIRST_QUERY, *OTHERS, *OPTIONS)
COMPANIONS: dict[str, tuple[set[str], ...]] = {  # what a switch needs to change a problem
    **dict.fromkeys(FIRST_QUERY, tuple({s, "fewer queries"} for s in sorted(POSITIONAL))),
    AT_LENGTHS: ({"is_causal", "fewer queries", "kv_lengths", "batch"},),
    "by head": ({"attn_mask", "heads"}, {"attn_bias", "heads"}),
    "by entry": ({"is_causal", "fewer queries", AMID, "batch"},),
}  # fmt: skip
OF_AXES = {  # what a function may forget, of an option that has one array for each entry or head
    f"{of} of {name}": (name, axis)
    for name in ("attn_mask", "attn_bias") for axis, of in enumerate(("entries", "heads"))
} | {
    "entries of kv_lengths": ("kv_lengths", 0), "heads of alibi_slopes": ("alibi_slopes", 0),
    "heads of sinks": ("sinks", 0),
}  # fmt: skip
FORGOTTEN = (*OPTIONS, "q_offset", GROUPED)
MASKING = (
    "is_causal", "window_size", "kv_lengths", "attn_mask", "Lq", GROUPED, "heads are not", "groups",
)  # fmt: skip
CANDIDATES = 600
TRIES = 16  # rows that may fail to cover a crossing before it counts as one that cannot be covered
LEAST = 0.02  # share of numbers that must differ
SHAPE_AGAIN = 1.5  # what a crossing counts in a shape that others have: JAX compiles for each shape


@dataclass(frozen=True)
class Sizes:
    """The sizes of the problems, which a function must be able to take.

    Attributes
    ----------
    unit : int, default 1
        A divisor of the numbers of queries and of keys.
    D : int, default 8
        The width of queries and keys.
    """

    unit: int = 1
    D: int = 8


PLAIN = Sizes()


@lru_cache(maxsize=1024)
def crossed(on: Switches, sizes: Sizes = PLAIN, seed: int = 0) -> Graded:
    """Return the problem with the switches ``on``, with numbers drawn from ``seed``."""
    B, (H, Hkv) = 3 if "batch" in on else 1, next((HEADS[h] for h in HEADS if h in on), (1, 1))
    Lk = _num_keys(on, sizes)
    step = max(1, Lk // 10)
    Lq = _num_queries(on, sizes, Lk)
    draw = Draw(f"crossed {seed} {sizes} {sorted(on)}")
    Dv = sizes.D // 2 + 1 if "wide values" in on else sizes.D
    given: dict[str, Any] = draw.qkv(B, H, Lq, Lk, sizes.D, Dv, Hkv, spread=1.3)
    lengths = Lk - step * np.array([2, 4, 0])[:B]  # never a multiple of a block, but the last
    first: Any = _first_query(on, Lq, Lk, step)
    if {AT_LENGTHS, "kv_lengths"} <= on and Lq < Lk:
        first = np.maximum(lengths - Lq, 0)
    if POSITIONAL & on and Lq != Lk:
        given["q_offset"] = first
        if "by entry" in on:
            given["q_offset"] = np.maximum(first + np.array([0, step, -step])[:B], 0)
    if "kv_lengths" in on:
        given["kv_lengths"] = lengths
    if "window_size" in on:  # the last query still sees a key
        last = Lq - 1 + int(np.max(given.get("q_offset", 0)))
        shortest = int(lengths.min()) if "kv_lengths" in on else Lk
        is_left_alone = "is_causal" in on and len(on) % 2
        right = None if is_left_alone else step
        given["window_size"] = (max(last - shortest + 1, 2 * step), right)
    if "is_causal" in on:
        given["is_causal"] = True
    rows = (B, H) if "by head" in on else (1, 1)
    if "attn_bias" in on:
        given["attn_bias"] = draw.numbers(*rows, Lq, Lk, spread=1.5)
    if "attn_mask" in on:
        given["attn_mask"] = mask_showing(0.6, given, rows, draw.rng)
    if "alibi_slopes" in on:
        slopes = np.geomspace(0.5, 0.0625, H) * 10 / Lk
        given["alibi_slopes"] = (2.0 ** np.round(np.log2(slopes))).astype(np.float32)
    if "softcap" in on:
        given["softcap"] = 1.25
    if "sinks" in on:
        given["sinks"] = draw.numbers(H) / 2 + np.float32(np.round(np.log2(Lk / 5)))
    if "scale" in on:
        given["scale"] = float(np.round(16 * 1.75 / np.sqrt(sizes.D)) / 16)  # not 1, if D > 3
    if "return_lse" in on:
        given["return_lse"] = True
    name = ", ".join(s for s in (LONG, *SWITCHES) if s in on) or "no switch"
    name += "" if sizes == PLAIN else f" (lengths × {sizes.unit}, D = {sizes.D})"
    family, shows = "alone", "one option or shape alone"
    if LONG in on:
        family, shows = "sized", "an option at the sizes of models"
    elif on not in alone():
        family, shows = "crossed", "whether one option is read beside another, or at a shape"
    return kept(Graded(f"crossed: {name}", given, shows, family=family))


def _num_keys(on: Switches, sizes: Sizes) -> int:
    if LONG in on:  # primes, so that no equal parts divide them
        Lk = 4099 if "one query" in on else 2063 if "fewer queries" in on else 133
        return -(-Lk // sizes.unit) * sizes.unit
    if sizes.unit == 1:
        return 41 if "many keys" in on else 10
    return sizes.unit * (3 if "many keys" in on else 2)


def _num_queries(on: Switches, sizes: Sizes, Lk: int) -> int:
    if "one query" in on:
        return 1
    if "fewer queries" in on:
        return 5 if sizes.unit == 1 else sizes.unit
    return Lk + (4 if sizes.unit == 1 else sizes.unit) if "more queries" in on else Lk


def _first_query(on: Switches, Lq: int, Lk: int, step: int) -> int:
    """Return the position of the first query, so that every query sees a key."""
    if Lq == Lk or AT_START in on:
        return 0
    if AMID in on:
        return Lk - 3 * step if Lq == 1 else max((Lk - Lq) // 2, 2 * step)
    return max(Lk - Lq, 0)


def mask_showing(
    share: float, given: Mapping[str, Any], rows: tuple[int, int], rng: np.random.Generator
) -> Array:
    """Return a mask that shows this share of each row's visible keys, and of its hidden keys."""
    visible = visibility(given)
    if rows != visible.shape[:2]:
        visible = np.asarray(visible.all((0, 1), keepdims=True))
    chance = np.where(visible, rng.random(visible.shape), 2)
    place = chance.argsort(-1).argsort(-1)  # of each key among those of its row, visible ones first
    kept = np.ceil(share * visible.sum(-1, keepdims=True))
    return np.where(visible, place < np.maximum(kept, 1), rng.random(visible.shape) < share)


# What forgetting changes, and which rows show it.


def without(arguments: Mapping[str, Any], forgotten: str) -> dict[str, Any]:
    """Return the arguments that a function uses if it forgets an option or the grouping."""
    given = dict(arguments)
    if forgotten == GROUPED:
        heads = np.arange(given["q"].shape[1]) % given["k"].shape[1]
        return {**given, "k": given["k"][:, heads], "v": given["v"][:, heads]}
    if forgotten == "q_offset":
        return {**given, "q_offset": 0}
    if forgotten in OF_AXES:
        name, axis = OF_AXES[forgotten]
        return {**given, name: first_for_all(given[name], axis)}
    given.pop(forgotten)
    return given


@lru_cache(maxsize=4096)
def shown(problem: Graded) -> frozenset[str]:
    """Return the options that a function must respect to answer this problem correctly."""
    given = problem.arguments
    x = Prepared(given, "bfloat16")
    right = deviate(x, {})
    found = {"return_lse"} & set(given)
    for name in present(given) - found:
        other = Prepared(without(given, name), "bfloat16")
        if name != GROUPED:
            vars(other)["products"] = x.products  # no option changes them
        wrong = deviate(other, {})
        apart = abs(wrong.output - right.output) > right.bound + wrong.bound
        if apart.mean() > LEAST:
            found.add(name)
    return frozenset(found)


def present(given: Mapping[str, Any]) -> set[str]:
    """Return the options that a problem has, among those that a function may forget."""
    is_grouped = given["k"].shape[1] != given["q"].shape[1]
    axes = {
        of for of, (name, axis) in OF_AXES.items()
        if name in given and np.ndim(given[name]) != 2 and np.shape(given[name])[axis] > 1
    }  # fmt: skip
    found = {name for name in FORGOTTEN if name in given} | axes
    return found | ({GROUPED} if is_grouped else set())


def crossings(given: Mapping[str, Any], forgotten: Iterable[str]) -> set[Crossing]:
    """Return the crossings of each ``forgotten`` option with conditions that ``given`` meets.

    ``given`` has the arguments of a problem. A crossing has one condition. For an option that
    concerns masks, or the grouping, it may also have two conditions about masks.
    """
    holding = sorted(c for c in conditions(given) if not c.startswith(ARRANGED))
    about_masks = [c for c in holding if c.startswith(MASKING)]
    found = set()
    for name in forgotten:
        ones = [frozenset([c]) for c in holding if not _is_about(name, c)]
        if f"{name} is given".startswith(MASKING) or name in (GROUPED, "q_offset", *OF_AXES):
            ones += [
                frozenset(pair) for pair in combinations(about_masks, 2)
                if not any(_is_about(name, c) for c in pair)
            ]  # fmt: skip
        found |= {(one, name) for one in ones}
    return found


def _is_about(name: str, condition: str) -> bool:
    option, _ = OF_AXES.get(name, (name, 0))
    return condition.startswith(("H ", "heads ") if name == GROUPED else option)


@lru_cache(maxsize=32)
def rows(
    taken: Switches, sizes: Sizes = PLAIN, seed: int = 0,
    excluded: frozenset[Switches] = frozenset(), asked: tuple[Switches, ...] = (),
) -> tuple[Switches, ...]:  # fmt: skip
    """Choose sets of switches whose problems cover all crossings that can be covered.

    ``taken`` are the switches to choose from. No chosen set contains a set in ``excluded``. Sets
    in ``asked`` are not chosen again: what they cover is covered. Shapes are few, as a function may
    be compiled for each.
    """
    pool = [*dict.fromkeys((*asked, *_candidates(taken, excluded)))]
    given = {on: crossed(on, sizes, seed).arguments for on in (*alone(), *pool)}
    shapes = {on: tuple(some[name].shape for name in "qkv") for on, some in given.items()}
    possible = {on: crossings(given[on], present(given[on])) for on in pool}
    tries = dict.fromkeys(set().union(*possible.values()), TRIES)
    chosen: list[Switches] = []
    used = {shapes[on] for on in (*alone(), *asked) if on <= taken}

    def covers(on: Switches) -> bool:
        """Count the try, and return whether it covers a crossing that no earlier row covers."""
        pool.remove(on)
        problem = crossed(on, sizes, seed)
        covered = crossings(problem.arguments, shown(problem)) & tries.keys()
        for crossing in possible[on] & tries.keys():
            tries[crossing] -= 1
            if crossing in covered or not tries[crossing]:
                del tries[crossing]
        return bool(covered)

    def gain(on: Switches) -> float:
        return len(possible[on] & tries.keys()) * (SHAPE_AGAIN if shapes[on] in used else 1)

    for on in asked:
        covers(on)
    while pool and gain(best := max(pool, key=gain)):
        if covers(best):
            chosen.append(best)
            used.add(shapes[best])
    return tuple(chosen)


@lru_cache(maxsize=32)
def _candidates(taken: Switches, excluded: frozenset[Switches]) -> list[Switches]:
    """Return random sets of switches that contain no excluded set, the same at each call."""
    rng = np.random.default_rng(1)
    found: dict[Switches, None] = {}
    for _ in range(CANDIDATES):
        share = rng.choice([0.25, 0.45, 0.65])
        on = {s for s in (*OTHERS, *OPTIONS) if rng.random() < share}
        on |= {str(rng.choice(list(kinds))) for kinds in (HEADS, QUERIES, FIRST_QUERY)}
        on &= taken
        found[frozenset(on)] = None
    return [on for on in found if not any(some <= on for some in excluded)]


def long(taken: Switches) -> list[Switches]:
    """Return sets of switches with more keys than a block has: each option alone, and some pairs.

    All are in ``taken``, but for ``LONG`` itself.
    """
    among = frozenset({"fewer queries", "at the end"})
    windowed = frozenset({"window_size", "one query"})
    sets = [
        *({s} for s in OPTIONS), *({s, "one query"} for s in OPTIONS),
        *(among | {s} for s in sorted(POSITIONAL)), {"is_causal", "window_size"},
        *(windowed | {s} for s in OPTIONS if s not in ("window_size", "kv_lengths")),
        windowed | {"kv_lengths", AT_LENGTHS},
        {"is_causal", "groups of 4"}, {"groups of 4", "one query"}, {"sinks", "window_size"},
        {"kv_lengths", "batch"}, {"attn_bias", "window_size"}, {"attn_mask", "window_size"},
    ]  # fmt: skip
    return [frozenset(on | {LONG}) for on in sets if on <= taken]


@lru_cache(maxsize=1)
def alone() -> tuple[Switches, ...]:
    """Return the sets of one switch, with those that it needs, and of options when decoding."""
    sets = [{s} | more for s in SWITCHES for more in COMPANIONS.get(s, (set(),))]
    decoding = [{s, "one query", "groups of 4"} for s in OPTIONS]  # often by a kernel of its own
    return (frozenset(), *map(frozenset, (*sets, *decoding)))
