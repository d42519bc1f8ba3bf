"""Ctrl-C while numba compiles: what comes afterwards works."""

import signal
import subprocess
import sys
import threading

import pytest

from minimha.kernels.os_threads import in_another_thread

PROGRAM = """
import random, signal
import numpy as np
from minimha import attention
from minimha.kernels.cpu import functions

def interrupt(*_):
    if is_running:
        raise KeyboardInterrupt

def made(n):
    names = {}
    exec(f"import math\\ndef f(s, b, h, i, j): return math.tanh(s * {n}.5) + h", names)
    return names["f"]

x, interrupted, is_running = np.ones((1, 1, 20, 4)), 0, False
attention(x, x, x, score_mod=made(0), backend="cpu")
draw = random.Random(SEED)
signal.signal(signal.SIGALRM, interrupt)
for n in range(1, 26):
    try:
        is_running = True
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0005, 0.15))
        attention(x, x, x, score_mod=made(n), backend="cpu")
        is_running = False
    except KeyboardInterrupt:
        interrupted += 1
assert interrupted, "nothing was interrupted"
for n in range(20, 23):
    attention(x, x, x, score_mod=made(n), mask_mod=lambda b, h, i, j: i + j >= n, backend="cpu")
y = x.astype(np.float32)
attention(y[:, :, :1], y, y, backend="cpu")
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")
@pytest.mark.parametrize("seed", [1, 2])
def test_functions_and_kernels_are_compiled_after_interrupts(seed):
    pytest.importorskip("numba", reason="numba, which compiles kernels, is not installed")
    code = PROGRAM.replace("SEED", str(seed))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_work_is_done_on_another_thread_than_the_main_one():
    assert in_another_thread(threading.current_thread) is not threading.main_thread()
    with pytest.raises(KeyError, match="sentence"):
        in_another_thread(lambda: {}["sentence"])
