"""The parts of a page around its steps: the start cells, the list of steps, and the flow chart."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from minimha.explain.figures.drawing import Drawing
from minimha.explain.figures.flow import flow
from minimha.explain.figures.gallery import figures
from minimha.explain.figures.matrix import MAPPED
from minimha.explain.story import story
from minimha.explain.trace import Step, Trace

MOST = 30  # steps in a list, or boxes in a chart; more are folded, by stage
WIDEST = 1100  # pixels of a chart
LARGEST = 2**12  # a trace with at most this many numbers has figures besides the flow chart
SURE = 0.9  # a weight above this leaves little to explain

Place = tuple[int, int, int]  # the number of a step, a row and a column


def places(trace: Trace, number: Mapping[Step, int]) -> dict[str, Place]:
    """Return up to three cells at which a reader can start, by name; the page opens at the first.

    The cells are the most probable next token, the chosen cell (``trace.cell``), and a weight
    between two tokens, as far as the trace has them. If it has none, the only cell is the first one
    of the last heatmap. ``number`` maps steps to their indices.
    """
    found: dict[str, Place] = {}
    if trace.cell:
        cells = [w.cell for w in story(trace, 0)]
        cell = next((c for c in cells if c.step.base == "weights"), cells[-1])
        found["Cell"] = _place(number[cell.step], cell.at)
    for step in trace.steps:
        if step.value.ndim != 2 or step.is_blank or not step.value.size:
            continue
        if step.name == "probabilities":
            at = (len(step.value) - 1, int(np.nan_to_num(step.value[-1]).argmax()))
            found = {"Prediction": _place(number[step], at)} | found
        elif step.base == "weights" and "Attention" not in found:
            found["Attention"] = _place(number[step], _telling(step))
    if not found and trace.steps:
        shaded = [step for step in trace.steps if step.base in MAPPED]
        found["Steps"] = (number[[*trace.steps[:1], *shaded][-1]], 0, 0)
    return found


def _place(step: int, at: Sequence[int]) -> Place:
    row, column = (0, 0, *at)[-2:]
    return step, row, column


def _telling(step: Step) -> tuple[int, int]:
    """Return the largest weight below ``SURE`` that a token has on another token."""
    value = np.where(step.value < SURE, step.value, 0)
    np.fill_diagonal(value, 0)
    row, column = np.unravel_index(value.argmax(), value.shape)
    return int(row), int(column)


def links(groups: Sequence[dict[str, Any]]) -> str:
    """Return links to all steps as HTML.

    ``groups`` are the page's records of steps. In a long list, the links of each stage are folded.
    """
    folds: dict[str, list[str]] = {}
    for n, group in enumerate(groups):
        stage = group["stage"] if len(groups) > MOST else ""
        name = group["name"].partition("[")[0] if stage else group["name"]
        link = (
            f'<li><a href="#{group["steps"][0]},0,0" data-group="{n}"><small>{n + 1}.</small> '
            f"{html.escape(name).replace('[', '<wbr>[')}</a></li>"
        )
        folds.setdefault(stage or f"\n{n}", []).append(link)
    return "\n".join(
        items[0] if stage.startswith("\n") else _fold(stage, f"<ol>{''.join(items)}</ol>", "li")
        for stage, items in folds.items()
    )


def _fold(summary: str, inside: str, around: str) -> str:
    details = f"<details><summary>{html.escape(summary)}</summary>{inside}</details>"
    return f"<{around}>{details}</{around}>"


def charts(trace: Trace, decimals: int) -> str:
    """Return the figures of a page as HTML.

    They are the flow chart, unless the trace selects steps, and for small traces all other figures
    except matrices and heatmaps.
    """
    found = {} if trace.only or trace.cell or trace.query else {"flow of data": _flow_chart(trace)}
    if sum(step.value.size for step in trace.steps) <= LARGEST:
        drawn = figures(trace.selected(head=trace.head), decimals)
        if trace.query:
            picked = trace.selected(["picks"], head=trace.head, query=trace.query)
            drawn |= figures(picked, decimals)
        for title, drawing in drawn.items():
            if title not in ("heatmaps", "matrices", "flow of data"):
                found[title] = _figure(drawing, title)
    return "\n".join(
        f"<section><h2>{html.escape(title.capitalize())}</h2>\n{figure}</section>"
        for title, figure in found.items()
    )


def _figure(drawing: Drawing, title: str) -> str:
    label = html.escape(title, quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{label}">'
        f"{drawing.inline(title)}</div>"
    )


def _flow_chart(trace: Trace) -> str:
    """Return the flow chart as HTML; one with many boxes is split and folded by stage."""
    whole = flow(trace, WIDEST)
    if _boxes(whole) <= MOST:
        return _figure(whole, "flow of data")
    stages: dict[str, dict[str, Step]] = {}
    for name, (step, *_) in trace.by_name.items():
        stages.setdefault(step.stage, {})[name] = step
    folds = []
    for stage, steps in stages.items():
        chart = flow(trace, WIDEST, steps.keys())
        if _boxes(chart) > MOST:  # formulas name the given steps too
            made = [name for name, step in steps.items() if trace.origins[step] is not None]
            chart = flow(trace, WIDEST, made)
        if chart.shapes:
            title = stage or "before and after"
            before = _stages_before(trace, stage, steps.values())
            summary = f"{title}, from {' and '.join(before)}" if before else title
            folds.append(_fold(summary, _figure(chart, title), "div"))
    return "\n".join(folds).replace("<details>", "<details open>", 1)


def _boxes(drawing: Drawing) -> int:
    return sum('class="box"' in shape for shape in drawing.shapes)


def _stages_before(trace: Trace, stage: str, steps: Iterable[Step]) -> list[str]:
    """Return the other stages from which the steps of a stage are computed."""
    hows = [how for step in steps if (how := trace.origins[step]) is not None]
    found = {s.stage: None for how in hows for s in how.operands if s is not None}
    return [name for name in found if name not in (stage, "")]
