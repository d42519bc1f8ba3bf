"""Packed sequences, pages, functions, and 8-bit keys: what `check` asks about them."""

import ml_dtypes
import numpy as np
import pytest
from thorough import thorough_after

import minimha
from minimha.check.answer import Answer
from minimha.check.arranged import KINDS, arranged, rearranged
from minimha.check.calling import Caller, arguments_of
from minimha.check.compared import compare
from minimha.check.crossed import SWITCHES, alone, crossed, long, rows
from minimha.check.expanded import ARRANGING, expanded
from minimha.check.page import as_text
from minimha.check.problems import graded
from minimha.check.search import NONE, known
from minimha.check.verdict import DIFFERENCES, judge


def taken(problem):
    """What the problem's arguments mean, by minimha's equations."""
    found = minimha.attention(**problem.arguments, backend="dense")
    return Answer(*(found if isinstance(found, tuple) else (found,)))


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_expected_is_what_the_equations_give(seed):
    """Sequences laid out as a batch against `attention`, which takes one sequence at a time."""
    for problem in arranged(seed):
        x = known(problem, "float32")
        assert compare(taken(problem), x.predicted(NONE), x.asks_lse).is_explained, problem.name


@pytest.mark.parametrize("kind", KINDS)
def test_crossed_problems_are_arranged_too(kind):
    every = frozenset(SWITCHES)
    found = [
        rearranged(crossed(on), (kind,), 0) for on in (*alone(), *rows(every), *long(every)[::3])
    ]
    problems = [problem for problem in found if problem is not None]
    assert len(problems) > len(found) / 3
    for problem in problems:
        x = known(problem, "float32")
        assert compare(taken(problem), x.predicted(NONE), x.asks_lse).is_explained, problem.name


def scaled_after_the_cap_while_decoding(q, k, v, softcap=None, k_scale=None, v_scale=None):
    if k_scale is None or softcap is None or q.shape[2] > 1:
        return dense(q, k, v, softcap=softcap, k_scale=k_scale, v_scale=v_scale)
    scales = (np.broadcast_to(s, k.shape[:3]) for s in (k_scale, v_scale))
    groups = q.shape[1] // k.shape[1]
    k, v, k_scale, v_scale = (np.repeat(x, groups, 1) for x in (k, v, *scales))
    S = q @ k.astype(np.float32).swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    S = softcap * np.tanh(S / softcap) * k_scale[:, :, None]
    W = np.exp(S - S.max(-1, keepdims=True))
    return W / W.sum(-1, keepdims=True) @ (v * v_scale[..., None])


def test_options_are_crossed_with_8_bits_and_shapes():
    report = minimha.check(scaled_after_the_cap_while_decoding)
    assert (report.verdict, report.deviations) == ("wrong", ("k_scale_late",)), str(report)
    assert report.findings.conditions == {"k_scale_late": "Lq = 1"}


def test_no_query_loses_all_its_keys_but_where_a_sequence_has_none():
    for problem in arranged(0):
        O = taken(problem).output
        assert (O != 0).any(-1).all() == ("no keys" not in problem.name), problem.name


def test_other_arguments_are_left_alone():
    x = np.zeros((1, 1, 2, 3))
    given = {"q": x, "k": x, "v": x, "is_causal": True}
    assert expanded(given) == (given, None)


def dense(q, k, v, **options):
    return minimha.attention(q, k, v, backend="dense", **options)


def pages_of_entry_0(q, k, v, block_table=None, **options):
    if block_table is not None:
        block_table = np.repeat(block_table[:1], len(block_table), 0)
    return dense(q, k, v, block_table=block_table, **options)


def pages_of_16(q, k, v, block_table=None, kv_lengths=None, **options):
    if block_table is not None:
        k, v = k[:, :, :16], v[:, :, :16]
        kv_lengths = np.minimum(kv_lengths, block_table.shape[1] * k.shape[2])
    return dense(q, k, v, block_table=block_table, kv_lengths=kv_lengths, **options)


def tiles_of_32_in_pages(q, k, v, block_table=None, kv_lengths=None, **options):
    if block_table is None:
        return dense(q, k, v, kv_lengths=kv_lengths, **options)
    size, j = k.shape[2], np.arange(block_table.shape[1] * k.shape[2])
    first = j // 32 * 32  # key of a tile, which all keys of the tile follow
    rows = np.minimum(block_table[:, first // size] * size + first % size + j - first, k.size)
    k, v = (x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (k, v))
    k, v = (x[np.minimum(rows, len(x) - 1)].swapaxes(1, 2) for x in (k, v))
    return dense(q, k, v, kv_lengths=kv_lengths, **options)


def borders_one_later(q, k, v, cu_seqlens_q=None, is_causal=False, softcap=None, scale=None):
    """Self-attention over packed sequences, which needs neither cu_seqlens_k nor q_offset."""
    if cu_seqlens_q is not None:
        cu_seqlens_q = cu_seqlens_q + np.r_[0, np.ones(len(cu_seqlens_q) - 2, np.int32), 0]
    return dense(
        q, k, v, cu_seqlens_q=cu_seqlens_q, is_causal=is_causal, softcap=softcap, scale=scale
    )


def reading_on(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, scale=None, softcap=None):
    """Tiles of 4 keys, of which a sequence's last one reads into the next sequence."""
    if cu_seqlens_q is None:
        return dense(q, k, v, scale=scale, softcap=softcap)
    starts = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    parts = []
    for s in range(len(starts) - 1):
        keys = slice(starts[s], starts[s] + -(-(starts[s + 1] - starts[s]) // 4) * 4)
        rows = q[:, :, cu_seqlens_q[s] : cu_seqlens_q[s + 1]]
        parts.append(dense(rows, k[:, :, keys], v[:, :, keys], scale=scale, softcap=softcap))
    return np.concatenate(parts, axis=2)


def twice_while_decoding(q, k, v, key_indices=None, **options):
    return (dense if q.shape[2] > 1 else in_turn)(q, k, v, key_indices=key_indices, **options)


def pages_in_order(q, k, v, block_table=None, **options):
    if block_table is not None:
        block_table = np.arange(block_table.size).reshape(block_table.shape)
    return dense(q, k, v, block_table=block_table, **options)


def cu_seqlens_k_ignored(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, **options):
    if cu_seqlens_q is None:
        return dense(q, k, v, **options)
    if "block_table" in options:
        return dense(q, k, v, cu_seqlens_q=cu_seqlens_q, **options)
    k, v = (x[:, :, : cu_seqlens_q[-1]] for x in (k, v))
    if "kv_lengths" in options:
        options["kv_lengths"] = np.minimum(options["kv_lengths"], np.diff(cu_seqlens_q))
    return dense(q, k, v, cu_seqlens_q=cu_seqlens_q, **options)


def lengths_ignored_when_packed(q, k, v, **options):
    if "cu_seqlens_q" in options and "block_table" not in options:
        options.pop("kv_lengths", None)
    return dense(q, k, v, **options)


def softcap_ignored_in_pages(q, k, v, **options):
    if "block_table" in options:
        options.pop("softcap", None)
    return dense(q, k, v, **options)


def without_offset(name):
    """A kernel whose function gets the query's row."""

    def attention(q, k, v, **options):
        if name in options:
            offset, mod = np.broadcast_to(options.get("q_offset", 0), 3), options[name]
            if np.size(options.get("q_offset", 0)) > 1:
                offset = np.array(options["q_offset"])

            def by_row(*arguments):
                *before, b, h, i, j = arguments
                return mod(*before, b, h, i - offset[b], j)

            options[name] = by_row
        return dense(q, k, v, **options)

    return attention


def causal_ignored_beside_mask_mod(q, k, v, is_causal=False, **options):
    return dense(q, k, v, is_causal=is_causal and "mask_mod" not in options, **options)


def mask_ignored_beside_mask_mod(q, k, v, **options):
    if "mask_mod" in options:
        options.pop("attn_mask", None)
    return dense(q, k, v, **options)


def ignored(name):
    def attention(q, k, v, **options):
        options.pop(name, None)
        return dense(q, k, v, **options)

    return attention


def picking(change):
    """A kernel that reads other keys than those that ``key_indices`` name."""

    def attention(q, k, v, key_indices=None, **options):
        if key_indices is not None:
            key_indices = change(key_indices, k.shape[2])
        return dense(q, k, v, key_indices=key_indices, **options)

    return attention


def in_turn(q, k, v, key_indices=None, **options):
    """Reads the keys that a query names one after another, without a look at earlier ones."""
    if key_indices is not None:
        (B, H, Lq, _), (_, Hkv, Lk, _) = q.shape, k.shape
        named = np.broadcast_to(key_indices, (B, Hkv, Lq, key_indices.shape[-1]))
        times = sum(np.equal.outer(named[..., n], np.arange(Lk)) for n in range(named.shape[-1]))
        with np.errstate(divide="ignore"):
            options["attn_bias"] = np.log(times.repeat(H // Hkv, 1)).astype(np.float32)
    return dense(q, k, v, **options)


def causal_by_place(q, k, v, key_indices=None, is_causal=False, q_offset=0, **options):
    if key_indices is not None and is_causal:
        places, i = np.arange(key_indices.shape[-1]), np.arange(q.shape[2])[:, None]
        seen = places <= i + np.reshape(q_offset, (-1, 1, 1, 1))
        key_indices, is_causal = np.where(seen, key_indices, -1), False
    options |= {"q_offset": q_offset, "is_causal": is_causal}
    return dense(q, k, v, key_indices=key_indices, **options)


def lengths_by_place(q, k, v, key_indices=None, kv_lengths=None, **options):
    if key_indices is not None and kv_lengths is not None:
        places, lengths = np.arange(key_indices.shape[-1]), np.reshape(kv_lengths, (-1, 1, 1, 1))
        key_indices, kv_lengths = np.where(places < lengths, key_indices, -1), None
    return dense(q, k, v, key_indices=key_indices, kv_lengths=kv_lengths, **options)


def indices_clipped(q, k, v, key_indices=None, kv_lengths=None, **options):
    if key_indices is not None and kv_lengths is not None:
        last = np.reshape(kv_lengths, (-1, 1, 1, 1)) - 1
        key_indices = np.minimum(key_indices, last)
    return dense(q, k, v, key_indices=key_indices, kv_lengths=kv_lengths, **options)


def distance_to_places(q, k, v, key_indices=None, alibi_slopes=None, scale=None, q_offset=0):
    """Gathers keys, and counts ALiBi's distance in what was gathered."""
    if key_indices is None or alibi_slopes is None:
        given = {"key_indices": key_indices, "alibi_slopes": alibi_slopes}
        return dense(q, k, v, scale=scale, q_offset=q_offset, **given)
    (B, H, Lq, D), (_, Hkv, Lk, _) = q.shape, k.shape
    picks = np.broadcast_to(key_indices, (B, Hkv, Lq, key_indices.shape[-1])).repeat(H // Hkv, 1)
    k, v = (x.repeat(H // Hkv, 1) for x in (k, v))
    S = q @ k.swapaxes(-1, -2) * (D**-0.5 if scale is None else scale)
    S = np.take_along_axis(S, np.maximum(picks, 0), -1)
    p = np.arange(Lq)[:, None] + np.reshape(q_offset, (-1, 1, 1, 1))
    S = S - alibi_slopes[:, None, None] * abs(p - np.arange(picks.shape[-1]))
    earlier = np.tril(picks[..., None] == picks[..., None, :], -1).any(-1)
    S = np.where((picks < 0) | earlier, -np.inf, S)
    top = S.max(-1, keepdims=True)
    E = np.exp(S - np.where(np.isneginf(top), 0, top))
    W = np.zeros((B, H, Lq, Lk))
    np.add.at(W, (*np.indices(picks.shape)[:3], np.maximum(picks, 0)), E)
    total = E.sum(-1, keepdims=True)
    return W @ np.nan_to_num(v) / np.where(total == 0, 1, total)


def values_of_the_nth_page(q, k, v, block_table=None, k_scale=None, v_scale=None, **options):
    if block_table is not None:
        n = np.arange(block_table.shape[1])
        pages = np.concatenate([v[n]] * len(block_table))
        k, block_table = k[block_table.ravel()], np.arange(block_table.size).reshape(-1, len(n))
        v = pages
    return dense(q, k, v, block_table=block_table, **options)


def positions_of_pages(q, k, v, block_table=None, kv_lengths=None, is_causal=False, q_offset=0):
    if block_table is None:
        given = {"is_causal": is_causal, "q_offset": q_offset, "kv_lengths": kv_lengths}
        return dense(q, k, v, **given)
    B, n = block_table.shape
    size = k.shape[2]
    k, v = (x[block_table].swapaxes(1, 2).reshape(B, x.shape[1], n * size, -1) for x in (k, v))
    j = (block_table[..., None] * size + np.arange(size)).reshape(B, 1, 1, -1)
    seen = np.arange(n * size) < np.reshape(kv_lengths, (-1, 1, 1, 1))
    if is_causal:
        seen = seen & (j <= np.arange(q.shape[2])[:, None] + np.reshape(q_offset, (-1, 1, 1, 1)))
    return dense(q, k, v, attn_mask=np.broadcast_to(seen, (B, 1, q.shape[2], n * size)))


def weights_become_integers(q, k, v, k_scale=None, v_scale=None, is_causal=False, q_offset=0):
    if k_scale is None:
        return dense(q, k, v, is_causal=is_causal, q_offset=q_offset)
    scales = (
        np.broadcast_to(s[:, None] if np.ndim(s) == 1 else s, k.shape[:3])[..., None]
        for s in (k_scale, v_scale)
    )
    groups = q.shape[1] // k.shape[1]
    K, V = (np.repeat(x * s, groups, 1) for x, s in zip((k, v), scales, strict=True))
    S = q @ K.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    if is_causal:
        i = np.arange(q.shape[2])[:, None] + np.reshape(q_offset, (-1, 1, 1, 1))
        S = np.where(np.arange(k.shape[2]) <= i, S, -np.inf)
    P = np.exp(S - S.max(-1, keepdims=True))
    return P.astype(v.dtype).astype(np.float32) @ V / P.sum(-1, keepdims=True)


def indices_of_head_mod_Hkv(q, k, v, key_indices=None, **options):
    if key_indices is not None:
        H, Hkv = q.shape[1], k.shape[1]
        k, v = (x.repeat(H // Hkv, 1) for x in (k, v))
        key_indices = np.broadcast_to(key_indices, (len(q), Hkv, *key_indices.shape[2:]))
        key_indices = key_indices[:, np.arange(H) % Hkv]
    return dense(q, k, v, key_indices=key_indices, **options)


def gathered(q, k, v, key_indices=None, **options):
    """Reads k[-1] for -1 as Python does, whatever else hides it."""
    if key_indices is None:
        return dense(q, k, v, **options)
    if {*options} - {"scale", "softcap", "sinks", "return_lse"}:
        raise NotImplementedError
    return in_turn(q, k, v, key_indices=key_indices % k.shape[2], **options)


def tabled(change):
    """A kernel that reads another table of pages."""

    def attention(q, k, v, block_table=None, **options):
        if block_table is not None:
            block_table = change(block_table, len(k))
        return dense(q, k, v, block_table=block_table, **options)

    return attention


def by_entry(change):
    """A kernel for pages that gets each entry's keys from ``change(pages, length)``."""

    def attention(q, k, v, block_table=None, kv_lengths=None, **options):
        if block_table is None or {*options} - {"scale", "softcap", "return_lse"}:
            raise NotImplementedError
        outputs = []
        for b, (row, length) in enumerate(zip(block_table, kv_lengths, strict=True)):
            own = (change(x[row[: -(-length // x.shape[2])]], length) for x in (k, v))
            outputs.append(dense(q[b : b + 1], *own, kv_lengths=length, **options))
        if not options.get("return_lse"):
            return np.concatenate(outputs)
        return tuple(np.concatenate(some) for some in zip(*outputs, strict=True))

    return attention


def untransposed(pages, length):
    return pages.reshape(1, pages.shape[1], -1, pages.shape[3])


def masked_places(pages, length):
    size = pages.shape[2]
    j = np.arange(len(pages) * size)
    return pages[j // size, :, j & (size - 1)].swapaxes(0, 1)[None]


def to_the_end_of_pages(q, k, v, block_table=None, kv_lengths=None, **options):
    if block_table is not None:
        kv_lengths = -(-np.asarray(kv_lengths) // k.shape[2]) * k.shape[2]
    return dense(q, k, v, block_table=block_table, kv_lengths=kv_lengths, **options)


def sequence_by_sequence(change):
    """A kernel for packed sequences; ``change(queries, keys)`` returns the keys of each."""

    def attention(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, **options):
        if cu_seqlens_q is None or {*options} - {"scale", "softcap"}:
            raise NotImplementedError
        queries = np.asarray(cu_seqlens_q)
        keys = queries if cu_seqlens_k is None else np.asarray(cu_seqlens_k)
        output = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
        for s, (first, end) in enumerate(zip(*change(queries, keys), strict=True)):
            rows, own = slice(*queries[s : s + 2]), slice(first, end)
            if first < end and queries[s] < queries[s + 1]:
                output[:, :, rows] = dense(q[:, :, rows], k[:, :, own], v[:, :, own], **options)
        return output

    return attention


def of_the_first_16(queries, keys):
    s = np.arange(len(keys) - 1) % 16
    return keys[s], keys[s + 1]


def up_to_an_empty_one(queries, keys):
    is_over = np.logical_or.accumulate(np.diff(queries) * np.diff(keys) == 0)
    return keys[:-1], np.where(is_over, keys[:-1], keys[1:])


def by_segments(counts_positions):
    """A kernel that numbers packed rows by the distinct starts of sequences before them."""

    def numbers(starts):
        number = np.searchsorted(np.unique(starts), np.arange(starts[-1]), "right") - 1
        begins = starts if counts_positions else np.unique(starts)
        return number, np.arange(len(number)) - begins[number]

    def attention(q, k, v, *, cu_seqlens_q, cu_seqlens_k, is_causal=False, q_offset=0,
                  kv_lengths=None):  # fmt: skip
        of_q, i = numbers(cu_seqlens_q)
        of_k, j = numbers(cu_seqlens_k)
        offset = np.broadcast_to(q_offset, (len(cu_seqlens_q) - 1,))
        seen = of_q[:, None] == of_k
        if is_causal:
            seen &= j <= (i + offset[of_q])[:, None]
        if kv_lengths is not None:
            seen &= j < np.asarray(kv_lengths)[of_k]
        return dense(q, k, v, attn_mask=seen)

    return attention


@pytest.mark.parametrize("counts_positions", thorough_after(1, [False, True]))
def test_sequences_without_a_number_are_named(counts_positions):
    report = minimha.check(by_segments(counts_positions))
    assert (report.verdict, report.deviations) == ("wrong", ("sequences_unnumbered",)), str(report)


def full_sequences_alone(q, k, v, *, cu_seqlens_q, cu_seqlens_k, q_offset=0, kv_lengths=None,
                         is_causal=False):  # fmt: skip
    number = np.maximum(np.cumsum(np.diff(cu_seqlens_q) > 0) - 1, 0)
    if np.ndim(q_offset):
        q_offset = q_offset[number]
    if np.ndim(kv_lengths):
        kv_lengths = kv_lengths[number]
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "is_causal": is_causal}
    return dense(q, k, v, q_offset=q_offset, kv_lengths=kv_lengths, **given)


@pytest.mark.thorough
def test_lengths_of_sequences_that_were_dropped_are_named():
    report = minimha.check(full_sequences_alone)
    assert report.deviations == ("sequences_unnumbered",), str(report)


def lengths_from_the_first_row(q, k, v, *, cu_seqlens_q, cu_seqlens_k, kv_lengths=None):
    if kv_lengths is not None:
        kv_lengths = np.maximum(kv_lengths - cu_seqlens_k[:-1], 0)
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return dense(q, k, v, kv_lengths=kv_lengths, **given)


def test_lengths_of_packed_rows_are_named():
    report = minimha.check(lengths_from_the_first_row)
    assert report.deviations == ("lengths_from_first_sequence",), str(report)


def decoding_from_pages_of_32(change):
    """A kernel that takes only pages of 32 keys, heads 64 or 128 wide, and one query."""

    def attention(q, k, v, *, block_table, kv_lengths, alibi_slopes=None, q_offset=0):
        if q.shape[2] > 1 or k.shape[2] != 32 or q.shape[3] not in (64, 128):
            raise NotImplementedError
        given = {"block_table": block_table, "kv_lengths": change(kv_lengths)}
        return dense(q, k, v, alibi_slopes=alibi_slopes, q_offset=q_offset, **given)

    return attention


@pytest.mark.thorough
def test_pages_are_met_at_the_size_and_width_that_a_kernel_takes():
    report = minimha.check(decoding_from_pages_of_32(lambda lengths: lengths))
    assert report.verdict == "right", str(report)
    assert "alibi_slopes" in report.covers["options"]
    short = decoding_from_pages_of_32(lambda lengths: np.maximum(lengths - 1, 1))
    report = minimha.check(short)
    assert (report.verdict, report.deviations) == ("wrong", ("lengths_one_too_short",))


def alibi_of_packed_rows(q, k, v, alibi_slopes=None, **options):
    starts = [options.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    if alibi_slopes is None or starts[0] is None or "block_table" in options:
        return dense(q, k, v, alibi_slopes=alibi_slopes, **options)
    moved = starts[0] - (starts[0] if starts[1] is None else starts[1])

    def score_mod(score, b, h, i, j):
        return score - alibi_slopes[h] * abs(i + moved[b] - j)

    return dense(q, k, v, score_mod=score_mod, **options)


def alibi_of_packed_keys(q, k, v, alibi_slopes=None, **options):
    """The distance is to the key's row among all packed keys."""
    starts = options.get("cu_seqlens_k", options.get("cu_seqlens_q"))
    if alibi_slopes is None or starts is None or "block_table" in options:
        return dense(q, k, v, alibi_slopes=alibi_slopes, **options)

    def score_mod(score, b, h, i, j):
        return score - alibi_slopes[h] * abs(i - starts[b] - j)

    return dense(q, k, v, score_mod=score_mod, **options)


def places_in_blocks(q, k, v, score_mod=None, mask_mod=None, **options):
    """Functions get the key's place in its block of 16."""

    def otherwise(function):
        return function and (lambda *at: function(*at[:-1], at[-1] % 16))

    functions = {"score_mod": otherwise(score_mod), "mask_mod": otherwise(mask_mod)}
    return dense(q, k, v, **functions, **options)


def rows_of_the_arrays(q, k, v, score_mod=None, mask_mod=None, **options):
    """Functions get the rows of packed arrays, and of a batch as if it were packed."""
    starts = options.get("cu_seqlens_q")
    keys = options.get("cu_seqlens_k", starts)
    if starts is None:
        b = np.arange(len(q) + 1)
        starts, keys = b * q.shape[2], b * k.shape[2]

    def otherwise(function):
        def moved(*at):
            *others, b, h, i, j = at
            return function(*others, b, h, starts[b] + i, keys[b] + j)

        return function and moved

    if "block_table" in options:
        return dense(q, k, v, score_mod=score_mod, mask_mod=mask_mod, **options)
    return dense(q, k, v, score_mod=otherwise(score_mod), mask_mod=otherwise(mask_mod), **options)


def whole_if_the_corners_are(q, k, v, mask_mod=None, **options):
    """Tiles of 16 queries and keys."""
    if mask_mod is None:
        return dense(q, k, v, **options)
    if {"cu_seqlens_q", "block_table", "score_mod", "key_indices"} & {*options}:
        raise NotImplementedError
    B, H, Lq, Lk, first = *q.shape[:3], k.shape[2], options.get("q_offset", 0)
    b, h, i, j = np.ogrid[:B, :H, :Lq, :Lk]
    i = i + np.broadcast_to(first, (B,)).reshape(-1, 1, 1, 1)
    seen = np.broadcast_to(mask_mod(b, h, i, j), (B, H, Lq, Lk)).copy()
    for r in range(0, Lq, 16):
        for c in range(0, Lk, 16):
            tile = seen[:, :, r : r + 16, c : c + 16]
            if tile[:, :, [0, 0, -1, -1], [0, -1, 0, -1]].all():
                tile[:] = True
    if options.get("attn_mask") is not None:
        seen = seen & options.pop("attn_mask")
    return dense(q, k, v, attn_mask=seen, **options)


def scales_of_the_first_tile(q, k, v, k_scale=None, v_scale=None, **options):
    """Tiles of 16 tokens."""
    if "block_table" not in options and np.ndim(k_scale) == 3:
        k_scale, v_scale = (s[..., np.arange(k.shape[2]) % 16] for s in (k_scale, v_scale))
    return dense(q, k, v, k_scale=k_scale, v_scale=v_scale, **options)


def first_query_before(q, k, v, cu_seqlens_q=None, **options):
    """The first query of a sequence belongs to the sequence before, whose positions go on."""
    if cu_seqlens_q is None:
        return dense(q, k, v, **options)
    starts = np.array(cu_seqlens_q)
    starts[1:-1] = np.minimum(starts[1:-1] + 1, starts[-1])
    offset = options.pop("q_offset", 0) + (starts - cu_seqlens_q)[:-1]
    options.setdefault("cu_seqlens_k", None if "block_table" in options else cu_seqlens_q)
    return dense(q, k, v, cu_seqlens_q=starts, q_offset=offset, **options)


def changed_after_the_mask(q, k, v, score_mod=None, mask_mod=None, **options):
    """score_mod gets -inf for hidden keys."""
    if score_mod is None or mask_mod is None:
        return dense(q, k, v, score_mod=score_mod, mask_mod=mask_mod, **options)

    def both(score, *at):
        return score_mod(np.where(mask_mod(*at), score, -np.inf), *at)

    return dense(q, k, v, score_mod=both, **options)


def minus_1_is_the_last_key(q, k, v, key_indices=None, **options):
    """As NumPy reads it; it counts once, beside an index of the last key, too."""
    if key_indices is None:
        return dense(q, k, v, **options)
    if {*options} - {"return_lse"}:
        raise NotImplementedError
    n, G = k.shape[2], q.shape[1] // k.shape[1]
    picks = np.asarray(key_indices).reshape((1,) * (4 - np.ndim(key_indices)) + key_indices.shape)
    seen = (picks[..., None] == np.arange(-1, n)).any(-2)
    times = seen[..., 1:].astype(float)
    times[..., -1] += seen[..., 0]
    times = np.repeat(times, G, 1) if times.shape[1] > 1 else times
    with np.errstate(divide="ignore"):
        return dense(q, k, v, attn_bias=np.log(times).astype(np.float32), **options)


def causal_ignored_beside_key_indices(q, k, v, is_causal=False, **options):
    return dense(q, k, v, is_causal=is_causal and "key_indices" not in options, **options)


def scaled(change):
    """A kernel that gets other 8-bit keys, values or scales."""

    def attention(q, k, v, k_scale=None, v_scale=None, **options):
        if k_scale is not None:
            options |= change(k, v, k_scale, v_scale)
            k, v = options.pop("k", k), options.pop("v", v)
        return dense(q, k, v, **options)

    return attention


def widened(x, scale):
    if np.ndim(scale) == 1:
        scale = scale[:, None]
    return x.astype(np.float32) * np.reshape(scale, (*np.shape(scale), 1))


def per_tensor(scale):
    return np.ravel(scale)[0]


def scales_of_head_0(k, v, k_scale, v_scale):
    if np.ndim(k_scale):
        axis = 1 if k_scale.ndim == 3 else 0
        k_scale, v_scale = (
            np.repeat(s.take([0], axis), s.shape[axis], axis) for s in (k_scale, v_scale)
        )
    return {"k_scale": k_scale, "v_scale": v_scale}


def reading(dtype, other):
    """A kernel that reads bytes of one dtype as another one."""

    def arrays(k, v, s, t):
        if k.dtype.name != dtype:
            return {"k_scale": s, "v_scale": t}
        if other is np.float32:  # without subnormal numbers
            k, v = (np.where(abs(np.float32(x)) < 2.0**-6, 0, np.float32(x)) for x in (k, v))
        else:
            k, v = k.view(other), v.view(other)
        return {"k": widened(k, s), "v": widened(v, t)}

    return scaled(arrays)


def scales_by_query_head(q, k, v, k_scale=None, v_scale=None, **options):
    H, Hkv = q.shape[1], k.shape[1]
    if k_scale is not None and np.ndim(k_scale):
        k, v = (x.repeat(H // Hkv, 1) for x in (k, v))
        axis = max(0, k_scale.ndim - 2)
        k_scale, v_scale = (s.take(np.arange(H) % Hkv, axis) for s in (k_scale, v_scale))
    return dense(q, k, v, k_scale=k_scale, v_scale=v_scale, **options)


def scales_in_the_sum(q, k, v, v_scale=None, block_table=None, attn_bias=None, **options):
    if v_scale is None:
        return dense(q, k, v, block_table=block_table, attn_bias=attn_bias, **options)
    if block_table is not None or attn_bias is not None:
        raise NotImplementedError
    scales = v_scale[:, None] if np.ndim(v_scale) == 1 else v_scale
    scales = np.broadcast_to(scales, k.shape[:3]).repeat(q.shape[1] // k.shape[1], 1)
    ones = np.float32(1)
    return dense(q, k, v, attn_bias=np.log(scales)[:, :, None], v_scale=ones, **options)


@pytest.mark.parametrize(
    ("kernel", "named", "where"),
    thorough_after(
        12,
        [
            (pages_of_entry_0, "pages_of_entry_0", ""),
            (pages_of_16, "page_size_wrong", ""),
            (tiles_of_32_in_pages, "page_size_wrong", ""),
            (borders_one_later, "sequences_begin_wrongly", ""),
            (reading_on, "sequences_end_in_whole_blocks", ""),
            (pages_in_order, "pages_in_order", ""),
            (cu_seqlens_k_ignored, "sequences_unseparated", ""),
            (lengths_ignored_when_packed, "lengths_ignored", "cu_seqlens_q is given"),
            (softcap_ignored_in_pages, "softcap_ignored", "block_table is given"),
            (without_offset("score_mod"), "functions_ignore_offset", ""),
            (without_offset("mask_mod"), "functions_ignore_offset", ""),
            (causal_ignored_beside_mask_mod, "causal_ignored", "mask_mod is given"),
            (mask_ignored_beside_mask_mod, "mask_ignored", "mask_mod is given"),
            (ignored("score_mod"), "score_mod_ignored", ""),
            (ignored("mask_mod"), "mask_mod_ignored", ""),
            (ignored("key_indices"), "key_indices_ignored", ""),
            (picking(lambda x, Lk: x[..., :1, :]), "key_indices_0_for_all", ""),
            (picking(lambda x, Lk: x[:1]), "key_indices_0_for_all", ""),
            (picking(lambda x, Lk: x % Lk), "key_indices_pick_by_minus_1", ""),
            (picking(lambda x, Lk: np.maximum(x, 0)), "key_indices_pick_by_minus_1", ""),
            (in_turn, "key_indices_count_twice", ""),
            (twice_while_decoding, "key_indices_count_twice", "Lq = 1"),
            (tabled(lambda x, n: x[:, np.arange(x.shape[1]) % 8]), "pages_repeat", ""),
            (
                tabled(lambda x, n: np.minimum(x[:, :1] + np.arange(x.shape[1]), n - 1)),
                "pages_in_order",
                "",
            ),
            (by_entry(untransposed), "page_size_wrong", ""),
            (by_entry(masked_places), "page_size_wrong", ""),
            (to_the_end_of_pages, "lengths_rounded_up", ""),
            (
                sequence_by_sequence(lambda q, k: (q[:-1], q[:-1] + np.diff(k))),
                "sequences_begin_wrongly",
                "",
            ),
            (sequence_by_sequence(of_the_first_16), "sequences_repeat", ""),
            (causal_ignored_beside_key_indices, "causal_ignored", "key_indices is given"),
            (causal_by_place, "hidden_by_place_of_index", ""),
            (lengths_by_place, "hidden_by_place_of_index", ""),
            (indices_clipped, "key_indices_clipped", ""),
            (distance_to_places, "alibi_by_place_of_index", ""),
            (values_of_the_nth_page, "pages_by_place", ""),
            (positions_of_pages, "positions_by_page_number", ""),
            (weights_become_integers, "weights_in_dtype_of_values", ""),
            (indices_of_head_mod_Hkv, "key_indices_by_head", ""),
            (alibi_of_packed_rows, "alibi_from_first_row", ""),
            (alibi_of_packed_keys, "alibi_from_first_row", ""),
            (places_in_blocks, "functions_count_in_blocks", ""),
            (rows_of_the_arrays, "functions_count_all_rows", ""),
            (scales_of_the_first_tile, "scales_repeat", ""),
            (first_query_before, "sequences_begin_wrongly", ""),
            (changed_after_the_mask, "score_mod_after_mask", ""),
            (minus_1_is_the_last_key, "key_indices_pick_by_minus_1", ""),
            (scaled(lambda k, v, s, t: {"k": widened(k, s), "v": v * 1.0}), "scales_ignored", ""),
            (scaled(lambda k, v, s, t: {"k_scale": s * s, "v_scale": t}), "scales_twice", ""),
            (scaled(lambda k, v, s, t: {"k_scale": t, "v_scale": s}), "scales_swapped", ""),
            (
                scaled(lambda k, v, s, t: {"k_scale": per_tensor(s), "v_scale": per_tensor(t)}),
                "scales_of_first_for_all",
                "",
            ),
            (scaled(scales_of_head_0), "scales_of_first_for_all", ""),
            (scaled(lambda k, v, s, t: {"k_scale": 1 / s, "v_scale": 1 / t}), "scales_divide", ""),
            (scales_by_query_head, "scales_tiled", ""),
            (scales_in_the_sum, "scales_in_sum", ""),
            (reading("float8_e4m3fn", np.float32), "eight_bits_misread", ""),
            (reading("int8", np.uint8), "eight_bits_unsigned", ""),
            (reading("float8_e4m3fn", ml_dtypes.float8_e5m2), "eight_bits_misread", ""),
        ],
    ),
)
def test_a_bug_that_only_these_options_show_is_named(kernel, named, where):
    problems = [*graded("float32"), *arranged(5)]  # of seed 0, two names explain all
    caller = Caller(kernel, "minimha", "float32")
    found = judge(problems, [caller.answer(arguments_of(problem)) for problem in problems])
    verdict = "differs" if named in DIFFERENCES else "wrong"
    assert (found.verdict, found.deviations) == (verdict, (named,)), found.readings
    assert found.conditions.get(named, "") == where
    assert found.explains[0] == found.explains[1]


@pytest.mark.parametrize(
    ("kernel", "named"),
    thorough_after(
        1,
        [
            (sequence_by_sequence(up_to_an_empty_one), {"sequences_end_at_empty"}),
            (gathered, {"key_indices_pick_by_minus_1", "key_indices_count_twice"}),
            (whole_if_the_corners_are, {"mask_mod_read_at_corners"}),
        ],
    ),
)
def test_a_bug_is_named_by_all_problems_with_these_options(kernel, named):
    report = minimha.check(kernel)
    assert (report.verdict, {*report.deviations}) == ("wrong", named), str(report)


@pytest.mark.thorough
def test_what_was_asked_is_in_the_report():
    report = minimha.check(dense)
    assert report.verdict == "right"
    states = report.covers["packed, paged, functions"]
    assert states == dict.fromkeys(ARRANGING, "tried")


def test_what_was_refused_is_in_the_report():
    def plain(q, k, v, mask_mod=None):
        return dense(q, k, v, mask_mod=mask_mod)

    report = minimha.check(plain)
    states = report.covers["packed, paged, functions"]
    assert report.verdict == "right"
    assert states == dict.fromkeys(ARRANGING, "refused") | {"mask_mod": "tried"}
    assert "score_mod" in report.refused
    text = " ".join(as_text(report).split())
    refused = "cu_seqlens_q, cu_seqlens_k, block_table, score_mod, key_indices, k_scale, v_scale"
    assert f"refused: {refused}; tried: mask_mod" in text


def test_functions_reach_a_kernel_in_another_process(tmp_path):
    where = tmp_path / "kernel.py"
    where.write_text(
        "import minimha\n"
        "def attention(q, k, v, score_mod=None, mask_mod=None, q_offset=None):\n"
        "    return minimha.attention(q, k, v, score_mod=score_mod, q_offset=q_offset,\n"
        "                             backend='dense')\n"
    )
    report = minimha.check(f"{where}:attention")
    assert report.deviations == ("mask_mod_ignored",)


def only_together(change=lambda picks: picks):
    """A kernel that takes key_indices only with packed sequences."""

    def attention(q, k, v, *, key_indices, cu_seqlens_q, cu_seqlens_k, scale=None, softcap=None):
        given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return dense(
            q, k, v, key_indices=change(key_indices), scale=scale, softcap=softcap, **given
        )

    return attention


def test_options_that_are_taken_only_together_are_asked_together():
    report = minimha.check(only_together())
    assert report.verdict == "right", str(report)
    assert len([one for one in report.problems if one["is_right"]]) > 20
    assert {"key_indices", "cu_seqlens_q", "softcap"} <= set(report.covers["options"])
    report = minimha.check(only_together(lambda picks: np.maximum(picks, 0)))
    assert (report.verdict, report.deviations) == ("wrong", ("key_indices_pick_by_minus_1",))


def in_pages_and_packed(q, k, v, *, block_table, cu_seqlens_q, kv_lengths, alibi_slopes=None):
    """As servers call it: positions count from a sequence's first query."""
    given = {"cu_seqlens_q": cu_seqlens_q, "kv_lengths": kv_lengths, "alibi_slopes": alibi_slopes}
    return dense(q, k, v, block_table=block_table, q_offset=0, **given)


def test_where_queries_stand_is_asked_with_what_a_function_requires():
    report = minimha.check(in_pages_and_packed)
    assert report.verdict == "right", str(report)
    assert "alibi_slopes" in report.covers["options"]


def distance_with_a_sign_when_decoding(q, k, v, *, block_table, kv_lengths, alibi_slopes=None,
                                       q_offset=None):  # fmt: skip
    given = {"block_table": block_table, "kv_lengths": kv_lengths}
    if alibi_slopes is None or q.shape[2] > 1:
        return dense(q, k, v, alibi_slopes=alibi_slopes, q_offset=q_offset, **given)
    j = np.arange(block_table.shape[1] * k.shape[2])
    bias = alibi_slopes[:, None, None] * (j - np.reshape(q_offset, (-1, 1, 1, 1)))
    return dense(q, k, v, attn_bias=bias, **given)


@pytest.mark.thorough
def test_a_decoding_query_amid_its_pages_is_asked():
    report = minimha.check(distance_with_a_sign_when_decoding)
    assert (report.verdict, report.deviations) == ("wrong", ("alibi_signed_distance",))


def pools_with_tokens_first(q, k, v, *, block_table, kv_lengths, scale=None):
    """Reads a pool (pages, Hkv, size, D) as (pages, size, Hkv, D)."""
    k, v = (x.reshape(len(x), -1, x.shape[1], x.shape[3]).swapaxes(1, 2) for x in (k, v))
    return dense(q, k, v, block_table=block_table, kv_lengths=kv_lengths, scale=scale)


@pytest.mark.thorough
def test_pools_in_another_order_of_axes_are_named():
    report = minimha.check(pools_with_tokens_first)
    assert (report.verdict, report.deviations) == ("wrong", ("page_size_wrong",))
