"""Apply scale, soft cap, bias and mask to one score, in plain Python that kernels compile.

The order is that of the equations: scaled → capped → biased (``attn_bias``, then ALiBi) → masked.
Causality, window and lengths are in ``minimha.equations.visibility``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Head(NamedTuple):
    """The options of one attention head, as plain numbers without reference counting."""

    left: int
    right: int
    offset: int
    length: int
    scale: float
    softcap: float
    slope: float


def head_of(o: Any, b: Any, h: Any) -> Any:
    """Return the options ``o`` of a problem for head h of batch entry b, as a ``Head``."""
    slope = o.slopes[h] if o.slopes.size else o.sinks.dtype.type(0)
    return Head(o.left, o.right, o.q_offset[b], o.kv_lengths[b], o.scale, o.softcap, slope)


def is_hidden(mask: Any, bias: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Return whether ``mask``, or a bias of -inf, hides key j from query i of head h."""
    if mask.size and not mask[b, h, i, j]:
        return True
    return bias.size > 0 and bias[b, h, i, j] == -math.inf


def final_score(s: Any, bias: Any, head: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Return the score of query i and key j: their dot product ``s``, scaled, capped and biased."""
    s *= head.scale
    if head.softcap:
        s = head.softcap * math.tanh(s / head.softcap)
    if bias.size:
        s += bias[b, h, i, j]
    if head.slope:
        s -= head.slope * abs(i + head.offset - j)
    return s
