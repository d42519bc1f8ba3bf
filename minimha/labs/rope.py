"""Show that RoPE rotates pairs of numbers by position, and that scores depend on distance."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minimha.explain.chart import Axis, Lines
from minimha.explain.figures.drawing import SIZE, Drawing
from minimha.explain.result import Result, Table
from minimha.layers.rope import RoPE

WIDTH, POSITIONS = 4, 5  # two pairs of numbers; positions that are drawn
LATER, FARTHEST = 1000, 12
RADIUS = 110  # pixels
APART = 10  # degrees between arrows above which each arrow has a number
ROPE = RoPE(WIDTH, interleaved=True)
TITLE = "RoPE: a query is rotated by its position"
ABOUT = (
    f"One query and one key of width {WIDTH}, drawn at random. Their numbers 0 and 1 are a point "
    f"of a plane, numbers 2 and 3 one of another. At position m RoPE turns pair i by m · θ_i, with "
    f"θ_i = 10000^(-2i/{WIDTH}) (Su et al. 2021): pair 0 fast, pair 1 slowly."
)


class Row(NamedTuple):
    """The query's pair (x, y) of index ``pair``, before and after its rotation to ``position``.

    ``degrees`` is the angle, and ``length`` the length of the rotated pair.
    """

    position: int
    pair: int
    degrees: float
    x: float
    y: float
    turned_x: float
    turned_y: float
    length: float


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: rotate a query to five positions, and score it at 13 distances."""
    q, k = np.random.default_rng(seed).standard_normal((2, 1, WIDTH))
    rows = []
    for m, turned in enumerate(ROPE.rotate(np.repeat(q, POSITIONS, 0), np.arange(POSITIONS))):
        angles = np.degrees(m * ROPE.frequencies())
        for i, (angle, after) in enumerate(zip(angles, turned.reshape(-1, 2), strict=True)):
            x, y = q[0, 2 * i : 2 * i + 2].tolist()
            rows.append(Row._make((m, i, float(angle), x, y, *after.tolist(), math.hypot(*after))))
    apart = np.arange(FARTHEST + 1)
    scores = {}
    for start in (0, LATER):
        keys = ROPE.rotate(np.repeat(k, len(apart), 0), start + apart)
        found = keys @ ROPE.rotate(q, [start])[0]
        scores[f"the query at position {start}"] = tuple(found.tolist())
    columns: dict[str, Callable[[Any], str]]
    columns = {"position": str, "pair": str, "angle": "{:.2f}°".format}
    columns |= dict.fromkeys(("x", "y", "x turned", "y turned", "length"), "{:.3f}".format)
    across = Axis("tokens from the query to the key")
    places = tuple(apart.tolist())
    lines = Lines("score of the same query and key", across, Axis("q · k"), places, scores)
    table = Table("the query's pairs (x, y) before and after", columns, tuple(rows))
    planes = (_plane([row for row in rows if row.pair == i], i) for i in range(WIDTH // 2))
    return Result("rope", TITLE, ABOUT, seed, (table,), (*planes, lines), conclude(rows, scores))


def conclude(rows: Sequence[Row], scores: dict[str, tuple[float, ...]]) -> str:
    """Return a sentence on the angles of rotation, and on the changes of lengths and scores."""
    turns = [f"pair {row.pair} by {row.degrees:.3g}°" for row in rows if row.position == 1]
    lengths = max(abs(math.hypot(row.x, row.y) - row.length) for row in rows)
    near, far = map(np.array, scores.values())
    return (
        f"Each position turns {' and '.join(turns)}; lengths change by {lengths:.0e} at most, and "
        f"scores by {abs(near - far).max():.0e} when query and key stand {LATER} positions later."
    )


def _plane(rows: Sequence[Row], pair: int) -> Drawing:
    """Draw one pair as arrows, one for each position; position 0 has another colour."""
    middle, step, drawing = RADIUS + 40, rows[1].degrees, Drawing()

    def at(x: float, y: float, size: float) -> tuple[float, float]:
        return RADIUS + 30 + x * RADIUS * size, middle - y * RADIUS * size

    drawing.text(0, SIZE / 2, f"pair {pair} of the query, turned in its plane", "bold")
    circle = (n * math.pi / 36 for n in range(73))
    drawing.line(*(at(math.cos(a), math.sin(a), 1) for a in circle), kind="faint")
    for row in reversed(rows):
        kind, size = "two" if row.position else "one", 1 / row.length
        tip = at(row.turned_x, row.turned_y, size)
        drawing.line(at(0, 0, 1), tip, kind=kind, tip=f"tip-{kind}")
        if step > APART or not row.position:
            words = str(row.position) if step > APART else f"0 to {POSITIONS - 1}"
            place = at(row.turned_x, row.turned_y, 1.12 * size)
            drawing.text(*place, words, anchor="middle", size=SIZE - 1)
    drawing.text(0, middle + RADIUS + 40, f"turned by {step:.3g}° per position", "muted")
    return drawing
