"""Turn a function's answers into a verdict: right, wrong and why, or cannot tell.

The first step finds which answers are right, and which relations between answers hold. The second
searches for the smallest set of deviations that explains the answers. If some answers remain
unexplained, the third reads facts from the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from minimha.check import readings, relations
from minimha.check.answer import Answer
from minimha.check.catalogue import DEVIATIONS
from minimha.check.catalogue_delta import CLEARING, IN_16_BITS, NAN_LEAKS
from minimha.check.catalogue_indexer import TIES
from minimha.check.conditions import sizes_of_wrong
from minimha.check.problems import Graded
from minimha.check.readings import Reading
from minimha.check.rounding import format_of
from minimha.check.search import NONE, Hypothesis, Item, Search, known, names_of, shared
from minimha.check.wrong_attention import HIDDEN_ROWS, LEAKS

Verdict = Literal["right", "differs", "wrong", "cannot tell"]

DIFFERENCES = {  # what most libraries have, and what harms no right use
    *LEAKS, *HIDDEN_ROWS, *NAN_LEAKS, *CLEARING, *TIES, "lse_base_2", "runs_differ_bitwise",
    "batches_differ_bitwise", "two_axes_misread",
    "key_indices_count_twice",  # no indexer picks a key twice
}  # fmt: skip

UNCONDITIONAL = {"lse_base_2"}  # conventions only if they have no conditions

TOLERANCE = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.2}  # of relations between answers
# Named only if no other deviation, which says more, explains as many answers.
GENERAL = {
    "offset_moved", "causal_in_blocks", "kv_batch_0_for_all", "sequences_end_at_empty", *IN_16_BITS,
}  # fmt: skip
NUMBERS = 4096  # of each output, looked at for the format that they were rounded to
WIDER = ("float32", "float64")  # output dtypes that lose no precision


@dataclass(frozen=True, eq=False)
class Result:
    """A problem, the function's answer, and the error of that answer."""

    problem: Graded
    answer: Answer
    expected: NDArray[Any]  # (B, H, Lq, Dv), float64
    expected_lse: NDArray[Any] | None  # (B, H, Lq), float64; None if not requested
    error: float  # the largest difference; infinite if only one is finite, or the shapes differ
    bound: float  # the largest difference that rounding explains, over all numbers
    is_right: bool
    is_refused: bool
    only_differs: bool = False  # wrong, but explained by ``DIFFERENCES``


@dataclass(frozen=True, eq=False)
class Findings:
    """The verdict on a function, with its evidence."""

    verdict: Verdict
    deviations: tuple[str, ...]  # the smallest set that explains most answers
    alternatives: tuple[tuple[str, ...], ...]  # other sets that explain equally many
    explains: tuple[int, int]  # the number of explained answers, and of all answers
    refused: tuple[str, ...]  # options that the function took in no problem
    readings: tuple[Reading, ...]
    results: tuple[Result, ...]
    tell_apart: str | None = None  # a clause on the options that would tell the sets apart
    conditions: Mapping[str, str] = field(default_factory=dict)  # of each deviation, as a clause
    unexplained: str = ""  # a clause on the problems that the deviations do not explain


def judge(
    problems: Sequence[Graded],
    answers: Sequence[Answer],
    *,
    dtype: str = "float32",
    inconsistent: Collection[str] = (),
    progress: Callable[[str], None] = lambda doing: None,
) -> Findings:
    """Judge a function by its ``answers``, one for each of ``problems``.

    ``dtype`` is that of q, k and v; ``progress`` receives a short text before each step. The
    deviations need not explain the problems named in ``inconsistent``.
    """
    if len(problems) != len(answers):
        raise ValueError(f"there are {len(answers)} answers to {len(problems)} problems")
    search = Search([known(problem, dtype) for problem in problems], answers, progress)
    results = tuple(_result(search, n) for n in range(len(problems)))
    refused, faults, notes = _refused(problems, answers), _faults(answers), _notes(answers, dtype)
    taken = [r for r in results if not r.is_refused]
    counts = sum(r.is_right for r in taken), len(taken)
    if not taken:
        return Findings("cannot tell", (), (), counts, refused, (), results)
    if all(r.is_right for r in taken):
        verdict: Verdict = "right" if not faults else "differs"
        verdict = verdict if {*faults} <= DIFFERENCES else "wrong"
        return Findings(verdict, faults, (), counts, refused, notes, results)
    if cause := _not_computed(taken):
        return Findings("wrong", (cause,), (), counts, refused, notes, results)
    coarse = _rounded_to(answers, dtype)
    search = Search(search.known, answers, progress, rounded_to=coarse, left_out=inconsistent)
    found = _best(search)
    if names_of(found[0]) <= DIFFERENCES and search.contradicted(found[0]):
        found = [NONE]
    sets = [tuple(sorted(names, key=_place)) for names in dict.fromkeys(map(names_of, found))]
    read = _readings(search, found[0], results, coarse or dtype)
    left = search.contradicted(found[0], in_all=True)
    if found[0] or faults:
        unexplained = sum(r.problem.name in inconsistent and not r.is_right for r in taken)
        counts = len(taken) - len(left) - unexplained, len(taken)
    if counts[0] < counts[1] and any(r.name == "dropout" for r in read):
        sets, left = [("weights_dropped_out",)], []
    faults = tuple(f for f in faults if not _follows(f, sets[0], search, found[0]))
    differs = search.with_mild(NONE)
    mild = frozenset(filter(_only_differs, found[0]))
    differs |= mild
    results = tuple(
        replace(r, only_differs=not (r.is_right or r.is_refused)
                and search.fit(n, differs).is_explained)
        for n, r in enumerate(results)
    )  # fmt: skip
    is_mild = bool(sets[0]) and {*faults} <= DIFFERENCES and mild == found[0] and not left
    return Findings(
        "differs" if is_mild else "wrong", sets[0] + faults, tuple(sets[1:]), counts, refused,
        (*read, *notes), results, _tell_apart(search, found), _conditions(found[0]),
        _unexplained(search, left),
    )  # fmt: skip


def _not_computed(taken: Sequence[Result]) -> str | None:
    """The deviation of a function that answers without its inputs; None if it has neither."""
    outputs = [r.answer.output for r in taken if r.answer.output is not None]
    if len(outputs) > 1 and all(_is_constant(o, outputs[0].flat[0]) for o in outputs):
        return "answer_constant"
    earlier: dict[Any, list[Result]] = {}
    wrong = cached = 0
    for result in (r for r in taken if r.answer.output is not None):
        output = np.asarray(result.answer.output)
        same = earlier.setdefault((output.shape, output.tobytes()), [])
        if not result.is_right:
            wrong += 1
            cached += np.ptp(output) > 0 and any(_inputs_differ(result, r) for r in same)
        same.append(result)
    return "answer_cached" if cached > 1 and cached >= wrong / 2 else None


def _is_constant(output: Any, number: float) -> bool:
    return bool((np.isnan(output) if np.isnan(number) else output == number).all())


def _inputs_differ(a: Result, b: Result) -> bool:
    """Return whether two problems have inputs of the same shapes and with other values.

    Inputs of other shapes may have the same answer: a function may leave out the later keys.
    So may the same values: a function that clips large scores weights them alike.
    """
    x, y = a.problem.arguments, b.problem.arguments
    names = [n for n in "qkvx" if n in x]
    if any(n not in y or np.shape(x[n]) != np.shape(y[n]) for n in names):
        return False
    return any(not np.array_equal(x[n], y[n], equal_nan=True) for n in names if n in "vx")


def _best(search: Search) -> list[Hypothesis]:
    """Return the sets that the fewest answers contradict, with conditions only where needed."""
    found = list(dict.fromkeys(map(search.with_mild, search.run())))
    left = {h: len(search.contradicted(h, in_all=True)) for h in found}
    found = [h for h in found if left[h] == min(left.values())]  # the rest tells them apart
    found = [h for h in found if not GENERAL & names_of(h)] or found
    firsts = {names_of(h) - DIFFERENCES: h for h in reversed(found)}
    found = [h for h in found if h == firsts[names_of(h) - DIFFERENCES]]
    if not left[found[0]]:
        return found
    wrong = search.contradicted(found[0], in_all=True)
    if all(search.known[n].graded.family == "sized" for n in wrong):
        return search.at_sizes(found[0]) or found
    starts = dict.fromkeys((found[0], search.with_mild(NONE)))
    tried = [[_needed(search, h) for h in search.conditional(start)] for start in starts]
    best = min(tried, key=lambda h: (len(search.contradicted(h[0], in_all=True)), len(h[0])))
    remaining = len(search.contradicted(best[0], in_all=True))
    if remaining and (at_sizes := search.at_sizes(found[0])):
        return at_sizes
    return best if remaining < min(left.values()) else found


def _needed(search: Search, found: Hypothesis) -> Hypothesis:
    """Return a set without the differences that the rest explains: ignored lengths show a NaN."""
    for item in sorted(found, key=str):
        rest = found - {item}
        left = set(search.contradicted(found, in_all=True))
        if item[0] in DIFFERENCES and left >= set(search.contradicted(rest, in_all=True)):
            found = rest
    return found


def _conditions(found: Hypothesis) -> dict[str, str]:
    return {name: " and ".join(sorted(some)) for name, _, *where in found for some in where}


def _unexplained(search: Search, left: Sequence[int]) -> str:
    """Return a clause that holds in the problems ``left``, and in few that are right."""
    wrong = [search.known[n] for n in left]
    others = [search.known[n] for n in search.taken if n not in left]
    if wrong and all(x.graded.family == "sized" for x in wrong):
        drawn = [x.graded for x in others if x.graded.family]
        if clause := sizes_of_wrong([x.graded for x in wrong], drawn):
            return clause
    return shared(wrong, others) if wrong else ""


def _rounded_to(answers: Sequence[Answer], dtype: str) -> str | None:
    """Return the format that all outputs were rounded to, if it is coarser than their dtype."""
    found = format_of(a.output.ravel()[:NUMBERS] for a in answers if a.output is not None)
    return found if found in list(TOLERANCE)[list(TOLERANCE).index(dtype) + 1 :] else None


def _result(search: Search, n: int) -> Result:
    x, answer, fit = search.known[n], search.answers[n], search.fit(n, NONE)
    expected = x.predicted(NONE)
    assert expected is not None  # right attention can always be computed
    return Result(
        x.graded, answer, expected.output, expected.lse if x.asks_lse else None, fit.error,
        fit.bound, fit.is_explained, answer.output is None,
    )  # fmt: skip


def _follows(fault: str, named: Sequence[str], search: Search, found: Hypothesis) -> bool:
    """Return whether a named deviation implies the fault, as dropout implies randomness."""
    if fault == "not_deterministic":
        return "weights_dropped_out" in named
    if fault != "wrong_shape" or not named:
        return False
    with_it = [n for n, answer in enumerate(search.answers) if fault in answer.faults]
    return all(search.fit(n, found).is_explained for n in with_it)


def _only_differs(item: Item) -> bool:
    name, _, *where = item
    return name in DIFFERENCES and not (where and name in UNCONDITIONAL)


def _place(identifier: str) -> tuple[bool, int]:
    """Return a sort key: what is wrong comes before what only differs."""
    return identifier in DIFFERENCES, list(DEVIATIONS).index(identifier)


def _refused(problems: Sequence[Graded], answers: Sequence[Answer]) -> tuple[str, ...]:
    """Return the options that the function takes in no problem."""
    taken: dict[str, bool] = {}
    for problem, answer in zip(problems, answers, strict=True):
        for option in problem.options:
            taken[option] = taken.get(option, False) or answer.output is not None
    return tuple(option for option, is_taken in taken.items() if not is_taken)


def _faults(answers: Sequence[Answer]) -> tuple[str, ...]:
    """Return the faults of all answers; a wider output dtype is not a fault."""
    found = {fault for answer in answers for fault in answer.faults}
    if all(a.dtype in WIDER for a in answers if "wrong_dtype" in a.faults):
        found.discard("wrong_dtype")
    return tuple(sorted(found, key=_place))


def _notes(answers: Sequence[Answer], dtype: str) -> tuple[Reading, ...]:
    dtypes = {a.dtype for a in answers if "wrong_dtype" in a.faults}
    return tuple(Reading("dtype", f"returns {name} for {dtype}") for name in sorted(dtypes))


def _readings(
    search: Search, found: Hypothesis, results: Sequence[Result], dtype: str
) -> tuple[Reading, ...]:
    """Return values of the named deviations, broken relations, and facts from the weights."""
    problems, answers = [x.graded for x in search.known], search.answers
    read = [
        Reading(name, _text(value))
        for name, value, *_ in sorted(found, key=str)
        if len(DEVIATIONS[name].values) > 1
    ]
    by_name = {p.name: a for p, a in zip(problems, answers, strict=True)}
    if search.rounded_to is not None:
        read.append(Reading("output", f"is rounded to {search.rounded_to}"))
    broken = relations.broken(by_name, TOLERANCE[dtype])
    read += [Reading(name, sentence) for name, sentence in broken.items()]
    if search.contradicted(found):  # something remains unexplained
        read += readings.read(problems, answers)
    if not found:
        taken = [r for r in results if not r.is_refused]
        read += readings.precision([(r.error, float(abs(r.expected).max())) for r in taken])
    return tuple(read)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _tell_apart(search: Search, found: Sequence[Hypothesis]) -> str | None:
    """Return a clause on the options that would tell the first two sets apart."""
    other = next((h for h in found if names_of(h) != names_of(found[0])), None)
    if other is None:
        return None
    needed: list[set[str]] = []
    for n, x in enumerate(search.known):
        if n in search.taken:
            continue
        a, b = x.predicted(found[0]), x.predicted(other)
        if a is None or b is None:
            continue
        apart = abs(a.output - b.output) > a.bound + b.bound
        if (apart & ~a.is_free & ~b.is_free).any():
            needed.append(set(x.graded.options))
    if not needed:
        return "no problem tells them apart"
    options = min(needed, key=len)
    return f"to tell them apart, accept {' and '.join(sorted(options)) or 'other sizes'}"
