"""Are two deviations at once named as the pair? All pairs: ``python -m tests.check.pairs``."""

import itertools
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests import each other from there

from check.mutants import answers

from minimha.check.catalogue import DEVIATIONS
from minimha.check.expanded import ARRANGING
from minimha.check.prepared import Prepared
from minimha.check.problems import graded
from minimha.check.search import KIND_OF
from minimha.check.verdict import judge

UNSIMULATED = ("run", "dropout")  # stages that no equation computes
NOT_GRADED = (  # only crossed options or large sizes show them
    "causal_ignored_in_tail", "alibi_from_window", "written_as_far_as_inputs", "lse_uncapped",
)  # fmt: skip
OF_LAYERS = ("num_heads", "b_q", "b_v", "b_o", "rope_base", "cache")


def of_attention():
    """The deviations that a function of q, k and v may have, and that equations compute."""
    return [
        deviation
        for deviation in DEVIATIONS.values()
        if deviation.stage not in UNSIMULATED
        and not set(deviation.needs) & {*OF_LAYERS, *ARRANGING}
        and deviation.identifier not in KIND_OF
        and deviation.identifier not in NOT_GRADED
    ]


def pairs():
    """Identifiers of different stages, two by two."""
    for a, b in itertools.combinations(of_attention(), 2):
        if a.stage != b.stage:
            yield a.identifier, b.identifier


def verdict_on(pair, problems, prepared, dtype="float32"):
    """How a function with both deviations was judged.

    "pair"; "one of these: …", the pair among them; "alone: …", where the other deviation changes
    no answer; "other: …".
    """
    deviations = {name: DEVIATIONS[name].values[0] for name in pair}
    found = judge(problems, answers(problems, deviations, dtype, prepared), dtype=dtype)
    sets = [set(found.deviations), *map(set, found.alternatives)]
    if sets == [set(pair)]:
        return "pair"
    if set(pair) in sets:
        return f"one of these: {found.deviations} {found.alternatives}"
    explains_all = found.explains[0] == found.explains[1]
    if explains_all and set(found.deviations) < set(pair):
        return f"alone: {found.deviations}"
    return f"other: {found.deviations} {found.alternatives} {found.explains}"


def main(every=1, dtype="float32"):
    """All pairs, or every n-th."""
    problems = graded(dtype)
    prepared = [Prepared(p.arguments, dtype, p.is_exact) for p in problems]
    counts, longest = Counter(), 0.0
    for pair in itertools.islice(pairs(), 0, None, every):
        start = time.process_time()
        how = verdict_on(pair, problems, prepared, dtype)
        longest = max(longest, time.process_time() - start)
        counts[how.partition(":")[0]] += 1
        if how != "pair":
            sys.stdout.write(f"{pair[0]} {pair[1]} → {how}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{dict(counts)}, the longest took {longest:.1f} s\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
