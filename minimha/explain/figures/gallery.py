"""Choose the figures of a trace, and combine them in one picture."""

from collections.abc import Sequence

from minimha.explain import wording
from minimha.explain.figures.angles import angles
from minimha.explain.figures.blocks import grid
from minimha.explain.figures.drawing import SIZE, Drawing, in_rows, stacked
from minimha.explain.figures.flow import flow
from minimha.explain.figures.matrix import MAPPED, legend, matrix, scales_of
from minimha.explain.figures.pick import pick
from minimha.explain.story import story
from minimha.explain.trace import Step, Trace

WIDEST = 960  # pixels of a row; a single figure may be wider
GAP = 28


def svg(trace: Trace, decimals: int) -> str:
    """Return all figures of ``trace`` as one SVG picture."""
    head = Drawing()
    head.text(0, SIZE / 2 + 2, trace.example, "bold", size=SIZE + 3)
    if trace.source:
        head.text(0, 32, trace.source, "muted")
    return stacked([head, *figures(trace, decimals).values()], GAP).svg(trace.example)


def figures(trace: Trace, decimals: int) -> dict[str, Drawing]:
    """Return the figures of a trace by title.

    ``trace.only``, ``trace.cell`` and ``trace.query`` select figures. If none of them is given, the
    result has each figure that is not empty for this run. If ``trace.only`` or ``trace.query`` is
    given, or if there is no other figure, the result has the matrices of the shown steps.
    """
    drawn = {"cell": _cell(trace, decimals)} if trace.cell else {}
    is_whole = not (trace.only or trace.cell or trace.query)
    if is_whole:
        drawn |= {"flow of data": flow(trace, 1.5 * WIDEST)}
    if not trace.only or "heatmap" in trace.only:
        drawn["heatmaps"] = _heatmaps(trace.drawn("heatmap"), decimals)
    picked = [pick(one, decimals) for one in wording.picks(trace)]
    drawn["values picked"] = in_rows(picked, WIDEST, GAP)
    if is_whole:
        drawn |= {"angles": angles(trace.steps, WIDEST, decimals), "blocks": grid(trace)}
    found = {title: drawing for title, drawing in drawn.items() if drawing.shapes}
    if ((trace.only or trace.query) and trace.shown) or not found:
        found["matrices"] = _chosen(trace.shown, decimals)
    return found


def _cell(trace: Trace, decimals: int) -> Drawing:
    drawing = Drawing()
    drawing.text(0, SIZE / 2, f"cell {trace.cell}", "bold")
    for written in story(trace, decimals):
        drawing.text(0, drawing.height + SIZE, written.line, "number")
    return drawing


def _chosen(steps: Sequence[Step], decimals: int) -> Drawing:
    """Draw each step as a matrix, the scales of heatmaps, and the numbers that documents print."""
    scales = scales_of(steps)
    drawn = []
    for s in steps:
        relation = s.relation if s.base == "weights" else ""
        title = ", ".join(filter(None, (s.title, s.size if s.whole else "", relation)))
        formula = "" if s.formula in (s.symbol, s.name) else s.formula
        drawn.append(matrix(s, title, decimals, scales, formula))
    parts = [in_rows(drawn, WIDEST, GAP)]
    mapped = [step for step in steps if step.base in MAPPED]
    parts += [legend(mapped, scales)] if mapped else []
    parts += [_printed(step) for step in steps if step.printed]
    return stacked(parts, GAP)


def _printed(step: Step) -> Drawing:
    drawing = Drawing()
    for source, numbers, remarks in wording.printed(step):
        lines = [f"{step.title}, printed in {source}: {numbers}"]
        lines += [f"    {remark.sentence}" for remark in remarks]
        for line in lines:
            indent = 16 * line.startswith(" ")
            drawing.text(indent, drawing.height + SIZE, line.strip(), "" if indent else "muted")
    return drawing


def _heatmaps(steps: Sequence[Step], decimals: int) -> Drawing:
    drawn = wording.heatmaps(steps)
    if not drawn:
        return Drawing()
    mapped = [step for _, step in drawn]
    scales = scales_of(mapped)
    maps = [matrix(step, title, decimals, scales) for title, step in drawn]
    return stacked([in_rows(maps, WIDEST, GAP), legend(mapped, scales)], GAP)
