"""Draw a query's weights as bars, each beside the value that it multiplies."""

import numpy as np

from minimha.explain.figures.drawing import SIZE, Drawing, breadth, short
from minimha.explain.numbers import cells
from minimha.explain.wording import Pick

ROW = 26
LABEL = 14  # characters
WHOLE = 300  # pixels of a weight of 1


def pick(picked: Pick, decimals: int) -> Drawing:
    """Draw the weights of the query ``picked`` as bars, each beside its value, and their output.

    Keys with small weights may share one bar.
    """
    query, weights, values, output = picked
    number, rest = picked.rest
    labels = [short((weights.columns or ())[n], LABEL) for n in picked.keys]
    labels += [f"{number} more"] if number else []
    left = max(breadth(label) for label in labels) + 12
    drawing = Drawing()
    drawing.text(0, SIZE / 2, picked.title, "bold")
    row = weights.value[query]
    shares = np.nan_to_num([*row[picked.keys], *([rest] if number else [])]).tolist()
    numbers, rows = cells(np.array(shares), decimals, like=row)[0], cells(values.value, decimals)
    vectors = [f" · [{' '.join(rows[n])}]" for n in picked.keys] + [""] * bool(number)
    lines = zip(labels, shares, numbers, vectors, strict=True)
    for n, (label, share, text, vector) in enumerate(lines, 1):
        middle = (n + 0.5) * ROW
        drawing.text(left - 8, middle, label, "muted", anchor="end")
        drawing.rect(left, middle - 8, WHOLE * share, 16, "bar")
        drawing.text(left + WHOLE + 12, middle, text + vector, "number")
    total = f"sum: [{' '.join(cells(output.value, decimals)[query])}]"
    drawing.line((left, ROW), (left, ROW * (len(labels) + 1)))
    drawing.text(left + WHOLE + 12, (len(labels) + 1.5) * ROW, total, "number bold")
    return drawing
