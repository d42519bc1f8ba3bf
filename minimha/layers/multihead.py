"""Multi-head attention: several attentions side by side, each with projections of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention
from minimha.equations.problem import as_floating
from minimha.equations.tap import Tap, no_tap, renamed


def multi_head_attention(
    x: ArrayLike,
    W_q: ArrayLike,
    W_k: ArrayLike,
    W_v: ArrayLike,
    W_o: ArrayLike,
    *,
    tap: Tap = no_tap,
    **options: Any,
) -> NDArray[Any]:
    """concat(head_0, …, head_H-1) W_o, with head_h = attention(x W_q[h], x W_k[h], x W_v[h]).

    Axes: ``B`` batch, ``L`` tokens, ``E`` model width, ``H`` heads, ``Hkv`` key/value heads,
    ``D`` head width, ``Dv`` value width.

    Parameters
    ----------
    x : array_like of shape (L, E) or (B, L, E)
    W_q : array_like of shape (H, E, D)
    W_k : array_like of shape (Hkv, E, D)
    W_v : array_like of shape (Hkv, E, Dv)
    W_o : array_like of shape (H * Dv, E)
    tap : callable ``tap(name, value) -> value``
        Hears x, the weights, every step of the attention, concat and output.
    **options
        Those of ``minimha.attention``, without ``return_lse``.

    Returns
    -------
    ndarray of shape (L, E) or (B, L, E)

    Raises
    ------
    ValueError, TypeError
        Shapes that do not fit together, or something that is not numbers.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    Examples
    --------
    One token, one head, identity weights: the token attends to itself.

    >>> I = np.eye(2)
    >>> multi_head_attention([[3, 4]], [I], [I], [I], I)
    array([[3., 4.]])
    """
    given = {"x": x, "W_q": W_q, "W_k": W_k, "W_v": W_v, "W_o": W_o}
    x, W_q, W_k, W_v, W_o = (as_floating(name, array) for name, array in given.items())
    if "return_lse" in options:
        raise TypeError("return_lse is no option of multi_head_attention: its heads are mixed")
    _check_widths(x, W_q, W_k, W_v, W_o)
    x = tap("x", x)[..., None, :, :]
    q, k, v = x @ tap("W_q", W_q), x @ tap("W_k", W_k), x @ tap("W_v", W_v)
    heads = attention(q, k, v, tap=renamed(tap, output="head_output"), **options)
    concat = np.moveaxis(heads, -3, -2)
    concat = tap("concat", concat.reshape(*concat.shape[:-2], W_o.shape[0]))
    return np.asarray(tap("output", concat @ tap("W_o", W_o)))


def _check_widths(
    x: NDArray[Any], W_q: NDArray[Any], W_k: NDArray[Any], W_v: NDArray[Any], W_o: NDArray[Any]
) -> None:
    if x.ndim not in (2, 3):
        raise ValueError(f"x has shape {x.shape}: expected (L, E) or (B, L, E)")
    for name, W in (("W_q", W_q), ("W_k", W_k), ("W_v", W_v)):
        if W.ndim != 3 or W.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{name} has shape {W.shape}: expected one (E, D) matrix a head, "
                f"with x's model width E={x.shape[-1]}"
            )
    joined = W_q.shape[0] * W_v.shape[2]
    if W_o.ndim != 2 or W_o.shape[0] != joined:
        raise ValueError(
            f"W_o has shape {W_o.shape}: expected (H · Dv, E) with H · Dv = "
            f"{W_q.shape[0]} · {W_v.shape[2]} = {joined}"
        )
