"""Run the checked function in a process that reads problems on stdin and writes answers to stdout.

Text that the function prints goes to stderr, and the function finds its stdin empty.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import IO, Any

from minimha.check.answer import Answer
from minimha.check.expanded import FUNCTIONS, NAMED
from minimha.check.wire import receive, send


def main() -> None:
    """Load the function that the command line names, and answer problems until stdin ends."""
    settings = json.loads(sys.argv[1])
    problems, answers = _private_streams()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        caller = _caller(settings)
    except (ValueError, TypeError) as error:
        send(answers, {"error": str(error)})
        os._exit(0)
    send(answers, {"loaded": True})
    try:
        while (problem := receive(problems)) is not None:
            if problem.get("window_size") is not None:
                problem["window_size"] = tuple(problem["window_size"])
            problem |= {n: NAMED[problem[n]] for n in FUNCTIONS if n in problem}
            send(answers, as_record(caller.answer(problem)))
    except OSError as error:
        sys.exit(f"it closed a file descriptor not its own: {error}")
    os._exit(0)  # even if the function left threads behind


def as_record(answer: Answer) -> dict[str, Any]:
    """Convert an answer to a record for ``wire.send``."""
    return {"faults": list(answer.faults)} | {
        name: value
        for name in ("output", "lse", "refusal", "dtype", "note")
        if (value := getattr(answer, name)) is not None
    }


def as_answer(record: dict[str, Any]) -> Answer:
    """Convert a record of ``as_record`` back to an answer."""
    return Answer(**{**record, "faults": tuple(record["faults"])})


def _caller(settings: dict[str, Any]) -> Any:
    from minimha.check.calling import Caller
    from minimha.check.calling_layers import LayerCaller
    from minimha.check.target import load

    kind = LayerCaller if settings.pop("is_layer", False) else Caller
    return kind(load(settings.pop("target")), **settings)


def _private_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Take over stdin and stdout; the function gets an empty file and stderr in their place."""
    problems, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return problems, answers


def _end_with(parent: int) -> None:
    """End this process as soon as its parent process has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
