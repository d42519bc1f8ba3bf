"""Finds and names the bug in an attention function, from its answers to graded problems.

This module can be called itself, as its function ``check``:

>>> import minimha
>>> import numpy as np
>>> def without_scale(q, k, v):
...     weights = np.exp(q @ k.swapaxes(-1, -2))
...     return weights / weights.sum(axis=-1, keepdims=True) @ v
>>> report = minimha.check(without_scale)
>>> report.verdict, report.deviations
('wrong', ('scale_missing', 'softmax_no_maximum'))
>>> from minimha.check import assert_attention
>>> assert_attention(minimha.attention)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from minimha.check import translation
from minimha.check.answer import Answer
from minimha.check.calling import ARRAYS, DTYPES, Caller, arguments_of
from minimha.check.calling_layers import LayerCaller
from minimha.check.candidate import TIMEOUT, Candidate
from minimha.check.page import as_text
from minimha.check.problems import graded, layer_problems
from minimha.check.report import Report
from minimha.check.target import split
from minimha.check.verdict import judge
from minimha.equations.arguments import choice, flag, number

__all__ = ["Report", "assert_attention", "check"]

Progress = Callable[[str], None]


def check(
    function: Callable[..., Any] | str,
    speaks: str = "minimha",
    dtype: str = "float32",
    *,
    is_layer: bool = False,
    arrays: str | None = None,
    device: str | None = None,
    timeout: float = TIMEOUT,
    progress: Progress = lambda doing: None,
) -> Report:
    """Name the bugs of a function that should compute softmax(scale · Q Kᵀ + bias) V.

    The function is called on graded problems, each of which uses as few options as possible. Its
    outputs are compared with those of right attention, and of attention with each known bug. An
    exception counts as an option that the function does not take, not as a bug.

    Parameters
    ----------
    function : str or callable
        ``"mykernel.py:attention"`` or ``"package.module:attention"`` runs in a separate process,
        where a crash, a hang or ``exit()`` is a result. A callable, which may be a closure, runs in
        this process, without limits.
    speaks : {"minimha", "torch", "flash_attention", "jax", "keras", "onnx"}, default "minimha"
        The library whose conventions the function follows. "minimha" calls it as
        ``minimha.attention``; another name uses that library's layout, arguments and masks.
    dtype : {"float32", "float16", "bfloat16"}, default "float32"
        The dtype of queries, keys and values.
    is_layer : bool, default False
        If True, ``function`` is a class of whole layers, which is called as
        ``minimha.check.calling_layers`` describes; ``speaks`` must be "minimha" or "torch".
    arrays : {"numpy", "torch", "jax", "cupy"}, optional
        The library whose arrays the function receives; by default the usual one for ``speaks``. If
        the function refuses those arrays, other imported libraries are tried.
    device : str, optional
        The device of torch's arrays, such as "cuda"; implies ``arrays="torch"``. Default is the
        CPU.
    timeout : float, default 20
        Seconds for each problem in the separate process; the first problem gets three times this.
    progress : callable ``progress(doing)``, optional
        Receives a few words before each step.

    Returns
    -------
    Report
        Its ``verdict`` is "right", "wrong" or "cannot tell"; its ``deviations`` are the smallest
        set of bugs that explains most problems; ``str(report)`` is the verdict in two sentences.

    Raises
    ------
    ValueError, TypeError
        There is no such function, or it takes none of the problems. In the second case the message
        holds the error that it raised on the plainest problem.

    Examples
    --------
    >>> from minimha.dialects import torch
    >>> check(torch.scaled_dot_product_attention, speaks="torch").verdict
    'right'
    """
    choice("speaks", speaks, translation.DIALECTS)
    choice("dtype", dtype, DTYPES)
    if arrays is not None:
        choice("arrays", arrays, ARRAYS)
    settings: dict[str, Any] = {"speaks": speaks, "dtype": dtype}
    settings |= {"arrays": arrays, "device": device}
    problems = layer_problems(dtype) if flag("is_layer", is_layer) else graded(dtype)
    if isinstance(function, str):
        timeout = number("timeout", timeout, low=1e-3)
        split(function)
        with Candidate(function, timeout, is_layer=is_layer, **settings) as candidate:
            answers = candidate.answers(problems, progress)
        name = function
    elif callable(function):
        caller = (LayerCaller if is_layer else Caller)(function, **settings)
        answers = []
        for problem in problems:
            progress(problem.name)
            answers.append(caller.answer(arguments_of(problem)))
        name = _name_of(function)
    else:
        raise TypeError(
            f"function is of type {type(function).__name__}: expected something that can be "
            f"called, or its location, such as 'mykernel.py:attention'"
        )
    return judged(problems, answers, name, speaks, dtype, progress)


def judged(
    problems: Sequence[Any],
    answers: Sequence[Answer],
    function: str,
    speaks: str,
    dtype: str,
    progress: Progress = lambda doing: None,
) -> Report:
    """Report on a function that gave ``answers``; raise ValueError if it took no problem."""
    if all(answer.refusal is not None for answer in answers):
        raise ValueError(
            f"{function} takes none of the problems; on the plainest, {problems[0].name!r}: "
            f"{answers[0].refusal}"
        )
    findings = judge(problems, answers, dtype=dtype, progress=progress)
    return Report.of(findings, function, speaks, dtype)


def assert_attention(function: Callable[..., Any] | str, **settings: Any) -> None:
    """Raise AssertionError with the verdict, unless ``check`` finds the function right.

    Parameters
    ----------
    function, **settings
        As in ``check``.

    Raises
    ------
    AssertionError
        The function is wrong. The message names the bug, the smallest problem that shows it, and
        what to change.

    Examples
    --------
    >>> from minimha.api import attention
    >>> assert_attention(attention)
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    report = check(function, **settings)
    if report.verdict != "right":
        raise AssertionError(as_text(report, taken=len("AssertionError: ")))


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


class _Callable(ModuleType):
    """The type of this module, which makes it callable as ``check``."""

    __call__ = staticmethod(check)

    def __dir__(self) -> list[str]:
        return __all__


sys.modules[__name__].__class__ = _Callable
