"""Set and return the number of threads that CPU kernels may use.

The default is NUMBA_NUM_THREADS, else OMP_NUM_THREADS, as in other libraries. The number never
exceeds the CPUs that the process's affinity mask and its container's quota allow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from minimha.equations.arguments import integer
from minimha.kernels import remembered

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_chosen: int | None = None


def get_num_threads() -> int:
    """Return the number of threads that CPU kernels use, including the caller's."""
    return _chosen or _from_environment()


def set_num_threads(number: int) -> None:
    """Set the number of threads that the CPU kernels of this process use, including the caller's.

    Parameters
    ----------
    number : int
        From 1 to the number of CPUs that this process may use.

    Raises
    ------
    TypeError, ValueError
        ``number`` is not an integer, or is outside that range.
    """
    global _chosen
    most = usable_cpus()
    if integer("number", number) > most:
        raise ValueError(
            f"number is {number!r}: expected 1 to {most}, the CPUs that this process may use"
        )
    _chosen = int(number)
    remembered.forget()


@cache
def _from_environment() -> int:
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        first = os.environ.get(name, "").split(",")[0].strip()  # OpenMP: one number per level
        if first.isdecimal() and int(first) > 0:
            return min(int(first), usable_cpus())
    return usable_cpus()


def usable_cpus() -> int:
    """Return the number of CPUs that the affinity mask and the container's quota allow to use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cpus, *_quotas()]))


def _quotas() -> Iterator[int]:
    """Yield the CPUs, rounded up, that each control group (v1 or v2) of this process allows."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:  # not Linux, or no /proc
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            folder, names = CGROUPS, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            folder, names = CGROUPS / controllers, ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        relative = PurePosixPath(group.lstrip("/"))
        for part in (relative, *relative.parents):  # a parent's quota limits its children
            try:
                numbers = " ".join((folder / part / name).read_text() for name in names).split()
            except OSError:  # the path does not exist inside the container
                continue
            if len(numbers) == 2 and numbers[0].isdecimal() and int(numbers[1]) > 0:
                yield max(1, -(-int(numbers[0]) // int(numbers[1])))
