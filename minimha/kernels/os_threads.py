"""Start system threads, even under gevent, and even if a signal handler raises an exception.

gevent and eventlet replace functions in Python's modules, before or after minimha is imported, and
run all Python threads in one system thread. A kernel's helper thread, which never returns to
Python, would block them all. So threads and locks come from a second copy of the built-in module
``_thread``.

A signal handler, such as that of Ctrl-C, may raise between any two bytecodes of the main thread. So
starting a thread takes one bytecode, and so does ending a thread.
"""

from __future__ import annotations

import threading
from _queue import Empty, SimpleQueue  # gevent and eventlet do not patch these
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from importlib.machinery import BuiltinImporter
from importlib.util import module_from_spec
from typing import Any

_spec: Any = BuiltinImporter.find_spec("_thread")
_thread: Any = module_from_spec(_spec)
_spec.loader.exec_module(_thread)
RLock = _thread.RLock


def start(target: Callable[[], Any], started: list[int]) -> bool:
    """Start a thread that calls ``target``, and append its identifier to ``started``.

    Returns False if the system provides no more threads.
    """
    new, before = map(_thread.start_new_thread, [target], [()]), len(started)
    try:
        started.extend(new)  # one step
    except RuntimeError:
        if len(started) > before:  # a signal's handler raised the error
            raise
    return len(started) > before


def call(tasks: Sequence[Callable[[], Any]], cancel: Callable[[], None] | None = None) -> None:
    """Call each task in a new thread, or in this thread if the system provides no more threads.

    If a task in a new thread raises, this function raises that exception when all tasks have ended.
    If this thread raises, as in a signal handler, it calls ``cancel``, and waits until all threads
    end or a second exception occurs. Without ``cancel`` it does not wait then, so a task that
    writes to memory must keep references to that memory.
    """
    started: list[int] = []
    ended: list[BaseException | None] = []
    bell: SimpleQueue[None] = SimpleQueue()

    def run(task: Callable[[], Any]) -> None:
        error = None
        try:
            task()
        except BaseException as caught:
            error = caught
        ended.append(error)
        bell.put(None)

    def wait() -> None:
        while len(ended) < len(started):
            with suppress(Empty):  # a signal just before ``get`` does not end it
                bell.get(timeout=0.1)

    try:
        for n, task in enumerate(tasks):
            if len(started) < n or not start(partial(run, task), started):
                task()
        wait()
    except BaseException:
        if cancel:
            cancel()
            wait()
        raise
    for error in filter(None, ended):
        raise error


def in_another_thread(work: Callable[[], Any]) -> Any:
    """Call ``work`` outside the main thread, and return its result.

    If the calling thread is not the main one, ``work`` is called directly. Ctrl-C ends the wait for
    the result, but not the call.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    result: list[Any] = []
    context = copy_context()  # it has the arguments' names
    call([lambda: result.append(context.run(work))])
    return result[0]
