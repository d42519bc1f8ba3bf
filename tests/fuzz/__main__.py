"""``python -m tests.fuzz``: problems of one seed on one backend, or one of them again."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests import each other from there

from fuzz.cases import draw
from fuzz.run import RUN_ON, check, failures
from fuzz.smaller import reduced


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--backend", choices=RUN_ON, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=500, help="how many")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this one, in this process")
    given = parser.parse_args()
    if given.only is None:
        number = 0
        for failure in failures([given.backend], given.seed, range(given.problems)):
            number += 1
            sys.stdout.write(failure.report(given.seed) + "\n")
            sys.stdout.flush()
        sys.stdout.write(f"{number} of {given.problems} problems failed\n")
        return number > 0
    faulthandler.enable()
    case = draw(given.seed, given.only)
    faults = check(case, given.backend)
    sys.stdout.write("\n".join([str(case), *(faults or ["nothing is wrong"]), ""]))
    if faults:
        small = reduced(case, given.backend)
        sys.stdout.write("\n".join(["", "reduced:", str(small), *check(small, given.backend), ""]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
