"""Draw a flow chart of a run: a box per matrix, and arrows from its operands.

A box is below the boxes of all its operands. An input is one row above its first use. Within a row,
boxes are ordered by the mean position of their neighbours. An arrow across a row has a place in it
(Sugiyama et al. 1981).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from minimha.explain.figures.drawing import Drawing, breadth, in_lines, in_rows
from minimha.explain.labels import BLOCK
from minimha.explain.trace import Trace

NAME, FORMULA = 13, 11  # sizes of text
LONGEST = 40  # characters of a line of a formula
BOX, LINE = 28, 14  # height of a box without a formula, and of each line of a formula
BETWEEN, ASIDE = 40, 18  # space below a box, and to its sides
SWEEPS = 8


@dataclass(eq=False)
class Box:
    """A box of a flow chart, centred at ``x``; a box without a name is space for an arrow.

    ``above`` are the boxes of its operands, and ``below`` those of the steps that use it.
    """

    row: int
    width: float = 2.0
    name: str = ""
    formula: list[str] = field(default_factory=list)
    shape: str = ""
    x: float = 0.0
    top: float = 0.0
    height: float = BOX
    above: list[Box] = field(default_factory=list)
    below: list[Box] = field(default_factory=list)


def flow(trace: Trace, widest: float, names: Collection[str] | None = None) -> Drawing:
    """Draw a flow chart of the steps in ``names``, by default of all steps.

    Steps without arrows, steps of blocks, and steps of stages like ``[cross, step 1]``, which
    repeat the stage ``[cross]``, are omitted. If no arrows join two groups of steps, each group has
    its own chart. The charts stand in rows of at most ``widest`` pixels.
    """
    parts = _connected(_sources(trace, trace.by_name if names is None else names))
    return in_rows([_flow(trace, part) for part in parts], widest, 3 * ASIDE)


def _flow(trace: Trace, sources: Mapping[str, list[str]]) -> Drawing:
    rows = _arranged(_boxes(trace, sources))
    drawing = Drawing()
    left = min((box.x - box.width / 2 for row in rows for box in row), default=0.0)
    for box in (box for row in rows for box in row):
        box.x -= left
    _stack(rows)
    boxes = [box for row in rows for box in row if box.name]
    for draw in (_arrows, _draw):
        for box in boxes:
            draw(drawing, box)
    return drawing


def _sources(trace: Trace, names: Collection[str]) -> dict[str, list[str]]:
    """Return, for each name to draw, the names from which any head is computed."""
    found: dict[str, list[str]] = {}
    for name in (n for n in trace.by_name if "," not in n and not BLOCK.search(n) and n in names):
        operands = _split(trace, name, found) or _operands(trace, name)
        found[name] = [operand for operand in dict.fromkeys(operands) if operand in found]
    return found


def _operands(trace: Trace, name: str) -> list[str]:
    made = trace.origins[trace.by_name[name][0]]
    operands = [] if made is None else list(made.operands)
    if made is not None and made.operation == "pairs":
        del operands[2:]  # K gives only the number of keys
    if made is not None and made.operation == "total" and operands[1] is None:
        del operands[2:]  # only a sink is relative to the maximum
    names = [step.name for step in operands if step is not None]
    if made is not None and made.operation == "cosine":  # the dot product of unit vectors
        units = [operand[0] + "_unit" + operand[1:] for operand in names]
        names = units if all(unit in trace.by_name for unit in units) else names
    return names


def _split(trace: Trace, name: str, before: Iterable[str]) -> list[str]:
    """Return the name of the matrix of all heads that contains ``name``, if there is one."""
    step = trace.by_name[name][0]
    combined = f"{step.base}_combined{name[len(step.base) :]}"
    if combined not in before:
        return []
    part = trace.by_name[combined][0].value[..., : step.value.shape[-1]]
    is_part = part.shape == step.value.shape and np.allclose(part, step.value, equal_nan=True)
    return [combined] if is_part else []


def _connected(sources: Mapping[str, list[str]]) -> list[dict[str, list[str]]]:
    """Return the connected components of the graph that have an arrow."""
    parts: list[dict[str, list[str]]] = []
    for name, operands in sources.items():
        near = [part for part in parts if part.keys() & set(operands)]
        joined = {key: part[key] for part in near for key in part} | {name: operands}
        parts = [part for part in parts if part not in near] + [joined]
    return [part for part in parts if len(part) > 1]


def _rows_of(sources: Mapping[str, list[str]]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for name, operands in sources.items():  # in the order of computation
        rows[name] = 1 + max((rows[operand] for operand in operands), default=-1)
    users = {operand: [n for n in sources if operand in sources[n]] for operand in sources}
    for name, operands in sources.items():
        if not operands and users[name]:
            rows[name] = min(rows[user] for user in users[name]) - 1
    return rows


def _boxes(trace: Trace, sources: Mapping[str, list[str]]) -> list[list[Box]]:
    """Return the boxes in rows, with reserved space for each arrow that passes a row."""
    numbers = _rows_of(sources)
    rows: list[list[Box]] = [[] for _ in range(1 + max(numbers.values(), default=-1))]
    boxes: dict[str, Box] = {}
    for name in numbers:
        step = trace.by_name[name][0]
        is_named = step.formula in (step.symbol, name)
        formula = [] if is_named else in_lines(step.formula, LONGEST)
        shape = " × ".join(map(str, trace[name].shape))
        words = [breadth(line, FORMULA) for line in [*formula, shape]]
        width = 18 + max([breadth(name, NAME), *words])
        boxes[name] = Box(numbers[name], width, name, formula, shape)
        rows[numbers[name]].append(boxes[name])
    for name in numbers:
        for operand in sources[name]:
            above = boxes[operand]
            for row in range(above.row + 1, numbers[name]):
                place = Box(row)
                rows[row].append(place)
                _join(above, place)
                above = place
            _join(above, boxes[name])
    return rows


def _join(above: Box, below: Box) -> None:
    above.below.append(below)
    below.above.append(above)


def _arranged(rows: list[list[Box]]) -> list[list[Box]]:
    """Move each box in its row as near as possible to the mean position of its neighbours."""
    for row in rows:
        _spread(row, range(len(row)))
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        for row in rows if downwards else rows[::-1]:
            near = [box.above if downwards else box.below for box in row]
            wanted = [
                fmean(other.x for other in others) if others else box.x
                for box, others in zip(row, near, strict=True)
            ]
            _spread(row, wanted)
    return rows


def _spread(row: list[Box], wanted: Iterable[float]) -> None:
    """Order the boxes by their wanted positions, move them apart, and centre the row again."""
    pairs = sorted(zip(wanted, row, strict=True), key=lambda pair: pair[0])
    row[:] = [box for _, box in pairs]
    right = -float("inf")
    for place, box in pairs:
        box.x = max(place, right + ASIDE + box.width / 2)
        right = box.x + box.width / 2
    shift = fmean(place - box.x for place, box in pairs)
    for box in row:
        box.x += shift


def _stack(rows: list[list[Box]]) -> None:
    """Set the top and the height of each row; the longest formula decides."""
    top = 0.0
    for row in rows:
        height = BOX + LINE * max([1, *(len(box.formula) for box in row)])
        for box in row:
            box.top, box.height = top, height
        top += height + BETWEEN


def _draw(drawing: Drawing, box: Box) -> None:
    drawing.rect(box.x - box.width / 2, box.top, box.width, box.height, "box")
    y = box.top + box.height / 2 - (LINE * len(box.formula) + 2) / 2 * bool(box.formula)
    drawing.text(box.x, y, box.name, "bold", anchor="middle", size=NAME)
    for n, line in enumerate(box.formula, 1):
        drawing.text(box.x, y + 3 + n * LINE, line, "muted", anchor="middle", size=FORMULA)
    if box.below:
        half, y = breadth(box.shape, FORMULA) / 2 + 2, box.top + box.height + 12
        drawing.rect(box.x - half, y - 7, 2 * half, 14, "ground")
        drawing.text(box.x, y, box.shape, "muted", anchor="middle", size=FORMULA)


def _arrows(drawing: Drawing, box: Box) -> None:
    for below in box.below:
        points = [(box.x, box.top + box.height)]
        place, last = below, box
        while not place.name:
            points += [(place.x, place.top), (place.x, place.top + place.height)]
            place, last = place.below[0], place
        entry = place.x + _aside(place, last)
        drawing.line(*points, (entry, place.top), tip="tip")


def _aside(box: Box, source: Box) -> float:
    """Return the distance from the centre of ``box`` at which the arrow from ``source`` enters."""
    order = sorted(box.above, key=lambda other: other.x)
    return (order.index(source) - (len(order) - 1) / 2) * min(24, box.width / (len(order) + 1))
