"""Read traces that ``export`` wrote as JSON or npz."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.explain.catalogue import entry
from minimha.explain.printed import PrintedMatrix, Status
from minimha.explain.trace import Trace, printable

NAME = re.compile(r"[^\W\d]\w*(\[[\w=, ]+\])*")  # of a step; exports use the name in file names
HEADS = ("H", "Hkv")
KINDS = ("head", "kv_head")


def trace_from(
    record: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
) -> Trace:
    """Rebuild a trace from ``record``, the parsed JSON of ``export.as_json``.

    If it comes from an npz file, ``arrays`` are the other arrays of the file.

    Raises ValueError for a record that ``export`` cannot have written.
    """
    hidden: dict[str, NDArray[np.bool_]] = {}
    kept: dict[str, tuple[str, list[int]]] = {}
    try:
        trace = Trace(
            example=str(record["example"]), source=str(record["source"]),
            labels={axis: tuple(map(str, names)) for axis, names in record["labels"].items()},
            notes={step: printable(str(note)) for step, note in record["notes"].items()},
            printed=[matrix for step in record["steps"] for matrix in _printed(step)],
            blocks=tuple(record["blocks"]) if record["blocks"] else None,
            given=tuple(record["given"]), computed=tuple(record["computed"]),
            num_heads=None if record["num_heads"] is None else int(record["num_heads"]),
            hidden=hidden, kept=kept,
        )  # fmt: skip
        by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for step in record["steps"]:
            by_name[step["name"]].append(step)
        for name, steps in by_name.items():
            if not NAME.fullmatch(name):
                raise ValueError(f"{name[:40]!r} is no name of a step")
            trace(name, _whole(name, steps, None if arrays is None else arrays[name]))
            kinds = [key for key in KINDS if key in steps[0]]
            numbers = list(dict.fromkeys(step[kind] for kind in kinds for step in steps))
            if kinds and numbers != list(range(max(2, len(numbers)))):
                kept[name] = kinds[0], numbers
            if any("hidden" in step for step in steps):
                hidden[name] = _whole(name, steps, np.array([_hidden(step) for step in steps]))
        _ = trace.steps
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"it is no trace as minimha exports it: {what}") from None
    return trace


def _whole(
    name: str, steps: Sequence[Mapping[str, Any]], array: NDArray[Any] | None
) -> NDArray[Any]:
    """Return the values of a step as one array, with all batch entries and heads."""
    shape = tuple(steps[0]["shape"])
    if array is None:
        dtype = np.dtype(steps[0].get("dtype", "float64"))
        if dtype.kind not in "biuf":  # an item of another kind may be as large as memory
            raise ValueError(f"{name} has the dtype {dtype}: expected one of numbers")
        array = np.array([step["value"] for step in steps], dtype)
    batches, heads = (
        len({step[key] for step in steps for key in keys if key in step})
        for keys in (("batch",), KINDS)
    )
    axes = entry(name).axes
    if batches and not heads and set(HEADS) & set(axes) and axes[-1:] == (*steps[0]["axes"],)[-1:]:
        heads = 1  # the axis that was left out
    return array.reshape((*(n for n in (batches, heads) if n), *shape))


def _hidden(step: Mapping[str, Any]) -> NDArray[np.bool_]:
    found = np.zeros(step["shape"], bool)
    for at in step.get("hidden", ()):
        found[tuple(at)] = True
    return found


def _printed(step: Mapping[str, Any]) -> list[PrintedMatrix]:
    return [
        _matrix(step, source, list(numbers))
        for source, numbers in groupby(step.get("printed", ()), key=lambda p: str(p["source"]))
    ]


def _matrix(
    step: Mapping[str, Any], source: str, numbers: Sequence[Mapping[str, Any]]
) -> PrintedMatrix:
    rows = groupby(numbers, key=lambda number: number["index"][:-1])
    first = numbers[0]
    exact = np.array([number["exact"] for number in numbers], np.float64)
    return PrintedMatrix(
        step["name"], tuple(" ".join(str(n["text"]) for n in row) for _, row in rows),
        printable(source),
        but={tuple(n["index"]): Status(n["status"]) for n in numbers}, head=step.get("head"),
        exact=exact.reshape(step["shape"]), origin=printable(first["origin"]),
        has_inputs=first["exact"] is not None, exactly=printable(first["exactly"]),
    )  # fmt: skip
