"""Report on a checked function: the fields and the sentences of a report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from minimha.check.answer import MISSING, NOT_ASKED
from minimha.check.catalogue import DEVIATIONS
from minimha.check.conditions import sizes
from minimha.check.crossed import crossings, present, shown
from minimha.check.deviation import Deviation
from minimha.check.expanded import ARRANGING
from minimha.check.problems import REQUIRED, is_given
from minimha.check.translation import DIALECTS
from minimha.check.verdict import DIFFERENCES, Findings, Result, Verdict

MOST_LISTED = 16  # the most numbers of an option in the JSON; longer ones become dtype and shape


@dataclass(frozen=True)
class Report:
    """The findings of ``check``; ``str(report)`` is the verdict, ``page.as_text(report)`` a page.

    Attributes
    ----------
    function, speaks, dtype : str
        The arguments of ``check``.
    verdict : {"right", "differs", "wrong", "cannot tell"}
        "differs" if all bugs found are harmless, such as a NaN that leaks from a hidden key.
        "right" also if all are conventions of the library ``speaks``.
    deviations : tuple of str
        The identifiers of the bugs: the smallest set that explains most problems.
    alternatives : tuple of tuple of str
        Other sets that explain equally many problems.
    explains : pair of int
        The number of problems that are explained, and the number that the function takes.
    refused : tuple of str
        Options that the function does not take.
    readings : tuple of dict
        ``name``, ``value`` and ``fit`` of each fact that the function's outputs show.
    problems : tuple of dict
        ``name``, ``options``, ``error`` (None without an output), ``is_right`` and ``is_refused``
        of each problem.
    covers : dict
        What was tried, and what was not: ``options``, ``crossings``, ``sizes``, ``refused`` and
        ``not_asked``. ``packed, paged, functions`` maps each of these options to "tried", "refused"
        or "not asked". ``crossings`` counts pairs of a condition and an option that may be ignored
        there: those that were tried, and all. It exists only if no bug was found.
    seed : int
        Pass it to ``check`` to repeat the numbers of this report's problems.
    conventions : tuple of str
        A clause about each deviation that is a convention of the library ``speaks``.
    findings : Findings
        The problems, answers and expected outputs themselves.
    """

    function: str
    speaks: str
    dtype: str
    verdict: Verdict
    deviations: tuple[str, ...]
    alternatives: tuple[tuple[str, ...], ...]
    explains: tuple[int, int]
    refused: tuple[str, ...]
    readings: tuple[dict[str, Any], ...]
    problems: tuple[dict[str, Any], ...]
    covers: dict[str, Any]
    seed: int
    conventions: tuple[str, ...]
    findings: Findings = field(repr=False)

    @classmethod
    def of(
        cls, findings: Findings, function: str, speaks: str, dtype: str, seed: int = 0
    ) -> Report:
        """Return the report on ``findings``."""
        own = DIALECTS[speaks].conventions
        conventions = tuple(own[name] for name in findings.deviations if name in own)
        explained, taken = findings.explains
        known = sum(
            result.problem.name in DIALECTS[speaks].inconsistent
            for result in findings.results
            if not (result.is_right or result.is_refused)
        )
        is_complete = all(r.answer.refusal != MISSING for r in findings.results)
        is_own = len(conventions) == len(findings.deviations) > 0 and explained + known >= taken
        verdict: Verdict = "right" if is_own else findings.verdict
        return cls(
            function,
            speaks,
            dtype,
            verdict if verdict != "right" or is_complete else "cannot tell",
            findings.deviations,
            findings.alternatives,
            findings.explains,
            _refused(findings) + _without_lse(findings),
            tuple(
                {"name": reading.name, "value": reading.value, "fit": reading.fit}
                for reading in findings.readings
            ),
            tuple(_record(result) for result in findings.results),
            _covers(findings, verdict),
            seed,
            conventions,
            findings,
        )

    def to_json(self) -> str:
        """Return the fields as JSON, without ``conventions`` and ``findings``.

        Infinite errors are strings.
        """
        record = {f.name: getattr(self, f.name) for f in fields(self)[:-2]}
        record["conditions"] = dict(self.findings.conditions)
        return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1) + "\n"

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def passes(self, *, strict: bool = False) -> bool:
        """Return whether the verdict is "right", or "differs" if ``strict`` is False."""
        return self.verdict == "right" or (self.verdict == "differs" and not strict)

    @property
    def failure(self) -> str | None:
        """Return why most outputs cannot be compared, as a sentence, or None if they can.

        Most outputs must have the right shape. A few have it by chance, if swapped axes are equal.
        """
        answers = [r.answer for r in self.findings.results if r.answer.refusal is None]
        misshapen = [answer for answer in answers if "wrong_shape" in answer.faults]
        num_compared = sum(a.output is not None for a in answers) - len(misshapen)
        if num_compared > len(misshapen):
            return self._missing if self.verdict == "cannot tell" else None
        first = next(answer for answer in answers if answer.faults)
        return f"{self.function} gives no output that can be compared: {first.note}"

    @property
    def _missing(self) -> str | None:
        """Return a sentence about missing answers, or None if there are none."""
        results = self.findings.results
        names = [r.problem.name for r in results if r.answer.refusal == MISSING]
        if not names:
            return None
        is_or_are = "is" if len(names) == 1 else "are"
        return (
            f"{self.function} has answers to {len(results) - len(names)} of {len(results)} "
            f"problems; {len(names)} {is_or_are} missing, the first to {names[0]!r}: where your "
            f"function does not take a problem, answer with an array 'refused' that is True"
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return the verdict and its evidence, or why there is no verdict."""
        explained, taken = self.explains
        if self.failure is not None:
            return (f"{self.failure.rstrip('.')}.",)
        if self.verdict == "right":
            own = f"; {_listed(self.conventions)}" if self.conventions else ""
            first = f"{self.function} is right in all {taken} problems that it takes{own}."
            return first, self._taken
        if self.verdict == "differs":
            what = "; ".join(map(self._clause, self.deviations))
            return (
                f"{self.function} is right but for this: {what}.",
                f"This explains all {taken} problems that it takes.", self._taken,
            )  # fmt: skip
        failing = sum(not (r.is_right or r.is_refused) for r in self.findings.results)
        if self.verdict == "cannot tell":
            return (
                f"{self.function} is wrong in {failing} of {taken} problems, and no known "
                f"deviation explains how.",
                "What its outputs show is read below.",
            )
        what = "; ".join(map(self._clause, self.deviations))
        where = self.findings.unexplained and f" where {self.findings.unexplained}"
        if {*self.deviations} <= DIFFERENCES and explained < taken:
            number = taken - explained if what else failing
            found = (
                f"{self.function} is wrong{where}: no deviation explains how.",
                f"{number} of {taken} problems show it.",
            )
            return (*found, f"Besides, {what}.") if what else found
        if not explained:
            shown = f"{failing} of {taken} problems show it."
            return f"{self.function} is wrong{where}: {what}.", shown
        share = f"all {taken}" if explained == taken else f"{explained} of the {taken}"
        evidence = f"This explains {share} problems that it takes."
        if explained < taken and all(
            n in DEVIATIONS and DEVIATIONS[n].stage == "run" for n in self.deviations
        ):
            evidence = f"{share} problems come out right."
        elif explained < taken and where:
            evidence += f" The others are wrong{where}."
        found = f"{self.function} is wrong: {what}.", evidence
        return (*found, f"{self._missing}.") if self._missing else found

    def change(self, deviation: Deviation) -> str:
        """Return a sentence on what to change in the function to remove ``deviation``."""
        if deviation.identifier == "wrong_shape" and self._lse_note:
            return "Return (output, log-sum-exp), and nothing else in its place."
        return deviation.change

    def _clause(self, identifier: str) -> str:
        """Return a clause on what is wrong, about the log-sum-exp if only its shape is."""
        if identifier == "wrong_shape" and self._lse_note:
            return self._lse_note
        where = self.findings.conditions.get(identifier)
        return f"{_clause(identifier)}, where {where}" if where else _clause(identifier)

    @property
    def _taken(self) -> str:
        if not self.refused:
            return "It takes every option."
        return f"It does not take {_listed(self.refused)}."

    @property
    def _lse_note(self) -> str:
        """Return the note on the shape of the log-sum-exp, if only that shape is wrong."""
        wrong = [r for r in self.findings.results if "wrong_shape" in r.answer.faults]
        outputs = [r.answer.output for r in wrong]
        is_lse = all(
            output is not None and output.shape == r.expected.shape
            for output, r in zip(outputs, wrong, strict=True)
        )
        return wrong[0].answer.note if wrong and is_lse else ""

    @property
    def smallest(self) -> Result | None:
        """Return the failing problem that is easiest to debug, or None if no problem fails.

        Wrong answers precede harmless differences. Then outputs of the right shape precede missing
        or misshapen ones. Then problems with the same numbers in each run (``family`` is "")
        precede others. Of equals, a problem with the fewest scores, then options, is returned.
        """
        failing = [
            (result.only_differs,
             answer.output is None or result.expected.shape != answer.output.shape,
             bool(result.problem.family), _num_scores(result), len(options_of(result)), n)
            for n, result in enumerate(self.findings.results)
            for answer in [result.answer]
            if not (result.is_right or result.is_refused)
        ]  # fmt: skip
        return self.findings.results[min(failing)[-1]] if failing else None

    def conformance(self) -> list[dict[str, str]]:
        """Return a table of the options: whether each is right, refused or deviates, and how."""
        results = self.findings.results
        names = {name: None for result in results for name in features(result)}
        right = {name for r in results if r.is_right for name in features(r)}
        taken = {name for r in results if r.answer.refusal is None for name in features(r)}
        asked = {name for r in results if _is_refused(r) for name in features(r)}
        blamed: dict[str, str] = {}
        for result in results:
            if not result.is_right and result.answer.refusal is None:
                found = set(features(result))
                is_silent = result.answer.output is None or "wrong_shape" in result.answer.faults
                for name in found - right or found:
                    blamed.setdefault(name, result.answer.note if is_silent else "")
        records = []
        for name in names:
            is_refused = name not in taken or name in self.refused
            state = "refused" if is_refused else "deviates" if name in blamed else "right"
            if name not in taken | asked:
                state = NOT_ASKED
            how = "" if state == NOT_ASKED else blamed.get(name) or self._how(name, state)
            records.append({"option": name, "": state, "how": "" if state == "right" else how})
        return records

    def _how(self, name: str, state: str) -> str:
        if state == "refused":
            reasons = (
                r.answer.refusal
                for r in self.findings.results
                if _is_refused(r) and name in features(r) and r.answer.refusal
            )
            reason = next(reasons, "")
            return "" if "unexpected keyword argument" in reason else reason
        own = DIALECTS[self.speaks].conventions
        named = [n for n in self.deviations if name in _rows(n)]
        return "; ".join(own.get(n) or _clause(n) for n in named)


# Rows of the conformance table that are not options.
PLAIN, GROUPED = "no option", "grouped heads"
DEAD, LEAK = "queries that see no key", "NaN in hidden keys"
PER_CHANNEL = "decay per channel"
GATHERED = {  # the row of the table for each argument of a layer
    **dict.fromkeys(("b_q", "b_k", "b_v", "b_o"), "biases"),
    **dict.fromkeys(("rope_base", "rope_interleaved"), "rotary positions"),
    "num_kv_heads": GROUPED,
}


def _rows(identifier: str) -> tuple[str, ...]:
    """Return the rows of the conformance table that a deviation belongs to."""
    deviation = DEVIATIONS.get(identifier)
    if deviation is None:
        return ()
    rows = {"rows that see nothing": (DEAD,), "leaks": (LEAK,)}
    needs = tuple(name for name in deviation.needs if name not in REQUIRED)
    needs = (*needs, "q_offset") if "offset" in deviation.wrong else needs
    return rows.get(deviation.stage, needs or (PLAIN,))


def features(result: Result) -> list[str]:
    """Return the rows of the conformance table that a problem belongs to."""
    arguments = result.problem.arguments
    found = dict.fromkeys(GATHERED.get(name, name) for name in options_of(result))
    if result.problem.kind == "delta rule":
        if arguments["v"].shape[1] != arguments["q"].shape[1]:
            found[GROUPED] = None
        if arguments["g"].ndim > arguments["beta"].ndim:
            found[PER_CHANNEL] = None
    if result.problem.kind == "attention":
        if arguments["k"].shape[1] != arguments["q"].shape[1]:
            found[GROUPED] = None
        if (result.expected == 0).all(axis=-1).any():
            found[DEAD] = None
        if any(np.isnan(arguments[name]).any() for name in ("k", "v")):
            found[LEAK] = None
    return list(found) or [PLAIN]


def options_of(result: Result) -> Mapping[str, Any]:
    """Return the options of a problem, without those that are None or False."""
    options = result.problem.options
    return {n: x for n, x in options.items() if is_given(n, x)}


def _covers(findings: Findings, verdict: Verdict) -> dict[str, Any]:
    """Return what the function's answers cover, and which problems it did not answer."""
    tried = [r for r in findings.results if r.answer.output is not None]
    every = [r.problem.arguments for r in tried if r.problem.kind == "attention"]
    names = [name for result in tried for name in features(result)]
    found: dict[str, Any] = {"options": {name: names.count(name) for name in dict.fromkeys(names)}}
    if verdict in ("right", "differs"):
        covered, possible = set(), set()
        for result in tried:
            if result.problem.family in ("alone", "crossed"):
                given = result.problem.arguments
                silent = {"return_lse"} if result.answer.lse is None else set()
                covered |= crossings(given, shown(result.problem) - silent)
                possible |= crossings(given, present(given) - silent)
        found["crossings"] = [len(covered), len(possible)]
    ranges = [sizes(given) for given in every]
    found["sizes"] = {n: sorted({s[n] for s in ranges}) for n in (ranges[0] if ranges else ())}
    found["packed, paged, functions"] = _arranging(findings)
    found["refused"] = sum(_is_refused(r) for r in findings.results)
    found["not_asked"] = sum(r.answer.is_unasked for r in findings.results)
    return found


def _arranging(findings: Findings) -> dict[str, str]:
    """Return whether each option was tried that is not among the graded ones."""
    states = {}
    for name in ARRANGING:
        asked = [r for r in findings.results if name in r.problem.arguments]
        asked = [r for r in asked if not r.answer.is_unasked]
        is_taken = any(r.answer.refusal is None for r in asked)
        states[name] = "tried" if is_taken else "refused" if asked else NOT_ASKED
    return states


def _record(result: Result) -> dict[str, Any]:
    error = None if result.is_refused or result.answer.output is None else result.error
    return {
        "name": result.problem.name,
        "options": {name: _plain(value) for name, value in options_of(result).items()},
        "error": error if error is None or math.isfinite(error) else str(error),
        "is_right": bool(result.is_right),
        "is_refused": result.answer.refusal is not None,
    }


def _plain(value: Any) -> Any:
    if callable(value):  # one of the problems' functions
        return value.__name__
    if not isinstance(value, np.ndarray):
        return value.item() if isinstance(value, np.generic) else value
    if value.size <= MOST_LISTED and value.ndim < 2:
        return value.tolist()
    return f"{value.dtype.name} {value.shape}"


def _is_refused(result: Result) -> bool:
    """Return whether the function was called and did not take the problem."""
    return result.answer.refusal is not None and not result.answer.is_unasked


def _refused(findings: Findings) -> tuple[str, ...]:
    """Return the refused options, without those of problems that failed or were not asked."""
    silent = [r for r in findings.results if r.answer.output is None]
    refused = {name for r in silent if _is_refused(r) for name in r.problem.options}
    failed = {name for r in silent if r.answer.refusal is None for name in r.problem.options}
    others = {name for r in silent for name in r.problem.options} - refused
    return tuple(name for name in findings.refused if name not in failed | others)


def _without_lse(findings: Findings) -> tuple[str, ...]:
    """Return ``return_lse`` in a tuple if no output came with the requested log-sum-exp."""
    asked = [
        result.answer for result in findings.results
        if result.problem.arguments.get("return_lse") and result.answer.output is not None
    ]  # fmt: skip
    has_none = asked and all(answer.lse is None for answer in asked)
    return ("return_lse",) if has_none and "return_lse" not in findings.refused else ()


def _num_scores(result: Result) -> int:
    """Return the number of scores in a problem; in a layer every token sees every token."""
    given = result.problem.arguments
    if result.problem.layer is None:
        is_attention = result.problem.kind == "attention"  # where k may be pages
        keys = sizes(given)["Lk"] if is_attention else given["k"].shape[-2]
        return int(np.prod(given["q"].shape[:-1]) * keys)
    B, L, _ = given["x"].shape
    return int(B * L * L * result.problem.layer["num_heads"])


def _clause(identifier: str) -> str:
    """Return a clause on what is wrong, without its capital and full stop."""
    if identifier not in DEVIATIONS:
        return identifier
    words = DEVIATIONS[identifier].wrong.rstrip(".")
    first = words.split()[0]
    is_name = first in ("K", "Q", "V") or first[1:] != first[1:].lower()  # ALiBi, NaN
    is_name = is_name or first[1:2] == "_"  # W_o
    return words if is_name else words[0].lower() + words[1:]


def _listed(words: tuple[str, ...]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
