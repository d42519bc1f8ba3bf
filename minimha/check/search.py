"""Search for the smallest set of known bugs (deviations) that explains a function's answers.

A function with a set of deviations answers every problem as the deviated equations do. The search
starts from no deviation. It takes the first problem whose answer contradicts the current set, and
adds each deviation, or pair, that explains that answer. So it follows the evidence, and need not
try all sets. It keeps the sets that the fewest answers contradict.

An item is a deviation with a value, such as a block size. A hypothesis is a set of items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations, islice, product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from minimha.check.answer import Answer
from minimha.check.arranged import FAMILY as ARRANGED
from minimha.check.catalogue import DEVIATIONS
from minimha.check.catalogue_delta import CLEARING, IN_16_BITS, NAN_LEAKS, OF_DELTA
from minimha.check.catalogue_indexer import OF_INDEXERS, TIES
from minimha.check.compared import Fit, compare
from minimha.check.conditions import USUAL, conditions, limits, sizes
from minimha.check.expanded import ARRANGING, expanded
from minimha.check.fitted import fitted
from minimha.check.prepared import Impossible, Prepared
from minimha.check.problems import Graded
from minimha.check.visible import KINDS
from minimha.check.wrong_attention import HIDDEN_ROWS, LEAKS, Deviated, deviate
from minimha.check.wrong_delta import PreparedDelta, deviate_delta
from minimha.check.wrong_indexer import PreparedIndexer, deviate_indexer
from minimha.check.wrong_layer import PreparedLayer, deviate_layer

Array = NDArray[Any]
Item = tuple[Any, ...]  # an identifier, its value, and the set of conditions if it has any
Hypothesis = frozenset[Item]
AnyPrepared = Prepared | PreparedLayer | PreparedDelta | PreparedIndexer
PREPARED: dict[str, Callable[[Graded, str], AnyPrepared]] = {
    "layer": PreparedLayer, "delta rule": PreparedDelta, "indexer": PreparedIndexer,
}  # fmt: skip
DEVIATED: dict[type, Callable[[Any, Mapping[str, Any]], Deviated]] = {
    Prepared: deviate, PreparedLayer: deviate_layer, PreparedDelta: deviate_delta,
    PreparedIndexer: deviate_indexer,
}  # fmt: skip
# The kind of problem of each deviation that neither attention nor its layers can have.
KIND_OF = {
    d.identifier: kind
    for kind, some in (("delta rule", OF_DELTA), ("indexer", OF_INDEXERS)) for d in some
}  # fmt: skip
OWN_KINDS = tuple(dict.fromkeys(KIND_OF.values()))  # also the families of these problems
Items = TypeVar("Items", Hypothesis, list[Item])

STEPS = 6  # enough to find four deviations and their right values
WIDTH = 8  # the most hypotheses that are followed at a time
MARGIN = 3  # a followed hypothesis has at most this many more contradictions than the best one
TRIED = 6  # the most contradicting problems to look at, besides exact ones
TARGETS = 2  # the search stops looking after explaining this many problems
BRANCHES = 24  # the most hypotheses that grow from one
FEW = 4  # answers that one deviation may leave unexplained before pairs are tried
SAMPLE = 10  # the number of problems by which hypotheses are ranked
SHARE = 0.5  # the least share of wrong answers that a named set must explain
NEARLY_ALL = 0.95  # the least share of all answers, for a set with lost precision
MOST_SHARED = 3  # conditions on problems that no deviation explains
MOST_CONDITIONAL = 3  # deviations under conditions that one function may have
FEW_SCORES = 1 << 17  # scores of a problem in which bugs are searched for
FEW_NUMBERS = 1 << 16  # of a problem's arrays and products, which are kept in float64
MOST_FITS = 10_000  # no new set is tried after this many comparisons
NONE: Hypothesis = frozenset()


class Known:
    """One graded problem, with the answers that functions with known bugs would give.

    Predictions for at most one deviation are cached for the next function; of a large problem only
    the right answer.
    """

    def __init__(self, problem: Graded, dtype: str) -> None:
        self.graded, self.dtype = problem, dtype
        is_attention = problem.kind == "attention"
        plain = expanded(problem.arguments)[0] if is_attention else problem.arguments
        self.length = plain["x" if problem.layer else "k"].shape[-2]
        self.options = set(problem.options) | set(problem.layer or ()) | {*plain} - {"q_offset"}
        has_conditions = is_attention or problem.kind == "delta rule"
        self.conditions = conditions(problem.arguments) if has_conditions else frozenset()
        self.sizes = sizes(problem.arguments) if is_attention else {}
        self.has_nan = not problem.layer and any(
            np.isnan(problem.arguments[name]).any() for name in "qkv"
        )
        self.own_kind = problem.kind if problem.kind in OWN_KINDS else None
        self.asks_lse = bool(problem.arguments.get("return_lse"))
        self._predicted: dict[Hypothesis, Deviated | None] = {}
        self._kinds: list[list[Item]] | None = None

    @cached_property
    def is_mild(self) -> bool:
        """Whether the problem has NaN, or queries that see no key: most libraries fail there.

        In the delta rule, a state that g = -inf clears counts as such a query. All problems for
        indexers are mild: equal scores may be anywhere.
        """
        if self.graded.kind == "indexer":
            return True
        if self.graded.kind == "delta rule":
            return self.has_nan or bool(np.isneginf(self.graded.arguments["g"]).any())
        x = None if self.graded.family else self._prepared
        return self.has_nan or (isinstance(x, Prepared) and bool(x.sees_nothing.any()))

    @property
    def num_scores(self) -> int:
        """Return the number of scores, 0 for a layer."""
        rows = () if self.graded.layer else self.graded.arguments["q"].shape[:3]
        return int(np.prod(rows)) * self.length if rows else 0

    @property
    def prepared(self) -> AnyPrepared:
        """Return the problem's arguments in float64."""
        return _prepared(self.graded, self.dtype) if self.is_large else self._prepared

    @cached_property
    def is_large(self) -> bool:
        """Whether the problem's arrays, and answers to it with bugs, take too much room to keep."""
        arrays = [x for x in self.graded.arguments.values() if isinstance(x, np.ndarray)]
        numbers = sum(x.size for x in arrays) + 2 * self.num_scores
        return self.graded.kind == "attention" and numbers > FEW_NUMBERS

    @cached_property
    def _prepared(self) -> AnyPrepared:
        if self.graded.kind == "attention":
            return Prepared(self.graded.arguments, self.dtype, self.graded.is_exact)
        return PREPARED[self.graded.kind](self.graded, self.dtype)

    def holds(self, condition: str) -> bool:
        """Return whether a condition holds, which may be a size such as "Lk > 128"."""
        name, sign, end = condition.partition(" > " if " > " in condition else " < ")
        if name not in self.sizes or not end.isdigit():
            return condition in self.conditions
        size = self.sizes[name]
        return size > int(end) if sign == " > " else size < int(end)

    def relevant(self, hypothesis: Iterable[Item]) -> Hypothesis:
        """Return the items of a hypothesis that may change the answer to this problem.

        Values with the same effect on this problem become one. If there are six keys, blocks of 16
        and of 32 keys have the same effect.
        """
        items = map(self.usual, hypothesis)
        return frozenset(item for item in items if item is not None)

    def usual(self, item: Item) -> Item | None:
        """Return the representative of the items with the same effect on this problem as ``item``.

        Returns None if ``item`` has no effect.
        """
        name, value, *where = item
        if where and not all(map(self.holds, where[0])):
            return None
        item = name, value
        needs = DEVIATIONS[name].needs
        if needs and self.options.isdisjoint(needs):
            return None
        if KIND_OF.get(name) != self.own_kind:
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
        """Return the answer that a hypothesis predicts, or None if the shapes exclude it."""
        key = self.relevant(hypothesis)
        if key in self._predicted:
            return self._predicted[key]
        try:
            prediction = deviated(self.prepared, dict(key))
        except Impossible:
            prediction = None
        if not key or (len(key) == 1 and not self.is_large):
            self._predicted[key] = prediction
        return prediction

    def kinds(self) -> list[list[Item]]:
        """Return the items that change the answer, in groups of equal effect."""
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


@lru_cache(maxsize=1536)  # more than one function gets: its problems come twice, in one order
def known(problem: Graded, dtype: str) -> Known:
    """Return the ``Known`` of a problem, cached with its predictions for the next function."""
    return Known(problem, dtype)


def deviated(prepared: AnyPrepared, deviations: Mapping[str, Any]) -> Deviated:
    """Return the answer to a problem of any kind with ``deviations``, as ``deviate`` does."""
    return DEVIATED[type(prepared)](prepared, deviations)


def all_items() -> list[Item]:
    """Return every deviation with each of its values, as items."""
    return [(d.identifier, value) for d in DEVIATIONS.values() for value in d.values]


def _clauses(wrong: Sequence[Known], right: Sequence[Known]) -> list[list[str]]:
    """Return sets of conditions that hold for all wrong problems, and for few of the right ones.

    A set has one or two conditions on shapes, sizes or options. It also has those that no option
    of ``ARRANGING`` is given, where it needs them: in pages, a kernel may go another way.
    """
    always = frozenset.intersection(*(x.conditions for x in wrong))
    apart = sorted(c for c in always & USUAL if c.startswith(ARRANGING))

    def ends(others: Iterable[Known]) -> list[str]:
        return limits([x.graded for x in wrong], [x.graded for x in others])

    plain = [x for x in right if all(map(x.holds, apart))]
    found: list[list[str]] = [] if plain else [[]]
    for c in (*sorted(always - USUAL), *ends(plain)):
        rest = [x for x in plain if x.holds(c)]
        found += [[c, other] for other in ends(rest)] if rest else [[c]]
    for some in found:
        others = [x for x in right if all(map(x.holds, some))]
        some += [c for c in apart if not all(x.holds(c) for x in others)]
    return [some for some in found if some]


def shared(wrong: Sequence[Known], right: Sequence[Known]) -> str:
    """Return up to ``MOST_SHARED`` conditions that hold for all wrong problems, as a clause.

    Each leaves out as many of the right problems as it can. Returns "" if none leaves out any.
    """
    always = sorted(frozenset.intersection(*(x.conditions for x in wrong)) - USUAL)
    chosen: list[str] = []
    while right and len(chosen) < MOST_SHARED:
        ends = (
            limits([x.graded for x in wrong], [x.graded for x in right]) if wrong[0].sizes else []
        )
        left = {c: [x for x in right if x.holds(c)] for c in (*always, *ends)}
        best = min(left, key=lambda c: len(left[c]), default="")
        if not best or len(left[best]) == len(right):
            break
        chosen.append(best)
        right = left[best]
    return " and ".join(", ".join(chosen).rsplit(", ", 1))


def _fingerprint(prediction: Deviated | None) -> Any:
    """Return a hashable value that is equal for equal predictions."""
    if prediction is None:
        return None
    p = prediction
    return tuple(x.tobytes() for x in (p.output, p.lse, p.is_free, p.is_lse_free, *p.others))


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
        first = next((f for f in ("", *OWN_KINDS, "alone", "crossed") if f in families), ARRANGED)
        # A set is searched for in these, and must hold in all.
        plain = [n for n, f in zip(self.taken, families, strict=True) if f == first]
        self.plain = [n for n in plain if not self.known[n].is_mild] or plain
        self.fitted = fitted([x.graded for x in self.known], self.answers)

    def fit(self, n: int, hypothesis: Iterable[Item]) -> Fit:
        x = self.known[n]
        key = n, x.relevant(hypothesis)
        if key not in self._fits:
            prediction = x.predicted(key[1])
            self._fits[key] = compare(
                self.answers[n], prediction, x.asks_lse, self.rounded_to, measures=not key[1]
            )
        return self._fits[key]

    def contradicted(self, hypothesis: Hypothesis, *, in_all: bool = False) -> list[int]:
        """Return the indices of problems whose answers the hypothesis does not explain.

        Without ``in_all``, only the graded problems count, or the next ``family`` of problems if
        the function takes none of the graded ones.
        """
        problems = self.taken if in_all else self.plain
        return [n for n in problems if not self.fit(n, hypothesis).is_explained]

    def run(self) -> list[Hypothesis]:
        """Search, and return the smallest supported hypotheses that the fewest answers contradict.

        If none is better than the empty hypothesis, the result is only that one.
        """
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

    def with_mild(self, hypothesis: Hypothesis) -> Hypothesis:
        """Return the hypothesis with what best explains NaN in keys, and queries that see no key.

        For indexers, it is what explains equal scores. If no such deviation explains more, none is
        added. The values of the hypothesis's other deviations are chosen first, as in ``valued``.
        """
        small = [n for n in self.taken if self.known[n].graded.family != "sized"]
        hypothesis = self.valued(hypothesis, small)
        for names, has_nan in (
            (LEAKS + NAN_LEAKS, True), (HIDDEN_ROWS + CLEARING + TIES, False),
        ):  # fmt: skip
            mild = [n for n in small if self.known[n].is_mild and self.known[n].has_nan == has_nan]
            new = [name for name in names if name not in names_of(hypothesis)]
            items = [(name, DEVIATIONS[name].values[-1]) for name in new]
            sets = (hypothesis, *(hypothesis | {item} for item in items))
            hypothesis = min(sets, key=lambda h: self.left(h, mild))
        return hypothesis

    def valued(self, hypothesis: Hypothesis, problems: Sequence[int]) -> Hypothesis:
        """Return the hypothesis with the values that leave the fewest ``problems`` unexplained."""
        least = self.left(hypothesis, problems)
        for item in sorted(hypothesis, key=str) if least else ():
            rest = hypothesis - {item}
            for other in self.values_of(item):
                if (count := self.left(rest | {other}, problems, least)) < least:
                    hypothesis, least = rest | {other}, count
        return hypothesis

    def left(self, hypothesis: Hypothesis, problems: Sequence[int], most: int | None = None) -> int:
        """Return the number of ``problems`` that the hypothesis leaves unexplained.

        If it is above ``most``, it is only the first number above.
        """
        unexplained = (n for n in problems if not self.fit(n, hypothesis).is_explained)
        return sum(1 for _ in islice(unexplained, None if most is None else most + 1))

    def conditional(self, hypothesis: Hypothesis) -> list[Hypothesis]:
        """Extend a hypothesis by deviations that occur only under conditions.

        At most ``MOST_CONDITIONAL`` deviations are added, one per step. A step chooses a problem
        that contradicts the hypothesis so far. If possible, its answer has finite nonzero numbers;
        of these problems, it has the fewest conditions. The step tries all deviations that explain
        this problem, and keeps one that leaves the fewest problems unexplained.

        In the end, all problems except those of models' sizes must be explained. Of all wrong
        answers, those of models' sizes included, at least half (``SHARE``) must be explained, one
        of them with finite nonzero numbers. Returns the extensions that are equally good, or only
        the hypothesis if there is none.
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
            n = min(telling, key=self._plainness)
            tried = {
                h: self.left(h, small)
                for item in (item for items in self.known[n].kinds() for item in items)
                if self.explains(n, found[0] | {item})
                for h in self.under_conditions(n, found[0], item)
            }
            # Counting ends early if what explains much, and what is wrong and small, comes first.
            order = sorted(self.taken, key=lambda n: (n not in left, self.known[n].num_scores))
            best, least = [], len(left) - 1
            for h in sorted(tried, key=tried.__getitem__):
                if (count := self.left(h, order, least)) < least:
                    best, least = [h], count
                elif count == least:
                    best.append(h)
            if not best:
                break
            found = sorted(best, key=lambda h: (_num_conditions(h), _rank(h)))
            found = [h for h in found if _num_conditions(h) == _num_conditions(found[0])]
        return [hypothesis]

    def _plainness(self, n: int) -> tuple[int, int]:
        """Return a sort key of problem n: its unusual conditions, and its scores."""
        return len(self.known[n].conditions - USUAL), self.known[n].num_scores

    def at_sizes(self, hypothesis: Hypothesis) -> list[Hypothesis]:
        """Extend a hypothesis by a deviation that explains what only models' sizes show.

        The deviation may need a condition, or sizes above the largest right ones, or both. It must
        explain all answers.
        """
        left = self.contradicted(hypothesis, in_all=True)
        n = min(left, key=lambda n: self.known[n].num_scores)
        if self.known[n].num_scores > FEW_SCORES:
            return []
        wrong, found = [self.known[m] for m in left], []
        for item in (item for items in self.known[n].kinds() for item in items):
            h = hypothesis | {item}
            if self.explains(n, h) and self.left(h, left) == 0:
                right = [self.known[m] for m in self.contradicted(h, in_all=True)]
                where = _clauses(wrong, right) if right else []
                found += [hypothesis | {(*item, frozenset(some))} for some in where] or [h]
        found = [h for h in found if not self.contradicted(h, in_all=True)]
        found.sort(key=lambda h: (_num_conditions(h), _rank(h)))
        return [h for h in found if _num_conditions(h) == _num_conditions(found[0])]

    def under_conditions(self, n: int, hypothesis: Hypothesis, item: Item) -> list[Hypothesis]:
        """Return hypotheses in which ``item`` occurs, always or under conditions of problem ``n``.

        The conditions are one, or two, of those that hold there.
        """
        needs = DEVIATIONS[item[0]].needs[:1]
        holding = sorted(c for c in self.known[n].conditions if not c.startswith(needs))
        is_arranging = bool(set(needs) & set(ARRANGING))
        if not is_arranging:  # that no sequences are packed is no condition to try
            holding = [c for c in holding if c not in USUAL or not c.startswith(ARRANGING)]
        unusual = [c for c in holding if c not in USUAL]
        chosen = [frozenset([c]) for c in holding]
        if not is_arranging:
            chosen += [frozenset(pair) for pair in combinations(unusual, 2)]
        return [hypothesis | {item}, *(hypothesis | {(*item, c)} for c in chosen)]

    def best(
        self, grown: Iterable[Hypothesis], found: Mapping[Hypothesis, int]
    ) -> list[Hypothesis]:
        """Return the hypotheses to follow in the next step, best first."""
        ranked = sorted(grown, key=lambda h: (found[h], len(h), _rank(h)))
        return [h for h in _varied(ranked, 2) if found[h] <= found[ranked[0]] + MARGIN][:WIDTH]

    def grown(self, hypothesis: Hypothesis) -> list[Hypothesis]:
        """Return extensions of the hypothesis that explain the first contradicting answers."""
        targets, found = 0, []
        contradicted = self.contradicted(hypothesis)
        for n in self.targets(contradicted):
            grown = [h for h in self.extended(n, hypothesis) if self.explains(n, h)]
            found += grown
            targets += bool(grown)
            if targets == TARGETS or len(self._fits) > MOST_FITS:
                break
        sample = contradicted[:SAMPLE]
        if len(sample) < SAMPLE:  # what is right must stay so
            sample += [n for n in self.plain if n not in sample]

        def unexplained(h: Hypothesis) -> int:
            wrong = (n for n in sample if not self.fit(n, h).is_explained)
            return sum(1 for _ in islice(wrong, SAMPLE))

        if contradicted and not hypothesis and min(map(unexplained, found), default=9) > FEW:
            found += self.grown_by_two(contradicted[0])
        ranked = sorted(dict.fromkeys(found), key=lambda h: (unexplained(h), _rank(h)))
        return _varied(ranked, 2)[:BRANCHES]

    def targets(self, contradicted: Sequence[int]) -> list[int]:
        """Return the contradicted problems to look at: easy problems, then those about rounding."""
        is_exact = [self.known[n].graded.is_exact for n in contradicted]
        easy = [n for n, exact in zip(contradicted, is_exact, strict=True) if not exact]
        easy.sort(key=lambda n: not _is_full(self.answers[n]))
        return easy[:TRIED] + [n for n, exact in zip(contradicted, is_exact, strict=True) if exact]

    def explains(self, n: int, hypothesis: Hypothesis) -> bool:
        fit = self.fit(n, hypothesis)
        return fit.is_explained and not fit.is_mute

    def extended(self, n: int, hypothesis: Hypothesis) -> list[Hypothesis]:
        """Return the hypotheses with one more deviation, or with another value of a deviation.

        The new deviation belongs to a stage of attention that the hypothesis leaves right.
        """
        stages = {DEVIATIONS[name].stage for name, *_ in hypothesis}
        found = []
        if len(hypothesis) < self.most:
            items = [item for items in self.known[n].kinds() for item in items]
            items += [item for item in self.fitted if self.known[n].usual(item) is not None]
            found = [hypothesis | {i} for i in items if DEVIATIONS[i[0]].stage not in stages]
        for held in hypothesis:
            found += [hypothesis - {held} | {item} for item in self.values_of(held)]
        return found

    def values_of(self, held: Item) -> list[Item]:
        """Return the items with the deviation of ``held``: one for each known or fitted value."""
        values = [(held[0], value) for value in DEVIATIONS[held[0]].values]
        return values + [item for item in self.fitted if item[0] == held[0]]

    def grown_by_two(self, n: int) -> list[Hypothesis]:
        """Return the pairs of items that explain answer ``n``, without repeating equal effects."""
        found: list[Hypothesis] = []
        for kinds in combinations(_varied(self.known[n].kinds(), 3), 2):
            pairs = [frozenset(p) for p in product(*map(_usual, kinds)) if _stages_differ(p)]
            if pairs and self.explains(n, pairs[0]):
                found += pairs
        return found

    def chosen(self, found: Mapping[Hypothesis, int]) -> list[Hypothesis]:
        """Return the smallest supported hypotheses that the fewest answers contradict.

        ``found`` maps each hypothesis to the number of answers that contradict it. If none is
        better than the empty hypothesis, the result is only that one.
        """
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
        """Return the hypothesis without the items that explain no answer."""
        count = len(self.contradicted(hypothesis))
        for item in sorted(hypothesis, key=str):
            if len(self.contradicted(hypothesis - {item})) <= count:
                return self.needed(hypothesis - {item})
        return hypothesis

    def is_supported(self, hypothesis: Hypothesis) -> bool:
        """Return whether each item explains an answer that the rest of the hypothesis does not.

        An explained answer must hold finite nonzero numbers, because zeros and NaN fit too easily.
        The hypothesis must explain half of the wrong answers, because a few fit by chance. With
        lost precision, whose bounds are wide, it must explain nearly all answers.
        """
        tells = any(
            self.explains(n, hypothesis) and _has_numbers(self.answers[n]) for n in self.plain
        )
        wrong, left = len(self.contradicted(NONE)), len(self.contradicted(hypothesis))
        enough = wrong - left >= SHARE * wrong
        if any(is_precision(name) or name in IN_16_BITS for name, *_ in hypothesis):
            enough = enough and left <= (1 - NEARLY_ALL) * len(self.plain)
        if names_of(hypothesis) & {*IN_16_BITS}:  # which shows in most problems
            enough = enough and wrong >= SHARE * len(self.plain)
        return tells and enough and all(self.evidence(hypothesis, item) for item in hypothesis)

    def evidence(self, hypothesis: Hypothesis, item: Item) -> list[int]:
        """Return the indices of the answers that the hypothesis explains only with ``item``."""
        less = hypothesis - {item}
        explained = [
            n
            for n in self.contradicted(less)
            if self.fit(n, hypothesis).tells_more_than(self.fit(n, less))
        ]
        if is_precision(item[0]):
            explained = [n for n in explained if self.known[n].graded.is_exact]
        return explained


def _has_numbers(answer: Answer) -> bool:
    O = answer.output
    return O is not None and bool((np.isfinite(O) & (O != 0)).any())


def _is_full(answer: Answer) -> bool:
    """Whether every query has numbers, which zeros and NaN are not."""
    O = answer.output
    return O is not None and bool((np.isfinite(O) & (O != 0)).any(-1).all())


def is_precision(identifier: str) -> bool:
    return DEVIATIONS[identifier].stage.startswith("precision")


def names_of(hypothesis: Iterable[Item]) -> frozenset[str]:
    return frozenset(name for name, *_ in hypothesis)


def _usual(items: Iterable[Item]) -> list[Item]:
    """Return the first item of each identifier."""
    return list({item[0]: item for item in reversed(list(items))}.values())


def _varied(candidates: Iterable[Items], most: int) -> list[Items]:
    """Return the candidates in order, at most ``most`` with the same identifiers."""
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
    """Return a sort key: the places of the items in the catalogue, values outside of it last."""
    return sorted(_PLACES.get(item[:2], len(_PLACES)) for item in hypothesis)


def _num_conditions(hypothesis: Hypothesis) -> tuple[int, int]:
    """Return a sort key: the number of conditions, and how many of them are the usual case."""
    conditions = [c for _, _, *where in hypothesis for some in where for c in some]
    return len(conditions), sum(c in USUAL for c in conditions)
