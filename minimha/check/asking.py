"""Choose the problems for a function, depending on its earlier answers.

A switch is an option or a shape, which a problem has or lacks. First come the graded problems, then
each switch alone. Then come rows, sets of switches, that combine the switches that the function
takes. A wrong or refused row is asked again with fewer switches, until none can be left out. If the
function refuses the plainest problem, other sizes are tried. The sizes of models and random
problems come last, and only for a function that is right at small sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from secrets import randbits

import numpy as np

from minimha.check.answer import NOT_ASKED, Answer
from minimha.check.arranged import PAGES, PAIRS, arranged, kinds_of, rearranged
from minimha.check.compared import compare
from minimha.check.conditions import OPTIONS, sizes
from minimha.check.crossed import (
    AMID,
    AT_START,
    FIRST_QUERY,
    LONG,
    PLAIN,
    SWITCHES,
    Sizes,
    Switches,
    alone,
    crossed,
    long,
    rows,
)
from minimha.check.drawn import BLOCK, drawn, fewer
from minimha.check.problems import TWO_AXES, Graded, with_four_axes
from minimha.check.search import NONE, known
from minimha.check.sized import ALONE, CUT, cut, sized

Ask = Callable[[Sequence[Graded]], list[Answer]]

TRIED = [
    Sizes(unit, D)
    for unit, D in (
        (1, 64), (1, 128), (16, 64), (64, 64), (64, 128), (128, 64), (128, 128), (32, 32), (16, 16),
        (64, 32), (256, 64),
    )
]  # fmt: skip
NEEDED: tuple[Switches, ...] = (
    frozenset(), *(frozenset({s}) for s in ("one query", "is_causal", "window_size")),
)  # fmt: skip
WIDE, WIDEST = 128, 192  # widths of heads, with which each option is asked again
PAGED_WIDTHS = (64, 128)  # of heads, for functions that take no plain problem
PATIENCE = 12  # problems of a kind that are refused before it counts as not taken
LARGEST = 1024  # width, and divisor of lengths, that may be declared
MOST_SHRUNK = 3
MANY, FEW = 50, 2  # shapes of random problems; other libraries may compile for each
ROUNDS = 8  # times that rows are chosen again, without switches that exclude each other


@cache
def drawn_seed() -> int:
    """Return a random seed, the same in all calls of this process."""
    return randbits(32)


@dataclass(frozen=True)
class Limits:
    """The shapes that a function takes, as its author declares them.

    Attributes
    ----------
    head_dims : tuple of int, optional
        The possible values of D and Dv; by default the empty tuple, which allows any.
    multiple_of : int, default 1
        A divisor of Lq and Lk.
    max_heads : int, optional
        The most query heads; default is no limit.
    is_square : bool, default False
        Whether Lq must equal Lk.
    """

    head_dims: tuple[int, ...] = ()
    multiple_of: int = 1
    max_heads: int | None = None
    is_square: bool = False

    def check(self) -> None:
        """Raise ValueError if every problem with these shapes would be too large."""
        for name, some in (("head_dims", self.head_dims), ("multiple_of", (self.multiple_of,))):
            for size in some:
                if size > LARGEST:
                    raise ValueError(
                        f"{name} is {size}: expected at most {LARGEST}; no problem is that large"
                    )

    def exclude(self, problem: Graded) -> bool:
        """Return whether a problem has a shape that the function does not take."""
        s = sizes(problem.arguments)
        return (
            bool(self.head_dims and {s["D"], s["Dv"]} - set(self.head_dims))
            or bool(s["Lq"] % self.multiple_of or s["Lk"] % self.multiple_of)
            or (self.max_heads is not None and s["H"] > self.max_heads)
            or (self.is_square and s["Lq"] != s["Lk"])
        )


@dataclass
class Asking:
    """The problems that a function was given, and its answers."""

    ask: Ask
    dtype: str
    seed: int
    limits: Limits = Limits()
    arranges: bool = True  # whether packed sequences, pages and functions may be asked
    page: int = PAGES[0]  # keys of a page that the function takes
    answers: dict[Graded, Answer] = field(default_factory=dict)

    def all(self, problems: Sequence[Graded]) -> list[Answer]:
        """Return the answers to ``problems``; the function is given each problem only once."""
        for p in problems:
            if p not in self.answers and p.kind == "attention" and self.limits.exclude(p):
                self.answers[p] = Answer(refusal=f"{NOT_ASKED}: you declared other shapes")
        new = [p for p in problems if p not in self.answers]
        self.answers.update(zip(new, self.ask(new), strict=True))
        return [self.answers[p] for p in problems]

    def run(self, graded: Sequence[Graded]) -> None:
        """Ask the graded problems, then the problems that their answers lead to.

        For layers and the delta rule, only the graded problems are asked.
        """
        self.all(graded)
        if graded[0].kind != "attention":
            return
        self._meet_two_axes(graded)
        fitting = next((pair for pair in self._fits() if self._takes(*pair)), None)
        if fitting is None:
            if self.arranges:
                self._meet_arranged()
            return
        singles, others = self._meet(*fitting)
        small = [p for p in self.answers if p.family and p.family != "sized"]
        kinds = self._arrange(fitting[0], others) if self.arranges else []
        if not any(self.is_wrong(p, asks_lse=False) for p in small):
            self.all([*sized(self.seed), *self._wide(fitting[0], singles)])
            self._ask_random(fitting[0], singles, kinds)
            self._narrow()
            self._compare_batches()

    def _ask_random(
        self, some: Sizes, singles: Sequence[Switches], kinds: Sequence[tuple[str, ...]]
    ) -> None:
        """Ask random problems, alone and with options of ``kinds`` in turn.

        The first that are wrong are asked with fewer options, until each of these is needed.
        """
        problems = self._random(some, singles)
        self.all(problems)
        self._ask_arranged(problems, kinds)
        for p in [p for p in problems if self.is_wrong(p)][:MOST_SHRUNK]:

            def is_wrong_with(options: Switches, whole: Graded = p) -> bool:
                return self.is_wrong(fewer(whole, options))

            smallest(frozenset(OPTIONS) & {*p.options}, is_wrong_with)

    def _random(self, some: Sizes, singles: Sequence[Switches]) -> tuple[Graded, ...]:
        """Return random problems with switches of ``singles``; what all of these have, all have."""
        taken, needed = frozenset().union(*singles), frozenset.intersection(*singles)
        shapes = MANY if self.arranges else FEW
        return drawn(taken, needed, some, self.seed, shapes, self.limits.head_dims)

    def _ask_arranged(self, problems: Sequence[Graded], kinds: Sequence[tuple[str, ...]]) -> bool:
        """Ask the problems with options of ``kinds`` in turn; return whether all are taken."""
        turns = zip(problems, cycle(kinds), strict=False)
        found = (rearranged(p, one, self.seed, self.page) for p, one in turns)
        answers = self.all([p for p in found if p is not None])
        return bool(answers) and all(answer.refusal is None for answer in answers)

    def _meet_two_axes(self, graded: Sequence[Graded]) -> None:
        """Note a mask, or bias, of two axes that is misread, if that of four is read rightly."""
        for p in graded:
            if p.name in TWO_AXES and self.is_wrong(p):
                whole = with_four_axes(p)
                if not self.is_wrong(whole) and self.is_taken(whole):
                    answer = self.answers[whole]
                    faults = (*answer.faults, "two_axes_misread")
                    self.answers[p] = replace(answer, faults=faults)

    def _compare_batches(self) -> None:
        """Note where a batch entry has other bits alone, twice: a compilation may come between."""
        if any("runs_differ_bitwise" in answer.faults for answer in self.answers.values()):
            return  # then batches differ, too
        by_name = {p.name: p for p in self.answers}
        for one in [p for p in self.answers if p.name.endswith(ALONE)]:
            pair = by_name[one.name.removesuffix(ALONE)], one
            if _differ(*map(self.answers.__getitem__, pair)) and _differ(*self.ask(pair)):
                answer = self.answers[one]
                faults = (*answer.faults, "batches_differ_bitwise")
                self.answers[one] = replace(answer, faults=faults)

    def _narrow(self) -> None:
        """Find the largest right number of keys, queries or heads, if all larger ones are wrong."""
        taken = [
            p for p in list(self.answers)
            if p.family == "sized" and not kinds_of(p) and self.is_taken(p)
        ]  # fmt: skip
        wrong = [p for p in taken if self.is_wrong(p)]
        options = [{*p.options, "q_offset"} for p in wrong] or [set()]
        shared = set.intersection(*options) - {"q_offset"}
        alike = [  # graded problems may be large and yet show nothing of this, as with equal keys
            p for p in self.answers if p.family and p not in wrong
            and shared <= {*p.options} <= set.union(*options) and self.is_taken(p)
        ]  # fmt: skip
        for name in CUT if wrong else ():
            right = [sizes(p.arguments)[name] for p in alike]
            first = min(wrong, key=lambda p: sizes(p.arguments)[name])
            least, most = sizes(first.arguments)[name], max(right, default=0)
            if least <= most:
                continue
            while least - most > 1:
                middle = (least + most) // 2
                problem = cut(first, name, middle)
                if not self.is_taken(problem):
                    break
                least, most = (middle, most) if self.is_wrong(problem) else (least, middle)

    def _wide(self, some: Sizes, taken: Sequence[Switches]) -> list[Graded]:
        """Return problems for each switch alone, with wide heads and in whole blocks of keys."""
        needed = frozenset.intersection(*taken)
        alone = [on for on in taken if len(on - needed) == 1 and on - needed <= {*OPTIONS}]
        wide, widest = (replace(some, D=max(some.D, D)) for D in (WIDE, WIDEST))
        whole = replace(wide, unit=int(np.lcm(some.unit, BLOCK)))
        pairs = [(on, wide) for on in taken]
        pairs += [(on, new) for new in (whole, widest) for on in alone]
        problems = [crossed(on, new, self.seed) for on, new in pairs if new != some]
        return [replace(problem, family="sized") for problem in problems]

    def _meet_arranged(self) -> None:
        """Ask a function that may need pages, or packed sequences, since it takes no plain problem.

        Heads are as wide as it takes. As in ``_meet``, rows have the switches that are taken alone.
        """
        for some in (PLAIN, *(replace(PLAIN, D=D) for D in PAGED_WIDTHS)):
            if kinds := self._arrange(some, ()):
                for one in kinds:
                    fitting = (on for on in NEEDED if self._ask_rearranged([on], one, some))
                    if (needed := next(fitting, None)) is not None:
                        self._meet_rearranged(one, some, needed)
                return

    def _meet_rearranged(self, kinds: tuple[str, ...], some: Sizes, needed: Switches) -> None:
        """Ask each switch alone, rows and random problems, all with options of ``kinds``."""
        sets = [on | needed for on in alone()]
        singles = [on for on in sets if self._ask_rearranged([on], kinds, some)]
        taken = frozenset().union(*singles)
        rest = [on | needed for on in (*rows(taken, some, self.seed), *long(taken))]
        self._ask_rearranged(rest, kinds, some)
        self._ask_rearranged(singles, kinds, replace(some, D=WIDEST))
        self._ask_arranged(self._random(some, singles), [kinds])

    def _ask_rearranged(
        self, sets: Sequence[Switches], kinds: tuple[str, ...], some: Sizes
    ) -> bool:
        """Ask problems with options of ``kinds`` added; return whether all are taken.

        Packed sequences are three, with offsets of their own in every other problem.
        """
        if "cu_seqlens_q" in kinds:
            more = {"batch"}, {"batch", "by entry"}
            sets = [on | more[n % 2] for n, on in enumerate(sets)]
        plain = [crossed(on, some, self.seed) for on in dict.fromkeys(sets)]
        return self._ask_arranged(plain, [kinds])

    def _arrange(self, some: Sizes, answered: Sequence[Switches]) -> list[tuple[str, ...]]:
        """Ask problems of each kind, unless the plainest are all refused, and return what is taken.

        Problems that were ``answered`` without an option of these kinds are asked with it, too, and
        every third with both options of a pair. If nothing else is taken, pairs are tried, too.
        Each kind is also asked with many keys and wide heads.
        """
        taken: dict[str, int] = {}  # by kind, keys in a page of the first problem
        refused: Counter[tuple[str, ...]] = Counter()
        for problem in arranged(self.seed, some.D):
            own = tuple(kinds_of(problem))
            if refused[own] >= PATIENCE and own[0] not in taken:
                continue
            if not self.is_taken(problem):
                refused[own] += 1
            elif len(own) == 1:
                taken.setdefault(own[0], problem.arguments["k"].shape[2])
        self.page = taken.get("block_table", self.page)
        kinds: list[tuple[str, ...]] = [(kind,) for kind in taken]
        pairs = [
            pair for pair in PAIRS
            if any((kind,) in kinds for kind in pair) or not (kinds or answered)
            if any(self._ask_rearranged([needed], pair, some) for needed in NEEDED[:2])
        ]  # fmt: skip
        for one in kinds:
            self._ask_rearranged(answered, one, some)
            for D in {some.D, max(some.D, WIDEST)}:
                self._ask_rearranged([frozenset({LONG})], one, replace(some, D=D))
        for pair in pairs:
            self._ask_rearranged(answered[::3], pair, some)
        return kinds or [*pairs]

    def _fits(self) -> list[tuple[Sizes, Switches]]:
        """Return the sizes to try, and the switches that each problem needs then."""
        declared = []
        if self.limits != Limits():
            widths = self.limits.head_dims or (PLAIN.D,)
            declared = [Sizes(self.limits.multiple_of, D) for D in widths]
        return [(some, needed) for needed in NEEDED for some in (*declared, PLAIN, *TRIED)]

    def _takes(self, some: Sizes, needed: Switches) -> bool:
        return self.is_taken(crossed(needed, some, self.seed))

    def _place(self, some: Sizes, needed: Switches) -> Switches:
        """Return the switch of the first keys if fewer queries than keys must stand there."""
        first = frozenset({AT_START})
        for option in ("is_causal", "window_size"):
            on = needed | {option, "fewer queries"}
            if not self._takes(some, on) and self._takes(some, on | first):
                return first
        return frozenset()

    def is_taken(self, problem: Graded) -> bool:
        """Return whether the function gives any answer to the problem, right or wrong."""
        return self.all([problem])[0].refusal is None

    def is_wrong(self, problem: Graded, *, asks_lse: bool = True) -> bool:
        """Return whether the answer to the problem has an error that rounding does not explain."""
        (answer,), x = self.all([problem]), known(problem, self.dtype)
        asks_lse = asks_lse and x.asks_lse
        return answer.output is not None and not (
            compare(answer, x.predicted(NONE), asks_lse).is_explained
        )

    def _meet(self, some: Sizes, needed: Switches) -> tuple[list[Switches], list[Switches]]:
        """Ask each switch alone, then rows of those that are taken.

        Returns what was taken alone, and what else was answered.
        """
        needed = needed | self._place(some, needed)
        needs: dict[str, Switches] = {}  # of options that are not taken alone

        def completed(on: Switches) -> Switches:
            return on.union(needed, *(needs[s] for s in on if s in needs))

        def problem(on: Switches) -> Graded:
            return crossed(completed(on), some, self.seed)

        for option in OPTIONS:
            for more in NEEDED:
                if self.is_taken(crossed(needed | more | {option}, some, self.seed)):
                    needs |= {option: more} if more else {}
                    break
        singles = [on for on in alone() if self.is_taken(problem(on))]
        wrong = [on for on in singles if self.is_wrong(problem(on))]
        taken = frozenset(s for s in SWITCHES for on in singles if s in on)
        excluded: set[Switches] = set()
        num_shrunk = 0
        answered: list[Switches] = []
        for _ in range(ROUNDS):
            before = len(excluded)
            for on in rows(taken, some, self.seed, frozenset(excluded), tuple(answered)):
                if not self.is_taken(problem(on)):
                    excluded.add(smallest(on, lambda some: not self.is_taken(problem(some))))
                    continue
                answered.append(on)
                if self.is_wrong(problem(on)) and not any(few <= on for few in wrong):
                    num_shrunk += 1
                    if num_shrunk <= MOST_SHRUNK:
                        few = smallest(on, lambda some: self.is_wrong(problem(some)))
                        wrong.append(few)  # amid the keys, both sides of a window show
                        self.all([problem(few - {*FIRST_QUERY} | (taken & {AMID}))])
            if len(excluded) == before:
                break
        several = [on for on in long(taken) if self.is_taken(problem(on))]
        return [*map(completed, singles)], [*map(completed, (*answered, *several))]


def _differ(whole: Answer, alone: Answer) -> bool:
    """Whether the first entry of an answer has other bits than the answer to it alone."""
    if whole.output is None or alone.output is None:
        return False
    return not np.array_equal(whole.output[:1], alone.output, equal_nan=True)


def smallest(on: Switches, still: Callable[[Switches], bool]) -> Switches:
    """Return a minimal part of the switches ``on`` for which ``still`` is True."""
    for switch in sorted(on):
        if still(on - {switch}):
            return smallest(on - {switch}, still)
    return on


def exchanged(graded: Sequence[Graded], seed: int = 0) -> list[Graded]:
    """Return the problems for a function that runs elsewhere, all chosen in advance."""
    every = frozenset(SWITCHES)
    others = dict.fromkeys((*alone(), *rows(every, PLAIN, seed)))
    return [*graded, *(crossed(on, PLAIN, seed) for on in others)]
