"""Searches for the smallest set of deviations that explains the answers.

A function with a set of deviations answers every problem as the deviated equations do. The search
starts from no deviation. It takes the first problem whose answer contradicts the current set, and
adds each deviation, or pair, that explains that answer. So it follows the evidence, and need not
try all sets. It keeps the sets that the fewest answers contradict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations, product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from minimha.check.answer import Answer
from minimha.check.catalogue import DEVIATIONS
from minimha.check.conditions import USUAL, conditions
from minimha.check.fitted import fitted
from minimha.check.prepared import Impossible, Prepared
from minimha.check.problems import Graded
from minimha.check.rounding import FORMATS, rounded
from minimha.check.wrong_attention import HIDDEN_ROWS, Deviated, deviate
from minimha.check.wrong_layer import PreparedLayer, deviate_layer

Array = NDArray[Any]
Item = tuple[Any, ...]  # an identifier, its value, and the set of conditions if it has any
Hypothesis = frozenset[Item]
Items = TypeVar("Items", Hypothesis, list[Item])

STEPS = 6  # enough to find four deviations and their right values
WIDTH = 8  # the most hypotheses that are followed at a time
MARGIN = 3  # a followed hypothesis has at most this many more contradictions than the best one
TRIED = 6  # the most contradicting problems to look at, besides exact ones
TARGETS = 2  # the search stops looking after explaining this many problems
BRANCHES = 24  # the most hypotheses that grow from one
SAMPLE = 10  # the number of problems by which hypotheses are ranked
SHARE = 0.5  # the least share of wrong answers that a named set must explain
NEARLY_ALL = 0.95  # the least share of all answers, for a set with lost precision
MOST_CONDITIONAL = 3  # deviations under conditions that one function may have
FEW_SCORES = 1 << 16  # scores of a problem whose arrays are kept
MOST_FITS = 5_000  # no new set is tried after this many comparisons
NONE: Hypothesis = frozenset()
KINDS = {  # the options that hide keys, by their name in deviations of hiding
    "mask": {"attn_mask"},
    "positions": {"is_causal", "window_size"},
    "lengths": {"kv_lengths"},
}


@dataclass(frozen=True, eq=False)
class Fit:
    """The comparison of an answer with a prediction."""

    is_explained: bool
    # A pair for the output, and one for the log-sum-exp if compared: where the answer differs from
    # the prediction, and where the prediction allows any number. Empty if the shapes differ.
    wrong: tuple[tuple[Array, Array], ...] = ()
    error: float = np.inf  # the largest difference
    bound: float = 0.0  # the largest difference that rounding explains

    @property
    def is_mute(self) -> bool:
        """Whether the prediction allows any answer."""
        return all(bool(is_free.all()) for _, is_free in self.wrong)

    def tells_more_than(self, other: Fit) -> bool:
        """Whether this fit predicts, not merely allows, a number that ``other`` gets wrong."""
        if not other.wrong or not self.wrong:
            return self.is_explained and not self.is_mute
        pairs = zip(self.wrong, other.wrong, strict=False)
        return self.is_explained and any(
            there.shape != is_free.shape or bool((there & ~is_free).any())
            for (_, is_free), (there, _) in pairs
        )


class Known:
    """One graded problem, and the answers of functions with any set of deviations.

    Predictions for one deviation, or none, are kept for the next function.
    """

    def __init__(self, problem: Graded, dtype: str) -> None:
        self.graded, self.dtype = problem, dtype
        self.length = problem.arguments["x" if problem.layer else "k"].shape[-2]
        self.options = set(problem.options) | set(problem.layer or ())
        self.conditions = frozenset() if problem.layer else conditions(problem.arguments)
        self.asks_lse = bool(problem.arguments.get("return_lse"))
        self._predicted: dict[Hypothesis, Deviated | None] = {}
        self._kinds: list[list[Item]] | None = None

    @property
    def prepared(self) -> Prepared | PreparedLayer:
        """The arguments in float64."""
        if self.graded.layer is None:
            rows = int(np.prod(self.graded.arguments["q"].shape[:3]))
            if rows * self.length > FEW_SCORES:
                return _prepared(self.graded, self.dtype)
        return self._prepared

    @cached_property
    def _prepared(self) -> Prepared | PreparedLayer:
        if self.graded.layer is not None:
            return PreparedLayer(self.graded, self.dtype)
        return Prepared(self.graded.arguments, self.dtype, self.graded.is_exact)

    def relevant(self, hypothesis: Iterable[Item]) -> Hypothesis:
        """The deviations of a set that may change the answer.

        Values with the same effect on this problem become one. If there are six keys, blocks of 16
        and of 32 keys have the same effect.
        """
        items = map(self.usual, hypothesis)
        return frozenset(item for item in items if item is not None)

    def usual(self, item: Item) -> Item | None:
        """The item that stands for all with its effect on this problem; None without effect."""
        name, value, *where = item
        if where and not where[0] <= self.conditions:
            return None
        item = name, value
        needs = DEVIATIONS[name].needs
        if needs and self.options.isdisjoint(needs):
            return None
        if name == "causal_always" and "is_causal" in self.options:
            return None
        if name.startswith("online"):
            if name == "online_last_block_dropped":
                return None if self.length % value == 0 else (name, min(value, self.length + 1))
            return None if value >= self.length else item
        if DEVIATIONS[name].stage == "hiding":
            kind, *more = value if isinstance(value, tuple) else (value,)
            present = [k for k, options in KINDS.items() if not self.options.isdisjoint(options)]
            if kind != "all" and kind not in present:
                return None
            kind = "all" if present == [kind] else kind
            return name, (kind, *more) if more else kind
        return item

    def predicted(self, hypothesis: Iterable[Item]) -> Deviated | None:
        """The predicted answer under the deviations; None if they do not fit the shapes."""
        key = self.relevant(hypothesis)
        if key in self._predicted:
            return self._predicted[key]
        try:
            prediction = _deviate(self.prepared, dict(key))
        except Impossible:
            prediction = None
        if len(key) <= 1:
            self._predicted[key] = prediction
        return prediction

    def kinds(self) -> list[list[Item]]:
        """The items that change the answer, grouped by their effect."""
        if self._kinds is None:
            right = _fingerprint(self.predicted(NONE))
            kinds: dict[Any, list[Item]] = {}
            for item in all_items():
                if self.usual(item) is None:
                    continue
                if is_precision(item[0]) and not self.graded.is_exact:
                    continue  # its bounds are too wide here to be evidence
                prediction = _fingerprint(self.predicted([item]))
                if prediction not in (None, right):
                    kinds.setdefault(prediction, []).append(item)
            self._kinds = list(kinds.values())
        return self._kinds


@lru_cache(maxsize=4)  # their arrays are large
def _prepared(problem: Graded, dtype: str) -> Prepared:
    return Prepared(problem.arguments, dtype, problem.is_exact)


@lru_cache(maxsize=2048)
def known(problem: Graded, dtype: str) -> Known:
    """The problem with its predictions, which the next function finds again."""
    return Known(problem, dtype)


def _deviate(prepared: Prepared | PreparedLayer, deviations: Mapping[str, Any]) -> Deviated:
    if isinstance(prepared, PreparedLayer):
        return deviate_layer(prepared, deviations)
    return deviate(prepared, deviations)


def all_items() -> list[Item]:
    """Every deviation with each of its values."""
    return [(d.identifier, value) for d in DEVIATIONS.values() for value in d.values]


def _fingerprint(prediction: Deviated | None) -> Any:
    """A hashable value that is equal for equal predictions."""
    if prediction is None:
        return None
    p = prediction
    return tuple(x.tobytes() for x in (p.output, p.lse, p.is_free, p.is_lse_free, *p.others))


def compare(
    answer: Answer, prediction: Deviated | None, asks_lse: bool, rounded_to: str | None = None
) -> Fit:
    """Compare an answer with a prediction, within the bounds of rounding.

    ``rounded_to`` is the format that the output was rounded to, if coarser than its dtype.
    """
    if prediction is None or answer.output is None:
        return Fit(False)
    p, got = prediction, np.asarray(answer.output, np.float64)
    if got.shape != p.output.shape:
        return Fit(False)
    with np.errstate(all="ignore"):
        bound = p.bound
        if rounded_to is not None:
            bits, exponent = FORMATS[rounded_to]
            size = np.where(np.isfinite(p.output), abs(p.output), 0)
            bound = bound + 2.0**-bits * size + 2.0 ** (2 - exponent - bits)
        near = _near(got, p.output, bound) | p.is_free
        for other in p.others:
            near |= _near(got, other, bound)
        if rounded_to is not None:  # numbers beyond its range became infinite
            near |= np.isinf(got) & (got == rounded(p.output, bits, exponent))
        wrong, error = [(~near, p.is_free)], _distance(got, p.output)
        if asks_lse and answer.lse is not None:
            L = np.asarray(answer.lse, np.float64)
            if L.shape != p.lse.shape:
                return Fit(False)
            wrong.append((~(_near(L, p.lse, p.lse_bound) | p.is_lse_free), p.is_lse_free))
            error = max(error, _distance(L, p.lse))
    largest = float(np.nan_to_num(p.bound).max(initial=0))
    return Fit(not any(where.any() for where, _ in wrong), tuple(wrong), error, largest)


def _near(got: Array, wanted: Array, bound: Array) -> Array:
    near = (abs(got - wanted) <= bound) | (got == wanted)
    return np.asarray(near | (np.isnan(got) & np.isnan(wanted)))


def _distance(got: Array, wanted: Array) -> float:
    """The largest difference; infinite if only one of two numbers is finite."""
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    difference = np.where(same, 0, abs(got - wanted))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


@dataclass
class Search:
    """The search for sets of deviations that explain ``answers``."""

    known: Sequence[Known]
    answers: Sequence[Answer]
    progress: Callable[[str], None] = lambda doing: None
    most: int = 4
    rounded_to: str | None = None
    left_out: Collection[str] = ()  # names of problems that no set need explain
    _fits: dict[tuple[int, Hypothesis], Fit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.taken = [
            n
            for n, (x, answer) in enumerate(zip(self.known, self.answers, strict=True))
            if answer.output is not None and x.graded.name not in self.left_out
        ]
        families = [self.known[n].graded.family for n in self.taken]
        first = next((f for f in ("", "alone", "crossed") if f in families), "")
        # A set is searched for in these, and must hold in all.
        self.plain = [n for n, f in zip(self.taken, families, strict=True) if f == first]
        self.fitted = fitted([x.graded for x in self.known], self.answers)

    def fit(self, n: int, hypothesis: Iterable[Item]) -> Fit:
        x = self.known[n]
        key = n, x.relevant(hypothesis)
        if key not in self._fits:
            prediction = x.predicted(key[1])
            self._fits[key] = compare(self.answers[n], prediction, x.asks_lse, self.rounded_to)
        return self._fits[key]

    def contradicted(self, hypothesis: Hypothesis, *, in_all: bool = False) -> list[int]:
        """The plain problems, or all, whose answers these deviations do not explain."""
        problems = self.taken if in_all else self.plain
        return [n for n in problems if not self.fit(n, hypothesis).is_explained]

    def run(self) -> list[Hypothesis]:
        """The smallest sets that the fewest answers contradict; [∅] if no set helps."""
        found: dict[Hypothesis, int] = {NONE: len(self.contradicted(NONE))}
        beam, least = [NONE], found[NONE]
        for step in range(STEPS):
            self.progress(f"deviations, step {step + 1}")
            grown = {h for hypothesis in beam for h in self.grown(hypothesis)} - set(found)
            found.update({h: len(self.contradicted(h)) for h in grown})
            beam = self.best(grown, found)
            if not beam or not found[beam[0]] or found[beam[0]] > least:
                break
            if len(self._fits) > MOST_FITS:
                break
            least = found[beam[0]]
        return self.chosen(found)

    def conditional(self, hypothesis: Hypothesis) -> list[Hypothesis]:
        """Extend the set by deviations under conditions, if they explain all but models' sizes.

        A deviation is tried if it explains the contradicting problem with the fewest conditions.
        The extension must explain half of the wrong answers, one with numbers among them.
        """
        found, wrong = [hypothesis], self.contradicted(hypothesis, in_all=True)
        for _ in range(MOST_CONDITIONAL + 1):
            left = self.contradicted(found[0], in_all=True)
            small = [n for n in left if self.known[n].graded.family != "sized"]
            if not small:
                explained = [n for n in wrong if n not in left and _has_numbers(self.answers[n])]
                enough = len(wrong) - len(left) >= SHARE * len(wrong)
                return found if explained and enough else [hypothesis]
            telling = [n for n in small if _has_numbers(self.answers[n])] or small
            n = min(telling, key=lambda n: len(self.known[n].conditions - USUAL))
            counts = {
                h: len(self.contradicted(h, in_all=True))
                for item in (item for items in self.known[n].kinds() for item in items)
                if self.explains(n, found[0] | {item})
                for h in self.under_conditions(n, found[0], item)
            }
            least = min(counts.values(), default=len(left))
            if least >= len(left):
                break
            best = [h for h, count in counts.items() if count == least]
            found = sorted(best, key=lambda h: (_num_conditions(h), _rank(h)))
            found = [h for h in found if _num_conditions(h) == _num_conditions(found[0])]
        return [hypothesis]

    def under_conditions(self, n: int, hypothesis: Hypothesis, item: Item) -> list[Hypothesis]:
        """The set with ``item`` under each condition, or two, that holds for problem ``n``."""
        needs = DEVIATIONS[item[0]].needs[:1]
        holding = sorted(c for c in self.known[n].conditions if not c.startswith(needs))
        unusual = [c for c in holding if c not in USUAL]
        chosen = [frozenset([c]) for c in holding]
        chosen += [frozenset(pair) for pair in combinations(unusual, 2)]
        return [hypothesis | {(*item, c)} for c in chosen]

    def best(
        self, grown: Iterable[Hypothesis], found: Mapping[Hypothesis, int]
    ) -> list[Hypothesis]:
        """The hypotheses to follow in the next step."""
        ranked = sorted(grown, key=lambda h: (found[h], len(h), _rank(h)))
        return [h for h in _varied(ranked, 2) if found[h] <= found[ranked[0]] + MARGIN][:WIDTH]

    def grown(self, hypothesis: Hypothesis) -> list[Hypothesis]:
        """Extend the set to explain the first contradicting answers; most promising sets first."""
        targets, found = 0, []
        contradicted = self.contradicted(hypothesis)
        for n in self.targets(contradicted):
            grown = [h for h in self.extended(n, hypothesis) if self.explains(n, h)]
            if not grown and n == contradicted[0] and not hypothesis:
                grown = self.grown_by_two(n)
            found += grown
            targets += bool(grown)
            if targets == TARGETS or len(self._fits) > MOST_FITS:
                break
        sample = contradicted[:SAMPLE]

        def unexplained(h: Hypothesis) -> int:
            return sum(not self.fit(n, h).is_explained for n in sample)

        ranked = sorted(dict.fromkeys(found), key=lambda h: (unexplained(h), _rank(h)))
        return _varied(ranked, 2)[:BRANCHES]

    def targets(self, contradicted: Sequence[int]) -> list[int]:
        """The problems to look at: easy ones first, then those about rounding."""
        is_exact = [self.known[n].graded.is_exact for n in contradicted]
        easy = [n for n, exact in zip(contradicted, is_exact, strict=True) if not exact]
        return easy[:TRIED] + [n for n, exact in zip(contradicted, is_exact, strict=True) if exact]

    def explains(self, n: int, hypothesis: Hypothesis) -> bool:
        fit = self.fit(n, hypothesis)
        return fit.is_explained and not fit.is_mute

    def extended(self, n: int, hypothesis: Hypothesis) -> list[Hypothesis]:
        """Sets with one more deviation, of an unused stage, or with another value of one."""
        stages = {DEVIATIONS[name].stage for name, *_ in hypothesis}
        found = []
        if len(hypothesis) < self.most:
            items = [item for items in self.known[n].kinds() for item in items]
            items += [item for item in self.fitted if self.known[n].usual(item) is not None]
            found = [hypothesis | {i} for i in items if DEVIATIONS[i[0]].stage not in stages]
        for held in hypothesis:
            values = [(held[0], value) for value in DEVIATIONS[held[0]].values]
            values += [item for item in self.fitted if item[0] == held[0]]
            found += [hypothesis - {held} | {item} for item in values]
        return found

    def grown_by_two(self, n: int) -> list[Hypothesis]:
        """Pairs of deviations that explain answer ``n``; those with one effect are tried once."""
        found: list[Hypothesis] = []
        for kinds in combinations(_varied(self.known[n].kinds(), 3), 2):
            pairs = [frozenset(p) for p in product(*map(_usual, kinds)) if _stages_differ(p)]
            if pairs and self.explains(n, pairs[0]):
                found += pairs
        return found

    def chosen(self, found: Mapping[Hypothesis, int]) -> list[Hypothesis]:
        """The smallest supported sets with the fewest contradictions; [∅] if no set helps."""
        for least in sorted(set(found.values())):
            if least == found[NONE]:
                break
            candidates = {self.needed(h) for h, n in found.items() if n == least}
            candidates = {h for h in candidates if h and self.is_supported(h)}
            if candidates:
                smallest = min(map(len, candidates))
                return sorted((h for h in candidates if len(h) == smallest), key=_rank)
        return [NONE]

    def needed(self, hypothesis: Hypothesis) -> Hypothesis:
        """Remove the deviations that explain nothing."""
        count = len(self.contradicted(hypothesis))
        for item in sorted(hypothesis, key=str):
            if len(self.contradicted(hypothesis - {item})) <= count:
                return self.needed(hypothesis - {item})
        return hypothesis

    def is_supported(self, hypothesis: Hypothesis) -> bool:
        """Whether each deviation explains an answer that the rest of the set does not.

        An explained answer must hold finite nonzero numbers, because zeros and NaN fit too easily.
        The set must explain half of the wrong answers, because a few fit by chance. With lost
        precision, whose bounds are wide, it must explain nearly all answers.
        """
        tells = any(
            self.explains(n, hypothesis) and _has_numbers(self.answers[n]) for n in self.plain
        )
        wrong, left = len(self.contradicted(NONE)), len(self.contradicted(hypothesis))
        enough = wrong - left >= SHARE * wrong
        if any(is_precision(name) for name, *_ in hypothesis):
            enough = enough and left <= (1 - NEARLY_ALL) * len(self.plain)
        return tells and enough and all(self.evidence(hypothesis, item) for item in hypothesis)

    def evidence(self, hypothesis: Hypothesis, item: Item) -> list[int]:
        """The answers that the set explains only with ``item``."""
        less = hypothesis - {item}
        explained = [
            n
            for n in self.contradicted(less)
            if self.fit(n, hypothesis).tells_more_than(self.fit(n, less))
        ]
        if item[0] == "lse_of_dead_rows":  # it allows any log-sum-exp, and predicts none
            explained = [n for n in self.contradicted(less) if self.explains(n, hypothesis)]
        if item[0] in HIDDEN_ROWS[:3]:  # these allow any log-sum-exp
            explained = [n for n in explained if "return_lse" not in self.known[n].options]
        if is_precision(item[0]):
            explained = [n for n in explained if self.known[n].graded.is_exact]
        return explained


def _has_numbers(answer: Answer) -> bool:
    O = answer.output
    return O is not None and bool((np.isfinite(O) & (O != 0)).any())


def is_precision(identifier: str) -> bool:
    return DEVIATIONS[identifier].stage.startswith("precision")


def names_of(hypothesis: Iterable[Item]) -> frozenset[str]:
    return frozenset(name for name, *_ in hypothesis)


def _usual(items: Iterable[Item]) -> list[Item]:
    """The first item of each identifier."""
    return list({item[0]: item for item in reversed(list(items))}.values())


def _varied(candidates: Iterable[Items], most: int) -> list[Items]:
    """The candidates in order, at most ``most`` with the same identifiers."""
    counts: Counter[frozenset[str]] = Counter()
    kept = []
    for items in candidates:
        counts[names_of(items)] += 1
        if counts[names_of(items)] <= most:
            kept.append(items)
    return kept


def _stages_differ(items: Iterable[Item]) -> bool:
    stages = [DEVIATIONS[name].stage for name, *_ in items]
    return len(stages) == len(set(stages))


_PLACES = {item: n for n, item in enumerate(all_items())}


def _rank(hypothesis: Hypothesis) -> list[int]:
    """A sort key: the places of the items in the catalogue, values outside of it last."""
    return sorted(_PLACES.get(item[:2], len(_PLACES)) for item in hypothesis)


def _num_conditions(hypothesis: Hypothesis) -> tuple[int, int]:
    """A sort key: the number of conditions, and how many of them are the usual case."""
    conditions = [c for _, _, *where in hypothesis for some in where for c in some]
    return len(conditions), sum(c in USUAL for c in conditions)
