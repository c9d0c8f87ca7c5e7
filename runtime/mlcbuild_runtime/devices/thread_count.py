"""Chooses the processors and the number of threads for computing: as many as the cores that together compute
fastest.

The cores of one machine may differ in speed, some run two threads each, and a control group may grant less
than a core. The files of `/sys` and `/proc` are read below the directory `root`, so that other machines can
be simulated. Source of the files: Linux's Documentation/ABI/testing/sysfs-devices-system-cpu and
Documentation/admin-guide/cgroup-v2.rst; of NUMA distances: include/linux/topology.h; of the names of sysctl:
`man 3 sysctl` of macOS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from mlcbuild_format import control_groups
from mlcbuild_format.processors import sysctl

STATIC = 0.92
"""Fraction of a decode step's work that is divided equally among the threads before the step begins; threads
that finish early take parts of the rest. It is the largest such fraction of all CPU kernels."""
_INTEL_EFFICIENCY, _APPLE_EFFICIENCY = 0.4, 0.35
"""Vector throughput of an efficiency core divided by that of a performance core of the same chip, for Intel
(first) and for Apple (second): half as many vector pipes at 0.7 to 0.8 of the clock. Estimated from published
pipe counts and clocks, not measured."""
_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_REMOTE_DISTANCE = 20
"""The NUMA distance from which Linux calls memory remote: another socket. The parts of one socket (Intel's
SNC, AMD's NPS) are 11 to 12 apart."""
_FULL = 1024
"""The value of cpu_capacity in Linux for the fastest core of a machine."""


def default_threads(root: Path = Path("/")) -> int:
    """Returns the number of threads that compute fastest, within the CPU quota of the process's control
    group; at least 1. It is one per physical core at most, because threads of one core share its vector
    units, and on Linux only the cores of the fastest socket count. Where the cores cannot be listed (neither
    Linux nor macOS), it is the number of logical processors. root: the directory that contains sys/ and
    proc/."""
    if sys.platform == "linux":
        speeds = core_speeds(default_processors(root), root)
    elif sys.platform == "darwin":
        speeds = apple_core_speeds(sysctl)
    else:
        speeds = []
    count = best_count(speeds or [1.0] * (os.cpu_count() or 1))
    return max(1, min(count, _quota(root) or count))


def default_processors(root: Path = Path("/")) -> frozenset[int]:
    """Returns the logical processors of the socket that computes fastest, of those that this process may use.
    It needs Linux: other systems may raise AttributeError. root: the directory that contains sys/.

    Weights lie in the memory of the socket whose threads read them first. A decoding step is bound by reading
    them, so threads of another socket would wait for its memory, and every barrier of a kernel would cross
    the link between sockets. Nodes with local distances to each other count as one socket.
    """
    return best_socket(os.sched_getaffinity(0), root)


def stay_on_socket() -> None:
    """Restricts the calling thread, and the threads that it starts later, to the processors of the socket
    that computes fastest. Does nothing on other systems than Linux, or if the system forbids it."""
    if sys.platform == "linux":
        with suppress(OSError):  # A sandbox may forbid it; the threads then move between sockets.
            os.sched_setaffinity(0, default_processors())


def best_socket(allowed: Collection[int], root: Path) -> frozenset[int]:
    """Returns those of the allowed processors that are on the fastest socket; all of them where the system
    lists no NUMA nodes. Of equally fast sockets the one with the lowest node is returned. allowed: numbers of
    logical processors; root: the directory that contains sys/."""
    nodes = sorted(_processor_list(root / _NODES / "online"))
    sockets = []
    for node in nodes:
        distances = zip(nodes, _text(root / _NODES / f"node{node}/distance").split(), strict=False)
        near = [other for other, text in distances if text.isdecimal() and int(text) < _REMOTE_DISTANCE]
        lists = [_processor_list(root / _NODES / f"node{other}/cpulist") for other in near]
        sockets.append(frozenset(allowed).intersection(frozenset().union(*lists)))
    best = max(sockets, key=lambda socket: sum(core_speeds(socket, root)), default=frozenset())
    return best or frozenset(allowed)


def best_count(speeds: Collection[float]) -> int:
    """Returns how many cores compute a step soonest if the fastest ones are used; of equally good numbers the
    smallest.

    The fraction STATIC of the step's work is divided equally among n threads, so the step takes at least
    STATIC / (n * speed of the slowest of the n cores). It also takes at least 1 / (sum of the speeds of the n
    cores). On equal cores all are used. speeds: the speed of each core, in any unit; at least one.
    """
    ordered = sorted(speeds, reverse=True)
    rates = [min(n * ordered[n - 1] / STATIC, sum(ordered[:n])) for n in range(1, len(ordered) + 1)]
    return 1 + rates.index(max(rates))


def core_speeds(allowed: Collection[int], root: Path) -> list[float]:
    """Returns the speed of each physical core that has a logical processor in `allowed`, relative to the
    machine's fastest core, which has 1; a core also has 1 if the system does not report its speed. allowed:
    numbers of logical processors; root: the directory that contains sys/.

    Arm machines with cores of several sizes state each core's capacity. Intel's do so only in new kernels,
    and for scalar code, so there the list of efficiency cores is used: each has 0.4.
    """
    slow = _processor_list(root / "sys/devices/cpu_atom/cpus")
    cores = {}
    for cpu in allowed:
        siblings = _text(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        capacity = _text(root / _CPUS / f"cpu{cpu}/cpu_capacity")
        if slow:
            cores[siblings] = _INTEL_EFFICIENCY if cpu in slow else 1.0
        else:
            cores[siblings] = int(capacity) / _FULL if capacity.isdecimal() and int(capacity) else 1.0
    return list(cores.values())


def apple_core_speeds(sysctl: Callable[[str], str]) -> list[float]:
    """Returns the speed of each physical core of a machine with macOS: 1 for performance cores, 0.35 for
    efficiency cores; [] if the system does not list its cores. sysctl: function from a name of sysctl to its
    value, "" if there is no such name."""
    levels = sysctl("hw.nperflevels")
    if not levels.isdecimal():
        cores = sysctl("hw.physicalcpu")
        return [1.0] * int(cores) if cores.isdecimal() else []
    counts = [sysctl(f"hw.perflevel{level}.physicalcpu") for level in range(int(levels))]
    cores_of = [int(count) if count.isdecimal() else 0 for count in counts]
    return [1.0] * sum(cores_of[:1]) + [_APPLE_EFFICIENCY] * sum(cores_of[1:])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _processor_list(path: Path) -> frozenset[int]:
    """Returns the numbers of the processors that a file lists in the form "0-3,8"; an empty set if the file
    is absent or malformed."""
    numbers: set[int] = set()
    for part in filter(None, _text(path).split(",")):
        first, dash, last = part.partition("-")
        if not dash:
            last = first
        if not (first.isdecimal() and last.isdecimal()):
            return frozenset()
        numbers.update(range(int(first), int(last) + 1))
    return frozenset(numbers)


def _quota(root: Path) -> int | None:
    """Returns the number of processors that the strictest of the process's control groups grants, rounded up;
    None if unlimited. root: the directory that contains sys/ and proc/."""
    grants = [_grant(place) for place in control_groups.directories("cpu", root)]
    return min((grant for grant in grants if grant is not None), default=None)


def _grant(group: Path) -> int | None:
    """Returns the CPU limit of the control group whose directory is `group`, in processors, rounded up; None
    if it has none, or if it cannot be read."""
    try:
        if (group / "cpu.max").is_file():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if limit == "max" or int(limit) < 0 else -(-int(limit) // int(period))
    except (OSError, ValueError):
        return None
