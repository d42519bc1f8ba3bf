"""How many threads a kernel may use.

``set_num_threads`` decides; without it NUMBA_NUM_THREADS, else OMP_NUM_THREADS, as in the libraries
that run beside minimha. There are never more threads than CPUs that the process may use: those of
its affinity mask, and as many as the quota of its container pays for.
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
    """Threads that kernels use, the caller's among them."""
    return _chosen or _from_environment()


def set_num_threads(number: int) -> None:
    """Set how many threads the CPU kernels of this process use, the caller's among them.

    Parameters
    ----------
    number : int
        From 1 to the number of CPUs that this process may use.

    Raises
    ------
    TypeError, ValueError
        Another type, or a number outside of that range.
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
    """CPUs that this process may use, as its affinity mask and its container's quota allow."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cpus, *_quotas()]))


def _quotas() -> Iterator[int]:
    """CPUs, rounded up, that the control groups of this process pay for (cgroups v2, then v1)."""
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
        for part in (relative, *relative.parents):  # a parent's quota holds for its children
            try:
                numbers = " ".join((folder / part / name).read_text() for name in names).split()
            except OSError:  # the container does not see its own path
                continue
            if len(numbers) == 2 and numbers[0].isdecimal() and int(numbers[1]) > 0:
                yield max(1, -(-int(numbers[0]) // int(numbers[1])))
