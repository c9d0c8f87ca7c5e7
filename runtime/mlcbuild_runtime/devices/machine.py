"""This machine's processor against a bundle's target, and how many threads to use.

mlcbuild_format/processors.py has the table of processors. `refusal` is called before anything of the library
is loaded. Source of the tile registers' system call: Linux's Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from pathlib import Path

from mlcbuild_format import processors
from mlcbuild_format.bundle import Machine

_LOOKS, _BETWEEN = 12, 0.001
_NO_SYSTEM = "a machine without a system"
_SYSTEMS = {"darwin": "macos", "win32": "windows"}
"""sys.platform -> processors.System, where they differ."""
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: the system call, ARCH_REQ_XCOMP_PERM, and the state component of tile registers."""


def refusal(target: Machine) -> str | None:
    """Returns why this machine cannot run a bundle for `target`, as one sentence; None if it can."""
    if target.device != "cpu":
        return f"the bundle is for the device '{target.device}', but this runtime runs CPUs only"
    if target.output != "shared":
        return (
            f"the bundle holds an '{target.output}' to be linked elsewhere, not a library that can be loaded"
        )
    system = processors.system(target.triple)
    here = f"{processors.family(platform.machine())} on {_SYSTEMS.get(sys.platform, sys.platform)}"
    there = f"{processors.family(target.architecture)} on {_NO_SYSTEM if system == 'none' else system}"
    if here != there:
        return f"the bundle is for {there} ({target.triple}), but this machine is {here}"
    present = processors.present()
    missing = missing_features(target, present) if present is not None else []
    if missing:
        return (
            f"the bundle is for the processor '{target.cpu}', and this machine's processor lacks"
            f" {', '.join(missing)}: build a bundle for a target that it has"
        )
    return None


def missing_features(target: Machine, present: frozenset[str]) -> list[str]:
    """Returns the features that `target` needs and `present` lacks, sorted."""
    return sorted(_needed(target) - present)


def prepare(target: Machine) -> str | None:
    """Requests the registers that a bundle for `target` uses from the system.

    Returns why the bundle cannot run, as one sentence; None if it can. Must be called before any of the
    bundle's code runs, on a machine that has the processor for it.
    """
    if "amx-tile" not in _needed(target) or allow_tiles():
        return None
    return (
        "the bundle uses the tile registers of AMX, and this system does not let processes have them: Linux"
        " does from 5.16 on, unless it runs in a virtual machine or a sandbox that forbids it; build a bundle"
        " for a target without amx-tile"
    )


def allow_tiles() -> bool:
    """Requests AMX tile registers for all threads of this process; returns true if they are granted."""
    if sys.platform != "linux" or processors.family(platform.machine()) != "x86_64":
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)
    except (OSError, AttributeError):
        return False


def _needed(target: Machine) -> frozenset[str]:
    return processors.needed(target.architecture, target.cpu, target.features)


def default_threads() -> int:
    """Returns the physical cores that this process may use within the quota of its control group, at least
    1."""
    if sys.platform == "linux":
        allowed = os.sched_getaffinity(0)
        cores = {_siblings(cpu) for cpu in allowed}
        count = len(cores)
    else:
        count = os.cpu_count() or 1
    return max(1, min(count, _quota() or count))


def free_cores(enough: int, root: Path = Path("/")) -> int | None:
    """Returns the logical processors on which nothing else computes; None where that is not reported.

    Samples several times and keeps the best, up to `enough`: a client on this machine also runs for a moment.
    Where too few are free, this takes twelve milliseconds.
    """
    fewest, cores = None, os.cpu_count() or 1
    for look in range(_LOOKS):
        time.sleep(_BETWEEN if look else 0)
        try:
            running = int((root / "proc" / "loadavg").read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return None
        fewest = running if fewest is None else min(fewest, running)
        if cores - max(0, fewest - 1) >= enough:  # this thread runs, too
            break
    return cores - max(0, (fewest or 1) - 1)


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quota(root: Path = Path("/")) -> int | None:
    """Returns the processors that control groups grant to this process, rounded up; None if unlimited.

    The limits of the process's own group and of its parents hold, in version 2 (cpu.max) and version 1.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    grants = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")
        group = base / path.lstrip("/")
        # In a container the path may be the host's, and only `base` be there.
        grants += [_grant(place) for place in (group, *group.parents) if place.is_relative_to(base)]
    return min((grant for grant in grants if grant is not None), default=None)


def _grant(group: Path) -> int | None:
    """Returns the limit of one control group."""
    try:
        if (group / "cpu.max").is_file():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if limit == "max" or int(limit) < 0 else -(-int(limit) // int(period))
    except (OSError, ValueError):
        return None
