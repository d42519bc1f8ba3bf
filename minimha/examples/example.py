"""Define ``Example``: inputs, a computation, and the numbers that a document prints for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap
from minimha.explain.printed import PrintedMatrix
from minimha.explain.trace import Trace


@dataclass(frozen=True)
class Note:
    """A note for the runs whose arguments equal its ``is_causal`` and ``is_scaled``.

    None equals any value.
    """

    words: str
    is_causal: bool | None = None
    is_scaled: bool | None = None


@dataclass(frozen=True)
class Example:
    """A worked example: the computation ``run``, and the texts and numbers that describe it.

    ``run`` is called with a tap, ``is_causal`` and ``is_scaled`` (whether scores are divided by
    √d_k). The attributes of the same names are the document's settings, and ``is_adjustable``
    states whether a caller may change them.
    """

    name: str
    title: str  # what the example shows, in a line
    source: str
    sentence: str  # the tokens, as the document writes them
    run: Callable[[Tap, bool, bool], Any]  # (tap, is_causal, is_scaled)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_causal: bool = False  # whether the document uses a causal mask,
    is_scaled: bool = True  # whether the document divides by √d_k,
    is_adjustable: bool = True  # and whether a caller may change these two
    printed: tuple[PrintedMatrix, ...] = ()
    notes: Mapping[str, str | Note] = field(default_factory=dict)  # by step name
    blocks: tuple[int, int] | None = None
    given: tuple[str, ...] = ()
    document: str = ""  # the number of the document that the example reproduces, if any
    left_out: str = ""  # that document's other numbers, and why they are left out

    @property
    def label(self) -> str:
        """The name and, if any, the document's number, as in ``the-cat-sat (document 003)``."""
        return f"{self.name} (document {self.document})" if self.document else self.name

    def trace(self, is_causal: bool | None = None, is_scaled: bool | None = None) -> Trace:
        """Run the example and return the trace of its steps.

        By default, both arguments are those of the example. For other values, the trace omits the
        numbers that the example's document prints, and ValueError is raised unless
        ``is_adjustable``.
        """
        causal = self.is_causal if is_causal is None else is_causal
        scaled = self.is_scaled if is_scaled is None else is_scaled
        is_own = (causal, scaled) == (self.is_causal, self.is_scaled)
        if not is_own and not self.is_adjustable:
            raise ValueError(
                f"example {self.label} has neither a causal mask nor scaling to change: "
                f"it shows {self.title}"
            )
        own = {"causal": (causal, self.is_causal), "scaled": (scaled, self.is_scaled)}
        changes = [word if now else f"not {word}" for word, (now, was) in own.items() if now != was]
        changed = "" if is_own else f" (changed: {', '.join(changes)})"
        trace = Trace(
            f"{self.label}: {self.title}{changed}", source=self.source, labels=self.labels,
            notes=_holding(self.notes, causal, scaled), printed=self.printed if is_own else (),
            blocks=self.blocks, given=self.given,
        )  # fmt: skip
        self.run(trace, causal, scaled)
        return trace


def _holding(notes: Mapping[str, str | Note], causal: bool, scaled: bool) -> dict[str, str]:
    """Return the text of the notes for this mask and this scaling, by step name."""
    given = {name: note if isinstance(note, Note) else Note(note) for name, note in notes.items()}
    return {
        name: note.words
        for name, note in given.items()
        if note.is_causal in (None, causal) and note.is_scaled in (None, scaled)
    }


def matrix(*rows: str) -> NDArray[np.float64]:
    """Return a float64 matrix from one string per row, as in ``matrix("1 0", "0 1")``."""
    return np.array([[float(number) for number in row.split()] for row in rows])
