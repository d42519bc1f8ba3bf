"""Random matrices as files store them, and their numbers, widened by other means than minimha's."""

import ml_dtypes
import numpy as np

PLAIN = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# For each of ggml's formats: numbers and bytes of a block, and where its float16 scales are.
GGML = {
    "Q8_0": (32, 34, (0,)), "Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)), "Q5_1": (32, 24, (0, 2)), "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,)),
}  # fmt: skip
ALL = (*PLAIN, *GGML, "MXFP4")


def columns_of(name, columns):
    """``columns``, or the next smaller number of them that fills blocks."""
    size = 1 if name in PLAIN else GGML.get(name, (32,))[0]
    return columns // size * size or size


def drawn(name, rows, columns, seed=0):
    """Bytes (rows, n), the bytes of scales or None, and the numbers in float64."""
    rng = np.random.default_rng(seed)
    if name in PLAIN:
        numbers = rng.normal(size=(rows, columns)).astype(PLAIN[name])
        return numbers.view(np.uint8).reshape(rows, -1), None, numbers.astype(np.float64)
    if name == "MXFP4":
        stored = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        scales = rng.integers(120, 131, (rows, columns // 32), np.uint8)
        return stored, scales, mxfp4(stored, scales)
    size, nbytes, at = GGML[name]
    blocks = rng.integers(0, 256, (rows * columns // size, nbytes), np.uint8)
    for first in at:
        scale = rng.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16)
        blocks[:, first : first + 2] = scale.view(np.uint8)
    stored = blocks.reshape(rows, -1)
    return stored, None, ggml(name, stored)


def ggml(name, stored):
    """The numbers that the package gguf reads."""
    from gguf import GGMLQuantizationType, quants

    with np.errstate(all="ignore"):
        return quants.dequantize(stored, GGMLQuantizationType[name]).astype(np.float64)


def mxfp4(stored, scales):
    """The numbers of MXFP4, one after the other, from the words of its specification."""
    result = np.empty((len(stored), 2 * stored.shape[1]))
    for row, at in np.ndindex(*result.shape):
        byte = int(stored[row, at // 2])
        four = byte >> 4 if at % 2 else byte & 15
        exponent, mantissa = four >> 1 & 3, four & 1
        size = 2 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        result[row, at] = (-size if four & 8 else size) * 2.0 ** (int(scales[row, at // 32]) - 127)
    return result
