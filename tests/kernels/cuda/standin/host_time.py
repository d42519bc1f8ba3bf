# ruff: noqa: T201  (a program, whose output is what it prints)
"""How long the host takes for a call on arrays on a GPU, without the GPU's own time.

    PYTHONPATH=tests python -m kernels.cuda.standin --no-emulation -m kernels.cuda.standin.host_time

prints microseconds of this thread, the least of many batches of calls, and what each call asks of
the driver. Above them is a loop of plain Python, since machines differ. Less than 1 µs of each call
is the stand-in's own, in C; a driver takes longer. Its arrays answer as quickly as CuPy's, but when
they come by DLPack, each of the four exports is a function of Python, of 1 µs. On a real GPU,
``bench --backend cuda`` has the whole overhead of a call.
"""

import sys
import time
from functools import cache

from cuda.bindings import driver
from kernels.cuda import standin
from kernels.cuda.standin.arrays import Array, current, numbers

from minimha import attention
from minimha.kernels.cuda import driver as gpu

BATCH, BATCHES = 20, 200
LOOP = "1000 rounds of a loop of Python"
COUNTED = {
    "launches": "cuLaunchKernel",
    "allocations": "cuMemAllocFromPoolAsync",
    "copies": "cuMemcpyHtoDAsync",
    "calls of the driver": None,
}
CASES = {  # B, H, Hkv, Lq, Lk, D, dtype, options
    "rung 4": (1, 8, 8, 512, 512, 64, "bfloat16", {}),
    "rung 4, causal, with L": (1, 8, 8, 512, 512, 64, "bfloat16",
                               {"is_causal": True, "return_lse": True}),
    "rung 4, ALiBi": (1, 8, 8, 512, 512, 64, "bfloat16", {"alibi_slopes": [0.5] * 8}),
    "rung 4, D 40": (1, 8, 8, 512, 512, 40, "bfloat16", {}),
    "rung 4, D 41, by copies": (1, 8, 8, 512, 512, 41, "bfloat16", {}),
    "decode": (4, 8, 8, 1, 512, 64, "bfloat16", {}),
    "decode, kv_lengths": (4, 8, 8, 1, 512, 64, "bfloat16", {"kv_lengths": [512, 80, 7, 400]}),
    "rung 3": (1, 8, 8, 512, 512, 64, "float32", {}),
    "rung 2": (1, 8, 8, 512, 512, 64, "float64", {}),
}  # fmt: skip


def microseconds(calls):
    """Of this thread's time, per call of each; in turn, so that a slow moment hits them all."""
    for call in calls.values():
        call()
    batches = [[_nanoseconds(call) for call in calls.values()] for _ in range(BATCHES)]
    least = map(min, zip(*batches, strict=True))
    return {name: time / BATCH / 1000 for name, time in zip(calls, least, strict=True)}


def _nanoseconds(call):
    start = time.thread_time_ns()
    for _ in range(BATCH):
        call()
    return time.thread_time_ns() - start


def python_loop():
    total = 0
    for i in range(1000):
        total += i * i
    return total


def case(B, H, Hkv, Lq, Lk, D, dtype, options):
    """A call of ``attention``."""
    q, k = numbers(B, H, Lq, D, dtype=dtype), numbers(B, Hkv, Lk, D, dtype=dtype)
    return lambda: attention(q, k, k, **options)


def by_dlpack(call):
    """The same, with arrays of a class that is not known to be CuPy's."""

    def called():
        cupy.ndarray = None
        call()
        cupy.ndarray = Array

    cupy = sys.modules["cupy"]
    return called


def counts(call):
    """What one call asks of the driver."""
    before = [standin.driver.count(function) for function in COUNTED.values()]
    call()
    after = [standin.driver.count(function) for function in COUNTED.values()]
    return dict(zip(COUNTED, (b - a for a, b in zip(before, after, strict=True)), strict=True))


def main():
    gpu.current()
    sys.modules["cupy"].empty = cache(Array)  # how long a library takes for an array is not ours
    current.ptr = int(gpu.call(driver.cuStreamCreate, 0))
    calls = {name: case(*given) for name, given in CASES.items()}
    calls["rung 4, arrays by DLPack"] = by_dlpack(calls["rung 4"])
    times = microseconds({LOOP: python_loop} | calls)
    print(f"{LOOP:32} {times[LOOP]:6.1f} µs")
    for name, call in calls.items():
        asked = ", ".join(f"{number} {what}" for what, number in counts(call).items())
        print(f"{name:32} {times[name]:6.1f} µs; {asked}")


if __name__ == "__main__":
    main()
