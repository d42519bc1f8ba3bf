"""Check masks that follow the conventions of other libraries.

Libraries use the same words for different conventions, so an error names the likely library.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, name_of, rectangular


def boolean(name: str, value: ArrayLike, expected: str) -> NDArray[np.bool_]:
    """Return ``value`` as a boolean array; raise TypeError for any other dtype.

    The error contains ``expected``, a description of the mask.

    >>> boolean("mask", [[1, 1, 0]], "bool, True = keep")
    Traceback (most recent call last):
    TypeError: mask has dtype int64: expected bool, True = keep; it looks like Hugging Face's
    attention_mask, where 1 = may attend
    """
    mask = rectangular(name, value)
    if mask.dtype != np.bool_:
        raise TypeError(
            f"{name_of(name)} has dtype {mask.dtype}: expected {expected}{owner_by_values(mask)}"
        )
    return mask


def boolean_or_floating(name: str, value: ArrayLike) -> NDArray[Any]:
    """Return a mask as an array of bool (True for visible keys) or of floats (added to scores)."""
    mask = rectangular(name, value)
    return mask if mask.dtype == np.bool_ else as_floating(name, mask)


def broadcasts(mask: NDArray[Any], shape: tuple[int, ...]) -> bool:
    """Return whether ``mask`` broadcasts to ``shape``, the shape of the scores.

    >>> broadcasts(np.ones((1, 5)), (2, 4, 3, 5)), broadcasts(np.ones((3, 5)), (2, 4, 1, 5))
    (True, False)
    """
    sizes = zip(mask.shape[::-1], shape[::-1], strict=False)
    return mask.ndim <= len(shape) and all(size in (1, whole) for size, whole in sizes)


def score_options(mask: NDArray[Any] | None, bias: NDArray[Any] | None) -> dict[str, Any]:
    """Return a mask and a bias as a dictionary of arguments for ``attention``.

    A boolean mask becomes ``attn_mask``. A mask of numbers becomes ``attn_bias``, or is added to
    the bias. Raise ValueError if the shapes of both do not broadcast.
    """
    if mask is None:
        return {} if bias is None else {"attn_bias": bias}
    if mask.dtype == np.bool_:
        return {"attn_mask": mask} | score_options(None, bias)
    if bias is None:
        return {"attn_bias": mask}
    try:
        np.broadcast_shapes(mask.shape, bias.shape)
    except ValueError:
        raise ValueError(
            f"the mask has shape {mask.shape} but the bias {bias.shape}: both are added to scores "
            f"(B, H, L, Lk)"
        ) from None
    # In 16 bits the lowest number, by which masks hide, would overflow together with a bias.
    wide = np.promote_types(np.promote_types(mask.dtype, bias.dtype), np.float32)
    return {"attn_bias": mask.astype(wide) + bias}


def owner_by_axes(mask: NDArray[Any], shape: tuple[int, ...]) -> str:
    """Return a hint for an error: whose boolean masks have the shape of ``mask``.

    ``shape`` is that of the scores. The result is "" if no library's masks, or those of several,
    have the shape.

    >>> owner_by_axes(np.ones((2, 5), bool), (2, 4, 3, 5))  # for scores (B, H, Lq, Lk)
    '; it looks like a padding mask, where True = ignore in torch and keep in flash-attention'
    """
    if mask.dtype != np.bool_:
        return ""
    B, H, Lq, Lk = shape
    known = [
        ((B, Lk), "a padding mask, where True = ignore in torch and keep in flash-attention"),
        ((B, Lq, Lk), "Keras's attention_mask, where True = may attend"),
        ((B * H, Lq, Lk), "torch.nn.MultiheadAttention's attn_mask, where True = ignore"),
    ]
    owners = [owner for axes, owner in known if axes == mask.shape]
    if mask.ndim == 4 and broadcasts(mask, shape):
        owners.append("scaled_dot_product_attention's attn_mask, where True = may attend")
    return f"; it looks like {owners[0]}" if len(owners) == 1 else ""


def owner_by_values(mask: NDArray[Any]) -> str:
    """Return a hint for an error: whose masks have values like those of ``mask``, or "" if unknown.

    >>> owner_by_values(np.array([[1, 1, 0]]))
    "; it looks like Hugging Face's attention_mask, where 1 = may attend"
    """
    if mask.dtype.kind not in "iuf" or not mask.any():
        return ""
    if ((mask == 0) | (mask == 1)).all():
        return "; it looks like Hugging Face's attention_mask, where 1 = may attend"
    if (mask <= 0).all() and (mask < -100).any():
        return (
            "; it looks like the float masks of torch and ONNX, which are added: 0 = may attend, "
            "-inf = hidden"
        )
    return ""
