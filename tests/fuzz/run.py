"""One problem on one backend; and many, in a child process, since a wrong address ends one."""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from fuzz.bounds import Expected
from fuzz.cases import Case, draw, plain
from fuzz.forms import presented
from fuzz.memory import placed
from minimha.api import BACKENDS, attention
from minimha.equations.problem import Problem
from minimha.kernels.ladder import LADDER

RUN_ON = ("dense", "tiled", "cpu", *LADDER)
LIMIT = 300  # seconds for one problem; the first of a dtype may compile


@dataclass(frozen=True)
class Failure:
    """What is wrong with a problem's result."""

    number: int
    backend: str
    faults: list[str]

    def report(self, seed: int) -> str:
        """The faults, the problem, and the command that runs it again and makes it smaller."""
        return "\n".join(
            [
                f"problem {self.number} of seed {seed} on {self.backend}:",
                *self.faults,
                str(draw(seed, self.number)),
                f"python -m tests.fuzz --backend {self.backend} --seed {seed} --only {self.number}",
                "",
            ]
        )


def solve(backend: str, arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    """Output and log-sum-exp, from a backend by its public door or from a rung by itself."""
    if backend in BACKENDS:
        return attention(**arrays, **options, backend=backend, return_lse=True)
    problem = Problem.of(**arrays, **options)
    return problem.as_given(*import_module(f"minimha.kernels.{backend}").forward(problem))


Check = Callable[[Case, str, Expected | None], list[str]]


def check(case: Case, backend: str, expected: Expected | None = None) -> list[str]:
    """What is wrong with a backend's result for ``case``, in sentences."""
    expected = expected or Expected(case)
    case, back = presented(case)
    arrays = {}
    for name, array in case.arrays.items():
        arrays[name] = placed(array, case.layouts.get(name, plain(array.ndim)))
        if name in ("q", "k", "v", "k_scale", "v_scale"):
            arrays[name] = arrays[name][(0,) * (4 - case.rank)]
    results = []
    for _ in range(2):
        with warnings.catch_warnings(), np.errstate(all=case.errstate):
            warnings.simplefilter("error")
            try:
                results.append(solve(backend, arrays, case.options))
            except Exception as error:
                return [f"{type(error).__name__} was raised: {error}"]
    (output, lse), again = results
    faults = []
    if output.tobytes() != again[0].tobytes() or lse.tobytes() != again[1].tobytes():
        faults.append("the second call gave other bits than the first")
    for name, array in case.arrays.items():
        now = np.reshape(arrays[name], array.shape)
        if now.tobytes() != np.ascontiguousarray(array).tobytes():
            faults.append(f"{name} was written to")
    return faults + expected.faults(*back(output, lse))


def failures(
    backends: Iterable[str], seed: int, numbers: Iterable[int], check: Check = check
) -> Iterator[Failure]:
    """Run each problem on each backend, in a child process; yield those that fail or end it.

    A problem that hangs is the last.
    """
    jobs = deque((number, backend) for number in numbers for backend in backends)
    while jobs:
        context = multiprocessing.get_context("spawn")
        connection, end = context.Pipe()
        child = context.Process(target=_work, args=(end, seed, list(jobs), check), daemon=True)
        child.start()
        end.close()
        try:
            while jobs:
                number, backend = jobs.popleft()
                if not connection.poll(LIMIT):
                    yield Failure(number, backend, [f"no result after {LIMIT} seconds"])
                    return
                faults = connection.recv()
                if faults:
                    yield Failure(number, backend, faults)
        except EOFError:
            child.join()
            yield Failure(number, backend, [_how_it_ended(child.exitcode)])
        finally:
            child.kill()
            child.join()


def _work(connection: Connection, seed: int, jobs: list[tuple[int, str]], check: Check) -> None:
    faulthandler.enable()
    drawn = -1
    for number, backend in jobs:
        if number != drawn:
            case, drawn = draw(seed, number), number
            expected = Expected(case)
        connection.send(check(case, backend, expected))


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"{signal.Signals(-code).name} ended the process: was memory beyond an array read?"
    return f"the process ended with exit code {code}"
