"""What the checked function answered to one problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

MISSING = "there is no answer to it"  # the refusal where none was handed in
NOT_ASKED = "not asked"  # how a refusal begins where the function was not called


@dataclass(frozen=True, eq=False)
class Answer:
    """Output, log-sum-exp, refusal and faults of one call.

    Attributes
    ----------
    output : ndarray of shape (B, H, Lq, Dv), float32 or float64, or None
        None where the call was refused or failed. It keeps the shape that came, right or wrong.
    lse : ndarray of shape (B, H, Lq), float32 or float64, or None
    refusal : str or None
        One line: why the function does not take this problem. Never evidence of a bug.
    faults : tuple of str
        What the caller saw: "wrong_shape", "wrong_dtype", "writes_into_inputs",
        "not_deterministic", "returns_its_input"; and where there is no output "not_an_array",
        "crashes", "hangs", "exhausts_memory".
    dtype : str
        Of the output as it was returned, "" where there is none.
    note : str
        A sentence about the faults: the expected shape, how the process ended.
    """

    output: NDArray[Any] | None = None
    lse: NDArray[Any] | None = None
    refusal: str | None = None
    faults: tuple[str, ...] = ()
    dtype: str = ""
    note: str = ""
