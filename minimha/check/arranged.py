"""Generate problems with packed sequences, pages, functions, indices of keys, and 8-bit keys.

A function gets the problems of a kind only if it takes the plainest of them. All are tiny. If
a bug shows in other problems, it is searched for in those; deviations must explain these too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from minimha.check import expanded
from minimha.check.conditions import POSITIONAL
from minimha.check.prepared import Prepared
from minimha.check.problems import Draw, Graded, kept, visibility
from minimha.equations.arrays import FLOAT8, extension
from minimha.equations.functions import PARAMETERS

FAMILY = "arranged"
KINDS = {  # what a problem shows, by the option that it is about
    "score_mod": "whether score_mod gets the score and the indices that it should",
    "mask_mod": "whether mask_mod gets the indices that it should, and hides",
    "cu_seqlens_q": "whether packed sequences stay apart",
    "block_table": "whether keys are read from their pages",
    "key_indices": "whether each query sees the keys that it picks, and these once",
    "k_scale": "whether 8-bit keys and values are multiplied by their scales",
}
PAIRS = (  # of options that a function may take only together
    ("key_indices", "cu_seqlens_q"), ("key_indices", "block_table"),
    ("block_table", "cu_seqlens_q"),
)  # fmt: skip
CROSSED = (
    ("is_causal",), ("window_size",), ("kv_lengths",), ("groups",), ("alibi_slopes",),
    ("softcap",), ("sinks", "return_lse"), ("scale",), ("is_causal", "kv_lengths"),
    ("is_causal", "window_size", "kv_lengths", "alibi_slopes", "softcap", "groups"),
)  # fmt: skip
OVER_SCORES = (("attn_mask",), ("attn_bias",))  # not taken beside packed sequences or pages
PAGES = (16, 4, 32, 24, 64, 256)  # keys of a page
DECODING, ENDS = "one query", "at the ends"  # of the keys, as where a kernel decodes
QUERIES, KEYS = np.array([3, 5, 2]), np.array([7, 6, 9])  # of packed sequences
EQUAL = np.array([4, 4, 4]), np.array([9, 9, 9])  # sequences that only their offsets tell apart
IN_PAGES = np.array([41, 64, 35])  # keys of each batch entry; the second fills its last page
LARGE_PAGES = (24, 48, 80, 128, 160)  # most of which no block of 64 keys divides
BLOCKS_IN_PAGES = np.array([141, 288, 205])


@lru_cache(maxsize=2)
def arranged(seed: int = 0, D: int = 8) -> tuple[Graded, ...]:
    """Return the problems, the plainest of each kind before the others of that kind."""
    problems = (
        *_functions(seed, D), *_packed(seed, D), *_paged(seed, D),
        *_shared_and_far(seed, D), *_both(seed, D), *_picked(seed, D), *_scaled(seed, D),
    )  # fmt: skip
    return tuple(kept(problem) for problem in problems)


@lru_cache(maxsize=1024)
def rearranged(
    problem: Graded, kinds: tuple[str, ...], seed: int, page: int = PAGES[0]
) -> Graded | None:
    """Return a problem of ``crossed`` with one option of ``KINDS``, or two of ``PAIRS``.

    The numbers stay as they are: keys move into pages, and batch entries become packed sequences,
    with a sequence without queries between them. Functions, indices of keys and 8-bit numbers are
    added. A ``page`` has so many keys. Returns None if the problem excludes such an option.
    """
    found: Graded | None = problem
    for kind in kinds:
        found = found and _rearranged(found, kind, seed, page)
    return found


def _rearranged(problem: Graded, kind: str, seed: int, page: int) -> Graded | None:
    given, draw = dict(problem.arguments), Draw(f"{problem.name} {kind} {seed}")
    (B, _, Lq, _), (_, Hkv, Lk, _) = given["q"].shape, given["k"].shape
    offset = np.broadcast_to(given.get("q_offset", max(Lk - Lq, 0)), (B,))
    is_placed = bool(POSITIONAL & set(given)) or kind in PARAMETERS
    if is_placed and (Lq != Lk or kind == "block_table"):
        given["q_offset"] = offset
    if kind == "block_table":
        lengths = np.broadcast_to(given.get("kv_lengths", Lk), (B,))
        given |= _in_pages(draw, given, page) | {"kv_lengths": lengths}
    elif kind == "cu_seqlens_q":
        if {"attn_mask", "attn_bias"} & set(given):
            return None
        given = _in_sequence(given)
    elif kind in PARAMETERS:
        given[kind] = expanded.NAMED[f"{kind[:-4]}_by_all"]
    elif kind == "key_indices":
        given[kind] = _picks(draw, given)
    else:
        given = _in_8_bits(draw, given, (B, Hkv, Lk))
    if Prepared(given).sees_nothing.any():  # functions may hide the only key that a query sees
        return None
    family = problem.family if problem.family == "sized" else FAMILY
    return kept(replace(_problem(problem.name, kind, given), family=family))


def _in_pages(draw: Draw, given: dict[str, Any], size: int) -> dict[str, Any]:
    """Return keys, values and a table of pages of ``size`` keys in any order."""
    B, _, Lk, _ = given["k"].shape
    number = -(-Lk // size)
    table = _table(draw, B, number)
    found: dict[str, Any] = {"block_table": table}
    for X in "kv":
        filled = np.pad(given[X], [(0, 0), (0, 0), (0, number * size - Lk), (0, 0)])
        split = filled.reshape(*filled.shape[:2], number, size, -1).swapaxes(1, 2)
        found[X] = draw.numbers(B * number + 1, *split.shape[2:])
        found[X][table] = split
    return found


def _in_sequence(given: dict[str, Any]) -> dict[str, Any]:
    """Return packed sequences of the batch entries, the second of several without queries."""
    (B, _, Lq, _), Lk = given["q"].shape, given["k"].shape[2]
    order, queries = list(range(B)), [Lq] * B
    if B > 1:
        order, queries = [0, 0, *order[1:]], [Lq, 0, *queries[1:]]
    found = {name: x for name, x in given.items() if name not in ("kv_lengths", "q_offset")}
    for name in {"q", "key_indices"} & {*given}:
        found[name] = np.concatenate(list(given[name]), 1)[None]
    for name in ("kv_lengths", "q_offset"):
        if name in given:
            found[name] = np.broadcast_to(given[name], (B,))[order]
    found["cu_seqlens_q"] = _starts(queries)
    if "block_table" in given:
        return found | {"block_table": given["block_table"][order]}
    for X in "kv":
        found[X] = np.concatenate([given[X][b] for b in order], 1)[None]
    return found | {"cu_seqlens_k": _starts([Lk] * len(order))}


def _picks(draw: Draw, given: dict[str, Any]) -> Any:
    """Return six keys for each query: one that it sees, and one that is none, among others."""
    (B, _, Lq, _), (_, Hkv, Lk, _) = given["q"].shape, given["k"].shape
    seen = visibility(given).reshape(B, Hkv, -1, Lq, Lk).all(2)
    turns = draw.rng.random(seen.shape) - seen
    picks = turns.argsort(-1)[..., :5]
    return np.insert(picks, min(3, Lk), -1, axis=-1).astype(np.int32)


def kinds_of(problem: Graded) -> list[str]:
    """Return the options of ``KINDS`` that a problem has."""
    return [name for name in KINDS if name in problem.arguments]


def _problem(name: str, kind: str, given: dict[str, Any]) -> Graded:
    return Graded(f"{kind}: {name}", given, KINDS[kind], family=FAMILY)


def _options(draw: Draw, on: tuple[str, ...], H: int, lengths: Any) -> dict[str, Any]:
    """Return the options ``on``; ``lengths`` are those that ``kv_lengths`` hold."""
    options = {
        "is_causal": True, "window_size": (3, 1), "kv_lengths": lengths, "softcap": 1.25,
        "alibi_slopes": np.float32(0.5) / np.arange(1, H + 1, dtype=np.float32), "scale": 0.75,
        "sinks": draw.numbers(H) + np.float32(1), "return_lse": True,
    }  # fmt: skip
    return {name: options[name] for name in on if name in options}


def _functions(seed: int, D: int) -> Iterator[Graded]:
    """Yield problems with score_mod and mask_mod, first alone and then beside other options."""
    for kind in ("score_mod", "mask_mod"):
        by = [expanded.NAMED[f"{kind[:-4]}_by_{of}"] for of in ("key", "query", "head", "entry")]
        for f in by:
            yield _with_function(seed, D, kind, f.__name__.replace("_", " "), f, (), None)
        every = expanded.NAMED[f"{kind[:-4]}_by_all"]
        rows = (*CROSSED, *OVER_SCORES, ("attn_mask", "is_causal", "window_size"))
        for name, function, on, offset in (
            ("the query's position", by[1], (), 2),
            ("other positions in each entry", every, (), np.array([2, 4])),
            ("is_causal, as many keys", every, ("is_causal",), None),
            (DECODING, every, (DECODING,), 4),
            *((", ".join(on), every, on, 2 if POSITIONAL & {*on} else None) for on in rows),
        ):
            yield _with_function(seed, D, kind, name, function, on, offset)
    for words, score_mod in (("", expanded.score_by_all), (" bounded", expanded.score_bounded)):
        name = f"and{words} score_mod"
        both = _with_function(seed, D, "mask_mod", name, expanded.mask_by_all, (), 2)
        yield replace(both, arguments={**both.arguments, "score_mod": score_mod})


def _with_function(
    seed: int, D: int, kind: str, name: str, function: Any, on: tuple[str, ...], offset: Any
) -> Graded:
    draw = Draw(f"{kind} {name} {seed}")
    B, H, Lq, Lk = 2, 4, 1 if DECODING in on else 9 if offset is None else 5, 9
    given: dict[str, Any] = draw.qkv(B, H, Lq, Lk, D, Hkv=2 if "groups" in on else H)
    given |= _options(draw, on, H, np.array([6, 8]))
    if "attn_mask" in on:
        given["attn_mask"] = draw.rng.random((B, H, Lq, Lk)) < 0.7
        given["attn_mask"][..., :4] = True  # no query loses all its keys
    if "attn_bias" in on:
        given["attn_bias"] = draw.numbers(B, H, Lq, Lk)
    given |= {} if offset is None else {"q_offset": offset}
    return _problem(name, kind, {**given, kind: function})


def _starts(lengths: Any) -> Any:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _packed(seed: int, D: int) -> Iterator[Graded]:
    """Yield problems with packed sequences, with as many keys as queries, and with more."""
    many, some = 1 + np.arange(40) % 3, ((), ("is_causal",), ("groups",))
    of_many = (*some, ("kv_lengths",))
    for queries, keys, words, rows in (
        (QUERIES, QUERIES, "as many keys", some), (QUERIES, KEYS, "more keys", ((), *CROSSED)),
        (QUERIES, KEYS[::-1], "other keys", some), (many, many[::-1] + 2, "40 sequences", of_many),
        (QUERIES, KEYS * [1, 0, 1], "no keys in a sequence", ((), ("return_lse",))),
        (*EQUAL, "equal sequences", (("is_causal",), ("window_size",))),
    ):  # fmt: skip
        for on in rows:
            name = ", ".join([words, *on])
            draw = Draw(f"packed {name} {seed}")
            H, Hkv = 4, 2 if "groups" in on else 4
            given: dict[str, Any] = draw.qkv(1, H, int(sum(queries)), int(sum(keys)), D, Hkv=Hkv)
            given |= {"cu_seqlens_q": _starts(queries), "cu_seqlens_k": _starts(keys)}
            given |= _options(draw, on, H, keys - np.resize([1, 0, 2], len(keys)))
            if words != "as many keys" and POSITIONAL & {*on}:
                given["q_offset"] = keys - queries
            if words == "equal sequences":
                given["q_offset"] = np.array([5, 1, 3])
            yield _problem(name, "cu_seqlens_q", given)


def _pool(
    draw: Draw, size: int, H: int, Hkv: int, D: int, *, shares: bool = False, Lq: int = 5,
    lengths: Any = IN_PAGES, unused: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return queries, a pool of pages in any order, and the table of each entry's pages.

    The table has ``unused`` pages after those of the longest entry.
    """
    number = -(-int(lengths.max()) // size) + unused
    table = _table(draw, 3, number)
    if shares:  # as after a common prompt
        table[1, 0] = table[0, 0]
    given: dict[str, Any] = draw.qkv(3 * number + 1, H, Lq, size, D, Hkv=Hkv)
    given["q"] = given["q"][:3].copy()
    return {**given, "block_table": table, "kv_lengths": lengths}


def _table(draw: Draw, B: int, number: int) -> Any:
    """Return a table of ``number`` pages for each batch entry, in any order, of one more page."""
    return draw.rng.permutation(B * number + 1)[: B * number].reshape(B, number).astype(np.int32)


def _paged(seed: int, D: int) -> Iterator[Graded]:
    """Yield problems with pages of several sizes, private and shared ones."""
    rows: list[tuple[str, ...]] = [
        (), (DECODING,), ("shares",), ("is_causal",), (ENDS, "is_causal"),
        (DECODING, ENDS, "is_causal", "groups"),
    ]  # fmt: skip
    asked = [(on, size) for on in rows for size in PAGES]
    asked += [(on, PAGES[0]) for on in CROSSED[1:]]
    for on, size in asked:
        name = ", ".join([f"pages of {size}", *on])
        draw = Draw(f"paged {name} {seed}")
        Hkv, Lq = 2 if "groups" in on else 4, 1 if DECODING in on else 5
        given = _pool(draw, size, 4, Hkv, D, shares="shares" in on, Lq=Lq)
        given |= _options(draw, on, 4, IN_PAGES - 3)
        if "window_size" in given:
            given["window_size"] = (17, 2)
        if POSITIONAL & {*on}:
            given["q_offset"] = IN_PAGES - (Lq if ENDS in on else 8)
        yield _problem(name, "block_table", given)
    for size in LARGE_PAGES:
        draw = Draw(f"pages of {size}, more keys than a block {seed}")
        given = _pool(draw, size, 4, 2, D, lengths=BLOCKS_IN_PAGES, unused=1)
        name = f"pages of {size}, more keys than a block"
        yield _problem(name, "block_table", given)
        causal = {"is_causal": True, "q_offset": BLOCKS_IN_PAGES - 5}
        yield _problem(f"{name}, is_causal", "block_table", {**given, **causal})


def _shared_and_far(seed: int, D: int) -> Iterator[Graded]:
    """Yield a problem whose entries share their first pages, and one with a large pool of pages."""
    draw, lengths = Draw(f"shared pages {seed}"), np.array([60, 19, 47])
    given = _pool(draw, 16, 4, 2, D, lengths=lengths)
    given["block_table"][:, :2] = given["block_table"][0, :2]
    yield _problem("an entry that ends in shared pages", "block_table", given)
    draw, pages = Draw(f"many pages {seed}"), 1200  # of 2 heads and 16 keys: more than 2^15 rows
    given = draw.qkv(pages, 4, 1, 16, D, Hkv=2)
    table = draw.rng.permutation(np.arange(1024, pages))[: 3 * 4].reshape(3, 4)
    given |= {"q": given["q"][:3], "block_table": table.astype(np.int32), "kv_lengths": IN_PAGES}
    yield _problem(f"{pages} pages of 16", "block_table", given)


def _both(seed: int, D: int) -> Iterator[Graded]:
    """Yield packed queries with pages, and functions beside packed sequences and pages."""
    functions = {"score_mod": expanded.score_by_all, "mask_mod": expanded.mask_by_all}
    for paged in (False, True):
        for some in ((), ("score_mod",), ("mask_mod",), ("score_mod", "mask_mod")):
            if not paged and not some:
                continue
            words = [*(["pages of 16"] if paged else []), *some]
            draw = Draw(f"both {words} {seed}")
            given = _pool(draw, 16, 4, 2, D) if paged else {}
            keys = IN_PAGES if paged else KEYS
            packed = draw.qkv(1, 4, int(sum(QUERIES)), int(sum(KEYS)), D, Hkv=2)
            given = {**packed, **given, "q": packed["q"], "cu_seqlens_q": _starts(QUERIES)}
            if not paged:
                given["cu_seqlens_k"] = _starts(KEYS)
            given |= {"is_causal": True, "q_offset": keys - QUERIES}
            given |= {name: functions[name] for name in some}
            yield _problem(f"{', '.join(words)}, packed", "cu_seqlens_q", given)


def _picked(seed: int, D: int) -> Iterator[Graded]:
    """Yield problems with key_indices; -1 stands for none, and some queries name a key twice."""
    rows = (
        ("four keys", (), 4, 0),
        ("fewer keys for some", (), 4, 2),
        ("duplicates", (), 6, 0),
        ("duplicates, one query", (DECODING,), 6, 0),
        ("is_causal, for each key/value head", ("is_causal", "groups"), 6, 2),
        ("kv_lengths, return_lse", ("kv_lengths", "return_lse"), 6, 2),
        ("alibi_slopes", ("alibi_slopes",), 6, 2),
        ("150 of 301 keys", (), 150, 2),
        ("150 of 301 keys, duplicates", (), 150, 0),
        ("150 of 301 keys, none amid them", (), 150, 0),
    )
    for name, on, K, most in rows:
        draw = Draw(f"picked {name} {seed}")
        Lk = 301 if K > 9 else 9
        B, H, Hkv, Lq = 2, 4, 2 if "groups" in on else 4, 1 if DECODING in on else 5
        given: dict[str, Any] = draw.qkv(B, H, Lq, Lk, D, Hkv=Hkv)
        given |= _options(draw, on, H, np.array([6, 8]))
        rows_of = (B, Hkv if on and most else 1, Lq)
        turns = draw.rng.random((*rows_of, Lk))
        i = np.arange(Lq)
        turns[..., i, 1 + i % 3] = -1  # each query names a key that no option hides
        picks = turns.argsort(-1)[..., :K].astype(np.int32)
        if "duplicates" in name:
            picks[..., -1] = picks[..., 0]
        if "none" in name:  # the last place of each block
            picks[..., 15::16] = -1
        picks[..., 1:][np.arange(1, K) <= draw.rng.integers(0, most + 1, (*rows_of, 1))] = -1
        given |= {"key_indices": picks} | ({"q_offset": 4} if POSITIONAL & {*on} else {})
        yield _problem(name, "key_indices", given)


def _scaled(seed: int, D: int) -> Iterator[Graded]:
    """Yield problems with int8 keys and values, whose scales are powers of 2.

    So the products of numbers and scales are exact in every dtype.
    """
    rows = (
        ("one scale", (), ()),
        ("one for each head", (), (4,)),
        ("one for each token and head", (), (2, 4, 9)),
        ("groups, one for each head", ("groups",), (2,)),
        ("groups, one for each token and head", ("groups",), (2, 2, 9)),
        ("is_causal, kv_lengths", ("is_causal", "kv_lengths"), (2, 4, 9)),
        ("window_size, return_lse", ("window_size", "return_lse"), (2, 4, 9)),
        ("scale, softcap", ("scale", "softcap"), (2, 4, 9)),
        ("attn_bias, sinks", ("attn_bias", "sinks"), (2, 4, 9)),
        ("alibi_slopes", ("alibi_slopes",), (2, 4, 9)),
        ("70 keys", (), (2, 4, 70)),
        ("70 keys, one for all", (), ()),
        ("70 keys, one for each head", (), (4,)),
        ("groups, one query", ("groups", DECODING), (2, 2, 9)),
    )
    for name, on, shape in rows:
        draw = Draw(f"scaled {name} {seed}")
        Lk = 70 if name.startswith("70 keys") else 9
        Hkv = 2 if "groups" in on else 4
        Lq = 1 if DECODING in on else 9
        given: dict[str, Any] = draw.qkv(2, 4, Lq, Lk, D, Hkv=Hkv)
        given |= _options(draw, on, 4, np.array([6, 8]))
        if "attn_bias" in on:
            given["attn_bias"] = draw.numbers(1, 4, 9, Lk)
        yield _scaled_problem(name, draw, given, shape)
        if shape != (4,):
            yield from _scaled_float8(name, draw, given, shape)
    for size in PAGES[:2]:
        draw = Draw(f"scaled pages of {size} {seed}")
        given = _pool(draw, size, 4, 2, D)
        yield _scaled_problem(f"pages of {size}", draw, given, given["k"].shape[:3])


def _scaled_problem(name: str, draw: Draw, given: dict[str, Any], shape: tuple[int, ...]) -> Graded:
    return _problem(name, "k_scale", _in_8_bits(draw, given, shape))


def _in_8_bits(draw: Draw, given: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments with int8 keys and values, and with scales of the given shape."""
    found = dict(given)
    for X in "kv":
        found[X] = draw.rng.integers(-128, 128, given[X].shape, np.int8)
        found[f"{X}_scale"] = np.exp2(draw.rng.integers(-7, -4, shape)).astype(np.float32)
    return found


def _scaled_float8(
    name: str, draw: Draw, given: dict[str, Any], shape: tuple[int, ...]
) -> Iterator[Graded]:
    """Yield the problem with numbers of every size that float8_e4m3fn has, if NumPy knows it."""
    try:
        float8 = extension("k", FLOAT8)
    except TypeError:
        return
    found = dict(given)
    for X in "kv":
        exponents = draw.rng.integers(-9, 3, given[X].shape)
        numbers = draw.rng.integers(-15, 16, given[X].shape) * np.exp2(exponents)
        found[X] = numbers.astype(float8)
        found[f"{X}_scale"] = np.exp2(draw.rng.integers(-3, 0, shape)).astype(np.float32)
    yield _problem(f"{FLOAT8}, {name}", "k_scale", found)
