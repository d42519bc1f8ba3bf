"""Matrices as files store them: what their bytes mean, and how they stand in for arrays."""

import numpy as np
import pytest
from stored_weights import ALL, GGML, columns_of, drawn, ggml

from minimha.equations.stored import FORMATS, Stored


def stored(name, rows=7, columns=96):
    data, scales, numbers = drawn(name, rows, columns_of(name, columns))
    return Stored.of_rows(name, data, scales), numbers


@pytest.mark.parametrize("name", ALL)
def test_bytes_mean_what_others_read_in_them(name):
    pytest.importorskip("gguf", reason="gguf, which reads the formats, is missing")
    W, numbers = stored(name)
    assert (W.shape, W.T.shape, len(W)) == (numbers.shape, numbers.shape[::-1], 7)
    assert (W.size, W.ndim, W.dtype) == (numbers.size, 2, np.float32)
    np.testing.assert_array_equal(np.asarray(W), numbers.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(W.T), numbers.T.astype(np.float32))


@pytest.mark.parametrize("name", GGML)
def test_every_byte_is_read_as_gguf_reads_it(name):
    pytest.importorskip("gguf", reason="gguf, which reads the formats, is missing")
    size, nbytes, _ = FORMATS[name]
    data = np.random.default_rng(1).integers(0, 256, (300, 256 // size * nbytes), np.uint8)
    np.testing.assert_array_equal(np.asarray(Stored.of_rows(name, data)), ggml(name, data))


@pytest.mark.parametrize("name", ["bfloat16", "Q4_K", "MXFP4"])
def test_rows_are_chosen_as_an_arrays_rows(name):
    pytest.importorskip("gguf", reason="gguf, which reads the formats, is missing")
    W, numbers = stored(name)
    for key in (slice(2, 5), slice(1, None, 2)):
        assert isinstance(W[key], Stored)
        np.testing.assert_array_equal(np.asarray(W[key]), numbers[key])
        assert isinstance(W.T[:, key], Stored)
        np.testing.assert_array_equal(np.asarray(W.T[:, key]), numbers.T[:, key])
    for key in ([5, 0, 0], [[1, 2], [3, -1]], 4, (2, slice(3, 9))):
        key = np.array(key) if isinstance(key, list) else key
        np.testing.assert_array_equal(W[key], numbers[key])
    np.testing.assert_array_equal(W.T[3], numbers.T[3])
    order = np.array([6, 0, 3, 3])
    np.testing.assert_array_equal(np.asarray(W.reordered(order)), numbers[order])


def test_an_array_of_another_dtype_or_shape_is_a_copy():
    W, numbers = stored("float16")
    assert W.astype(np.float32, copy=False) is W
    assert W.astype(np.float64).dtype == np.float64
    np.testing.assert_array_equal(W.T.reshape(3, -1), numbers.T.reshape(3, -1))
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # NumPy 1 copies where it has to
        with pytest.raises(ValueError, match="copy=False"):
            np.array(W, copy=False)
    assert W.nbytes == 2 * W.size
    assert repr(W.T) == "Stored(float16, shape=(96, 7))"
