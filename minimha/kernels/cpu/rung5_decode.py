"""CPU rung 5, decode: compute few queries against many keys, at the speed of reading K and V.

With one query per head, the panels of rung 4 would be nearly empty, and tasks too few for many
cores. Here the keys are split among tasks (split-K, as in Flash-Decoding). A task
computes all queries of a key/value head, H / Hkv heads of Lq queries each. So every key and value
is read from memory once. S = Q K_jᵀ has one query per row; a score is a dot product along the head
width. If there are many keys, blocks that a ``mask_mod`` hides are not read. Each split s yields
m_s, l_s and O_s, which are merged by log-sum-exp:

    m = max m_s,   l = Σ exp(m_s - m) l_s,   O = Σ exp(m_s - m) O_s / l

8-bit keys and values are widened in registers. Their scales multiply scores (after line 8) and
weights (before line 10), which are fewer numbers than K and V. If the queries are bfloat16 and the
CPU multiplies pairs of bfloat16 numbers, they become bfloat16 instead, and so do the weights
(``simd.bytes``). int8 then takes 0.67 times as long as bfloat16 (0.64 to 0.75 in 12 runs) and
float8_e4m3fn 0.62 times (0.60 to 0.68), where widening to float32 took 1.0 and 1.3 times (32 heads
over 8, 65536 keys of width 128; two cores of an AMD EPYC, 2026-11-29).

Pages in random order take longer than keys in one piece: 1.3 × for pages of 16 keys, 1.15 × for
pages of 64 (16384 keys of width 128, float32; one core of an AMD EPYC, 2026-11-23).

Measured: K and V are read at 80 % or more of the bandwidth of the same threads when they only read
(32 heads over 8, 2048 keys: 80, 87 and 93 % in three runs; two cores of an AMD EPYC, 2026-11-21).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from minimha.equations.problem import Problem
from minimha.kernels.cpu.arguments import BYTE, DOUBLE, INDEX, REAL, TASKS, Buffer, unpacker
from minimha.kernels.cpu.blocks import visible_run, visible_to_heads
from minimha.kernels.cpu.functions import call_function
from minimha.kernels.cpu.jit import jit, jit_inline
from minimha.kernels.cpu.kernel import Kernel, Sizes
from minimha.kernels.cpu.mask import (
    final_score,
    has_softcap_or_bias,
    head_of,
    is_full,
    is_visible,
    key_range,
)
from minimha.kernels.cpu.nonfinite import add_visible_values, has_nonfinite, note_nonfinite
from minimha.kernels.cpu.selection import is_picked, place_in
from minimha.kernels.cpu.simd.bytes import (
    COPIES,
    MOST_KEYS,
    are_multiplied,
    byte_products,
    has_nan,
    round_queries,
    round_weights,
    weighted_bytes,
)
from minimha.kernels.cpu.simd.dot import ROWS_AHEAD, dot_products, weighted_rows
from minimha.kernels.cpu.simd.memory import fetch_add, flat, halves_of, matrix
from minimha.kernels.cpu.simd.softmax import lanes_exp, lanes_max
from minimha.kernels.cpu.simd.vector import VECTORS, panel_width
from minimha.kernels.cpu.storage import (
    Rows,
    find_chosen,
    find_keys,
    float_keys,
    float_rows,
    is_far,
    is_in_one_piece,
    is_read_in_place,
    key_number,
    keys_ahead,
    keys_from,
    most_queries,
    queries_of,
    rows_at,
    scale_columns,
    start_of_chosen,
    write_numbers,
)
from minimha.kernels.cpu.threads import get_num_threads

B_C = 768  # keys per block, at least
SCORES = 9216  # per block, if keys are many: the softmax then interrupts reading less often
NEAR = 32  # keys, or values, that stay in the L1 cache from one use to the next
SUMMED = MOST_KEYS  # keys whose values are summed before the sum is added to O
SPLIT = 512  # keys per split, at least: fewer are not worth a merge
TASKS_PER_THREAD = 4  # at least, so that threads finish together
WORTH_SHARING = 1 << 16  # numbers of K and V; reading fewer is faster than waking another thread
WORTH_SKIPPING = 1 << 22  # numbers of K and V; reading fewer is faster than calling a ``mask_mod``

# Each thread has queries (R, D), scores and visible pairs (R, B_c), a part of O's sum (R, Dv), one
# number per lane, widened rows, and starts of rows of K or V. For 8-bit keys it has weights
# (R, SUMMED) and queries (R, D) in bfloat16. All threads share O (R, Dv), m and l (R) of every
# split of every head.
BUFFERS = dict.fromkeys(("Q", "S", "part", "top", "shift", "total", "wide", "narrow"), Buffer(REAL))
BUFFERS |= {
    "visible": Buffer(BYTE),
    "starts": Buffer(INDEX),
    "parts_O": Buffer(REAL, is_shared=True),
}
BUFFERS |= {"parts_ml": Buffer(DOUBLE, is_shared=True)}
unpack = unpacker(**BUFFERS)
FINISHED = 1  # counter 0 counts tasks; those from 1 on count the finished splits of each head


def sizes(problem: Problem, *, splits: int | None = None, B_c: int | None = None) -> Sizes:
    """Return buffer lengths and threads for ``problem``, with the keys split into ``splits`` parts.

    By default there are enough splits for four tasks per thread, but a split has at least 512 keys.
    A block has ``B_c`` keys, by default ``block_size(problem)``, rounded up to whole panels.
    """
    (_, H, _, D), (_, Hkv, _, Dv) = problem.q.shape, problem.v.shape
    B, Lk = len(problem.kv_lengths), longest_k(problem)
    itemsize, rows = problem.compute.itemsize, H // Hkv * longest_q(problem)
    widest = panel_width(itemsize)
    B_c = -(-(B_c or block_size(problem)) // widest) * widest
    workers = get_num_threads() if B * Hkv * Lk * (D + Dv) >= WORTH_SHARING else 1
    if splits is None:
        wanted = -(-TASKS_PER_THREAD * workers // max(1, B * Hkv))
        splits = max(1, min(wanted, Lk // SPLIT))
    lengths = dict.fromkeys(("S", "visible"), rows * B_c) | {"Q": rows * D, "part": rows * Dv}
    lengths |= dict.fromkeys(("top", "shift", "total"), widest)
    is_copied = problem.dtype.itemsize < itemsize or problem.key_indices is not None
    is_copied = is_copied or problem.k_scale is not None
    lengths |= {"narrow": 0 if problem.k_scale is None else rows * (D * COPIES + SUMMED) // 2}
    lengths |= {"wide": NEAR * max(D, Dv) if is_copied else 0}
    lengths |= {"parts_O": B * Hkv * splits * rows * Dv, "parts_ml": B * Hkv * splits * 2 * rows}
    lengths |= {"counters": FINISHED + B * Hkv, "starts": SUMMED + ROWS_AHEAD}
    return Sizes((splits, B_c), lengths, workers)


def block_size(problem: Problem) -> int:
    """Return the number of keys per block, for which a block has about ``SCORES`` scores.

    The number is at least ``B_C``, unless the longest sequence has fewer keys.
    """
    group = problem.q.shape[1] // problem.k.shape[1]
    most = max(B_C, SCORES // max(1, group * longest_q(problem)))
    return int(max(1, min(longest_k(problem), most)))


def longest_q(problem: Problem) -> int:
    """Return the number of queries of the sequence with the most queries."""
    return int(problem.num_queries.max(initial=0))


def longest_k(problem: Problem) -> int:
    """Return the largest number of keys that are read for any sequence.

    Without sequences it is Lk, and with ``key_indices`` at most the number of indices.
    """
    is_whole = problem.sequences is None
    longest = int(problem.k.shape[2] if is_whole else problem.kv_lengths.max(initial=0))
    if problem.key_indices is None:
        return longest
    return min(longest, int(problem.key_indices.shape[3]) * longest_q(problem))


def decode(line, worker):
    """Run thread number ``worker``: compute splits of keys, and merge heads that are complete."""
    q, k, v, mask, bias, o, O, L, t, (splits, B_c) = unpack(line, worker)
    H, D, Hkv, Dv = q.shape[1], q.shape[3], v.shape[1], v.shape[3]
    most = H // Hkv * most_queries(o)
    while True:
        task = fetch_add(t.counters, TASKS)
        if task >= len(o.queries) * Hkv * splits:
            return
        head, split = task // splits, task % splits
        b, kv, group = head // Hkv, head % Hkv, H // Hkv
        _, _, Lq = queries_of(o, b)
        rows = group * Lq
        load_queries(q, matrix(t.Q, 0, rows, D), o, b, kv, group, t.wide)
        is_narrow = o.is_bfloat16 and are_multiplied(k, D) and are_multiplied(v, Dv)
        if is_narrow:
            narrow = flat(halves_of(t.narrow), rows * SUMMED)
            is_narrow = round_queries(t.Q, rows, D, narrow)
        part = part_of(t, head * splits + split, rows, most, Dv)
        for r in range(rows):
            part.m[r] = -math.inf
            part.l[r] = 0
            for d in range(Dv):
                part.O[r, d] = 0
        start, stop = key_range(0, Lq, o.q_offset[b], o.left, o.right, o.kv_lengths[b])
        start, stop, _ = visible_to_heads(o, b, kv * group, group, Lq, start, stop)
        if o.chosen.size:
            start, stop = places_of(o, b, kv, start, stop)
        size = max(0, stop - start)
        stop = start + (split + 1) * size // splits
        start += split * size // splits
        j1 = start
        while j1 < stop:
            end = min(j1 + B_c, stop)
            j0, j1, all_visible = visible_run(o, b, kv * group, group, Lq, j1, end)
            if j0 < j1:
                n = j1 - j0
                update_rows(
                    k, v, part, mask, bias, o, b, kv, Lq, D, B_c, j0, n, all_visible, is_narrow, t
                )
        if fetch_add(t.counters, TASKS + FINISHED + head) == splits - 1:
            merge(t, splits, o, O, L, b, kv, Hkv, most)


KERNEL = Kernel(
    decode,
    BUFFERS,
    sizes,
    widens=True,
    scales=True,
    skips=True,
    worth_skipping=WORTH_SKIPPING,
    gathers=True,
)
plan, forward = KERNEL.plan, KERNEL.forward


class Part(NamedTuple):
    """Output O (R, Dv), maximum m (R,) and sum l (R,) of R queries over one split of the keys."""

    O: Any
    m: Any
    l: Any


@jit_inline
def part_of(t, n, rows, most, Dv):
    """Return the ``Part`` of split n, which has ``rows`` rows.

    n counts the splits of all sequences and key/value heads. Each split has room for ``most`` rows.
    """
    m = flat(t.parts_ml, 2 * n * most)
    return Part(matrix(t.parts_O, n * most * Dv, rows, Dv), m, flat(m, rows))


@jit_inline
def load_queries(q, Q, o, b, kv, group, copies):
    """Copy the queries of the ``group`` heads that share key/value head ``kv`` into Q.

    Row g · Lq + i is query i of the g-th of these heads.
    """
    (entry, first, Lq), D = queries_of(o, b), q.shape[3]
    for g in range(group):
        for i in range(Lq):
            row = float_rows(q, entry, kv * group + g, first + i, 1, o, copies)
            for d in range(D):
                Q[g * Lq + i, d] = row.line[row.start + d]


@jit_inline
def update_rows(
    k, v, part, mask, bias, o, b, kv, Lq, D, B_c, j0, n, all_visible, is_narrow, t
):  # fmt: skip
    """Update m, l and O of all queries with n keys from j0 on (FlashAttention-2, lines 8 to 10).

    If ``all_visible``, ``mask_mod`` hides none of these keys. With ``key_indices``, j0 and n count
    only the keys that at least one query of the sequence picked. If there are several queries, a
    key is hidden from those that did not pick it. If ``is_narrow``, the thread has the queries in
    bfloat16, too.
    """
    rows, panel = part.O.shape[0], panel_width(t.S.itemsize)
    S, visible = matrix(t.S, 0, rows, B_c), matrix(t.visible, 0, rows, B_c)
    lowest = S.dtype.type(-math.inf)
    is_direct, starts = is_read_in_place(k, o), t.starts
    size, Q = piece_size(is_direct, rows), flat(halves_of(t.narrow), rows * SUMMED)
    for near in range(0, n, size):  # line 8
        depth, far = min(size, n - near), is_far(k)
        if is_direct and is_regular(o):
            keys = keys_from(k, o, b, kv, j0 + near)
            if is_narrow:
                byte_products(flat(k, 0), keys, 0, Q, t.S, near, B_c, depth, rows, D, far)
            else:
                dot_products(flat(k, 0), keys, 0, t.Q, 0, D, t.S, near, B_c, depth, rows, D, far)
            continue
        find_rows(k, o, b, kv, j0 + near, depth, starts)
        if is_narrow:
            byte_products(flat(k, 0), starts, 0, Q, t.S, near, B_c, depth, rows, D, far)
        elif is_direct:
            dot_products(flat(k, 0), starts, 0, t.Q, 0, D, t.S, near, B_c, depth, rows, D, far)
        else:
            K = float_keys(k, starts, depth, o, t.wide)
            dot_products(K.line, starts, 0, t.Q, 0, D, t.S, near, B_c, depth, rows, D, False)
    scale_columns(k, o.k_scale, S, o, b, kv, j0, n)
    is_partial = mask.size > 0 or bias.size > 0 or o.score_mod != 0
    is_partial = is_partial or (o.mask_mod != 0 and not all_visible)
    is_partial = is_partial or (o.chosen.size > 0 and Lq > 1)
    first, last = key_number(o, b, kv, j0), key_number(o, b, kv, j0 + n - 1)
    for i in range(Lq):
        offset, length = o.q_offset[b], o.kv_lengths[b]
        full = is_full(i, i + 1, first, last + 1, offset, o.left, o.right, length)
        is_partial = is_partial or not full
    apply_options(S, visible, mask, bias, o, b, kv, Lq, j0, n, is_partial)
    padded = -(-n // panel) * panel
    for r in range(rows):  # line 9
        for j in range(n, padded):
            S[r, j] = lowest
        lanes_max(t.S, r * B_c, padded // panel, VECTORS, t.top)
        m_old = part.m[r]
        largest = S.dtype.type(m_old)
        for lane in range(panel):
            largest = max(largest, t.top[lane])
        shift = largest if largest > lowest else S.dtype.type(0)
        for lane in range(panel):
            t.shift[lane] = shift
        lanes_exp(t.S, r * B_c, padded // panel, VECTORS, 1, t.shift, t.total)
        total = S.dtype.type(0)
        for lane in range(panel):
            total += t.total[lane]
        correction = math.exp(m_old - shift)
        part.m[r] = largest
        part.l[r] = correction * part.l[r] + total
        if correction != 1:
            for d in range(part.O.shape[1]):
                part.O[r, d] *= S.dtype.type(correction)
    scale_columns(v, o.v_scale, S, o, b, kv, j0, n)
    for begin in range(0, n, SUMMED):  # line 10
        add_values(
            v, part.O, o, b, kv, j0, begin, min(SUMMED, n - begin), is_partial, is_narrow, S,
            visible, t,
        )  # fmt: skip


@jit_inline
def piece_size(is_direct, rows):
    """Return the number of rows of k or v to process at a time, for ``rows`` queries.

    ``is_direct`` means that k or v is read without widening. With one, two or four queries, each
    row is then read once, and small pieces would only interrupt reading. Otherwise each row is read
    twice, and a small piece is still in the L1 cache the second time.
    """
    return SUMMED if is_direct and (rows == 1 or rows == 2 or rows == 4) else NEAR


@jit_inline
def add_values(v, O, o, b, kv, j0, begin, n, is_partial, is_narrow, S, visible, t):
    """Sum P V over n keys of a block, from key ``begin`` on, and then add the sum to O.

    Short sums lose fewer digits. If ``is_partial``, nonfinite values of hidden keys are left out.
    If ``is_narrow``, 8-bit values are multiplied by weights in bfloat16.
    """
    (rows, Dv), B_c, P, part, starts = O.shape, S.shape[1], t.S, t.part, t.starts
    if is_narrow and is_regular(o):
        keys = keys_from(v, o, b, kv, j0 + begin)
        if add_bytes(v, keys, O, P, begin, B_c, n, is_partial, t.narrow):
            return
    elif is_narrow:
        find_rows(v, o, b, kv, j0 + begin, n, starts)
        if add_bytes(v, starts, O, P, begin, B_c, n, is_partial, t.narrow):
            return
    for x in range(rows * Dv):
        part[x] = 0
    # If keys are hidden, ``has_nonfinite`` first reads the values as floats.
    is_direct, far = is_read_in_place(v, o) and not is_partial, is_far(v)
    is_scattered = o.chosen.size > 0
    size = piece_size(is_direct or (v.itemsize == O.itemsize and not is_scattered), rows)
    near = begin
    while near < begin + n:
        depth = min(size, begin + n - near)
        if is_partial and not is_scattered:
            depth = min(depth, keys_ahead(o, j0 + near))
        if is_direct and is_regular(o):
            keys = keys_from(v, o, b, kv, j0 + near)
            weighted_rows(P, near, B_c, flat(v, 0), keys, 0, part, 0, Dv, rows, Dv, depth, far)
            near += depth
            continue
        find_rows(v, o, b, kv, j0 + near, depth, starts)
        if is_direct:
            weighted_rows(P, near, B_c, flat(v, 0), starts, 0, part, 0, Dv, rows, Dv, depth, far)
        else:
            V = float_keys(v, starts, depth, o, t.wide)
            if is_partial and has_nonfinite(V, depth, Dv):
                add_visible_values(S, visible, V, matrix(part, 0, rows, Dv), near, depth)
            else:
                weighted_rows(P, near, B_c, V.line, starts, 0, part, 0, Dv, rows, Dv, depth, False)
        near += depth
    for r in range(rows):
        for d in range(Dv):
            O[r, d] += part[r * Dv + d]


@jit_inline
def add_bytes(v, starts, O, P, p, p_row, n, is_partial, narrow):
    """Add P V to O with weights in bfloat16, and return True.

    P's rows begin at P[p]. If ``is_partial``, keys may be hidden. If V then has NaN, the function
    only returns False.
    """
    (rows, Dv), line, weights = O.shape, flat(v, 0), halves_of(narrow)
    if is_partial and has_nan(line, starts, n, Dv):
        return False
    round_weights(P, p, p_row, rows, n, weights)
    weighted_bytes(weights, line, starts, 0, flat(O, 0), Dv, n, rows, Dv, is_far(v))
    return True


@jit_inline
def is_regular(o):
    """Return True if all rows that are read of a sequence have one constant stride."""
    return is_in_one_piece(o) and not o.chosen.size


@jit_inline
def find_rows(X, o, b, kv, j, n, starts):
    """Call ``find_keys`` or, if the problem has ``key_indices``, ``find_chosen``."""
    if o.chosen.size:
        find_chosen(X, o, b, kv, j, n, starts)
    else:
        find_keys(X, o, b, kv, j, n, starts)


@jit
def places_of(o, b, kv, start, stop):
    """Return which items of ``o.chosen`` are keys from ``start`` to ``stop``, as start and stop."""
    keys, length = flat(o.chosen, start_of_chosen(o, b, kv)), o.chosen.shape[2]
    return place_in(keys, length, start), place_in(keys, length, max(start, stop))


@jit
def call_for_keys(function, X, r, o, b, kv, h, i, j0, n):
    """Call ``score_mod`` or ``mask_mod`` for row r of X, which is query i of head h.

    The row has n keys from j0 on, counted as in ``update_rows``.
    """
    x = r * X.shape[1]
    if not o.chosen.size:
        call_function(function, X, x, o, b, h, i, j0, 1, n, n, 0)
        return
    for j in range(n):
        key = key_number(o, b, kv, j0 + j)
        call_function(function, X, x + j, o, b, h, i, key, 1, 1, 1, 0)


@jit
def apply_options(S, visible, mask, bias, o, b, kv, Lq, j0, n, is_partial):
    """Apply scale, soft cap, bias and ALiBi to S; if ``is_partial``, also ``score_mod`` and masks.

    ``is_partial`` must be True if there is a ``score_mod`` or any pair may be hidden. Then hidden
    scores become -inf, and ``visible`` becomes 1 for visible pairs, else 0.
    """
    scale, is_scaled_only = S.dtype.type(o.scale), not has_softcap_or_bias(bias, o)
    (entry, first, _), first_head = queries_of(o, b), kv * (S.shape[0] // Lq)
    for r in range(S.shape[0]):
        h, i = first_head + r // Lq, r % Lq
        head, row = head_of(o, b, h), first + i
        if is_scaled_only:  # a separate loop, which LLVM vectorizes
            for j in range(n):
                S[r, j] *= scale
        else:
            for j in range(n):
                key = key_number(o, b, kv, j0 + j)
                S[r, j] = final_score(S[r, j], bias, head, entry, h, row, key)
        if is_partial:
            for j in range(n):
                key = key_number(o, b, kv, j0 + j)
                visible[r, j] = is_visible(mask, bias, head, entry, h, row, key)
                if Lq > 1:
                    visible[r, j] &= is_picked(o, entry, h, row, key)
            if o.mask_mod:
                call_for_keys(o.mask_mod, visible, r, o, b, kv, h, i, j0, n)
            if o.score_mod:
                call_for_keys(o.score_mod, S, r, o, b, kv, h, i, j0, n)
            for j in range(n):
                visible[r, j] &= S[r, j] != -math.inf or o.score_mod == 0
                if not visible[r, j]:
                    S[r, j] = -math.inf


@jit
def merge(t, splits, o, O, L, b, kv, Hkv, most):
    """Merge the splits of one key/value head into O and L, with the sink as one more split."""
    (entry, first, Lq), Dv, real = queries_of(o, b), O.shape[3], L.dtype.type
    group, total = O.shape[1] // Hkv, t.part
    rows, split = group * Lq, (b * Hkv + kv) * splits
    for r in range(rows):
        h, i = kv * group + r // Lq, first + r % Lq
        m = float(o.sinks[h])
        for s in range(splits):
            m = max(m, part_of(t, split + s, rows, most, Dv).m[r])
        shift = m if m > -math.inf else 0.0
        l = math.exp(o.sinks[h] - shift)
        for d in range(Dv):
            total[d] = 0
        for s in range(splits):
            part = part_of(t, split + s, rows, most, Dv)
            correction = math.exp(part.m[r] - shift)
            l += correction * part.l[r]
            for d in range(Dv):
                total[d] += real(correction) * part.O[r, d]
        inverse = real(1 / l) if l != 0 else real(0)
        for d in range(Dv):
            total[d] *= inverse
        note_nonfinite(Rows(total, 0, Dv), Dv, t.counters)
        row = rows_at(O, entry, h, i)
        write_numbers(total, 0, row.line, row.start, Dv, o)
        L[entry, h, i] = m + math.log(l) if l != 0 else -math.inf
