"""What the checked function answered to one problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

MISSING = "there is no answer to it"  # the refusal where none was handed in
NOT_ASKED = "not asked"  # how a refusal begins where the function was not called


@dataclass(frozen=True, eq=False)
class Answer:
    """Output, log-sum-exp, refusal and faults of one call."""

    # (B, H, Lq, Dv), float32 or float64, in the shape that came, right or wrong; None where the
    # call was refused or failed.
    output: NDArray[Any] | None = None
    lse: NDArray[Any] | None = None  # (B, H, Lq)
    refusal: str | None = None  # one line: why the function does not take this; never a bug
    # "wrong_shape", "wrong_dtype", "writes_into_inputs", "not_deterministic", "returns_its_input";
    # and where there is no output "not_an_array", "crashes", "hangs", "exhausts_memory".
    faults: tuple[str, ...] = ()
    dtype: str = ""  # of the output as it was returned, "" where there is none
    note: str = ""  # a sentence about the faults: the expected shape, how the process ended
