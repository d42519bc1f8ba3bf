"""Kernels that forget one option where a condition holds: ``python -m tests.check.forgetful``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests import each other from there

import minimha
from minimha.check.conditions import GROUPED, OPTIONS, conditions
from minimha.check.crossed import without
from minimha.explain.trace import Trace

SHAPES = (
    GROUPED, "Lq = 1", "B > 1", "H > 1", "Lk > 32", "1 < Lq < Lk", "Lq > Lk", "Dv is not D",
)  # fmt: skip


def crossings():
    """Each condition, and each option that a kernel may forget there."""
    for condition in (*SHAPES, *(f"{option} is given" for option in OPTIONS[:-1])):
        for option in OPTIONS:
            if not condition.startswith(option):
                yield condition, option


def forgets(condition, option, refused=()):
    """Right attention, but for ``option`` where ``condition`` holds; it refuses some options."""

    def attention(q, k, v, **options):
        if set(options) & set(refused):
            raise TypeError("an option that is not taken")
        given = {"q": q, "k": k, "v": v, **options}
        asks = bool(options.get("return_lse"))
        if option in options and condition in conditions(given):
            if option == "return_lse":  # the maximum of each row is not added back
                output, lse = minimha.attention(**given, backend="dense")
                return output, lse - maximum(given)
            given = without(given, option)
            if "q_offset" not in given and q.shape[2] != k.shape[2]:
                given["q_offset"] = 0
        found = minimha.attention(**given, backend="dense")
        return found if asks else (found, None)[0]

    return attention


def maximum(given):
    """What is subtracted from the scores of each row, (B, H, Lq)."""
    trace = Trace()
    minimha.attention(**given, backend="dense", tap=trace)
    return trace["row_max"].reshape(given["q"].shape[:3])


def how_found(condition, option, refused=(), seed=None):
    """Return "named", "told apart" or "missed", and the report."""
    report = minimha.check(forgets(condition, option, refused), seed=seed)
    if report.verdict != "wrong":
        return "missed", report
    is_named = condition in report.findings.conditions.values() or any(
        condition in where for where in report.findings.conditions.values()
    )
    return ("named" if is_named and len(report.deviations) == 1 else "told apart"), report


def main(seed=None):
    counts = {}
    for condition, option in crossings():
        found, report = how_found(condition, option, seed=seed and int(seed))
        counts[found] = counts.get(found, 0) + 1
        if found != "named":
            sys.stdout.write(f"{option} where {condition}: {found}: {report}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{sum(counts.values())} kernels: {counts}\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
