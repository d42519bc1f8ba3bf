"""Grouped query heads: the numbers of repeated heads, without the memory for them."""

import tracemalloc

import numpy as np
import pytest
from problems import run


def grouped(Lq, Lk, H=8, Hkv=2, D=16, Dv=24, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = ((2, H, Lq, D), (2, Hkv, Lk, D), (2, Hkv, Lk, Dv))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("name", ["dense", "tiled"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("Lq", "Lk"), [(1, 130), (7, 7), (130, 300), (0, 5), (5, 0)])
@pytest.mark.parametrize("poison", [0.5, np.nan, np.inf])
def test_heads_in_groups_have_the_bits_of_repeated_heads(Lq, Lk, poison, dtype, name):
    q, k, v = grouped(Lq, Lk, dtype=dtype)
    v[:, 1, 1:3, 5] = poison
    given = {"is_causal": True, "q_offset": 2}
    repeated = run(name, q, k.repeat(4, axis=1), v.repeat(4, axis=1), **given)
    for got, wanted in zip(run(name, q, k, v, **given), repeated, strict=True):
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["dense", "tiled"])
def test_keys_and_values_are_not_copied_for_each_query_head(name):
    q, k, v = grouped(1, 4096, H=32)
    tracemalloc.start()
    try:
        run(name, q, k, v)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2 * 32 * 4096 * 4  # eight numbers per score; a key and a value are 40
