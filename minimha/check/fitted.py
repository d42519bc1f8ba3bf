"""Find values of a bug that the catalogue lacks, such as a block of 40 keys, in the weights.

With V = I the output is the weights A. If hidden keys keep a weight, log A of a hidden key minus
that of a visible one is the difference of their scores. This gives the number that fills hidden
scores. Block sizes are tried one by one on the problem with many keys, where each size gives
different weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check import readings
from minimha.check.answer import Answer
from minimha.check.catalogue import BLOCKS, FILLS
from minimha.check.prepared import Prepared
from minimha.check.problems import MANY, Graded
from minimha.check.readings import Weights

Array = NDArray[Any]
Item = tuple[str, Any]

HIDING = {"mask weights": "mask", "causal weights": "positions", "window weights": "positions"}
CLOSE = 1e-3  # relative difference of equal weights
FEW = 12  # the most block sizes that are returned for one deviation


def fitted(problems: Sequence[Graded], answers: Sequence[Answer]) -> list[Item]:
    """Return deviations with values that the answers show and the catalogue lacks."""
    weights = Weights(problems, answers)
    with np.errstate(all="ignore"):
        return [*dict.fromkeys(_fills(weights)), *_blocks(weights)]


def _scale(weights: Weights, name: str, x: Prepared) -> float:
    """Return the scale that the weights in problem ``name`` show, or else the right scale."""
    found = weights[name]
    line = readings.line(*found) if found else None
    return line[0] if line else x.problem.scale


def _fills(weights: Weights) -> Iterator[Item]:
    for name, kind in HIDING.items():
        found = weights[name]
        if found is None or not ((found[1] > 0) & np.isfinite(found[1])).all():
            continue
        x, A = Prepared(found[0].arguments), found[1]
        scale = _scale(weights, "weights", x)
        S = x.products[0] * scale
        constant = np.where(x.visible, np.log(A) - S, 0).sum(-1) / x.visible.sum(-1)
        scores = np.log(A) - constant[..., None]
        for way, fill in (("fill", scores[~x.visible]), ("add", (scores - S)[~x.visible])):
            if np.ptp(fill) < 0.02 * abs(fill.mean()) and round(fill.mean(), 1) not in FILLS:
                for name_of_kind in ("all", kind):
                    value = float(round(fill.mean(), 2))
                    yield "hidden_score_small", (name_of_kind, value, way)
                    if way == "fill":
                        value = float(round(fill.mean() / scale, 2))
                        yield "hidden_score_small", (name_of_kind, value, "fill before the scale")


def _blocks(weights: Weights) -> Iterator[Item]:
    found = weights[f"weights of {MANY} keys"]
    if found is None or not np.isfinite(found[1]).all():
        return
    x, A = Prepared(found[0].arguments), found[1]
    S = x.products[0] * _scale(weights, "weights of two heads", x)
    running = np.maximum.accumulate(S, -1)
    E = np.exp(S - running[..., -1:])
    right = E / E.sum(-1, keepdims=True)
    if np.allclose(A, right, rtol=CLOSE, atol=0):
        return
    counts: Counter[str] = Counter()
    for B_c in range(MANY - 1, 0, -1):
        ends = np.minimum((x.j // B_c + 1) * B_c, MANY) - 1
        stale = np.exp(S - running[..., ends])
        whole = np.where(x.j < MANY // B_c * B_c, E, 0)
        for identifier, W in (
            ("online_output_not_rescaled", stale / E.sum(-1, keepdims=True)),
            ("online_sum_not_rescaled", E / stale.sum(-1, keepdims=True)),
            ("online_last_block_dropped", whole / whole.sum(-1, keepdims=True)),
        ):
            is_new = B_c not in BLOCKS and counts[identifier] < FEW
            if is_new and np.allclose(A, W, rtol=CLOSE, atol=0):
                counts[identifier] += 1
                yield identifier, B_c
