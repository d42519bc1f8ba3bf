"""Problems in parts: blocks and stripes of queries and keys, merged, are the whole problem."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import assert_as_good_as_plain, random_problems

from minimha import attention, merge
from minimha.equations import parts
from minimha.equations.parts import (
    Part,
    in_blocks,
    options_of,
    outline,
    placed,
    without_keys,
)


def assert_whole(problem, O, L):
    """O and L of a problem that was computed in parts of one key or more."""
    assert_as_good_as_plain(*problem, O, L, merges=problem[1].shape[2])


def attend(q, k, v, **options):
    return attention(q, k, v, return_lse=True, **options)


def in_slices(problem, rows, keys, batch=None, heads=None, **how):
    """O and L of the whole problem from all pairs of ``rows`` and ``keys``; which of them see.

    ``batch`` is in slices too, and so are ``heads``, those of the keys.
    """
    q, k, v, options = problem
    whole = outline({"q": q, "k": k, "v": v, **options})
    (B, H, Lq, _), (_, Hkv, _, Dv) = q.shape, v.shape
    O, L, seen = np.zeros((B, H, Lq, Dv)), np.zeros((B, H, Lq)), []
    for b, kv, r in product(batch or [slice(0, B)], heads or [slice(0, Hkv)], rows):
        h = slice(kv.start * H // Hkv, kv.stop * H // Hkv)
        sinks = None if whole.sinks is None else whole.sinks[h]
        found = [without_keys((*O[b, h, r].shape[:3], Dv), sinks)]
        for s in keys:
            part = Part(b, h, r, s)
            of_part = options_of(whole, options, part)
            if of_part is not None:
                seen.append((r, s))
                of_part |= placed(whole.functions, part) | how
                found.append(attend(q[b, h, r], k[b, kv, s], v[b, kv, s], **of_part))
        O[b, h, r], L[b, h, r] = merge(found)
    return O, L, seen


@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
@given(problem=random_problems(np.float64), data=st.data())
def test_parts_of_every_axis_give_the_whole_back(backend, problem, data):
    q, k, _, _ = problem
    sizes = k.shape[0], k.shape[1], q.shape[2], k.shape[2]
    batch, heads, rows, keys = (slices(n, data.draw(st.integers(1, 4))) for n in sizes)
    O, L, _ = in_slices(problem, rows, keys, batch, heads, backend=backend)
    assert_whole(problem, O, L)


def slices(length, size):
    return [slice(n, min(n + size, length)) for n in range(0, length, size)]


@given(problem=random_problems(np.float64, has_functions=False), num_stripes=st.integers(2, 4))
def test_stripes_of_queries_and_keys_give_the_whole_back(problem, num_stripes):
    q, k, v, options = problem
    offset = np.asarray(options["q_offset"]).ravel()[0]
    problem = q, k, v, options | {"alibi_slopes": None, "q_offset": int(offset)}
    stripes = [slice(n, None, num_stripes) for n in range(num_stripes)]
    assert_whole(problem, *in_slices(problem, stripes, stripes)[:2])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["00", "02", "04", "20", "22", "24", "40", "42", "44"]),
        ({"is_causal": True}, ["00", "20", "22", "40", "42", "44"]),
        ({"window_size": (1, 0)}, ["00", "20", "22", "42", "44"]),
        ({"kv_lengths": 3}, ["00", "02", "20", "22", "40", "42"]),
        ({"is_causal": True, "q_offset": -10}, []),
    ],
)
def test_parts_that_no_query_sees_are_known_before_anything_is_read(options, expected):
    x = np.ones((1, 1, 6, 2))
    slices = [slice(n, n + 2) for n in (0, 2, 4)]
    seen = in_slices((x, x, x, options), slices, slices)[2]
    assert [f"{r.start}{s.start}" for r, s in seen] == expected


def test_causal_stripes_have_equal_work():
    x = np.ones((1, 1, 12, 2))
    stripes = [slice(n, None, 3) for n in range(3)]
    O, _, seen = in_slices((x, x, x, {"is_causal": True}), stripes, stripes)
    assert len(seen) == 9
    np.testing.assert_allclose(O, 1, rtol=1e-15)


@pytest.mark.parametrize("holds_scores", [False, True])
@given(problem=random_problems(np.float64), data=st.data())
def test_blocks_of_any_size(holds_scores, problem, data):
    q, k, v, options = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "BLOCK", data.draw(st.integers(1, 500)))
        patch.setattr(parts, "SCORES", data.draw(st.integers(1, 100)))
        arguments = {"q": q, "k": k, "v": v, **options}
        O, L = in_blocks(attend, outline(arguments), arguments, holds_scores)
    assert_whole(problem, O, L)


def test_a_block_is_whole_chunks_of_the_store(monkeypatch):
    class Stored(np.ndarray):
        chunks = (1, 1, 3, 2)

    monkeypatch.setattr(parts, "BLOCK", 8 * (2 + 2) * 7)  # 7 keys in float64
    x = np.ones((1, 1, 10, 2)).view(Stored)
    heard = []

    def listening(q, k, v, **options):
        heard.append(k.shape[2])
        return attend(q, k, v, **options)

    arguments = {"q": np.ones((1, 1, 1, 2)), "k": x, "v": x}
    in_blocks(listening, outline(arguments), arguments, holds_scores=False)
    assert heard == [6, 4]
