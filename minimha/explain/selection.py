"""Select the steps to show, by the options ``--only``, ``--head``, ``--query`` and ``--hide``."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.explain.steps import Step

QUERY_AXES, KEY_AXES = (("L",), ("Lq",), ("B_r",)), ("Lk", "B_c")
LONGEST_ROW, MOST = 32, 16  # a longer row than the first is cut to the second
DRAWINGS = ("heatmap", "picks")  # drawings, which ``only`` may also name


def check_names(every: Sequence[Step], only: Sequence[str], blank: Sequence[str]) -> None:
    """Raise ValueError if ``only`` or ``blank`` names an unknown step; suggest a similar name."""
    if not only and not blank:
        return
    known = dict.fromkeys(name for step in every for name in sorted(step.names))
    for name in (*only, *blank):
        if name in known or (name in DRAWINGS and name not in blank):
            continue
        from difflib import get_close_matches  # imported here because the import is slow

        # The name without its head or stage may exist.
        plain = re.split(r"[,·\[]", name[:60])[0].strip().lower()
        exact = [plain] if plain in {*known, *DRAWINGS} else []
        near = exact or get_close_matches(name[:60], [*known, *DRAWINGS], 1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        stages = (re.sub(r"\[[^=]*\]", "", step.name) for step in every)  # without a stage: all
        shown = dict.fromkeys(re.sub(r"=\d+", "=…", name) for name in stages)
        raise ValueError(f"no step {name!r} here: {meant}the steps are {', '.join(shown)}")


def of_head(every: Sequence[Step], head: int | None) -> tuple[Step, ...]:
    """Return the steps that query head ``head`` computes or uses, or all steps if it is None.

    Raise ValueError if there is no such head.
    """
    heads = {step.head for step in every if step.head is not None}
    if head is None or (not heads and head == 0):
        return tuple(every)
    if head not in heads:
        which = {0: "one", 1: f"head {max(heads, default=0)}"}.get(len(heads))
        here = f"there is only {which}" if which else f"the heads are 0 to {max(heads)}"
        raise ValueError(f"no head {head} here: {here}")
    return tuple(step for step in every if step.is_of(head))


def blanked(step: Step) -> Step:
    """Return a copy of ``step`` with NaN instead of its numbers, for a worksheet."""
    blank = np.full(step.value.shape, np.nan)
    return replace(step, value=blank, hidden=None, printed=(), is_blank=True)


def row_of(step: Step, query: str) -> Step | None:
    """Return ``step`` with only the row of ``query``, or None if it has no such row.

    A long row is cut to its largest entries, or to those of largest magnitude if its columns are
    not keys.
    """
    row = step.number(0, query) if step.axes[:1] in QUERY_AXES else None
    if row is None:
        return None
    value, columns, kept = step.value[row : row + 1], step.columns, [[row]]
    if value.ndim == 2:
        kept += [largest(value[0] if step.axes[1] in KEY_AXES else abs(value[0]))]
        value, is_cut = value[:, kept[1]], len(kept[1]) < step.value.shape[1]
        if columns or is_cut:
            columns = tuple(columns[n] if columns else str(n) for n in kept[1])
    elif columns:
        columns = (columns[row],)
    return replace(
        step, value=value, columns=columns, whole=step.value.shape,
        rows=step.rows and (step.rows[row],),
        hidden=None if step.hidden is None else step.hidden[np.ix_(*kept)],
        printed=tuple(
            replace(c, index=tuple(k.index(n) for k, n in zip(kept, c.index, strict=True)))
            for c in step.printed
            if all(n in k for k, n in zip(kept, c.index, strict=True))
        ),
    )  # fmt: skip


def likeliest(step: Step, logits: NDArray[Any]) -> Step:
    """Return ``step`` with only the most probable tokens, if its last axis is a long vocabulary.

    They are the tokens with the largest ``logits`` in the last row. Any other step is returned
    unchanged.
    """
    if step.axes[-1:] != ("V",) or step.value.shape[-1] <= LONGEST_ROW:
        return step
    row = logits.reshape(-1, logits.shape[-1])[-1]
    kept = np.argsort(-row, kind="stable")[:MOST].tolist()
    labels = step.columns or [str(n) for n in range(len(row))]
    return replace(
        step, value=step.value[..., kept], columns=tuple(labels[n] for n in kept),
        whole=step.value.shape,
    )  # fmt: skip


def largest(row: NDArray[Any]) -> list[int]:
    """Return the indices of all entries of ``row``, or of the 16 largest in a long row, in order.

    >>> largest(np.zeros(3)), largest(np.arange(40))[:3]
    ([0, 1, 2], [24, 25, 26])
    """
    if len(row) <= LONGEST_ROW:
        return list(range(len(row)))
    return sorted(np.argsort(-row, kind="stable")[:MOST].tolist())
