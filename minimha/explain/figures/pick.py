"""How one query picks its values: a bar as long as each weight, and the value that it weighs."""

from collections.abc import Sequence

import numpy as np

from minimha.explain.figures.drawing import SIZE, Drawing, breadth, short
from minimha.explain.numbers import cells
from minimha.explain.trace import Step

ROW = 26
LABEL = 14  # characters
WHOLE = 300  # pixels of a weight of 1


def pick(steps: Sequence[Step], decimals: int) -> Drawing:
    """Draw the last query of a single head; nothing where there are several."""
    named = {step.name: step for step in steps if not step.place and step.value.ndim == 2}
    drawing = Drawing()
    if not {"weights", "v", "output"} <= named.keys() or named["output"].axes != ("Lq", "Dv"):
        return drawing
    weights, values, output = (named[name] for name in ("weights", "v", "output"))
    if not weights.value.size:
        return drawing
    labels = [short(label, LABEL) for label in weights.columns or ()]
    left = max(breadth(label) for label in labels) + 12
    drawing.text(0, SIZE / 2, f"how query {(weights.rows or ())[-1]} picks values", "bold")
    shares = np.nan_to_num(np.asarray(weights.value[-1], np.float64))
    numbers = cells(weights.value[-1], decimals)[0]
    picked = cells(values.value, decimals)
    for n, (label, share, row) in enumerate(zip(labels, shares.tolist(), picked, strict=True), 1):
        middle = (n + 0.5) * ROW
        drawing.text(left - 8, middle, label, "muted", anchor="end")
        drawing.rect(left, middle - 8, WHOLE * share, 16, "bar")
        words = f"{numbers[n - 1]} · [{' '.join(row)}]"
        drawing.text(left + WHOLE + 12, middle, words, "number")
    total = f"sum: [{' '.join(cells(output.value, decimals)[-1])}]"
    drawing.line((left, ROW), (left, ROW * (len(labels) + 1)))
    drawing.text(left + WHOLE + 12, (len(labels) + 1.5) * ROW, total, "number bold")
    return drawing
