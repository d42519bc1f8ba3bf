"""Run jobs with helper threads, but never wait for a helper that gets no core.

A barrier, as at the end of OpenMP's loops, waits for every thread, even if another process uses
that thread's core. Here the caller computes too. It opens the job, takes tasks
until none is left, closes the job, and waits only for helpers that have entered. A helper that
arrives later cannot enter. So a job's time depends only on the cores that are free.

Helpers spin for ``SPIN`` seconds and then sleep on a futex, or in Python if there is none. A forked
child, which has none of its parent's threads, starts new ones.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from _queue import SimpleQueue
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minimha.kernels import os_threads
from minimha.kernels.cpu.arguments import CACHE_LINE
from minimha.kernels.cpu.compiler import Compiled, compiled
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.jit import jit_inline
from minimha.kernels.cpu.simd.vector import INT

SPIN = 100e-6  # seconds: longer than the gap between two calls, too short to disturb other threads
# The words that caller and helpers share, each on a separate cache line.
DOOR, BELL, ASLEEP, WAITING, BUSY, NEXT, LIMIT, KERNEL, ARGUMENTS, CPU, ALLOWED, MASK, IDS = (
    n * CACHE_LINE for n in range(13)
)
# DOOR is the number of helpers inside, plus OPEN during a job; BELL counts jobs; NEXT is the next
# worker's number, less than LIMIT; IDS has the number of helpers, then their thread ids.
OPEN = 1 << 40
MOST = 1024  # helpers

# The number of the system call futex, or None.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
HAS_FUTEX = FUTEX is not None
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # private to the process
PAUSE = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}.get(platform.machine())

I64 = types.int64


def _atomic(name: str) -> Any:
    """Return a primitive that applies an atomic operation to a word and returns the old word."""

    @intrinsic
    def operation(typing, address, value):
        def generate(context, builder, signature, arguments):
            word = builder.inttoptr(arguments[0], INT.as_pointer())
            return builder.atomic_rmw(name, word, arguments[1], "seq_cst")

        return I64(I64, I64), generate

    return operation


add, exchange = _atomic("add"), _atomic("xchg")


@intrinsic
def load(typing, address):
    """Return the 64-bit word at ``address``, read atomically."""

    def generate(context, builder, signature, arguments):
        word = builder.inttoptr(arguments[0], INT.as_pointer())
        return builder.load_atomic(word, "seq_cst", 8)

    return I64(I64), generate


@intrinsic
def pause(typing):
    """Execute the CPU's pause instruction, which saves resources while a thread spins."""

    def generate(context, builder, signature, arguments):
        if PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, PAUSE), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call(typing, function, arguments, worker):
    """Call the kernel at address ``function`` with the packed arguments at ``arguments``."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [INT, INT])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(I64, I64, I64), generate


if HAS_FUTEX:
    _syscall = types.ExternalFunction("syscall", I64(I64, I64, I64, I64, I64, I64, I64))
    _getcpu = types.ExternalFunction("sched_getcpu", types.int32())
    _setaffinity = types.ExternalFunction("sched_setaffinity", types.int32(types.int32, I64, I64))

    @jit_inline
    def sleep(address, value):
        """Sleep until another thread calls ``wake``, if the word at ``address`` is ``value``."""
        _syscall(FUTEX, address, FUTEX_WAIT, value & 0xFFFFFFFF, 0, 0, 0)

    @jit_inline
    def wake(address, number):
        """Wake up to ``number`` threads that sleep on the word at ``address``."""
        _syscall(FUTEX, address, FUTEX_WAKE, number, 0, 0, 0)

    @jit_inline
    def leave_core_to_caller(words):
        """Keep the helpers off the caller's core, where the scheduler tends to wake them."""
        cpu = np.int64(_getcpu())
        allowed = load(words + ALLOWED)
        mask = allowed & ~(np.int64(1) << cpu)
        if allowed and mask and load(words + CPU) != cpu:
            exchange(words + CPU, cpu)
            exchange(words + MASK, mask)
            for n in range(load(words + IDS)):
                _setaffinity(np.int32(load(words + IDS + 8 * (n + 1))), 8, words + MASK)

else:

    @jit_inline
    def sleep(address, value):
        """Do nothing, since without a futex callers spin and helpers sleep in Python."""

    @jit_inline
    def wake(address, number):
        """Do nothing, since without a futex Python wakes the helpers before a job opens."""

    @jit_inline
    def leave_core_to_caller(words):
        """Do nothing, since only Linux reports the core on which a thread runs."""


def run_job(words, kernel, arguments, workers, spins):
    """Run a kernel with up to ``workers`` threads, including the caller's.

    ``words`` is the address of the memory that caller and helpers share. A waiting thread pauses
    ``spins`` times before it sleeps.
    """
    is_open = workers > 1 and exchange(words + BUSY, 1) == 0  # unless another job uses the helpers
    if is_open:
        exchange(words + KERNEL, kernel)
        exchange(words + ARGUMENTS, arguments)
        exchange(words + NEXT, 1)
        exchange(words + LIMIT, workers)
        leave_core_to_caller(words)
        add(words + DOOR, OPEN)
        add(words + BELL, 1)
        if load(words + ASLEEP) > 0:
            wake(words + BELL, workers - 1)
    call(kernel, arguments, 0)
    if is_open:
        inside = add(words + DOOR, -OPEN) - OPEN
        spun = 0
        while inside > 0 and (spun < spins or not HAS_FUTEX):
            pause()
            spun += 1
            inside = load(words + DOOR)
        if inside > 0:  # a helper lost its core: sleep, so that it can use this one
            exchange(words + WAITING, 1)
            inside = load(words + DOOR)
            while inside > 0:
                sleep(words + DOOR, inside)
                inside = load(words + DOOR)
            exchange(words + WAITING, 0)
        exchange(words + BUSY, 0)


def help_out(words, seen, spins):
    """Wait in a helper thread for jobs after number ``seen``, and join each job that is open.

    Without a futex the function returns the number of jobs so far, and the helper sleeps in Python.
    """
    while True:
        spun = 0
        while load(words + BELL) == seen:
            if spun < spins:
                pause()
                spun += 1
            elif HAS_FUTEX:
                add(words + ASLEEP, 1)
                sleep(words + BELL, seen)
                add(words + ASLEEP, -1)
            else:
                return seen
        seen = load(words + BELL)
        if load(words + DOOR) >= OPEN:
            if add(words + DOOR, 1) >= OPEN:
                worker = add(words + NEXT, 1)
                if worker < load(words + LIMIT):
                    call(load(words + KERNEL), load(words + ARGUMENTS), worker)
            add(words + DOOR, -1)
            if load(words + WAITING):
                wake(words + DOOR, 1)


def spin(number):
    """Execute ``number`` pause instructions, to measure how long they take."""
    for _ in range(number):
        pause()


class Pool:
    """The helper threads of this process, and the memory that they share with callers."""

    def __init__(self) -> None:
        buffer = np.zeros((IDS + 8 * (MOST + 1) + CACHE_LINE) // 8, np.int64)
        self._words = buffer[-buffer.ctypes.data % CACHE_LINE // 8 :]
        self.words = int(self._words.ctypes.data)
        self._helpers: list[int] = []
        self._lock = os_threads.RLock()  # reentrant: a signal's handler may compute too
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._run = _compiled(run_job, types.void(I64, I64, I64, I64, I64))
        self._help = _compiled(help_out, I64(I64, I64, I64))
        self.spins = _spins(_compiled(spin, types.void(I64)))
        if HAS_FUTEX:
            cpus = os.sched_getaffinity(0)
            if max(cpus) < 63:
                self._write(ALLOWED, sum(1 << cpu for cpu in cpus))
            self._write(CPU, -1)

    def run(self, kernel: int, arguments: int, workers: int) -> None:
        """Run the kernel at address ``kernel`` in up to ``workers`` threads, including this one."""
        self.start(workers)
        if not HAS_FUTEX:
            for _ in range(workers - 1):
                self._bell.put(None)
        self._run.call(self.words, kernel, arguments, workers, self.spins)

    def start(self, workers: int) -> None:
        """Start as many helpers as a job with ``workers`` threads can use."""
        if workers <= len(self._helpers) + 1:
            return
        with self._lock:
            while len(self._helpers) < min(workers - 1, MOST):
                if not os_threads.start(self._helper, self._helpers):
                    return  # fewer threads suffice

    def _helper(self) -> None:
        if HAS_FUTEX:
            with self._lock:
                number = self._read(IDS) + 1
                self._write(IDS + 8 * number, threading.get_native_id())
                self._write(IDS, number)
            self._write(CPU, -1)
        seen = self._read(BELL)
        while True:
            if not HAS_FUTEX:
                self._bell.get()
            seen = self._help.call(self.words, seen, self.spins)

    def _read(self, word: int) -> int:
        return int(self._words[word // 8])

    def _write(self, word: int, value: int) -> None:
        self._words[word // 8] = value


def _compiled(function: Callable[..., Any], signature: Any) -> Compiled:
    system = "futex" if HAS_FUTEX else "portable"
    return compiled(function, signature, File(f"{function.__name__}-{system}", str(signature)))


def _spins(spin: Compiled) -> int:
    """Return how many pauses take ``SPIN`` seconds, by the shortest of 10 measurements."""
    tries, pauses = [], 200
    for _ in range(10):
        start = time.perf_counter()
        spin.call(pauses)
        tries.append(time.perf_counter() - start)
    return max(100, int(pauses * SPIN / max(1e-9, min(tries))))


_pool: Pool | None = None
_making = os_threads.RLock()


def pool() -> Pool:
    """Return the pool of this process, which starts threads when a job first needs them."""
    global _pool
    if _pool is None:
        with _making:
            _pool = _pool or Pool()
    return _pool


def _forget() -> None:
    global _pool, _making
    _pool, _making = None, os_threads.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
