"""Whose mask a refused one looks like: libraries mean different things by the same words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def owner_by_axes(mask: NDArray[Any], shape: tuple[int, ...]) -> str:
    """Whose boolean mask one of wrong axes looks like, to end a sentence; "" where that is open.

    Examples
    --------
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
    if mask.ndim == 4 and all(a in (1, b) for a, b in zip(mask.shape, shape, strict=True)):
        owners.append("scaled_dot_product_attention's attn_mask, where True = may attend")
    return f"; it looks like {owners[0]}" if len(owners) == 1 else ""


def owner_by_values(mask: NDArray[Any]) -> str:
    """Whose mask one of a wrong dtype looks like, to end a sentence; "" where that is open.

    Examples
    --------
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
