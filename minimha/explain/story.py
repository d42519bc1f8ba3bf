"""Follow one cell through all steps, from the score to its part of the output."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from minimha.explain.numbers import cells, term
from minimha.explain.trace import Step, Trace
from minimha.explain.written import Cell, Index, Written, cell

PAIRS = (("Lq", "Lk"), ("B_r", "B_c"))  # axes of matrices with a query per row and a key per column


def story(trace: Trace, decimals: int = 3) -> tuple[Written, ...]:
    """Return the computation of the cell ``trace.cell`` in each selected step that has this cell.

    The cell ``sat,cat`` has the row ``sat`` (a query) and the column ``cat`` (a key). Its steps are
    the score (raw, scaled and masked), the exponential, the weight, and the part of the output that
    comes from the key's value. If ``trace.only`` names other steps, row and column are labels of
    their axes. Raises ValueError if no selected step has such a cell, or if a label occurs twice.
    """
    parts = [part.strip() for part in trace.cell.split(",")]
    found: list[Written] = []
    for step in trace.steps:
        index = _index(trace, step, parts)
        if index is not None:
            found.append(cell(trace, step, index, decimals))
        elif step.made[:1] in (("product",), ("running product",)):
            found += _share_of(trace, step, parts, decimals)
    if len(parts) > 1:  # drop a number per row if no cell of that row is shown
        there = {_beside(w.cell.step) for w in found if not _is_per_row(w.cell.step)}
        found = [w for w in found if _beside(w.cell.step) in there]
    if not found:
        raise ValueError(_not_there(trace, parts))
    return tuple(found)


def _beside(step: Step) -> tuple[str, str]:
    return step.name[len(step.base) :], step.place


def _is_per_row(step: Step) -> bool:
    """Return whether the step has one number for each query."""
    return (step.axes[-1:] == ("1",) and step.value.ndim == 2) or step.axes == ("Lq",)


def _index(trace: Trace, step: Step, parts: Sequence[str]) -> Index | None:
    """Return the cell's index in ``step``, or None; a number per row needs only the row."""
    if _is_per_row(step):
        row = step.number(0, parts[0])
        return None if row is None or len(parts) > 2 else (row, 0)[: step.value.ndim]
    if step.value.ndim != len(parts) or not (step.axes[-2:] in PAIRS or trace.only):
        return None
    numbers = [step.number(n, part) for n, part in enumerate(parts)]
    index = tuple(n for n in numbers if n is not None)
    return index if len(index) == len(parts) else None


def _share_of(trace: Trace, step: Step, parts: Sequence[str], decimals: int) -> Iterator[Written]:
    """Yield the part of an output that comes from one key's value, if ``step`` is an output."""
    made = trace.origins[step]
    weights, values = (None, None) if made is None else made.operands[:2]
    if weights is None or values is None or weights.axes[-2:] not in PAIRS:
        return
    index = _index(trace, weights, parts)
    if index is None:
        return
    i, j = index
    weight = term(weights.value, decimals)(weights.value[i, j])
    row, output = (" ".join(cells(s.value, decimals)[n]) for s, n in ((values, j), (step, i)))
    [share] = cells(weights.value[i, j] * values.value[j], decimals, like=step.value)
    this = Cell(step, (i,))
    right = f"{weight} · [{row}] = [{' '.join(share)}]"
    text = f"{right}, its part of {this.text} = [{output}]"
    value = tuple(Cell(values, (j, n)) for n in range(values.value.shape[1]))
    yield Written(this, "part", (Cell(weights, index),), value, (), right, text)


def _not_there(trace: Trace, parts: Sequence[str]) -> str:
    if len(parts) > 2:
        return f"cell {trace.cell!r} has {len(parts)} parts: expected a row and a column"
    steps = [s for s in trace.steps if s.value.ndim == 2 and (s.axes[-2:] in PAIRS or trace.only)]
    if not steps:
        return f"cell {trace.cell!r}: no step shown has a query per row and a key per column"
    step = steps[0]
    sizes = zip(("rows", "columns"), (step.rows, step.columns), step.value.shape, strict=True)
    there = [
        f"{word} {', '.join(labels)}" if labels else f"{word} 0 to {size - 1}"
        for word, labels, size in sizes
        if not (word == "columns" and _is_per_row(step))
    ]
    known = [*(step.rows or ()), *(step.columns or ())]
    near = [[part] if part in known else get_close_matches(part, known, 1) for part in parts]
    meant = f"did you mean {','.join(m[0] for m in near)!r}? " if all(near) else ""
    return f"no cell {trace.cell!r} here: {meant}{step.title} has {', '.join(there)}"
