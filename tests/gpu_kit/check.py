"""Every carried kernel on this machine's GPU: against float64, with poisoned outputs, three times.

    python check.py [--only TEXT] [--runs N] [--limit SECONDS] [--each SECONDS] [--no-times]
                    [--output FILE]

needs Python, NumPy and NVIDIA's driver. It plays ``tape.json``: memory is filled with what a call
of minimha uploads, and everything else with bytes 0xFF, which is NaN; kernels are launched with the
same arguments; O and L are compared with the dense equations in float64. Between runs all of the
memory is filled again, and what they compute must be equal bit by bit: a difference is a race.
Last it measures whole calls by the GPU's clock. The exit status is 0 if all is right, 1 if
something is wrong, 2 if something is lacking.

Cases are played in a child process, which is replaced after a hang, a crash or an error that loses
the GPU's context, so that the others go on. FILE, JSON, is written after every case, and a table of
everything in Markdown beside it, ``table.md``.
"""

import argparse
import ctypes
import hashlib
import json
import os
import select
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

try:
    import numpy as np
except ImportError:
    print("check needs NumPy, which this Python has not: set PYTHON to one that has", flush=True)
    raise SystemExit(2) from None

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "src"))

import cases  # noqa: E402

from minimha.equations import dense  # noqa: E402
from minimha.equations.problem import Problem  # noqa: E402

DYNAMIC_SHARED = 48 << 10  # bytes of shared memory beyond which a kernel must opt in
LARGEST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
# CU_DEVICE_ATTRIBUTE_CLOCK_RATE, _MULTIPROCESSOR_COUNT, _MEMORY_CLOCK_RATE, _BUS_WIDTH
CLOCK, MULTIPROCESSORS, MEMORY_CLOCK, BUS = 13, 16, 36, 37
# Dense operations of a multiprocessor per cycle, 16 bits with sums in float32; CUDA C++ Programming
# Guide, "Arithmetic Instructions", and NVIDIA's white papers of the architectures.
ON_TENSOR_CORES = {(8, 0): 2048, (8, 6): 512, (8, 9): 512, (9, 0): 4096}
MEASURED = 10  # runs of a timed case, after one that is not counted
# What is written before each of these runs: more than any L2 cache holds, as often as Python needs
# to queue the launches, so that their time is the GPU's alone and inputs come from memory.
FLUSH, FLUSHES = 256 << 20, 16
STICKY = range(700, 800)  # errors after which the context is lost
# Two units in the last place of a number near 1, or rounding in sums.
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-5, "float64": 1e-11}
L_TOLERANCE = {"float64": 1e-11}  # of the others 2e-5: L is float32


class Lacking(Exception):  # noqa: N818  (it states a fact about the machine)
    """Something that the check needs is not here."""


class DriverError(Exception):
    """The driver refused; ``status`` is its number."""

    def __init__(self, function, status, text):
        super().__init__(f"{function} failed: {text} ({status})")
        self.status = status


class Driver:
    """libcuda by ctypes, on the first GPU."""

    def __init__(self):
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise Lacking("check needs NVIDIA's driver: there is no libcuda.so.1 here") from None
        count, context = ctypes.c_int(), ctypes.c_void_p()
        try:
            self("cuInit", 0)
            self("cuDeviceGetCount", ctypes.byref(count))
        except DriverError as error:
            raise Lacking(f"check needs a GPU: {error}") from None
        if not count.value:
            raise Lacking("check needs a GPU: NVIDIA's driver finds none")
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)
        self._functions = {}

    def __call__(self, name, *arguments):
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError(name, status, (text.value or b"an unknown error").decode())

    def compute_capability(self):
        return [self.attribute(MAJOR), self.attribute(MINOR)]

    def attribute(self, number):
        value = ctypes.c_int()
        self("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def peak(self, kind, dtype):
        """The GPU's "FLOP" or "bytes" per second at its highest clocks, or 0 if unknown."""
        if kind == "bytes":  # twice per clock, which is in kHz
            return 2e3 * self.attribute(MEMORY_CLOCK) * self.attribute(BUS) / 8
        cc = tuple(self.compute_capability())
        of_fma = 128 if cc == (8, 0) else 256
        each = of_fma if dtype == "float32" else ON_TENSOR_CORES.get(cc, 0)
        return 1e3 * self.attribute(CLOCK) * self.attribute(MULTIPROCESSORS) * each

    def milliseconds(self, launches, addresses, scratch):
        """What the launches take, by the GPU's clock; ``scratch`` are ``FLUSH`` bytes of memory."""
        events, took = (ctypes.c_void_p(), ctypes.c_void_p()), ctypes.c_float()
        for event in events:
            self("cuEventCreate", ctypes.byref(event), 0)
        for _ in range(FLUSHES):
            self("cuMemsetD8Async", ctypes.c_uint64(scratch), 0, ctypes.c_size_t(FLUSH), None)
        self("cuEventRecord", events[0], None)
        for launch in launches:
            self.launch(launch, addresses)
        self("cuEventRecord", events[1], None)
        self("cuEventSynchronize", events[1])
        self("cuEventElapsedTime", ctypes.byref(took), *events)
        for event in events:
            self("cuEventDestroy_v2", event)
        return took.value

    def allocate(self, size):
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address):
        self("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address, content):
        size = ctypes.c_size_t(content.nbytes)
        self(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(content.ctypes.data), size
        )

    def download(self, address, size):
        content = np.empty(size, np.uint8)
        to = ctypes.c_void_p(content.ctypes.data)
        self("cuMemcpyDtoH_v2", to, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return content

    def launch(self, launch, addresses):
        """Launch a kernel of the tape, where its blocks of memory are at these addresses."""
        values = list(launch["values"])
        for slot, block, offset in launch["places"]:
            values[slot] = addresses[block] + offset
        slots = (ctypes.c_uint64 * len(values))(*values)
        first = ctypes.addressof(slots)
        pointers = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))
        x, y, z, threads = launch["dimensions"]
        shared, function = launch["shared"], self._function(launch["file"], launch["shared"])
        self("cuLaunchKernel", function, x, y, z, threads, 1, 1, shared, None, pointers, None)

    def _function(self, file, shared):
        if file not in self._functions:
            content = (HERE / "cubins" / "minimha" / file).read_bytes()
            if hashlib.sha256(content[32:]).digest() != content[:32]:
                raise Lacking(f"cubins/minimha/{file} is damaged: copy the folder again")
            name, _, code = content[32:].partition(b"\0")
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self("cuModuleLoadData", ctypes.byref(module), code)
            self("cuModuleGetFunction", ctypes.byref(function), module, name)
            if shared > DYNAMIC_SHARED:
                self("cuFuncSetAttribute", function, LARGEST_DYNAMIC_SHARED, shared)
            self._functions[file] = function
        return self._functions[file]


def played(driver, recorded, contents, runs):
    """What each run downloads, as bytes."""
    addresses = [driver.allocate(size) for size, _ in recorded["blocks"]]
    results = []
    for _ in range(runs):
        for address, (_, content) in zip(addresses, recorded["blocks"], strict=True):
            driver.upload(address, contents[content])
        for launch in recorded["launches"]:
            driver.launch(launch, addresses)
        driver("cuCtxSynchronize")
        results.append([
            driver.download(addresses[block] + offset, size)
            for block, offset, size in recorded["downloads"]
        ])  # fmt: skip
    for address in addresses:
        driver.free(address)
    return results


def numbers(content, dtype):
    """Bytes as float64, or as float32 if that is their dtype."""
    if dtype == "bfloat16":
        return (content.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return content.view(dtype).astype(np.float64)


def fault(case, results):
    """What is wrong with the results of a case, or None."""
    if any((a != b).any() for run in results[1:] for a, b in zip(run, results[0], strict=True)):
        return "its runs differ: there is a race"
    q, k, v, options = cases.problem(case)
    exact = dense.forward(Problem.of(q, k, v, **options))
    real = "float64" if case["dtype"] == "float64" else "float32"
    found = {"O": numbers(results[0][0], case["dtype"]), "L": numbers(results[0][1], real)}
    tolerances = TOLERANCE[case["dtype"]], L_TOLERANCE.get(real, TOLERANCE["float32"])
    for (name, got), expected, tolerance in zip(found.items(), exact, tolerances, strict=True):
        got = got.reshape(*expected.shape[:3], -1) if name == "O" else got.reshape(expected.shape)
        got = got[..., : expected.shape[3]] if name == "O" else got
        is_finite = np.isfinite(expected)
        if not np.array_equal(got[~is_finite], expected[~is_finite], equal_nan=True):
            return f"{name} is {got[~is_finite][:3]} where it should be {expected[~is_finite][:3]}"
        error = abs(got - expected)[is_finite].max(initial=0)
        if not error <= tolerance * max(1, abs(expected[is_finite]).max(initial=0)):
            return f"{name} is off by {error:.1e}, more than {tolerance:.0e}"
    return None


def measured(driver, one):
    """The median time of a timed case, its rate per second and the rate's share of the peak."""
    case, dtype = one["case"], one["case"]["dtype"]
    rng, addresses = np.random.default_rng(0), []
    for size, content in one["blocks"]:
        addresses.append(driver.allocate(size))
        if content == "numbers":  # of the dtype; a bfloat16 is the upper half of a float32
            there = rng.standard_normal(size // (4 if dtype == "float32" else 2), np.float32)
            if dtype == "bfloat16":
                there = (there.view(np.uint32) >> 16).astype(np.uint16)
            driver.upload(addresses[-1], there)
        elif content != "nan":
            driver.upload(addresses[-1], np.load(HERE / "tape.npz")[content])
    scratch = driver.allocate(FLUSH)
    runs = range(MEASURED + 1)
    times = [driver.milliseconds(one["launches"], addresses, scratch) for _ in runs]
    for address in (*addresses, scratch):
        driver.free(address)
    kind, work = cases.work(case)
    median = statistics.median(times[1:])
    rate, peak = work / (median / 1e3), driver.peak(kind, dtype)
    share = round(rate / peak, 3) if peak else None
    return {"ms": round(median, 4), "rate": rate, "of": kind, "share": share}


def serve(runs):
    """Play the cases whose numbers are read, and write a line about each: this is the child."""
    tape = json.loads((HERE / "tape.json").read_text())
    contents, driver = np.load(HERE / "tape.npz"), None
    for line in sys.stdin:
        found = {"wrong": None}
        try:
            driver = driver or Driver()
            if driver.compute_capability() != tape["cc"]:
                arch, there = (
                    "".join(map(str, x)) for x in (tape["cc"], driver.compute_capability())
                )
                raise Lacking(
                    f"the kernels are compiled for sm_{arch}, and this GPU is sm_{there}: build "
                    f"the kit with --arch {there}"
                )
            one = (tape["cases"] + tape["timed"])[int(line)]
            if int(line) < len(tape["cases"]):
                found["wrong"] = fault(one["case"], played(driver, one, contents, runs))
            else:
                found |= measured(driver, one)
        except Lacking as lacking:
            found["lacking"] = str(lacking)
        except DriverError as error:
            found = {"wrong": str(error), "is_sticky": error.status in STICKY}
        print(json.dumps(found), flush=True)


class Child:
    """The process that plays cases, started by the command that started this one."""

    def __init__(self, runs):
        python = shlex.split(os.environ.get("PYTHON") or shlex.quote(sys.executable))
        command = [*python, str(Path(__file__).resolve()), "--child", "--runs", str(runs)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def play(self, number, limit):
        """What is found about a case; "is_over" if the child cannot play another one."""
        try:
            print(number, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return {"wrong": "its process ended before it began", "is_over": True}
        if not select.select([self._process.stdout], [], [], limit)[0]:
            return {"wrong": f"it does not end within {limit:g} s", "is_over": True}
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            return {"wrong": f"its process ended with status {status}", "is_over": True}
        found = json.loads(line)
        return found | {"is_over": found.pop("is_sticky", False)}

    def end(self):
        self._process.kill()
        self._process.wait()


def check(options):
    """Play the tape, case by case, and write what is found after each; return it by case."""
    tape = json.loads((HERE / "tape.json").read_text())
    timed = [] if options.no_times else tape["timed"]
    everything = [one["case"] for one in tape["cases"] + timed]
    wanted = [i for i, case in enumerate(everything) if options.only in cases.label(case)]
    found, child, end = {}, None, time.monotonic() + options.limit
    try:
        for i in wanted:
            if time.monotonic() > end:
                print(f"time is up: {len(wanted) - len(found)} of {len(wanted)} cases are left out")
                break
            child = child or Child(options.runs)
            one = child.play(i, options.each)
            if "lacking" in one:
                raise Lacking(one["lacking"])
            if one.pop("is_over"):
                child.end()
                child = None
            name = cases.label(everything[i])
            found[name] = one
            if one["wrong"]:
                print(f"WRONG {name}: {one['wrong']}", flush=True)
            if options.output:
                write(options.output, found)
    finally:
        if child:
            child.end()
    return found


def write(path, found):
    """Write what is found as JSON, and as a table beside it."""
    wrong = {name: one["wrong"] for name, one in found.items() if one["wrong"]}
    timed = {name: one for name, one in found.items() if "ms" in one}
    path.write_text(json.dumps({"cases": len(found), "wrong": wrong, "timed": timed}, indent=1))
    lines = ["| case | ms | TFLOP/s or TB/s | of the peak |", "| --- | --- | --- | --- |"]
    for name, one in timed.items():
        share = "-" if one["share"] is None else f"{100 * one['share']:.0f} %"
        unit = "TFLOP/s" if one["of"] == "FLOP" else "TB/s"
        lines.append(f"| {name} | {one['ms']} | {one['rate'] / 1e12:.3g} {unit} | {share} |")
    lines += [
        "",
        f"{len(found)} cases, {len(wrong)} wrong.",
        "",
        "| wrong | why |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {why} |" for name, why in wrong.items()]
    (path.parent / "table.md").write_text("\n".join(lines) + "\n")


def main():
    """Check, report, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check every carried kernel.")
    add = parser.add_argument
    add("--only", default="", help="cases whose name contains this")
    add("--runs", type=int, default=3, help="of each case (default 3)")
    add("--limit", type=float, default=540, help="seconds after which no case is begun")
    add("--each", type=float, default=60, help="seconds that a case may take (default 60)")
    add("--no-times", action="store_true", help="measure nothing")
    add("--output", type=Path, help="a JSON file")
    add("--child", action="store_true", help="play the cases whose numbers are read")
    options = parser.parse_args()
    if options.child:
        serve(options.runs)
        return 0
    try:
        found = check(options)
    except Lacking as lacking:
        print(lacking)
        return 2
    wrong = sum(one["wrong"] is not None for one in found.values())
    print(
        f"{len(found)} cases, {options.runs} runs each: {len(found) - wrong} right, {wrong} wrong"
    )
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
