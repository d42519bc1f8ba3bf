"""Show that a long key in another direction can have most weight by dot product, not by cosine."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention
from minimha.explain.chart import Axis, Lines
from minimha.explain.figures.angles import angles
from minimha.explain.figures.drawing import Drawing
from minimha.explain.figures.gallery import WIDEST
from minimha.explain.result import Result, Table
from minimha.explain.trace import Trace
from minimha.layers.cosine import cosine_attention

LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
DRAWN = (1.0, 2.0, 4.0)  # lengths short enough for a picture
LEARNED = 10.0
SAME = 1e-9  # weights that differ by less are equal
TITLE = "a key grows: dot product against cosine"


class Row(NamedTuple):
    """The scores and weights of two keys: "near" has almost the query's direction, "far" another.

    ``length`` is the length of the far key. ``by_dot``, ``by_cosine`` and ``by_learned`` are its
    weights by dot product, by cosine, and by cosine times a factor as models learn it.
    """

    length: float
    dot_near: float
    dot_far: float
    by_dot: float
    cosine_near: float
    cosine_far: float
    by_cosine: float
    by_learned: float


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: weigh a near and a far key by dot product and by cosine."""
    rng = np.random.default_rng(seed)
    near, far = np.radians([-rng.uniform(10, 30), rng.uniform(50, 75)])
    rows = tuple(_row(length, near, far) for length in LENGTHS)
    names = ("q·near", "q·far", "weight of far", "cos near", "cos far", "by cosine",
             f"by {LEARNED:g}·cosine")  # fmt: skip
    columns = {"length": "{:g}".format} | dict.fromkeys(names, "{:.3f}".format)
    series = {
        "dot product / √d_k": tuple(row.by_dot for row in rows),
        "cosine": tuple(row.by_cosine for row in rows),
        f"{LEARNED:g} · cosine": tuple(row.by_learned for row in rows),
    }
    across = Axis("length of the far key", 2)
    lines = Lines("weight of the far key", across, Axis("weight"), LENGTHS, series)
    about = (
        f"A query of length 1, a near key of length 1 at {-np.degrees(near):.0f}°, and a far key, "
        f"which grows, at {np.degrees(far):.0f}° on the other side. Both angles are drawn at "
        f"random; {LEARNED:g} is a factor as models learn it for cosines."
    )
    table = Table("what each key scores, and the far key's weight", columns, rows)
    figures = lines, _angles(near, far)
    return Result("similarity", TITLE, about, seed, (table,), figures, conclude(rows))


def conclude(rows: Sequence[Row]) -> str:
    """Return a sentence on the length from which the far key has more weight than the near key."""
    first, last = rows[0], rows[-1]
    won = next((row.length for row in rows if row.by_dot > 0.5), None)
    words = f"never up to length {last.length:g}" if won is None else f"from length {won:g} on"
    least, most = min(row.by_cosine for row in rows), max(row.by_cosine for row in rows)
    still = f"is {most:.3f} at every length"
    return (
        f"By dot product the far key has more weight than the near one {words} "
        f"({first.by_dot:.3f} at {first.length:g}, {last.by_dot:.3f} at {last.length:g}); by "
        f"cosine its weight "
        f"{still if most - least < SAME else f'goes from {least:.3f} to {most:.3f}'}."
    )


def _row(length: float, near: float, far: float) -> Row:
    q, k = _vectors(near, far, (length,))
    dots = k @ q[0]
    near_dot, far_dot = dots.tolist()
    near_cosine, far_cosine = (dots / np.linalg.norm(k, axis=1)).tolist()  # |q| is 1
    V = np.array([[0.0], [1.0]])  # with these values the output is the far key's weight
    by_dot = attention(q, k, V, backend="dense").item()
    by_cosine, by_learned = (
        cosine_attention(q, k, V, scale=s, backend="dense").item() for s in (1.0, LEARNED)
    )
    return Row(
        length, near_dot, far_dot, by_dot, near_cosine, far_cosine, by_cosine, by_learned
    )  # fmt: skip


def _vectors(
    near: float, far: float, lengths: tuple[float, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return q (1, 2) along the first axis, and k: the near key, then far keys of these lengths."""
    tip = np.array([np.cos(far), np.sin(far)])
    keys = [np.array([np.cos(near), np.sin(near)]), *(length * tip for length in lengths)]
    return np.array([[1.0, 0.0]]), np.stack(keys)


def _angles(near: float, far: float) -> Drawing:
    labels = {"Lq": ("0",), "Lk": ("near", *(f"far × {n:g}" for n in DRAWN))}
    trace = Trace(labels=labels)
    q, k = _vectors(near, far, DRAWN)
    cosine_attention(q, k, np.eye(len(k)), tap=trace)
    return angles(trace.steps, WIDEST, 2)
