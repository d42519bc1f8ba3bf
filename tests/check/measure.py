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
from minimha.check.catalogue_delta import OF_DELTA
from minimha.check.catalogue_indexer import OF_INDEXERS
from minimha.check.problems import graded
from minimha.check.problems_delta import delta_problems
from minimha.check.problems_indexer import indexer_problems
from minimha.check.verdict import judge


def missed_of(problems, forms, dtype):
    """Those of the forms, deviations with a value, that are not named where they are alone."""
    missed = []
    for name, value in forms:
        found = judge(problems, answers(problems, {name: value}, dtype), dtype=dtype)
        if found.deviations != (name,) or found.alternatives:
            missed.append((name, value, found.deviations, found.alternatives))
    return missed


def singles(dtype):
    """By the kind of problem, problems and deviations with the values to try."""

    def told(forms):
        return [form for form in forms if form[0] not in ROUNDED_BY[dtype]]

    usual = [(d.identifier, d.values[0]) for d in of_attention()]
    yield "attention", graded(dtype), told(usual)
    for problems, some in ((delta_problems, OF_DELTA), (indexer_problems, OF_INDEXERS)):
        forms = told([(d.identifier, value) for d in some for value in d.values])
        yield problems(0)[0].kind, problems(drawn_seed()), forms


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
        for kind, problems, forms in singles(dtype):
            missed = missed_of(problems, forms, dtype)
            named = len(forms) - len(missed)
            sys.stdout.write(f"{dtype}, {kind}: {named} of {len(forms)} named; missed {missed}\n")
        alarms, longest = false_alarms(dtype, count)
        sys.stdout.write(
            f"{dtype}: {len(alarms)} false alarms on {count} right kernels {alarms[:3]}; "
            f"the longest verdict took {longest:.2f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
