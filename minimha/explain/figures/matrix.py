"""Draw a matrix with labels; scores and weights are heatmaps, and all scores share one scale."""

from collections.abc import Iterable, Sequence

import numpy as np

from minimha.explain.figures.drawing import SIZE, Drawing, breadth, short
from minimha.explain.numbers import cells, limits
from minimha.explain.trace import Step

ROW = 24  # pixels
LABEL = 10  # characters
SMALL = 12  # size of numbers and labels
BOX = 8  # characters of a number to be filled in
LOW = 40  # pixels for the least number of a scale
LIGHTEST_ON = 0.66  # level above which light ink has more contrast than dark ink
MAPPED = ("scores", "energies", "cosine", "scaled", "scaled_cosine", "capped", "biased",
          "modified", "masked", "S", "exponentials", "weights")  # fmt: skip
SHARES = ("exponentials", "weights")  # from 0 to 1
Limits = tuple[float, float]


def scales_of(steps: Iterable[Step]) -> tuple[Limits, Limits]:
    """Return the limits of two colour scales: one for all scores in ``steps``, one for weights.

    The limits of weights are always 0 and 1.
    """
    return limits(step.value for step in steps if _is_scores(step)), (0.0, 1.0)


def matrix(
    step: Step, title: str, decimals: int, scales: tuple[Limits, Limits], formula: str = ""
) -> Drawing:
    """Draw the matrix of ``step`` with its labels, below ``title`` and ``formula``.

    ``scales`` is the result of ``scales_of``.
    """
    body = cells(step.value, decimals)
    if step.is_blank:
        body = [[" " * BOX for _ in row] for row in body]  # to write into
    rows = step.rows
    margin = max((breadth(short(label, LABEL), SMALL) + 8 for label in rows or ()), default=0)
    widths = _widths(body, step.columns)
    edges = [margin + sum(widths[:j]) for j in range(len(widths))]
    drawing = Drawing()
    drawing.text(0, SIZE / 2, title, "bold")
    top = ROW
    if formula:
        drawing.text(0, top + SMALL / 2 - 4, formula, "muted", size=SMALL)
        top += ROW - 4
    if step.columns:
        for x, width, label in zip(edges, widths, step.columns, strict=True):
            middle = x + width / 2, top + SMALL / 2
            drawing.text(*middle, label, "muted", anchor="middle", size=SMALL, longest=LABEL)
        top += ROW - 4
    heat = shades(step, scales)
    for i, row in enumerate(body):
        if rows:
            end = margin - 8, top + (i + 0.5) * ROW
            drawing.text(*end, rows[i], "muted", anchor="end", size=SMALL, longest=LABEL)
        for j, number in enumerate(row):
            level = None if heat is None else heat[i][j]
            cell(drawing, edges[j], top + i * ROW, widths[j], number, level)
    if not body or not body[0]:
        drawing.text(margin, top + ROW / 2, "(empty)", "muted")
    return drawing


def scale(name: str, bounds: Limits, steps: int = 20, *, room: float = LOW) -> Drawing:
    """Draw a colour bar of ``steps`` shades, with its name and its limits ``bounds``.

    The text of the lower limit gets at least ``room`` pixels. Bars one below the other are aligned
    if they have the same ``room``.
    """
    drawing = Drawing()
    low, high = cells(np.array(bounds), 2)[0]
    drawing.text(0, ROW / 2, name, "muted", size=SMALL)
    x = breadth("weights ", SMALL) + max(room, breadth(low, SMALL))
    drawing.text(x, ROW / 2, low, "number", anchor="end", size=SMALL)
    for n in range(steps):
        drawing.rect(x + 6 + 8 * n, 4, 8, ROW - 8, "heat", opacity=n / (steps - 1))
    drawing.rect(x + 6, 4, 8 * steps, ROW - 8, "cell")
    drawing.text(x + 12 + 8 * steps, ROW / 2, high, "number", size=SMALL)
    return drawing


def legend(steps: Sequence[Step], scales: tuple[Limits, Limits]) -> Drawing:
    """Draw the colour scales of ``steps``, and explain the signs × and ? if they occur.

    ``scales`` is the result of ``scales_of``.
    """
    drawing = Drawing()
    scored = any(map(_is_scores, steps))
    room = max(LOW, breadth(cells(np.array(scales[0]), 2)[0][0], SMALL)) if scored else LOW
    if scored:
        drawing.place(scale("scores", scales[0], room=room), 0, 0)
    if any(step.base in SHARES for step in steps):
        drawing.place(scale("weights", scales[1], room=room), 0, drawing.height)
    levels = [x for step in steps for row in shades(step, scales) or () for x in row]
    gap = "? is infinite or NaN. " if any(not np.isfinite(x) and not x < 0 for x in levels) else ""
    hidden = "× is hidden: score −∞, weight 0. " if any(map(np.isneginf, levels)) else ""
    words = f"{hidden}{gap}Rows are queries, columns keys."
    drawing.text(0, drawing.height + ROW / 2, words, "muted", size=SMALL)
    return drawing


def _is_scores(step: Step) -> bool:
    return step.base in set(MAPPED) - set(SHARES)


def _widths(body: Sequence[Sequence[str]], columns: Sequence[str] | None) -> list[float]:
    heads = [short(label, LABEL) for label in columns or [""] * len(body[0] if body else ())]
    texts = zip(heads, *body, strict=True)
    return [max(36, round(max(breadth(text, SMALL) for text in column) + 8)) for column in texts]


def shades(step: Step, scales: tuple[Limits, Limits]) -> list[list[float]] | None:
    """Return each cell's shade from 0 to 1, or -∞ for a hidden cell.

    NaN and ∞ remain as they are. Return None for a step that is blank or no heatmap.
    """
    if step.base not in MAPPED or step.value.ndim != 2 or step.is_blank:
        return None
    low, high = scales[step.base in SHARES]
    value = np.asarray(step.value, np.float64)
    level = (value - low) / ((high - low) or 1)
    hidden = np.isneginf(value) if step.hidden is None else step.hidden
    return np.where(hidden, -np.inf, level).tolist()  # type: ignore[no-any-return]


def cell(
    drawing: Drawing, x: float, y: float, width: float, number: str, level: float | None,
    size: float = SMALL,
) -> None:  # fmt: skip
    """Draw ``number`` in a box whose shade is ``level``, from 0 to 1, or None for no shade.

    If ``level`` is -∞ (hidden), the box shows × in place of the number. If it is NaN or ∞, the box
    shows a ?.
    """
    ink = "number"
    if level is not None and np.isfinite(level):
        drawing.rect(x, y, width, ROW, "heat", opacity=level)
        ink = "number on" if level >= LIGHTEST_ON else "number ink"
    elif level is not None:
        number, ink = "×" if level < 0 else "?", "number muted"
    drawing.rect(x, y, width, ROW, "cell")
    drawing.text(x + width / 2, y + ROW / 2, number, ink, anchor="middle", size=size)
