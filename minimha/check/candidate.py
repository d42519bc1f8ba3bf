"""Run the checked function in a separate process, where a crash or a hang is an answer too."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from minimha.check.answer import NOT_ASKED, Answer
from minimha.check.calling import arguments_of
from minimha.check.problems import Graded
from minimha.check.wire import receive, send
from minimha.check.worker import as_answer

TIMEOUT = 20.0  # seconds per problem
FIRST = 3  # times ``timeout`` for the first call, which may compile
LOADING = 60.0  # seconds to import the module
MEMORY = 4 * 2**30  # bytes that the process may use beyond those after loading
GIVE_UP = 3  # after this many hangs, or crashes before the first answer
POLL = 0.05  # seconds
GRACE = 1.0  # seconds to read the pipes of an ended process, which a child may hold open
KEPT_LINES, LONGEST_LINE = 3, 200  # of stderr, shown after a crash
UNREADABLE = "its answer cannot be read: it wrote to or closed a file descriptor not its own"

# As multiprocessing does: the child gets this process's sys.path.
START = (
    "import sys; sys.path[:] = {path!r}; from minimha.check.worker import main; "
    "sys.argv[1:] = {arguments!r}; main()"
)


class _Ended(Exception):  # noqa: N818
    """The process has ended; ``args`` are the fault and a sentence."""


class Candidate:
    """A function that runs in a separate process, restarted after a crash or a hang.

    The process is a fresh interpreter, not a fork: it inherits no threads or locks of this process.
    On Linux its resident memory is limited. Its address space is not, because CUDA, JAX and torch
    reserve much more than they use. ``settings`` are those of ``calling.Caller``, and ``is_layer``,
    which is True for a class of layers. The first call raises ValueError if the function cannot be
    found or imported.
    """

    def __init__(
        self, target: str, timeout: float = TIMEOUT, memory: int = MEMORY, **settings: Any
    ) -> None:
        self.settings = {"target": target, **settings}
        self.target, self.timeout, self.memory = target, timeout, memory
        self.has_answered = False
        self.failures, self.note = 0, ""  # hangs, and crashes before the first answer
        self._process: _Process | None = None

    def __enter__(self) -> Candidate:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def answers(
        self, problems: Iterable[Graded], progress: Callable[[str], None] = lambda doing: None
    ) -> list[Answer]:
        """Return one answer per problem, in order.

        After ``GIVE_UP`` failures in all, the remaining problems are not asked. ``progress``
        receives the name of each problem.
        """
        found: list[Answer] = []
        for problem in problems:
            if self.failures >= GIVE_UP:
                found.append(Answer(refusal=f"{NOT_ASKED}, after it had failed: {self.note}"))
                continue
            progress(problem.name)
            answer = self.answer(arguments_of(problem))
            found.append(answer)
            if "hangs" in answer.faults or (answer.faults and not self.has_answered):
                self.failures, self.note = self.failures + 1, answer.note
        return found

    def answer(self, problem: Mapping[str, Any]) -> Answer:
        """Return the answer to one problem, given as a dict of arguments."""
        if self._process is None:
            self._process = self._started()
        process = self._process
        is_first = process.num_answers == 0
        try:
            record = process.ask(problem, self.timeout * (FIRST if is_first else 1))
        except _Ended as end:
            self._end()
            fault, note = end.args
            return Answer(faults=(fault,), note=note)
        self.has_answered = True
        return as_answer(record)

    def _started(self) -> _Process:
        process = _Process(self.settings, self.memory)
        try:
            first = process.next(LOADING)
        except _Ended as end:
            process.kill()
            raise ValueError(f"{self.target} cannot be loaded: {end.args[1]}") from None
        except BaseException:
            process.kill()
            raise
        if "error" in first:
            process.kill()
            raise ValueError(first["error"])
        process.base = process.resident()
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None


class _Process:
    """A process with a checked function, and its two output streams."""

    def __init__(self, settings: Mapping[str, Any], memory: int) -> None:
        path = [place or os.getcwd() for place in sys.path]
        code = START.format(path=path, arguments=[json.dumps(settings)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that its children are killed with it
        )
        self.memory, self.base, self.num_answers = memory, 0, 0
        self._records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stderr: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._readers = [
            threading.Thread(target=read, args=(stream,), daemon=True)
            for read, stream in (
                (self._read_records, self.process.stdout), (self._read_stderr, self.process.stderr)
            )
        ]  # fmt: skip
        for reader in self._readers:
            reader.start()

    def ask(self, problem: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a problem within ``seconds``, or raise ``_Ended``."""
        assert self.process.stdin is not None
        with suppress(OSError):  # the process has ended; ``next`` finds out how
            if self.process.poll() is None:
                send(self.process.stdin, problem)
        record = self.next(seconds)
        self.num_answers += 1
        return record

    def next(self, seconds: float) -> dict[str, Any]:
        """Return the next record, or raise ``_Ended``."""
        deadline = time.monotonic() + seconds
        while True:
            has_ended = self.process.poll() is not None
            try:
                record = self._records.get(timeout=GRACE if has_ended else POLL)
            except queue.Empty:
                if not has_ended:
                    self._check(seconds, deadline)
                    continue
                record = None
            if record:
                return record
            raise _Ended("crashes", UNREADABLE if record == {} else self._how_it_ended())

    def resident(self) -> int:
        """Return the bytes of resident memory, or 0 if the system does not report them."""
        with suppress(OSError, ValueError, IndexError, AttributeError):
            pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def kill(self) -> None:
        """End the process and its children."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=POLL)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):
                stream.raw.close()  # type: ignore[union-attr]  # the reader holds the buffer's lock

    def _check(self, seconds: float, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise _Ended("hangs", f"it did not return within {seconds:g} s")
        grown = self.resident() - self.base
        if grown > self.memory:
            raise _Ended("exhausts_memory", f"it took {grown / 2**30:.1f} GiB of memory")

    def _how_it_ended(self) -> str:
        try:
            status = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:  # only its pipe has ended
            return UNREADABLE
        how = f"it ended with exit status {status}"
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else -status
            how = f"it was ended by signal {name}"
        self._readers[1].join(GRACE)
        lines = [line.decode("utf-8", "replace").strip() for line in list(self._stderr)]
        end = " | ".join(line for line in lines if line)
        return f"{how}; the end of its stderr: {end}" if end else how

    def _read_records(self, stream: IO[bytes]) -> None:
        record: dict[str, Any] | None
        try:
            while (record := receive(stream)) is not None:
                self._records.put(record)
        except Exception:  # the stream was closed, or holds no record
            record = {}
        self._records.put(record)

    def _read_stderr(self, stream: IO[bytes]) -> None:
        with suppress(OSError, ValueError):
            while line := stream.readline(2**16):
                self._stderr.append(line[:LONGEST_LINE])
