"""Call code that reads untrusted content, in a process with limits on time and memory."""

from __future__ import annotations

import json
import os
import sys
import weakref
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock
from typing import Any

# The process reads a method and arguments as a line of JSON, and answers so.
BEFORE, AFTER = (
    "import json, sys, time",
    """
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
except ImportError:  # Windows
    resource = None
for line in sys.stdin:
    if resource:  # seconds of the processor
        end = int(time.process_time()) + 1 + len(line) // 2**19
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
    try:
        method, *arguments = json.loads(line)
        if method == "make":
            made, answer = make(*arguments), None
        else:
            answer = getattr(made, method)(*arguments)
        text = json.dumps([getattr(answer, "ids", answer), None])
    except BaseException as error:  # a panic of a package is no Exception
        text = json.dumps([None, str(error) or type(error).__name__])
    print(text, flush=True)
""",
)


class Child:
    """An object in a separate process, whose methods ``ask`` calls.

    With untrusted content, a call could take endless time or all memory, or crash. Such a call can
    only end the separate process, and the next call starts another one. Otherwise, the process ends
    when the ``Child`` is freed.

    Parameters
    ----------
    code : str
        Python source that defines ``make(content)``, which returns the object.
    failure : str
        The beginning of error messages.
    content : str
        The argument of ``make``.

    Raises
    ------
    ValueError
        ``make`` raised an error, or the process ended.
    """

    def __init__(self, code: str, failure: str, content: str) -> None:
        self._given = self._code, self._failure, self._content = code, failure, content
        self._lock, self._owner = Lock(), 0
        self.ask()

    def __reduce__(self) -> Any:
        return Child, self._given

    def ask(self, *request: Any) -> Any:
        """Call the object's method ``request[0]`` with the arguments ``request[1:]``.

        Arguments and the returned result have JSON's types; of a result with an attribute ``ids``,
        that attribute is returned. Without a request, a process is started if none runs.

        Raises
        ------
        TypeError
            JSON cannot hold an argument.
        ValueError
            The method raised an error, or the process ended, as at a limit on time or memory.
        """
        with self._lock:
            requests = [request] if request else []
            if self._owner != os.getpid():  # at first, after an end, or in a fork
                self._process: Any = Popen(
                    [sys.executable, "-c", f"{BEFORE}{self._code}{AFTER}"], stdin=PIPE, stdout=PIPE,
                    stderr=DEVNULL, text=True, encoding="ascii", start_new_session=True,
                )  # fmt: skip
                weakref.finalize(self, self._process.__exit__, None, None, None)
                self._owner, requests = os.getpid(), [("make", self._content), *requests]
            answer = None
            try:
                for each in requests:
                    self._process.stdin.write(f"{json.dumps(each)}\n")
                    self._process.stdin.flush()
                    answer, error = json.loads(self._process.stdout.readline())
                    if error is not None:
                        raise ValueError(f"{self._failure}: {error}")
            except (OSError, json.JSONDecodeError):
                self._owner = 0
                raise ValueError(f"{self._failure}: out of time or memory") from None
        return answer
