"""Find and name the bugs of an attention function, from its answers to graded problems.

The module itself can be called in place of its function ``check``:

>>> import minimha
>>> import numpy as np
>>> def without_scale(q, k, v):
...     weights = np.exp(q @ k.swapaxes(-1, -2))
...     return weights / weights.sum(axis=-1, keepdims=True) @ v
>>> report = minimha.check(without_scale)
>>> report.verdict, report.deviations
('wrong', ('scale_missing', 'softmax_no_maximum'))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from minimha.check import translation
from minimha.check.answer import Answer
from minimha.check.asking import Ask, Asking, Limits, drawn_seed
from minimha.check.calling import ARRAYS, DTYPES, Caller, arguments_of, check_layout
from minimha.check.calling_layers import LayerCaller
from minimha.check.candidate import TIMEOUT, Candidate
from minimha.check.conditions import sizes
from minimha.check.page import as_text
from minimha.check.problems import Graded, graded, layer_problems
from minimha.check.problems_delta import delta_problems
from minimha.check.problems_indexer import indexer_problems
from minimha.check.report import Report
from minimha.check.target import split
from minimha.check.verdict import judge
from minimha.equations.arguments import choice, flag, integer, number

__all__ = ["Report", "assert_attention", "check"]

Progress = Callable[[str], None]


def check(
    function: Callable[..., Any] | str,
    speaks: str = "minimha",
    dtype: str | None = None,
    *,
    is_layer: bool = False,
    arrays: str | None = None,
    device: str | None = None,
    layout: str = "BHLD",
    timeout: float = TIMEOUT,
    seed: int | None = None,
    head_dims: Sequence[int] = (),
    multiple_of: int = 1,
    max_heads: int | None = None,
    is_square: bool = False,
    progress: Progress = lambda doing: None,
) -> Report:
    """Name the bugs of a function that should compute softmax(scale · Q Kᵀ + bias) V.

    The function is called on graded problems, each of which uses as few options as possible. Then
    it is called on problems that combine the options that it takes, and on problems of the sizes
    that models have. Its outputs are compared with those of right attention, and of attention with
    each known bug. An exception counts as an option or a shape that the function does not take, not
    as a bug.

    Parameters
    ----------
    function : str or callable
        ``"mykernel.py:attention"`` or ``"package.module:attention"`` runs in a separate process,
        where a crash, a hang or ``exit()`` is a result. A callable, which may be a closure, runs in
        this process, without limits.
    speaks : str, default "minimha"
        The library whose conventions the function follows. "minimha" calls it as
        ``minimha.attention``; if it has no parameter ``q_offset``, it gets only problems whose
        queries stand where it puts them, at the first or at the last keys. "torch",
        "flex_attention", "flash_attention", "flash_attention_varlen", "flash_attention_paged",
        "transformers", "jax", "keras" and "onnx" use that library's layout, arguments and masks.
        "gated_delta_rule" calls it as ``minimha.gated_delta_rule``, and "fla" as
        flash-linear-attention and transformers call theirs.
    dtype : {"float32", "float16", "bfloat16"}, default "float32"
        The dtype of queries, keys and values.
    is_layer : bool, default False
        If True, ``function`` is a class of whole layers, which is called as
        ``minimha.check.calling_layers`` describes; ``speaks`` must be "minimha", "torch" or
        "lightning_indexer".
    arrays : {"numpy", "torch", "jax", "cupy"}, optional
        The library whose arrays the function receives; by default the usual one for ``speaks``. If
        the function refuses those arrays, other imported libraries are tried.
    device : str, optional
        The device of torch's arrays, such as "cuda"; implies ``arrays="torch"``. Default is the
        CPU.
    timeout : float, default 20
        Seconds for each problem in the separate process; the first problem gets three times this.
    seed : int, optional
        Seed of the random numbers in the problems that combine options or have models' sizes.
        Default is a random seed per process; pass ``report.seed`` to repeat the problems.
    head_dims : sequence of int, optional
        The head widths that the function takes; problems of other widths are left out. Default is
        any width.
    multiple_of : int, default 1
        The function takes only lengths that this number divides.
    max_heads : int, optional
        The most query heads that the function takes; default is any number.
    is_square : bool, default False
        If True, the function takes only problems with equal numbers of queries and keys.
    progress : callable ``progress(doing)``, optional
        Receives a short text before each step.

    Returns
    -------
    Report
        Its ``verdict`` is "right", "differs", "wrong" or "cannot tell"; its ``deviations`` are the
        smallest set of bugs that explains most problems; ``report.covers`` holds what was tried;
        ``str(report)`` is the verdict in a few sentences.

    Raises
    ------
    ValueError, TypeError
        There is no such function, or it takes none of the problems. In the second case the message
        holds the error that it raised on the plainest problem.

    Examples
    --------
    >>> import minimha
    >>> def mine(q, k, v, is_causal=False):
    ...     return minimha.attention(q, k, v, backend="dense")
    >>> report = check(mine)
    >>> report.verdict, report.deviations
    ('wrong', ('causal_ignored',))
    """
    choice("speaks", speaks, translation.DIALECTS)
    if dtype is not None:
        choice("dtype", dtype, DTYPES)
    if arrays is not None:
        choice("arrays", arrays, ARRAYS)
    check_layout(layout, speaks, is_layer=flag("is_layer", is_layer))
    settings: dict[str, Any] = {"speaks": speaks, "arrays": arrays, "device": device}
    settings |= {} if is_layer else {"layout": layout}
    timeout = number("timeout", timeout, low=1e-3)
    seed = drawn_seed() if seed is None else integer("seed", seed, low=0)
    limits = Limits(
        tuple(integer("head_dims", D, low=1) for D in head_dims),
        integer("multiple_of", multiple_of, low=1),
        None if max_heads is None else integer("max_heads", max_heads, low=1),
        flag("is_square", is_square),
    )
    kind = translation.DIALECTS[speaks].kind
    if kind == "indexer" and not is_layer:
        raise ValueError(
            "speaks is 'lightning_indexer', which describes a class of layers: give is_layer=True"
        )
    if (is_layer or kind != "attention") and limits != Limits():
        raise ValueError(
            "head_dims, multiple_of, max_heads and is_square are for attention functions, not for "
            "layers and delta rules"
        )
    limits.check()
    if isinstance(function, str):
        split(function)
    elif not callable(function):
        raise TypeError(
            f"function is of type {type(function).__name__}: expected something that can be "
            f"called, or its location, such as 'mykernel.py:attention'"
        )
    first: tuple[dict[Graded, Answer], str] | None = None
    for tried in DTYPES if dtype is None else (dtype,):
        some = {**settings, "dtype": tried}
        # Other libraries' functions have no packed sequences, pages or functions of scores.
        asked = Asking(lambda new: [], tried, seed, limits, arranges=speaks == "minimha")
        with _asker(function, timeout, some, progress, is_layer=is_layer) as asked.ask:
            asked.run(_first(kind, tried, seed, is_layer=is_layer))
        first = first or (asked.answers, tried)
        if any(answer.refusal is None for answer in asked.answers.values()):
            first = asked.answers, tried
            break
    assert first is not None
    answers, taken = first
    name = function if isinstance(function, str) else _name_of(function)
    return judged([*answers], [*answers.values()], name, speaks, taken, progress, seed)


def _first(kind: str, dtype: str, seed: int, *, is_layer: bool) -> Sequence[Graded]:
    """Return the problems that come first; others depend on their answers."""
    if kind == "delta rule":
        return delta_problems(seed)
    if kind == "indexer":
        return indexer_problems(seed)
    return layer_problems(dtype) if is_layer else graded(dtype)


@contextmanager
def _asker(
    function: Callable[..., Any] | str, timeout: float, settings: Mapping[str, Any],
    progress: Progress, *, is_layer: bool,
) -> Iterator[Ask]:  # fmt: skip
    """A function that asks ``function`` problems, in another process if it is a location."""
    if isinstance(function, str):
        with Candidate(function, timeout, is_layer=is_layer, **settings) as candidate:
            yield lambda new: candidate.answers(new, progress)
        return
    caller = (LayerCaller if is_layer else Caller)(function, **settings)

    def ask(new: Sequence[Graded]) -> list[Answer]:
        answers = []
        for problem in new:
            progress(problem.name)
            answers.append(caller.answer(arguments_of(problem)))
        return answers

    yield ask


def judged(
    problems: Sequence[Any],
    answers: Sequence[Answer],
    function: str,
    speaks: str,
    dtype: str,
    progress: Progress = lambda doing: None,
    seed: int = 0,
) -> Report:
    """Return the report on a function's ``answers``; raise ValueError if it took no problem."""
    if all(answer.refusal is not None for answer in answers):
        asked = [(p, a) for p, a in zip(problems, answers, strict=True) if not a.is_unasked]
        problem, answer = asked[0]
        raise ValueError(
            f"{function} takes none of the problems; on the plainest, {problem.name!r}: "
            f"{answer.refusal}. {len(asked)} were tried{_widths(p for p, _ in asked)}"
        )
    inconsistent = translation.DIALECTS[speaks].inconsistent
    findings = judge(problems, answers, dtype=dtype, inconsistent=inconsistent, progress=progress)
    return Report.of(findings, function, speaks, dtype, seed)


def assert_attention(
    function: Callable[..., Any] | str, *, strict: bool = False, **settings: Any
) -> None:
    """Raise AssertionError with the verdict, unless ``check`` finds the function right.

    Parameters
    ----------
    function, **settings
        As in ``check``.
    strict : bool, default False
        If True, harmless differences count as bugs too, such as a NaN that leaks from a hidden key.

    Raises
    ------
    AssertionError
        The function is wrong. The message names the bug, the smallest problem that shows it, and
        what to change.

    Examples
    --------
    >>> import minimha
    >>> def mine(q, k, v):
    ...     return minimha.attention(q, k, v, backend="dense")
    >>> assert_attention(mine)
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    report = check(function, **settings)
    if not report.passes(strict=flag("strict", strict)):
        raise AssertionError(as_text(report, taken=len("AssertionError: ")))


def _widths(problems: Iterable[Graded]) -> str:
    """Return a clause on the sizes of problems, or "" if all are problems for layers."""
    tried = [sizes(problem.arguments) for problem in problems if problem.kind == "attention"]
    if not tried:
        return ""
    D, Lk = (sorted({s[name] for s in tried}) for name in ("D", "Lk"))
    return f", with D among {', '.join(map(str, D))} and {Lk[0]} to {Lk[-1]} keys"


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


class _Callable(ModuleType):
    """The type of this module, which makes it callable as ``check``."""

    __call__ = staticmethod(check)

    def __dir__(self) -> list[str]:
        return __all__


sys.modules[__name__].__class__ = _Callable
