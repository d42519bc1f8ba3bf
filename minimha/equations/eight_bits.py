"""Check, slice, widen and compute the scales of 8-bit keys and values.

A cache stores each key and value as 8-bit numbers and a factor, its scale. A key is k · k_scale,
computed in the dtype of intermediates: 8-bit numbers are widened exactly, and the product is
rounded once. Scales have the form (B, Hkv, Lk), or (num_pages, Hkv, page_size) for paged keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import as_floating, cast, name_of, of_one_dtype, rectangular
from minimha.equations.arrays import FLOAT8

LARGEST = {"int8": 127.0, FLOAT8: 448.0}  # each dtype's largest number
LIMIT = 2.0**64  # of a scale: sums of 2^31 values stay far inside float32's range
SCALES = {"k": "k_scale", "v": "v_scale"}


def is_eight_bit(dtype: Any) -> bool:
    """Return whether ``dtype`` is int8 or float8_e4m3fn, the dtypes of keys with scales."""
    return dtype.itemsize == 1 and dtype.name in LARGEST


def eight_bit_arrays(given: Mapping[str, Any]) -> dict[str, NDArray[Any]] | None:
    """Return q as floats and k and v as 8-bit numbers, or None if k and v have no scales.

    ``given`` has q, k, v, k_scale and v_scale. Raises the errors of ``is_scaled``.
    """
    arrays = {name: rectangular(name, given[name], hint=" and attn_mask") for name in "qkv"}
    if not is_scaled({**given, **arrays}):
        return None
    return arrays | of_one_dtype(q=arrays["q"])


def is_scaled(given: Mapping[str, Any]) -> bool:
    """Return whether k and v are 8-bit with scales; raise TypeError for one without the other.

    If k or v is 8-bit, also raises TypeError for 8-bit q, and for k and v of different dtypes. But
    int8 keys and values without scales are plain integers if the queries are integers too; then the
    result is False. Only the dtypes of q, k and v are read.
    """
    scales = {scale: given.get(scale) for scale in SCALES.values()}
    dtypes = {name: given[name].dtype for name in "qkv"}
    stored = {name: is_eight_bit(dtypes[name]) for name in SCALES}
    if all(scale is None for scale in scales.values()):
        has_float8 = any(stored[name] and dtypes[name].kind != "i" for name in SCALES)
        if not any(stored.values()) or (dtypes["q"].kind in "iu" and not has_float8):
            return False
    if is_eight_bit(dtypes["q"]):
        raise TypeError(
            f"{name_of('q')} has dtype {dtypes['q']}: queries have no scale, expected float16, "
            f"bfloat16, float32 or float64"
        )
    for name, scale in SCALES.items():
        if not stored[name] and scales[scale] is not None:
            raise TypeError(
                f"{name_of(scale)} is given but {name_of(name)} has dtype {dtypes[name]}: scales "
                f"belong to 8-bit numbers, {' or '.join(LARGEST)}"
            )
        if stored[name] and scales[scale] is None:
            raise TypeError(
                f"{name_of(name)} has dtype {dtypes[name]} but {name_of(scale)} is None: expected "
                f"the factor of its 8-bit numbers, which is 1.0 if they are the numbers themselves"
            )
    if dtypes["k"] != dtypes["v"]:
        raise TypeError(
            f"{name_of('k')} is {dtypes['k']} and {name_of('v')} is {dtypes['v']}: if one has "
            f"8 bits, both must have the same dtype"
        )
    return True


def scales_of(name: str, value: Any, stored: NDArray[Any], rank: int, compute: Any) -> NDArray[Any]:
    """Return the scales of ``stored`` (B, Hkv, Lk, D), checked and broadcast to (B, Hkv, Lk).

    ``value`` is one number, or one per head (Hkv,), or one per token and head. In the last case, it
    has the shape of the caller's array, which has ``rank`` axes, without the last axis.
    Raises ValueError for another shape, or unless all numbers are above 0 and at most ``LIMIT``.
    """
    array, shape = cast(as_floating(name, value), compute), stored.shape[:3]
    per_token = shape[3 - (rank - 1) :]
    if array.shape not in ((), shape[1:2], per_token):
        listed = f"({shape[1]},) for one per head, or {per_token} for one per token and head"
        raise ValueError(f"{name_of(name)} has shape {array.shape}: expected one number, {listed}")
    # NaN fails both comparisons.
    if array.size and not (array.min() > 0 and array.max() <= LIMIT):
        wrong = array[~((array > 0) & (array <= LIMIT))].flat[0]
        raise ValueError(
            f"{name_of(name)} has the number {wrong}: expected numbers above 0 and at most 2^64"
        )
    if array.shape == per_token and array.ndim:
        array = array.reshape(shape)
    elif array.ndim:
        array = array[:, None]
    return np.broadcast_to(array, shape)


def widened(stored: NDArray[Any], scales: NDArray[Any], compute: Any) -> NDArray[Any]:
    """Return keys or values in the dtype ``compute``: the 8-bit numbers times their scales."""
    with np.errstate(all="ignore"):
        return np.asarray(stored.astype(compute) * scales[..., None])


def quantized(
    name: str, x: NDArray[Any], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return ``x`` (..., D) as 8-bit numbers and one scale per row, (...,), float32.

    A scale is the row's largest magnitude over the largest number of ``dtype``, at least the
    smallest normal float32; the scale of a row of zeros is 1. Quotients in float32 are rounded to
    nearest, ties to even. Raises ValueError if a number is NaN, infinite or above 2^64.
    """
    wide, largest = cast(x, np.dtype(np.float32)), np.float32(LARGEST[dtype.name])
    top = abs(wide).max(axis=-1, initial=0)
    if not (top <= LIMIT).all():
        raise ValueError(
            f"{name_of(name)} has numbers that are NaN, infinite or above 2^64: expected finite "
            f"numbers, because a row is stored as its largest magnitude and 8 bits per number"
        )
    scales = np.maximum(top / largest, np.finfo(np.float32).tiny)
    scales = np.where(top == 0, np.float32(1), scales)
    quotients = np.clip(wide / scales[..., None], -largest, largest)
    if dtype.kind == "i":
        quotients = np.rint(quotients)
    return quotients.astype(dtype), scales
