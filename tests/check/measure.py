"""What `check` names and what it does not: ``python -m tests.check.measure``."""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests import each other from there

from check.mutants import DTYPES, ROUNDED_BY, answered_by, answers
from check.pairs import of_attention
from check.right import random_kernel

from minimha.check.asking import drawn_seed
from minimha.check.catalogue import DEVIATIONS
from minimha.check.catalogue_delta import OF_DELTA
from minimha.check.prepared import Prepared
from minimha.check.problems import graded
from minimha.check.problems_delta import delta_problems
from minimha.check.verdict import judge


def singles(dtype):
    """Each deviation with each of its usual values alone: how many are named, and what is not."""
    problems = graded(dtype)
    prepared = [Prepared(p.arguments, dtype, p.is_exact) for p in problems]
    missed, names = [], [d.identifier for d in of_attention()]
    observable = [name for name in names if name not in ROUNDED_BY[dtype]]
    for name in observable:
        deviations = {name: DEVIATIONS[name].values[0]}
        found = judge(problems, answers(problems, deviations, dtype, prepared), dtype=dtype)
        if found.deviations != (name,) or found.alternatives:
            missed.append((name, found.deviations, found.alternatives))
    return len(observable) - len(missed), len(observable), missed


def of_delta_rule(dtype):
    """Each form of each deviation of the gated delta rule alone: those that are not named."""
    problems, missed = delta_problems(drawn_seed()), []
    forms = [(one.identifier, value) for one in OF_DELTA for value in one.values]
    for name, value in forms:
        found = judge(problems, answers(problems, {name: value}, dtype), dtype=dtype)
        if found.deviations != (name,) or found.alternatives:
            missed.append((name, value, found.deviations, found.alternatives))
    return len(forms) - len(missed), len(forms), missed


def false_alarms(dtype, count):
    """Random right kernels that are not found right, and the longest time of a verdict."""
    problems, rng = graded(dtype), np.random.default_rng(17)
    alarms, longest = [], 0.0
    for _ in range(count):
        kernel, choices = random_kernel(rng, dtype)
        given = answered_by(kernel, problems)
        start = time.process_time()
        found = judge(problems, given, dtype=dtype)
        longest = max(longest, time.process_time() - start)
        if found.verdict != "right":
            alarms.append((choices, found.deviations))
    return alarms, longest


def main(count=200):
    for dtype in DTYPES:
        named, of, missed = singles(dtype)
        sys.stdout.write(f"{dtype}: {named} of {of} deviations named; missed {missed}\n")
        named, of, missed = of_delta_rule(dtype)
        sys.stdout.write(f"{dtype}: {named} of {of} forms of a delta rule's; missed {missed}\n")
        alarms, longest = false_alarms(dtype, count)
        sys.stdout.write(
            f"{dtype}: {len(alarms)} false alarms on {count} right kernels {alarms[:3]}; "
            f"the longest verdict took {longest:.2f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
