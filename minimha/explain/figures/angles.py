"""Draw dot product and cosine: two vectors as arrows, and the angle between them."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from minimha.explain.figures.drawing import SIZE, Drawing, breadth, in_rows, stacked
from minimha.explain.numbers import cells
from minimha.explain.trace import Step

PANEL = 170  # pixels of the longest arrow
MOST = 4  # keys
SMALL = 12


def angles(steps: Sequence[Step], widest: float, decimals: int) -> Drawing:
    """Draw the last query with each of the first four keys as arrows, and their angle.

    The pairs stand in rows of at most ``widest`` pixels. The drawing is empty if ``steps`` has no
    step "cosine", or lacks q or k.
    """
    cosine = next((s for s in steps if s.base == "cosine" and s.value.size), None)
    if cosine is None:
        return Drawing()
    sides = [s for s in steps if s.base in ("q", "k") and s.stage == cosine.stage]
    sides = sides if len(sides) == 2 else [s for s in steps if s.name in ("q", "k")]
    if [s.base for s in sides] != ["q", "k"]:
        return Drawing()
    q, keys = sides[0].value[-1], sides[1].value[:MOST]
    longest = max(float(np.linalg.norm(x)) for x in (q, *keys)) or 1.0
    names = (sides[0].rows or ())[-1], sides[1].rows or ()
    panels = [
        _panel(q, k, (names[0], names[1][n]), PANEL / longest, decimals) for n, k in enumerate(keys)
    ]
    title = Drawing()
    title.text(0, SIZE / 2, f"dot product and cosine: query {names[0]} with each key", "bold")
    return stacked([title, in_rows(panels, widest, 28)], 14)


def _panel(
    q: NDArray[np.float64], k: NDArray[np.float64], names: tuple[str, str], unit: float,
    decimals: int,
) -> Drawing:  # fmt: skip
    """Draw both vectors in the plane that they span; q is horizontal if D is larger than 2."""
    lengths = [float(np.linalg.norm(x)) for x in (q, k)]
    dot = float(q @ k)
    cosine = dot / (lengths[0] * lengths[1]) if all(lengths) else 0.0
    between = math.acos(max(-1.0, min(1.0, cosine)))
    turned = [math.atan2(x[1], x[0]) for x in (q, k)] if len(q) == 2 else [0.0, between]
    tips = [
        (size * unit * math.cos(angle), -size * unit * math.sin(angle))
        for size, angle in zip(lengths, turned, strict=True)
    ]
    left, top = (min(0.0, *(tip[n] for tip in tips)) for n in (0, 1))
    origin = 10 - left, 24 - top
    drawing = Drawing()
    _arc(drawing, origin, turned)
    for tip, name, kind in zip(tips, names, ("one", "two"), strict=True):
        end = origin[0] + tip[0], origin[1] + tip[1]
        drawing.line(origin, end, kind=kind, tip=f"tip-{kind}")
        letter = "q" if kind == "one" else "k"
        drawing.text(
            end[0] + 8, end[1] - (8 if kind == "one" else -8), f"{letter} {name}", size=SMALL
        )
    texts = [cells(np.array(number), decimals)[0][0] for number in (dot, *lengths, cosine)]
    lines = ["q · k = {}, |q| = {}, |k| = {}".format(*texts),
             # a cosine with few digits gives whole degrees only
             f"cosine {texts[3]}, angle {math.degrees(between):.0f}°"]  # fmt: skip
    below = max(drawing.height, origin[1]) + 16
    for n, line in enumerate(lines):
        drawing.text(0, below + 18 * n, line, "muted", size=SMALL)
    drawing.width = max(drawing.width, breadth(lines[0], SMALL))
    return drawing


def _arc(drawing: Drawing, origin: tuple[float, float], turned: Sequence[float]) -> None:
    start, end = turned
    swept = (end - start + math.pi) % (2 * math.pi) - math.pi  # the shorter way
    angles = [start + swept * n / 16 for n in range(17)]
    points = [(origin[0] + 26 * math.cos(a), origin[1] - 26 * math.sin(a)) for a in angles]
    drawing.line(*points, kind="faint")
