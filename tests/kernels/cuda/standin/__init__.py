"""A stand-in for NVIDIA's driver: the whole path of a call to a GPU, where there is none.

``libcuda.c`` is a libcuda.so.1 of our own, under NVIDIA's Python bindings or ctypes. Its GPUs'
machine code is PTX, and a launch runs in the emulator. So what the host does is tested as it is:
memory, copies, streams, graphs, modules, how arguments are packed.

    python -m kernels.cuda.standin [--no-emulation] SCRIPT | -m MODULE  [ARGUMENT …]

runs a program with it, if ``tests`` is in PYTHONPATH; a library cannot be taken back, so the tests
start a process for it. ``--no-emulation`` executes no kernel, to measure the host's time alone.

What it checks, besides what the emulator does: contexts and streams of several GPUs, the limits of
a launch and of memory, accesses outside of live arrays. New memory is filled with bytes 0xFF,
which is NaN, and so is what was freed. During capture nothing is executed, what cannot be captured
fails, and a graph copies from the host's memory at each of its launches, as a GPU's would.

What it lacks: everything is executed in the order in which it is queued, so it finds no missing
wait between streams. It loads real machine code, but cannot launch it.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from emulator import Emulator
from emulator.memory import GAP, Memory
from emulator.parse import BYTES, DTYPES, kind_of

FOLDER = Path(__file__).parent
TESTS = FOLDER.parents[2]
LAUNCH_FAILED = 719
CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_void_p),
)


def missing():
    """Why there is no stand-in here, or None."""
    if sys.platform != "linux":
        return "the stand-in for NVIDIA's driver is made for Linux"
    return None if shutil.which("gcc") else "gcc, which compiles the stand-in's libcuda, is missing"


def command(*arguments, emulation=True):
    """The command, and the environment, of a Python with the stand-in."""
    flags = () if emulation else ("--no-emulation",)
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, "-m", "kernels.cuda.standin", *flags, *map(str, arguments)]
    return program, os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)}


class Driver:
    """The stand-in in this process: what is configured, planned and counted.

    Attributes
    ----------
    launches : list of (str, tuple of int, int, int)
        Name, grid, threads per block and shared memory of each launch that was executed.
    failures : list of Exception
        What the emulator raised; the launch then failed with CUDA_ERROR_LAUNCH_FAILED.
    execute : callable
        Executes a launch, in the emulator unless it is replaced. It is called with the address of
        the module's text, the kernel's name, its grid and the threads of a block as an array of
        six, the bytes of dynamic shared memory, and the addresses of its arguments.
    """

    def __init__(self, library, emulation=True):
        self._library = library
        self.launches, self.failures = [], []
        self._callback = CALLBACK(self._launch) if emulation else None
        library.standin_memory.restype = ctypes.c_void_p
        library.standin_in_use.restype = ctypes.c_size_t
        library.standin_count.restype = ctypes.c_long
        self.configure()
        library.cuInit(0)
        self.memory = LiveMemory(library)

    def configure(self, devices=1, cc=(9, 0), memory=1 << 30):
        """Set the number of GPUs, their compute capability and the bytes of all together."""
        self._library.standin_configure(devices, *cc, ctypes.c_size_t(memory), self._callback)

    def fail(self, function, status):
        """Let the next call of a function, named without its version, fail with that error."""
        self._library.standin_fail(function.encode(), int(status))

    def count(self, function=None):
        """How often a function of the driver was called, such as "cuLaunchKernel"; or any of it."""
        return self._library.standin_count(function and function.encode())

    @property
    def in_use(self):
        """Bytes that are allocated now, but for tables of kernels."""
        return self._library.standin_in_use() - sum(map(len, self.memory.tables))

    def _launch(self, image, name, dimensions, shared, slots):
        try:
            self.execute(image, name, dimensions, shared, slots)
        except Exception as error:  # which cannot pass through C
            traceback.print_exc()
            self.failures.append(error)
            return LAUNCH_FAILED
        return 0

    def execute(self, image, name, dimensions, shared, slots):
        if image is None:
            raise NotImplementedError("real machine code cannot be launched by the stand-in")
        kernel = emulator(ctypes.string_at(image).decode())
        kinds = [kind_of(kind) for kind, _ in kernel.program.kernel.parameters]
        arguments = [
            np.frombuffer(ctypes.string_at(slots[i], BYTES[kind]), DTYPES[kind])[0]
            for i, kind in enumerate(kinds)
        ]
        launch = SimpleNamespace(
            grid=tuple(dimensions[:3]), threads=dimensions[3], shared=int(shared)
        )
        self.launches.append((name.decode(), launch.grid, launch.threads, launch.shared))
        kernel.run(launch, arguments, self.memory)


emulator = cache(Emulator)  # from a kernel's PTX


class LiveMemory(Memory):
    """The stand-in's memory for the emulator: only arrays that are allocated may be accessed."""

    def __init__(self, library):
        valid = ctypes.POINTER(ctypes.c_uint16)()
        self.start = library.standin_memory(ctypes.byref(valid))
        size = 1 << 30
        self.data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.start))
        self.valid = np.ctypeslib.as_array(valid, (size // GAP,))
        self._library, self.tables = library, {}

    def locate(self, team, address, size):
        """Return where in ``data`` each active thread's ``size`` bytes at ``address`` begin."""
        at = address - self.start
        team.check(address, (at < 0) | (at > self.data.size - size), "is in no array")
        granule, offset = np.divmod(at, GAP)
        team.check(address, offset + size > self.valid[granule], "is in no array")
        team.check_alignment(address, size)
        return at

    def put(self, array):
        """Copy a kernel's table here, once, and return its address."""
        content = np.ascontiguousarray(array).tobytes()
        if content not in self.tables:
            address = ctypes.c_uint64()
            size = ctypes.c_size_t(len(content))
            if self._library.cuMemAlloc_v2(ctypes.byref(address), size):
                raise MemoryError("no memory is left for a kernel's table")
            ctypes.memmove(address.value, content, len(content))
            self.tables[content] = address.value
        return self.tables[content]


def machine_code_is_ptx():
    """Let kernels be compiled for the stand-in's GPUs in this process."""
    from minimha.kernels.cuda import cubins, linker

    def in_ptx(kernel):
        text = kernel.ptx()
        (name,) = re.findall(r"\.visible \.entry ([\w$]+)\(", text)
        return linker.MachineCode(name, text.encode() + b"\0", "")

    linker.Intermediate.machine_code = in_ptx
    cubins.toolkit = lambda: "the stand-in's"


def start(emulation=True):
    """Compile the stand-in and make it this process's libcuda.so.1, for good."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libcuda.so.1"
        flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wl,-soname,libcuda.so.1"]
        sources = [str(FOLDER / "libcuda.c"), "-o", library, "-ldl", "-lpthread"]
        subprocess.run(["gcc", *flags, *sources], check=True)
        loaded = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    return Driver(loaded, emulation)
