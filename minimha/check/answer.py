"""Define ``Answer``, the result of calling a checked function with one problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

MISSING = "there is no answer to it"  # the refusal if an answer was not submitted
NOT_ASKED = "not asked"  # the first words of a refusal if the function was not called


@dataclass(frozen=True, eq=False)
class Answer:
    """The result of one call: output, log-sum-exp, refusal and faults.

    ``refusal`` is the reason why the function does not take the problem, or None if it does.
    ``faults`` are bugs apart from wrong numbers, such as "crashes"; ``note`` describes them.
    """

    # (B, H, Lq, Dv), or the wrong shape that was returned; float32 or float64. None if the call was
    # refused or failed.
    output: NDArray[Any] | None = None
    lse: NDArray[Any] | None = None  # (B, H, Lq)
    refusal: str | None = None  # one line: why the function does not take this problem; not a bug
    # "wrong_shape", "wrong_dtype", "writes_into_inputs", "not_deterministic", "returns_its_input",
    # "runs_differ_bitwise", "batches_differ_bitwise";
    # without an output: "not_an_array", "crashes", "hangs", "exhausts_memory".
    faults: tuple[str, ...] = ()
    dtype: str = ""  # dtype of the returned output; "" if there is none
    note: str = ""  # a sentence about the faults: the expected shape, or the end of the process

    @property
    def is_unasked(self) -> bool:
        """Return whether the function was not called."""
        return (self.refusal or "").startswith(NOT_ASKED)
