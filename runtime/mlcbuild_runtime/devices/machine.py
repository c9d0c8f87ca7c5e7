"""Compares this machine's processor with a bundle's target, requests the registers (AMX tiles) that a bundle
uses from the operating system, and counts idle processors, for the choice of the number of threads.

The comparison, `refusal`, comes before anything of the library is loaded, the request, `prepare`, before any
of its code runs. mlcbuild_format/processors.py has the table of processors. Source of the system call for
tile registers: Linux's Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mlcbuild_format import processors
from mlcbuild_format.bundle import Machine

_LOOKS, _BETWEEN = 12, 0.001
_SHORTEST = 0.1
"""Minimum seconds between two readings of CPU times that are compared: Linux counts them in steps of 0.01 s.
"""
_NO_SYSTEM = "a machine without a system"
_SYSTEMS = {"darwin": "macos", "win32": "windows"}
"""Value of sys.platform -> the name of the system in processors.System, where the names differ."""
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
"""Constants of Linux on x86-64 for a request to use AMX: the number of the system call arch_prctl, the
operation ARCH_REQ_XCOMP_PERM, and the state component of AMX tiles.
"""


def refusal(target: Machine) -> str | None:
    """Returns the reason why this machine cannot run a bundle for `target`, as an error message; None if it
    can, as far as the system reports the processor's features."""
    if target.device != "cpu":
        return f"the bundle is for the device '{target.device}', but this runtime runs CPUs only"
    if target.output != "shared":
        return (
            f"the bundle holds an '{target.output}' to be linked elsewhere, not a library that can be loaded"
        )
    system = processors.system(target.triple)
    this_machine = f"{processors.family(platform.machine())} on {_SYSTEMS.get(sys.platform, sys.platform)}"
    target_machine = (
        f"{processors.family(target.architecture)} on {_NO_SYSTEM if system == 'none' else system}"
    )
    if this_machine != target_machine:
        return f"the bundle is for {target_machine} ({target.triple}), but this machine is {this_machine}"
    present = processors.present()
    missing = missing_features(target, present) if present is not None else []
    if missing:
        return (
            f"the bundle is for the processor '{target.cpu}', and this machine's processor lacks"
            f" {', '.join(missing)}: build a bundle for a target that it has"
        )
    return None


def missing_features(target: Machine, present: frozenset[str]) -> list[str]:
    """Returns the CPU features that `target` requires and `present` lacks, sorted."""
    return sorted(_needed(target) - present)


def prepare(target: Machine) -> str | None:
    """Requests from the operating system the registers (AMX tiles) that a bundle for `target` uses. Returns
    the reason why the bundle cannot run, as an error message; None if it can. Must be called before any code
    of the bundle runs, on a machine whose processor `refusal` has accepted."""
    if "amx-tile" not in _needed(target) or allow_tiles():
        return None
    return (
        "the bundle uses the tile registers of AMX, and this system does not let processes have them: Linux"
        " does from 5.16 on, unless it runs in a virtual machine or a sandbox that forbids it; build a bundle"
        " for a target without amx-tile"
    )


def allow_tiles() -> bool:
    """Requests AMX tile registers for all threads of this process; returns True if they are granted, False if
    the system refuses, or is not Linux on x86-64."""
    if sys.platform != "linux" or processors.family(platform.machine()) != "x86_64":
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)
    except (OSError, AttributeError):
        return False


def _needed(target: Machine) -> frozenset[str]:
    return processors.needed(target.architecture, target.cpu, target.features)


class FreeCores:
    """Counts the logical processors on which nothing computes that would delay this process.

    A call samples up to 12 times, 1 ms apart, and uses the best: a client on this machine also runs for a
    moment. Processes with a nice value above 0 do not count, unless this process has one, too: beside nice 10
    a thread gets 90 % of its core. Linux's list of running threads does not tell them apart, but its CPU
    times do: if processes with a nice value have used at least half a processor since the last call, the CPU
    time of the others since then limits how many processors count as busy.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = lambda: os.times().user,
    ) -> None:
        """Creates a counter of free processors; its first call measures from now on. root: the directory that
        contains /proc; now: returns the time; spent: returns the CPU time of this process in user mode; both
        in seconds."""
        self._proc, self._now, self._spent = root / "proc", now, spent
        self._last = self._times()

    def __call__(self, enough: int) -> int | None:
        """Returns the number of free logical processors, the maximum of up to 12 samples; negative if more
        other threads run than there are processors, None if the system does not report it. It stops sampling
        as soon as `enough` are free."""
        most, fewest, cores = self._most_others(), None, os.cpu_count() or 1
        for look in range(_LOOKS):
            time.sleep(_BETWEEN if look else 0)
            try:
                running = int((self._proc / "loadavg").read_text().split()[3].partition("/")[0])
            except (OSError, ValueError, IndexError):
                return None
            others = max(0, running - 1)  # the sampling thread itself counts as running
            fewest = min(others, most) if fewest is None else min(fewest, others)
            if cores - fewest >= enough:
                break
        return cores - (fewest or 0)

    def _most_others(self) -> int:
        """Returns an upper bound of the number of processors on which other processes without a nice value
        compute: their CPU time since the last call divided by the wall time, rounded. Returns 2**30, no
        bound, after less than 0.1 s, if processes with a nice value used less than half a processor, if this
        process has one, too, or without a report of CPU times."""
        unknown, before, after = 1 << 30, self._last, self._times()
        if before is None or after is None or after[0] - before[0] < _SHORTEST:
            return unknown
        self._last = after
        seconds, user, niced = (new - old for new, old in zip(after, before, strict=True))
        if niced < 0.5 * seconds or os.getpriority(os.PRIO_PROCESS, 0) > 0:
            return unknown
        return round(max(0.0, user) / seconds)

    def _times(self) -> tuple[float, float, float] | None:
        """Returns three numbers of seconds: the time of the clock; the CPU time in user mode, of all
        processors together, of processes without a nice value, this process left out; and that of processes
        with one. None if the system does not report CPU times."""
        try:
            words = (self._proc / "stat").read_text().split(maxsplit=3)
            user, niced = (int(word) / os.sysconf("SC_CLK_TCK") for word in words[1:3])
        except (OSError, ValueError):
            return None
        return self._now(), user - self._spent(), niced
