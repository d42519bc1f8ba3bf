"""Run experiments, each with tables, figures and a conclusion computed from its numbers."""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from minimha.equations.arguments import integer
from minimha.explain.result import Result

__all__ = ["EXPERIMENTS", "Experiment", "run"]


class Experiment(NamedTuple):
    """An experiment: its question, the number of its progress steps, and the name of its module.

    ``steps`` is 0 if there is no progress bar. ``module`` is "" if the module has the name of the
    experiment.
    """

    question: str
    steps: int = 0
    module: str = ""


EXPERIMENTS = {
    "scale": Experiment("why are scores divided by √d_k?"),
    "similarity": Experiment("what does a longer key change by dot product, and by cosine?"),
    "heads": Experiment(
        "can one head follow two patterns at once, and what if a head is removed?", 13,
        "two_patterns",
    ),
    "masking": Experiment("where does a large negative number stop being −∞?"),
    "memory": Experiment("what do naive and tiled attention read and write, and the cache?", 8),
    "parallel": Experiment("is one product for all heads faster than one for each?", 6),
    "precision": Experiment("what does casting weights and values to 8 bits lose?"),
    "pytorch": Experiment("does the PyTorch class of document 001 compute the same?"),
    "rope": Experiment("how does RoPE rotate a query, and what does a score keep?"),
    "temperature": Experiment("how does a temperature sharpen or flatten a distribution?"),
}  # fmt: skip


def run(name: str, seed: int = 1, progress: Callable[[str], None] = lambda doing: None) -> Result:
    """Run the experiment ``name``, and return its tables, figures and conclusion.

    ``seed``, 0 or more, starts the random numbers. Long experiments call ``progress`` with a
    description of each step.
    Raises ValueError if there is no such experiment.

    >>> run("temperature").conclusion.partition(",")[0]
    'At T = 0.01 every draw is the greedy choice'
    """
    if name not in EXPERIMENTS:
        near = get_close_matches(str(name)[:40], EXPERIMENTS, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"no experiment {name!r}{meant}: there are {', '.join(EXPERIMENTS)}")
    seed = integer("seed", seed, 0)
    module = import_module(f"{__name__}.{EXPERIMENTS[name].module or name}")
    result: Result = module.run(seed, progress)
    return result
