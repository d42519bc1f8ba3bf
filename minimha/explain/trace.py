"""Define ``Trace``, the record of a run with its steps and their origins."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from minimha.explain import selection
from minimha.explain.catalogue import AXES, beside
from minimha.explain.labels import printable, token_labels
from minimha.explain.origins import Origins
from minimha.explain.record import Record
from minimha.explain.steps import HEAD_AXES, Step, axes_of, steps_of

__all__ = ["Step", "Trace", "printable", "token_labels"]
CACHED = ("by_name", "origins", "steps", "shown")  # computed from the arrays recorded so far


@dataclass(eq=False)
class Trace(Record):
    """A recorder of all intermediate arrays of a run, for ``attention(…, tap=trace)``.

    A *step* is a recorded array, or one head of it. A *stage* is the part of a step's name in
    brackets, as in ``q[encoder]`` or ``S[i=0,j=1]``.

    Parameters
    ----------
    example, source : str, optional
        A title, and the document from which the example comes.
    labels : mapping from axis name to labels, optional
        Usually from ``token_labels``. Labels for one stage, ``Lk[cross]``, or for one batch entry,
        ``Lk, batch 1``, take precedence. Labels of ``H`` name what each head links, such as
        "cat → sleeps".
    notes : mapping from step name to str, optional
        Sentences about a step, or about one head of it (``weights, head 1``). They follow the
        catalogue's sentence.
    printed : sequence of PrintedMatrix, optional
        The numbers that a document prints for steps of this run.
    blocks : (B_r, B_c), optional
        Block sizes, which give the labels of FlashAttention's blocks.
    given : collection of str, optional
        Names of steps that are inputs although the catalogue has a formula for them.
    computed : collection of str, optional
        Names of steps that the run computed, but whose arrays are not in this trace.
    hidden : mapping from step name to ndarray of bool, optional
        Masks of weights, True for hidden keys, if the trace lacks the masked scores.
    num_heads : int, optional
        The number of query heads, if the trace does not have all of them.
    kept : mapping from step name to (str, sequence of int), optional
        For steps without all heads of the run: "head" or "kv_head", and the heads' indices.
    only : sequence of str, optional
        The steps to show, with or without stage or head, and ``DRAWINGS``. Default is all.
    head : int, optional
        The query head to show, with the keys and values that it reads. Default is all.
    query : str, optional
        Label or number of a query. Only its rows are shown, and a drawing of the values that it
        averages (its "picks"). By default, all rows are shown, with the picks of the last query. If
        ``only`` has ``picks``, they are the picks of all queries.
    cell : str, optional
        Row and column, by label or number, of a cell whose computation is shown: ``sat,cat``.
    blank : sequence of str, optional
        The steps whose numbers are left out, as in an exercise.

    Examples
    --------
    >>> from minimha import attention
    >>> trace = Trace(labels=token_labels(["cat", "sat"]))
    >>> output = attention([[1, 0], [0, 1]], [[1, 0], [0, 1]], [[1], [3]], scale=1, tap=trace)
    >>> trace["weights"].round(3)
    array([[0.731, 0.269],
           [0.269, 0.731]])
    >>> [step.name for step in trace.steps]
    ['q', 'k', 'v', 'scores', 'row_max', 'exponentials', 'row_sum', 'weights', 'output']
    """

    only: Sequence[str] = ()
    head: int | None = None
    query: str = ""
    cell: str = ""
    blank: Sequence[str] = ()
    _repr_html_: ClassVar[Callable[[Trace], str]]  # for notebooks; set in ``explain/__init__.py``

    def __call__(self, name: str, value: Any) -> Any:
        """Store a read-only copy of ``value`` under ``name`` and return ``value`` itself."""
        for made in CACHED:
            self.__dict__.pop(made, None)
        return super().__call__(name, value)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the array stored under ``name``, without batch and head axes of length 1."""
        if name not in self:
            raise KeyError(f"no step {name!r}; this trace holds {', '.join(self)}")
        value = self.values[name]
        axes = zip(axes_of(self, name), value.shape, strict=True)
        return value.squeeze(
            tuple(n for n, (axis, size) in enumerate(axes) if axis in HEAD_AXES and size == 1)
        )

    def selected(self, names: Sequence[str] = (), **others: Any) -> Trace:
        """Return a trace of the same run that shows only the steps in ``names``, by default all.

        ``others`` may set the attributes head, query, cell and blank. Attributes that are not given
        keep their values.
        """
        only = tuple(name.replace(" · ", ", ") for name in names)  # headings have " · "
        chosen = replace(self, only=only, **others)
        chosen.values, chosen.functions = dict(self.values), dict(self.functions)
        if set(chosen.blank) == set(self.blank):  # then its steps and their origins are the same
            known = self.__dict__
            chosen.__dict__ |= {key: known[key] for key in ("by_name", "origins") if key in known}
        return chosen

    @cached_property
    def by_name(self) -> dict[str, tuple[Step, ...]]:
        """All steps of the run by name, one step for each batch entry and head, shown or not."""
        blank = set(self.blank)
        return {
            name: tuple(
                selection.blanked(step) if step.names & blank else step
                for step in steps_of(self, name)
            )
            for name in self
        }

    @cached_property
    def origins(self) -> Origins:
        """A mapping from each step to its origin: the operation and operands that compute it."""
        return Origins(self.by_name)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The selected steps in order of computation, one for each batch entry and head."""
        every, only = list(itertools.chain(*self.by_name.values())), set(self.only)
        selection.check_names(every, self.only, self.blank)
        found = selection.of_head(every, self.head)
        return tuple(step for step in found if not only or step.names & only)

    @cached_property
    def shown(self) -> tuple[Step, ...]:
        """The steps to print, cut to the row of ``query`` if given.

        There are none if ``cell`` is given without ``only``. A long vocabulary is cut to the tokens
        with the largest logits in the last row of the model's logits.
        """
        if self.cell and not self.only:
            return ()
        parts = (selection.row_of(s, self.query) if self.query else s for s in self.steps)
        return tuple(
            selection.likeliest(part, self.values.get(beside(part.name, "logits"), part.value))
            for part in parts
            if part is not None
        )

    def drawn(self, drawing: str) -> tuple[Step, ...]:
        """Return the steps, without blank ones, from which ``drawing`` is drawn.

        ``drawing`` is "heatmap" or "picks". The result is empty if the selection excludes it.
        """
        if not self.only and (self.cell or self.query) and not (self.query and drawing == "picks"):
            return ()
        if self.query and drawing == "heatmap" and drawing not in self.only:
            return ()  # a heatmap shows all queries
        every = itertools.chain(*self.by_name.values())
        steps = selection.of_head(list(every), self.head) if drawing in self.only else self.steps
        return tuple(step for step in steps if not step.is_blank)

    @property
    def legend(self) -> dict[str, str]:
        """The meaning of each letter in the axes of the selected steps: {"D": "head width", …}."""
        shown = {
            letter for s in self.steps for axis in s.axes for letter in re.findall(r"\w+", axis)
        }
        return {letter: meaning for letter, meaning in AXES.items() if letter in shown}

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the selected steps by name, with all their batch entries and heads."""
        found = {}
        for name, steps in itertools.groupby(self.steps, key=lambda step: step.name):
            shown = list(steps)
            sizes = (
                len({getattr(s, key) for s in shown} - {None})
                for key in ("batch", "kv_head" if shown[0].head is None else "head")
            )
            lead = [size for size in sizes if size]
            found[name] = np.stack([s.value for s in shown]).reshape((*lead, *shown[0].value.shape))
        return found
