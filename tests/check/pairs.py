"""Are two deviations at once named as the pair? All pairs: ``python -m tests.check.pairs``."""

import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests import each other from there

from check.mutants import answers

from minimha.check.deviations import DEVIATIONS
from minimha.check.prepared import Prepared
from minimha.check.problems import graded
from minimha.check.verdict import judge

UNSIMULATED = ("run", "dropout")  # stages that no equation computes
OF_LAYERS = ("num_heads", "b_q", "b_v", "b_o", "rope_base", "cache")


def of_attention():
    """The deviations that a function of q, k and v may have, and that equations compute."""
    return [
        deviation
        for deviation in DEVIATIONS.values()
        if deviation.stage not in UNSIMULATED and not set(deviation.needs) & set(OF_LAYERS)
    ]


def pairs():
    """Identifiers of different stages, two by two."""
    for a, b in itertools.combinations(of_attention(), 2):
        if a.stage != b.stage:
            yield a.identifier, b.identifier


def verdict_on(pair, problems, prepared, dtype="float32"):
    """ "pair", "one of these", "alone" (a smaller set explains all), or what was named instead."""
    deviations = {name: DEVIATIONS[name].values[0] for name in pair}
    found = judge(problems, answers(problems, deviations, dtype, prepared), dtype=dtype)
    sets = [set(found.deviations), *map(set, found.alternatives)]
    explains_all = found.explains[0] == found.explains[1]
    if sets == [set(pair)]:
        return "pair"
    if set(pair) in sets:
        return "one of these"
    if explains_all and len(found.deviations) < 2:
        return f"alone: {found.deviations}"
    return f"{found.deviations} {found.alternatives[:2]} {found.explains}"


def main(every=1, dtype="float32"):
    problems = graded(dtype)
    prepared = [Prepared(p.arguments, dtype, p.is_exact) for p in problems]
    counts, longest = {}, 0.0
    for pair in itertools.islice(pairs(), 0, None, every):
        start = time.perf_counter()
        said = verdict_on(pair, problems, prepared, dtype)
        longest = max(longest, time.perf_counter() - start)
        kind = said.split(":")[0] if said[0] != "(" else "other"
        counts[kind] = counts.get(kind, 0) + 1
        if kind != "pair":
            sys.stdout.write(f"{pair[0]} {pair[1]} → {said}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{counts}, the longest took {longest:.1f} s\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
