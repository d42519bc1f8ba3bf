"""Keys and values that stay in files: np.memmap and zarr, within a limit on memory."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import assert_as_good_as_plain, assert_close_to_exact, random_problems

from minimha import attention, block_mask
from minimha.equations import parts
from minimha.explain import Trace

LIMIT = 400  # seconds; a kernel may have to be compiled
BACKENDS = ("dense", "tiled", "cpu")

# 16 heads of zeros, but for one key and one value each; so an output is known in closed form.
WITHIN_256_MIB = """
import resource, sys
import numpy as np
from minimha import attention

folder, backend, dtype, num_keys = sys.argv[1:]
H, D, Lk, dtype = 16, 64, int(num_keys), np.dtype(dtype)
if backend == "cpu":
    attention(np.ones((1, H, 1, D)), np.ones((1, H, 1, D), dtype), np.ones((1, H, 1, 1), dtype))
maps = {}
for name, width in (("k", D), ("v", 1)):
    with open(f"{folder}/{name}", "wb") as file:
        file.truncate(H * Lk * width * dtype.itemsize)
    maps[name] = np.memmap(f"{folder}/{name}", dtype, "r+", shape=(1, H, Lk, width))
score = np.log(Lk - 1)
maps["k"][:, :, Lk // 3, 0], maps["v"][:, :, Lk // 3] = score, 2
q = np.eye(1, D) * np.ones((1, H, 1, 1))
resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, 256 << 20))
options = {} if backend == "auto" else {"backend": backend}
output = attention(q.astype(dtype), maps["k"], maps["v"], scale=1.0, **options)
assert output.shape == (1, H, 1, 1) and output.dtype == dtype
assert abs(output - 1).max() < 16 * np.finfo(dtype).eps, output
"""


def run(*arguments):
    settings = os.environ | {"OMP_NUM_THREADS": "1"}  # each thread of BLAS has memory of its own
    done = subprocess.run(
        [sys.executable, "-c", WITHIN_256_MIB, *map(str, arguments)],
        env=settings, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux limits memory by RLIMIT_DATA"
)


@linux
def test_a_gib_of_keys_in_256_mib(tmp_path):
    run(tmp_path, "auto", "float32", 1 << 18)


@linux
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_a_gib_of_keys_that_are_widened_in_256_mib(tmp_path, backend):
    run(tmp_path, backend, "float16", 1 << 18)


def mapped(folder, name, array):
    path = folder / name
    array.tofile(path)
    return np.memmap(path, array.dtype, "r", shape=array.shape)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_map_gives_what_an_array_gives(tmp_path, backend, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK", 1 << 12)
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 4, 5, 8)), *rng.normal(size=(2, 2, 2, 300, 8))
    maps = [mapped(tmp_path, name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    options = {"is_causal": True, "q_offset": [290, 20], "backend": backend, "return_lse": True}
    pairs = zip(attention(*maps, **options), attention(q, k, v, **options), strict=True)
    for found, expected in pairs:
        assert type(found) is np.ndarray
        np.testing.assert_allclose(found, expected, rtol=1e-12)


# As long as what they are indexed by: with what a part counts, an index is wrong or out of bounds.
BATCHES, HEADS, QUERIES, KEYS = (np.cos(np.arange(n) * n) for n in (2, 4, 20, 120))
DOCUMENTS = np.arange(120) // 30


def from_tables(s, b, h, i, j):
    return s + BATCHES[b] * QUERIES[i - 90] + HEADS[h] * KEYS[j]


def of_a_document(b, h, i, j):
    return (DOCUMENTS[i] == DOCUMENTS[j]) | (j < 9 * h + b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@settings(max_examples=settings.default.max_examples // 10)
@given(data=st.data())
def test_functions_count_from_the_beginning_of_the_whole(backend, dtype, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    Lq = data.draw(st.sampled_from([1, 4, 20]))
    q = rng.normal(size=(2, 4, Lq, 8)).astype(dtype)
    k, v = rng.normal(size=(2, 2, 2, 120, 8)).astype(dtype)
    options = {
        "q_offset": 90,
        "score_mod": data.draw(st.sampled_from([None, from_tables])),
        "mask_mod": of_a_document,
        "window_size": data.draw(st.sampled_from([None, (60, 2)])),
        "kv_lengths": data.draw(st.sampled_from([None, np.array([110, 20])])),
    }
    given_options = dict(options)
    if data.draw(st.booleans()):
        given_options["mask_mod"] = block_mask(of_a_document, Lq, 120, B=2, H=4, q_offset=90)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(parts, "BLOCK", data.draw(st.integers(1, 1 << 16)))
        patch.setattr(parts, "SCORES", data.draw(st.integers(1, 1 << 14)))
        maps = [mapped(Path(folder), name, x) for name, x in (("k", k), ("v", v))]
        found = attention(q, *maps, **given_options, backend=backend, return_lse=True)
    assert_close_to_exact(q, k, v, options, *found, merges=k.shape[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_for_stored_keys_gets_its_sentence(tmp_path, backend):
    x = np.ones((1, 1, 40, 4))
    k = mapped(tmp_path, "k", x)
    with pytest.raises(IndexError, match="index 2 is out of bounds for axis 0 with size 2"):
        attention(x, k, x, score_mod=lambda s, b, h, i, j: s + BATCHES[j], backend=backend)
    with pytest.raises(TypeError, match="mask_mod returned int64: expected bool, True where a"):
        attention(x, k, x, mask_mod=lambda b, h, i, j: j - i, backend=backend)
    mask = block_mask(lambda b, h, i, j: i >= j, 40, 39)
    with pytest.raises(ValueError, match=r"BlockMask for \(B, H, Lq, Lk\) = .*: expected one for"):
        attention(x, k, x, mask_mod=mask, backend=backend)


@pytest.mark.parametrize("shape", [(9, 4), (2, 9, 4), (1, 2, 9, 4)])
def test_ranks_come_out_as_they_came(tmp_path, shape):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    output, lse = attention(x, mapped(tmp_path, "k", x), x, return_lse=True)
    assert (output.shape, lse.shape, lse.dtype) == (shape, shape[:-1], np.float32)


def test_16_bit_numbers_are_rounded_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK", 1)
    q, k, v = np.random.default_rng(2).normal(size=(3, 1, 1, 50, 4)).astype(np.float16)
    found = attention(q, mapped(tmp_path, "k", k), mapped(tmp_path, "v", v))
    assert found.dtype == np.float16
    exact = attention(*(x.astype(np.float64) for x in (q, k, v)))
    assert (abs(found - exact) <= abs(exact) * 2**-11 + 1e-6).all()


def test_a_tap_hears_every_step_of_a_small_map(tmp_path):
    x = np.eye(3)
    trace = Trace()
    attention(x, mapped(tmp_path, "k", x), x, tap=trace)
    assert "weights" in [step.name for step in trace.steps]


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_bias"])
def test_a_file_that_became_shorter_is_refused_before_it_is_read(tmp_path, name):
    x = np.ones((1, 1, 4096, 4), np.float32)
    arrays = {"q": x, "k": x, "v": x, "attn_bias": np.zeros((4096, 4096), np.float32)}
    arrays[name] = mapped(tmp_path, name, arrays[name])
    os.truncate(tmp_path / name, 100)
    sentence = f"^{name} is a map of .*{name}, which has become shorter than its array: expected"
    with pytest.raises(ValueError, match=sentence):
        attention(**arrays)


def test_shapes_that_do_not_match_are_refused_in_the_same_words(tmp_path):
    x = np.ones((1, 1, 6, 4))
    k = mapped(tmp_path, "k", x)
    with pytest.raises(ValueError, match="v has Lk=5 but k has Lk=6: every key needs one value"):
        attention(x, k, x[:, :, :5])
    with pytest.raises(ValueError, match="with Lq=3 and Lk=6 needs q_offset"):
        attention(x[:, :, :3], k, x, is_causal=True)
    with pytest.raises(ValueError, match="backend is 'gpu': expected auto, dense"):
        attention(x, k, x, backend="gpu")
    with pytest.raises(TypeError, match="k has dtype <U1: expected integers, float16"):
        attention(x, mapped(tmp_path, "t", np.full((1, 1, 6, 4), "a")), x)


@given(problem=random_problems(np.float64))
def test_every_option_over_a_store(problem):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra zarr)")
    q, k, v, options = problem
    assume(k.size and v.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "BLOCK", 1)
        stores = [zarr.array(x, chunks=(1, 1, 2, x.shape[3]), store={}) for x in (k, v)]
        found = attention(q, *stores, **options, return_lse=True)
    assert_as_good_as_plain(q, k, v, options, *found, merges=k.shape[2])


def test_a_store_is_read_once_and_only_where_a_query_sees_it(tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra zarr)")
    monkeypatch.setattr(parts, "BLOCK", 1)
    x = np.random.default_rng(3).normal(size=(1, 1, 8, 2))
    k = zarr.create_array(tmp_path / "k", data=x, chunks=(1, 1, 2, 2), compressors=None)
    expected = attention(x[:, :, :2], x, x, is_causal=True, q_offset=2)
    for chunk in (2, 3):  # what these hold, no query sees
        (tmp_path / "k" / "c" / "0" / "0" / str(chunk) / "0").write_bytes(b"broken")
    found = attention(x[:, :, :2], k, x, is_causal=True, q_offset=2)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    with pytest.raises(ValueError, match="k cannot be read, keys 4 to 6: "):
        attention(x[:, :, :2], k, x)
    picks = [[3, 0], [1, -1]]
    found = attention(x[:, :, :2], k, x, key_indices=picks)
    np.testing.assert_allclose(found, attention(x[:, :, :2], x, x, key_indices=picks), rtol=1e-12)


FAR = 2**31 - 1  # the largest q_offset


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("q_offset", "options"),
    [
        (-FAR, {"window_size": (None, FAR)}),
        (FAR, {"is_causal": True, "alibi_slopes": [2.0**-30, 2.0**-31]}),
        (-FAR, {"alibi_slopes": [2.0**-30, 2.0**-31]}),
        ([-FAR, FAR], {"score_mod": lambda s, b, h, i, j: s + (i % 7) * (j % 5)}),
        (-FAR, {"is_causal": True}),
    ],
)
def test_the_farthest_offsets_over_several_blocks(
    tmp_path, monkeypatch, q_offset, options, backend
):
    monkeypatch.setattr(parts, "BLOCK", 1 << 10)
    monkeypatch.setattr(parts, "SCORES", 50)
    rng = np.random.default_rng(4)
    q, k, v = rng.normal(size=(2, 2, 9, 4)), *rng.normal(size=(2, 2, 2, 40, 4))
    maps = [mapped(tmp_path, name, x) for name, x in (("k", k), ("v", v))]
    options = options | {"q_offset": q_offset, "backend": backend, "return_lse": True}
    pairs = zip(attention(q, *maps, **options), attention(q, k, v, **options), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("raised", "error", "sentence"),
    [
        (MemoryError(), MemoryError, "^v does not fit into memory, keys 2 to 4: its chunks are"),
        (MemoryError("9 GiB"), MemoryError, "^v does not fit into memory, keys 2 to 4: 9 GiB"),
        (RuntimeError("no"), ValueError, "^v cannot be read, keys 2 to 4: RuntimeError: no"),
    ],
)
def test_what_a_store_raises_gets_a_sentence(monkeypatch, raised, error, sentence):
    class Stored:
        chunks, shape, dtype = (1, 1, 2, 2), (1, 1, 4, 2), np.dtype(np.float64)

        def __getitem__(self, index):
            if index[1].start:
                raise raised
            return np.ones((1, 1, 2, 2))

    Stored.__module__ = "zarr"
    monkeypatch.setattr(parts, "BLOCK", 1)
    x = np.ones((1, 1, 4, 2))
    with pytest.raises(error, match=sentence):
        attention(x, x, Stored())
