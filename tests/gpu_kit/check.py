"""Every carried kernel on this machine's GPU: against float64, with poisoned outputs, three times.

    python check.py [--only TEXT] [--runs N] [--limit SECONDS] [--output FILE]

needs Python, NumPy and NVIDIA's driver. It plays ``tape.json``: memory is filled with what a call
of minimha uploads, and everything else with bytes 0xFF, which is NaN; kernels are launched with the
same arguments; O and L are compared with the dense equations in float64. Between runs all of the
memory is filled again, and what they compute must be equal bit by bit: a difference is a race.
The exit status is 0 if all is right, 1 if something is wrong, 2 if something is lacking.
"""

import argparse
import ctypes
import hashlib
import json
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
        value, found = ctypes.c_int(), []
        for attribute in (MAJOR, MINOR):
            self("cuDeviceGetAttribute", ctypes.byref(value), attribute, 0)
            found.append(value.value)
        return found

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
        if not np.array_equal(got[~is_finite], expected[~is_finite]):
            return f"{name} is {got[~is_finite][:3]} where it should be {expected[~is_finite][:3]}"
        error = abs(got - expected)[is_finite].max(initial=0)
        if not error <= tolerance * max(1, abs(expected[is_finite]).max(initial=0)):
            return f"{name} is off by {error:.1e}, more than {tolerance:.0e}"
    return None


def check(options):
    """Play the tape; the faults by the names of their cases, and how many cases were played."""
    tape = json.loads((HERE / "tape.json").read_text())
    contents, driver = np.load(HERE / "tape.npz"), Driver()
    if driver.compute_capability() != tape["cc"]:
        arch, there = ("".join(map(str, x)) for x in (tape["cc"], driver.compute_capability()))
        raise Lacking(
            f"the kernels are compiled for sm_{arch}, and this GPU is sm_{there}: build the kit "
            f"with --arch {there}"
        )
    faults, count, end = {}, 0, time.monotonic() + options.limit
    wanted = [one for one in tape["cases"] if options.only in cases.label(one["case"])]
    for one in wanted:
        if time.monotonic() > end:
            print(f"time is up: {len(wanted) - count} of {len(wanted)} cases are left out")
            break
        name = cases.label(one["case"])
        count += 1
        try:
            wrong = fault(one["case"], played(driver, one, contents, options.runs))
        except DriverError as error:
            wrong = str(error)
            if error.status in STICKY:
                faults[name] = wrong
                print(f"WRONG {name}: {wrong}\nthe GPU's context is lost: run the others by --only")
                break
        if wrong:
            faults[name] = wrong
            print(f"WRONG {name}: {wrong}", flush=True)
    return faults, count


def main():
    """Check, report, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check every carried kernel.")
    add = parser.add_argument
    add("--only", default="", help="cases whose name contains this")
    add("--runs", type=int, default=3, help="of each case (default 3)")
    add("--limit", type=float, default=400, help="seconds after which no case is begun")
    add("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    try:
        faults, count = check(options)
    except Lacking as lacking:
        print(lacking)
        return 2
    print(
        f"{count} cases, {options.runs} runs each: {count - len(faults)} right, {len(faults)} wrong"
    )
    if options.output:
        options.output.write_text(json.dumps({"cases": count, "wrong": faults}, indent=1))
    return 1 if faults or not count else 0


if __name__ == "__main__":
    sys.exit(main())
