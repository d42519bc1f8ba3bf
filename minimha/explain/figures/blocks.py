"""Draw FlashAttention's blocks of scores, in the order of loading, and the skipped blocks."""

import re
from collections.abc import Sequence

import numpy as np

from minimha.explain.figures.drawing import SIZE, Drawing, breadth, short
from minimha.explain.figures.matrix import ROW, Limits, cell, scale, scales_of, shades
from minimha.explain.numbers import cells
from minimha.explain.trace import Step, Trace

CELL = 38  # width of one score, pixels
APART, ABOVE = 10, 18  # space left of and above a block; above is its number
SMALL = 11
LABEL = 5  # characters


def grid(trace: Trace) -> Drawing:
    """Draw the scores of the first head block by block.

    The drawing is empty if the run had no blocks.
    """
    steps = [step for step in trace.steps if step.base == "S" and not (step.head or step.batch)]
    drawing = Drawing()
    if not steps or trace.blocks is None:
        return drawing
    B_r, B_c = trace.blocks
    skipped = [s.value for s in trace.steps if s.base == "skipped" and not (s.head or s.batch)]
    pairs = [(int(i), int(j)) for i, j in np.reshape(skipped, (-1, 2))]
    title = f"blocks of scores in the order of loading: {len(steps)} loaded"
    drawing.text(0, SIZE / 2, title + f", {len(pairs)} skipped" * bool(pairs), "bold")
    scales = scales_of(steps)
    labels = trace.labels.get("Lq", ()), trace.labels.get("Lk", ())
    left = max((breadth(short(label, 10), SMALL) for label in labels[0]), default=20) + 8
    _axes(drawing, labels, (B_r, B_c), left)
    for n, step in enumerate(steps, 1):
        i, j = map(int, re.findall(r"\d+", step.stage))
        x, y = left + _at(j * B_c, B_c, CELL, APART), _down(i * B_r, B_r)
        _block(drawing, step, x, y, scales)
        drawing.text(x, y - 8, f"{n}.", "bold", size=SMALL)
    for i, j in pairs:
        size = min(B_r, len(labels[0]) - i * B_r), min(B_c, len(labels[1]) - j * B_c)
        _skip(drawing, left + _at(j * B_c, B_c, CELL, APART), _down(i * B_r, B_r), size)
    drawing.place(scale("scores", scales[0]), 0, drawing.height + 12)
    if any((np.isnan(step.value) | np.isposinf(step.value)).any() for step in steps):
        words = "? is infinite or NaN."
        drawing.text(0, drawing.height + SIZE, words, "muted", size=SMALL)
    return drawing


def _at(n: int, block: int, size: int, apart: int) -> float:
    """Return the position of the ``n``-th token, with a space before every block."""
    return n * size + n // block * apart


def _down(n: int, block: int) -> float:
    return 2 * ROW + ABOVE + _at(n, block, ROW, ABOVE)


def _axes(
    drawing: Drawing, labels: tuple[Sequence[str], Sequence[str]], blocks: tuple[int, int],
    left: float,
) -> None:  # fmt: skip
    for n, label in enumerate(labels[1]):
        x = left + _at(n, blocks[1], CELL, APART) + CELL / 2
        middle = x, 1.6 * ROW
        drawing.text(*middle, label, "muted", anchor="middle", size=SMALL, longest=LABEL)
    for n, label in enumerate(labels[0]):
        y = _down(n, blocks[0]) + ROW / 2
        drawing.text(left - 8, y, short(label, 10), "muted", anchor="end", size=SMALL)


def _block(drawing: Drawing, step: Step, x: float, y: float, scales: tuple[Limits, Limits]) -> None:
    numbers = cells(step.value, 1)
    for i, row in enumerate(shades(step, scales) or ()):
        for j, level in enumerate(row):
            cell(drawing, x + j * CELL, y + i * ROW, CELL, numbers[i][j], level, SMALL)


def _skip(drawing: Drawing, x: float, y: float, size: tuple[int, int]) -> None:
    height, width = size[0] * ROW, size[1] * CELL
    drawing.rect(x, y, width, height, "skipped", title="no query here may see a key: never loaded")
    drawing.line((x, y), (x + width, y + height), kind="faint")
    drawing.line((x, y + height), (x + width, y), kind="faint")
