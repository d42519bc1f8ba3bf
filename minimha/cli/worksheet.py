"""Check a filled worksheet, number by number: the option ``--answer``."""

import argparse
import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from minimha.cli.arguments import number
from minimha.equations.arguments import counted
from minimha.explain.printed import Status, classify
from minimha.explain.trace import Step, Trace
from minimha.explain.written import NO_KEY, Cell, Index, cell

Records = list[dict[str, str]]
FATES = {
    Status.EXACT: "right",
    Status.TRUNCATED: "truncated, not rounded",
    Status.WRONG: "wrong",
}


def checked(args: argparse.Namespace, trace: Trace) -> tuple[str, Records, Records]:
    """Return a title, the records of the wrong numbers, and the records of all numbers.

    The numbers are those of the file ``--answer``. It has the step that ``--hide`` names, one head
    below the other, with or without titles and labels. A number given with n decimals is right if
    the exact number, rounded to n decimals, equals it.
    """
    from minimha.cli.inputs import read_rows

    if not args.hide:
        raise ValueError("--answer needs --hide: the step whose numbers it holds")
    steps = trace.selected(args.hide, head=args.head).steps
    read = read_rows(args.answer)
    rows = [(line, row) for line, row in read if not any(_is_heading(row, step) for step in steps)]
    named = [step for step in steps if step.title in args.hide]  # without other stages or heads
    if len(rows) == sum(len(_rows(step)) for step in named):
        steps = tuple(named)
    expected = [(step, n, row) for step in steps for n, row in enumerate(_rows(step))]
    shape = _shape(named or steps)
    if len(rows) != len(expected):
        raise ValueError(f"{args.answer} has {counted(len(rows), 'row')}: {shape}")
    records = []
    for (line, fields), (step, n, row) in zip(rows, expected, strict=True):
        where = f"{args.answer}, line {line}"
        if step.rows and step.value.ndim > 1 and len(fields) == 1 + len(row):
            label = fields.pop(0).strip()
            if label != step.rows[n]:
                raise ValueError(f"{where} begins with {label!r}: expected {step.rows[n]!r}")
        if len(fields) != len(row):
            blank = re.search(r"\S[\t ]+\S", fields[0].strip()) if len(fields) == 1 else None
            hint = " (commas separate numbers)" if blank else ""
            came = f"{counted(len(fields), 'field')}{hint}"
            raise ValueError(f"{where} has {came}: {step.title} has {counted(len(row), 'column')}")
        for field, ((at, exact), text) in enumerate(zip(row, fields, strict=True), 1):
            record = _record(f"{where}, field {field}", step, at, exact, text)
            if _is_no_maximum(trace, step, at, text):
                record["verdict"] = FATES[Status.EXACT]
            records.append(record)
    wrong = [record for record in records if record["verdict"] != FATES[Status.EXACT]]
    right = len(records) - len(wrong)
    return f"{right} of {len(records)} numbers are right", wrong, records


def _is_no_maximum(trace: Trace, step: Step, at: Index, text: str) -> bool:
    """Return whether the answer is -∞ for the maximum of a row without scores, 0 by convention."""
    return (
        step.base == "row_max"
        and text.strip().replace("−", "-") in ("-inf", "-∞")
        and NO_KEY in cell(trace, step, at).text
    )


def _shape(steps: Sequence[Step]) -> str:
    """Return the rows of each step and of all, in words: ``weights has 3 rows of 3``."""
    sizes = [(step.title, len(_rows(step)), len(_rows(step)[0])) for step in steps if _rows(step)]
    parts = [f"{title} has {counted(rows, 'row')} of {width}" for title, rows, width in sizes]
    total = f", {sum(rows for _, rows, _ in sizes)} in all" if len(sizes) > 1 else ""
    return ", ".join(parts) + total


def _rows(step: Step) -> list[list[tuple[Index, float]]]:
    """Return the numbers of a step with their places, row by row."""
    width = step.value.shape[-1] if step.value.ndim else 1
    places = [(at, float(step.value[at])) for at in np.ndindex(step.value.shape)]
    return [places[n : n + width] for n in range(0, len(places), width)]


def _is_heading(fields: Sequence[str], step: Step) -> bool:
    """Return whether the fields of a line are the step's title or the labels of its columns."""
    words = [field.strip() for field in fields]
    if ", ".join(filter(None, words)) == step.title:
        return True
    labels = list(step.columns or ())
    if words == labels:
        return any(character.isalpha() for character in "".join(words))  # else it may be an answer
    return bool(labels) and words[1:] == labels and words[0] not in (step.rows or ())


def _record(where: str, step: Step, at: Index, exact: float, text: str) -> dict[str, str]:
    """Return one number of the answer, with its verdict."""
    text = text.strip()
    found = {"cell": f"{step.title}: {Cell(step, at).text}", "given": text}
    if not text:
        return found | {"verdict": "left blank"}
    try:
        number(text)
    except ValueError:
        raise ValueError(f"{where} is {text!r}: expected a number, or nothing") from None
    plain = format(Decimal(text.replace("−", "-")), "f") if "e" in text.lower() else text
    return found | {"verdict": FATES[classify(plain, exact)]}
