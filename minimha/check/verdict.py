"""From answers to a verdict: right, wrong and why, or cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention
from minimha.check.answer import Answer
from minimha.check.problems import Graded

Verdict = Literal["right", "wrong", "cannot tell"]


@dataclass(frozen=True, eq=False)
class Result:
    """One problem with its answer, and how far the answer is from the right one."""

    problem: Graded
    answer: Answer
    expected: NDArray[Any]
    expected_lse: NDArray[Any] | None
    error: float  # the largest error of an output; infinite where one is NaN or has no place
    bound: float  # the largest that rounding in the dtype explains
    is_right: bool
    is_refused: bool


@dataclass(frozen=True)
class Reading:
    """A number or a fact that the answers show, whatever the deviation is."""

    name: str
    value: str
    fit: float = 1.0


@dataclass(frozen=True, eq=False)
class Findings:
    """The verdict with its evidence."""

    verdict: Verdict
    deviations: tuple[str, ...]
    alternatives: tuple[tuple[str, ...], ...]
    explains: tuple[int, int]
    refused: tuple[str, ...]
    readings: tuple[Reading, ...]
    results: tuple[Result, ...]
    tell_apart: str | None = None  # which option would tell the alternatives apart


def judge(
    problems: Sequence[Graded],
    answers: Sequence[Answer],
    *,
    dtype: str = "float32",
    progress: Callable[[str], None] = lambda doing: None,
) -> Findings:
    """The verdict on the function that gave ``answers`` to ``problems``."""
    results = []
    for problem, answer in zip(problems, answers, strict=True):
        options = {**problem.arguments, "backend": "dense", "return_lse": True}
        expected, lse = attention(**options)
        refused = answer.output is None
        error = np.inf if answer.output is None else float(abs(answer.output - expected).max())
        is_right = error <= 1e-4
        results.append(Result(problem, answer, expected, lse, error, 1e-4, is_right, refused))
    taken = [r for r in results if not r.is_refused]
    right = sum(r.is_right for r in taken)
    verdict: Verdict = "cannot tell" if not taken else "right" if right == len(taken) else "wrong"
    return Findings(verdict, (), (), (right, len(taken)), (), (), tuple(results))
