"""Export a trace as an interactive HTML page, which shows the computation of any cell.

The page is one file and sends no requests. It embeds all numbers of a small run. Of a large run, it
embeds only the inputs and computes the rest from them, by operations that the module ``origins``
has checked. If the reader changes an input, the scale or the mask, the page recomputes all steps
that depend on it.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.explain import wording
from minimha.explain.figures.drawing import STYLE
from minimha.explain.figures.matrix import MAPPED, SHARES
from minimha.explain.mathml import mathml
from minimha.explain.origins import Origin
from minimha.explain.page.overview import charts, links, places
from minimha.explain.story import story
from minimha.explain.trace import Step, Trace
from minimha.explain.written import how_of

LARGEST = 2**21  # embedded numbers: about 8 MB
SMALL = 2**16  # a run with at most this many numbers is embedded whole, exactly
SCRIPTS = ("operations.js", "numbers.js", "changes.js", "words.js", "page.js")


def page(trace: Trace, decimals: int) -> str:
    """Return an interactive HTML page of ``trace``.

    ``decimals`` is the number of decimals of numbers that are not whole. Raises ValueError if the
    trace has too many numbers to embed.
    """
    made = _needed(trace)
    number = {step: n for n, step in enumerate(made)}
    record, embedded = _record(trace, made, number, decimals)
    encoded = b"".join(value.astype("<f8").tobytes() for value in embedded)
    encoded = encoded if record["isSmall"] else _rounded(record, embedded)
    data = base64.b64encode(gzip.compress(encoded, 6, mtime=0)).decode()
    groups = record["groups"]
    first = places(trace, number)
    record["first"] = next(iter(first.values()), None)
    style = f"{_part('style.css')}\n{STYLE}"
    script = "\n".join(map(_part, SCRIPTS))
    content = {
        "style-hash": _digest(style), "script-hash": _digest(script),
        "style": style, "script": script,
        "example": html.escape(trace.example),
        "legend": html.escape(". ".join(filter(None, [trace.source, wording.legend(trace)]))),
        "first": "\n".join(
            f'<li><a href="#{",".join(map(str, place))}">{name}</a></li>'
            for name, place in first.items()
        ),
        "list": links(groups), "cell": _cell(trace, number, decimals),
        "figures": charts(trace, decimals),
        "formulas": "\n".join(mathml(group.pop("tex")) for group in groups),
        "trace": json.dumps(record, ensure_ascii=False).replace("<", "\\u003c"), "data": data,
    }  # fmt: skip
    parts = _part("template.html").split("@")  # every second one is a name
    return "".join(content[part] if n % 2 else part for n, part in enumerate(parts))


def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the hash by which the page's content security policy allows a style or script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _cell(trace: Trace, number: Mapping[Step, int], decimals: int) -> str:
    if not trace.cell:
        return ""
    items = []
    for written in story(trace, decimals):
        step, at = written.cell.step, (0, 0, *written.cell.at)[-2:]
        link = f'<a href="#{number[step]},{at[0]},{at[1]}">{html.escape(step.title)}</a>'
        items.append(f"<li>{link}: <code>{html.escape(written.text)}</code></li>")
    return f"<h2>Cell {html.escape(trace.cell)}</h2>\n<ul>{''.join(items)}</ul>"


def _record(
    trace: Trace, made: Mapping[Step, Origin | None], number: Mapping[Step, int], decimals: int
) -> tuple[dict[str, Any], list[NDArray[np.float64]]]:
    tables = Tables()
    records = [_step(step, how, tables) for step, how in made.items()]
    is_small = sum(step.value.size for step in made) <= SMALL
    embedded, at = [], 0
    for (step, how), record in zip(made.items(), records, strict=True):
        record["stale"] = how is None and (
            trace.origins.follows(step) or step.base in ("difference", "kept")
        )
        record["how"] = how_of(step)
        if how is None or is_small:
            record["at"] = at
            embedded.append(np.asarray(step.value, np.float64).ravel())
            at += step.value.size
        if how is not None:
            record["made"] = {
                "operation": how.operation, "constant": how.constant,
                "from": [None if s is None else number[s] for s in how.operands],
            }  # fmt: skip
    if at > LARGEST:
        raise ValueError(
            f"a page would hold {at:,} numbers where {LARGEST:,} can be: export this run with "
            f"--format npz or json, or choose fewer steps with --only"
        )
    whole = {
        "isSmall": is_small, "decimals": decimals,
        "labels": tables.labels, "patterns": tables.patterns, "parts": tables.parts,
        "groups": _groups(trace.steps, number, records), "steps": records,
        **_changes(made, records),
    }  # fmt: skip
    return whole, embedded


class Tables:
    """Tables of the labels, masks and stages of a page; a step refers to their entries by index."""

    def __init__(self) -> None:
        self.labels: list[Sequence[str]] = []
        self.patterns: list[str] = []
        self.parts: list[str] = []

    def label(self, labels: Sequence[str] | None) -> int | None:
        """Store ``labels`` if they are new, and return their index; return None for None."""
        return None if labels is None else _number(self.labels, labels)

    def part(self, step: Step) -> int:
        """Store the stage of ``step``, as in ``q[encoder]``, if it is new, and return its index."""
        return _number(self.parts, step.stage)

    def mask(self, step: Step) -> dict[str, int | None]:
        """Return the mask of ``step``, in which hidden keys have the score -∞.

        For a causal mask, "offset" is the last key that query 0 sees, and "pattern" is None. For
        any other mask, "pattern" is its index, and "offset" is None.
        """
        hidden = np.isneginf(np.atleast_2d(step.value))
        offset = int((~hidden[0]).sum()) - 1
        if hidden.any() and (hidden == np.triu(np.ones_like(hidden), offset + 1)).all():
            return {"offset": offset, "pattern": None}
        return {"offset": None, "pattern": self.pattern(hidden)}

    def pattern(self, hidden: NDArray[np.bool_]) -> int:
        """Store the mask ``hidden`` (True for hidden keys) if it is new, and return its index."""
        return _number(self.patterns, base64.b64encode(np.packbits(hidden).tobytes()).decode())


def _number(known: list[Any], item: Any) -> int:
    if item not in known:
        known.append(item)
    return known.index(item)


def _needed(trace: Trace) -> dict[Step, Origin | None]:
    """Return the origins of all shown steps and, recursively, of their operands, in order."""
    found: dict[Step, Origin | None] = {}
    waiting = list(trace.steps)
    while waiting:
        step = waiting.pop()
        if step in found:
            continue
        how = None if step.is_blank else trace.origins[step]
        if how is not None and any(s is not None and s.is_blank for s in how.operands):
            how = None  # the page must not show blanked numbers
        found[step] = how
        waiting += [] if how is None else [s for s in how.operands if s is not None]
    ordered = (step for steps in trace.by_name.values() for step in steps)
    return {step: found[step] for step in ordered if step in found}


def _step(step: Step, how: Origin | None, tables: Tables) -> dict[str, Any]:
    shape = step.value.shape
    rows = int(np.prod(shape[:-1])) if len(shape) > 1 else 1
    is_masking = how is not None and how.operation in ("mask", "block")
    hidden = np.isneginf(step.value) if step.made[:1] == ("mask",) else step.hidden
    is_embedded = how is None and hidden is not None  # the page does not compute this mask
    mapped = "weights" if step.base in SHARES else "scores"
    return {
        "title": step.title, "symbol": step.symbol, "place": step.place,
        "stage": step.stage or step.name, "axes": list(step.axes), "shape": list(shape),
        "rows": rows, "cols": shape[-1] if shape else 1,
        "rowLabels": tables.label(step.rows), "columnLabels": tables.label(step.columns),
        "mapped": mapped if step.base in MAPPED else None,
        "base": step.base, "part": tables.part(step),
        "size": step.value.size, "made": None, "at": None, "group": None, "blank": step.is_blank,
        "mask": tables.mask(step) if is_masking else None,
        "hides": tables.pattern(hidden) if is_embedded and hidden is not None else None,
        "isBlock": how is not None and how.operation == "block",
    }  # fmt: skip


def _groups(
    shown: Sequence[Step], number: Mapping[Step, int], records: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the facts that all heads of a step share, and set ``group`` in each record."""
    groups = []
    for n, name in enumerate(dict.fromkeys(step.name for step in shown)):
        steps = [step for step in shown if step.name == name]
        for step in steps:
            records[number[step]]["group"] = n
        group = {
            "name": name, "stage": steps[0].stage,
            "tex": steps[0].tex, "source": steps[0].source,
            "notes": [step.note for step in steps],
            "printed": [list(_printed(step)) for step in steps],
            "steps": [number[step] for step in steps],
        }  # fmt: skip
        groups.append(group)
    return groups


def _printed(step: Step) -> Iterator[str]:
    for source, numbers, remarks in wording.printed(step):
        yield f"printed in {source}: {numbers}"
        yield from (remark.sentence for remark in remarks)


def _changes(
    made: Mapping[Step, Origin | None], records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the scale and mask that readers may change, and set ``scales`` in each record."""
    hows = [how for how in made.values() if how is not None]
    rescaled = {s for how in hows if how.operation == "scale" for s in how.operands}
    # Scores that are also used undivided are rescaled themselves.
    rescaled -= {s for how in hows if how.operation in ("mask", "row max") for s in how.operands}
    scales = []
    for (step, how), record in zip(made.items(), records, strict=True):
        record["scales"] = None
        if how is None:
            continue
        if how.operation == "block" or (
            how.operation == "scale" and not rescaled.isdisjoint(how.operands)
        ):
            record["scales"] = "constant"
            scales.append(how.constant)
        elif how.operation in ("dot", "cosine", "pairs") and step not in rescaled:
            record["scales"] = "product"
            scales.append(1.0)
    operations = {how.operation for how in hows}
    is_causal = any(r["mask"] and r["mask"]["offset"] is not None for r in records)
    return {
        "scale": scales[0] if scales and scales[0] else 1.0, "canScale": bool(scales),
        "causal": is_causal, "addsMask": not is_causal,
        "canMask": "exp" in operations and "block" not in operations,
    }  # fmt: skip


def _rounded(record: dict[str, Any], embedded: Sequence[NDArray[np.float64]]) -> bytes:
    """Return all numbers as int32 multiples of a quantum, two digits finer than shown.

    The first bytes of all numbers come first, then all second bytes, and so on.
    """
    wholes = []
    given = [step for step in record["steps"] if step["at"] is not None]
    for step, value in zip(given, embedded, strict=True):
        finite = np.isfinite(value)
        largest = abs(value[finite]).max(initial=0)
        step["quantum"] = float(max(10.0 ** -(record["decimals"] + 2), largest / 2**30))
        whole = np.rint(np.where(finite, value, 0) / step["quantum"]).astype("<i4")
        for n, place in enumerate((np.isneginf(value), np.isposinf(value), np.isnan(value))):
            whole[place] = n - 2**31  # the three lowest codes are -∞, ∞ and NaN
        wholes.append(whole)
    planes: NDArray[np.uint8] = np.concatenate(wholes).view(np.uint8).reshape(-1, 4).T
    return planes.tobytes()
