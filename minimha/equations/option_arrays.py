"""Check the options of ``attention`` that are numbers or arrays.

They give one number for the whole problem, or one per batch entry, per head or per score.
Axes: ``B`` batch, ``H`` query heads, ``Lq`` queries, ``Lk`` keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, cast, name_of, number, rectangular

Shape = tuple[int, int, int, int]
MASK_SHAPES = "(Lq, Lk), or 4-D and broadcastable to (B, H, Lq, Lk)"


def option_arrays(
    shape: Shape, fewest: int, compute: np.dtype[Any], *, attn_mask: ArrayLike | None,
    attn_bias: ArrayLike | None, alibi_slopes: ArrayLike | None, sinks: ArrayLike | None,
    softcap: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return these options in their final form, by name; None stays None.

    ``shape`` is (B, H, Lq, Lk), and ``fewest`` the smallest Lk that masks and biases may have.
    Raises TypeError and ValueError for a wrong dtype, shape or number.
    """
    H = shape[1]
    return {
        "attn_mask": None if attn_mask is None else _mask(attn_mask, shape, fewest),
        "attn_bias": None if attn_bias is None else _bias(attn_bias, shape, fewest, compute),
        "alibi_slopes": _per_head("alibi_slopes", alibi_slopes, H, compute),
        "sinks": _per_head("sinks", sinks, H, compute, may_be_none=True),
        "softcap": None if softcap is None else _softcap(softcap, compute),
    }


def _softcap(value: Any, compute: np.dtype[Any]) -> float:
    """Return ``softcap`` as a float; raise ValueError unless it is positive."""
    cap = number("softcap", value, compute)
    smallest = float(np.finfo(compute).tiny)
    if cap < smallest:
        raise ValueError(
            f"{name_of('softcap')} is {value!r}: expected a positive number, at least "
            f"{smallest:.1e}, or None for no cap"
        )
    return cap


def per_batch(name: str, value: ArrayLike, B: int, limits: tuple[int, int]) -> NDArray[np.int64]:
    """Return ``value``, one or B integers, as an int64 array (B,).

    Raises TypeError if an item is no integer. Raises ValueError for another shape, or if an integer
    is outside ``limits``, the smallest and the largest that are allowed.
    """
    array = rectangular(name, value)
    items = array.ravel().tolist()  # Python's integers, which do not wrap around
    if not all(type(item) is int for item in items):
        raise TypeError(f"{name_of(name)} is {value!r}: expected an integer, or B={B} integers")
    if array.shape not in ((), (B,)):
        raise ValueError(
            f"{name_of(name)} has shape {array.shape}: expected one integer, or shape (B,) = ({B},)"
        )
    low, high = limits
    if any(not low <= item <= high for item in items):
        raise ValueError(f"{name_of(name)} is {value!r}: expected integers from {low} to {high}")
    return np.full(B, items if array.ndim else items[0], np.int64)


def _per_head(
    name: str, value: ArrayLike | None, H: int, compute: np.dtype[Any], may_be_none: bool = False
) -> NDArray[Any] | None:
    """Return ``value`` as finite numbers (H,) in the dtype ``compute``, or None.

    If ``may_be_none``, -inf is allowed and means no sink. Raises ValueError for another shape,
    or for any other number that is not finite.
    """
    if value is None:
        return None
    array = as_floating(name, value)
    if array.shape != (H,):
        raise ValueError(
            f"{name_of(name)} has shape {array.shape}: expected (H,) = ({H},), one number "
            f"per query head"
        )
    array = _narrowed(array, compute)
    if not (np.isfinite(array) | (may_be_none & np.isneginf(array))).all():
        or_none = ", or -inf for no sink" * may_be_none
        raise ValueError(f"{name_of(name)} is {value!r}: expected finite numbers{or_none}")
    return array


def _narrowed(array: NDArray[Any], compute: np.dtype[Any]) -> NDArray[Any]:
    """Return ``array`` in the dtype ``compute``; finite numbers are clipped to its range."""
    if array.dtype.itemsize <= compute.itemsize:
        return cast(array, compute)
    limit = np.finfo(compute).max
    narrow = cast(array, compute)
    overflowed = np.isinf(narrow) & np.isfinite(array)
    return np.where(overflowed, np.copysign(limit, narrow), narrow) if overflowed.any() else narrow


def _mask(attn_mask: ArrayLike, shape: Shape, fewest: int) -> NDArray[np.bool_]:
    """Return ``attn_mask`` as a view of the scores' shape (B, H, Lq, Lk).

    The last axis may be shorter than Lk, if it has at least ``fewest`` keys. Raises TypeError for
    another dtype than bool, and ValueError for another shape.
    """
    array = rectangular("attn_mask", attn_mask)
    if array.dtype != np.bool_:
        raise TypeError(
            f"{name_of('attn_mask')} has dtype {array.dtype}: expected bool, True where a "
            f"query may attend to a key; numbers to be added to the scores go into attn_bias"
        )
    return _over_scores("attn_mask", array, shape, fewest)


def _bias(attn_bias: ArrayLike, shape: Shape, fewest: int, compute: np.dtype[Any]) -> NDArray[Any]:
    """Return ``attn_bias`` in the dtype ``compute``, shaped like the scores.

    The same shapes as in ``_mask`` are allowed. Raises TypeError for bool, and ValueError for
    another shape.
    """
    array = rectangular("attn_bias", attn_bias)
    if array.dtype == np.bool_:
        raise TypeError(
            f"{name_of('attn_bias')} has dtype bool: expected numbers, which are added to the "
            f"scores; True and False go into attn_mask"
        )
    narrow = _narrowed(as_floating("attn_bias", array), compute)
    return _over_scores("attn_bias", narrow, shape, fewest)


def _over_scores(name: str, array: NDArray[Any], shape: Shape, fewest: int) -> NDArray[Any]:
    """Return a read-only view of ``array`` with the shape (B, H, Lq, Lk) of the scores.

    The last axis may be shorter, if it has at least ``fewest`` items.
    """
    if array.ndim and fewest <= array.shape[-1] < shape[3] and array.shape[-1] != 1:
        shape = (*shape[:3], array.shape[-1])
    fits = array.ndim == 4 and all(
        size in (1, whole) for size, whole in zip(array.shape, shape, strict=True)
    )
    if not fits and array.shape != shape[2:]:
        B, H, Lq, Lk = shape
        raise ValueError(
            f"{name_of(name)} has shape {array.shape}: expected {MASK_SHAPES}, "
            f"here ({Lq}, {Lk}) or ({B}, {H}, {Lq}, {Lk})"
        )
    return np.broadcast_to(array, shape)
