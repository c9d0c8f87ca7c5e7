"""Determines what build steps can use of this machine: the number of cores, by CPU affinity but without
regard to a container's CPU quota, and the bytes of memory, within a container's limit. Also names the kind of
machine, by which measured speeds are stored and steps assigned to the workers of a cluster."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

from mlcbuild_format import memory as memory_of_machine


def cores() -> int:
    """Returns the number of logical CPUs on which this process may run, by its CPU affinity on Linux, all of
    the machine elsewhere; 1 if the system does not report it. A CPU quota of a container is not considered.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> int:
    """Returns the number of bytes of memory that all running build steps may use together: nine tenths of the
    machine's memory, or of the container's limit if that is smaller."""
    return memory_of_machine.available() * 9 // 10


def kind() -> str:
    """Returns the processor of this machine and the number of logical CPUs that this process may use, such as
    "Some Processor, 8 cores". GPUs do not count. Machines with equal text count as equally fast."""
    return f"{_processor()}, {cores()} cores"


def label(machine_kind: str) -> str:
    """Returns the text "machine " followed by `machine_kind`: the label by which the scheduler of a cluster
    assigns steps to workers on one kind of machine. machine_kind: processor and number of cores, such as
    "Some Processor, 8 cores"."""
    return f"machine {machine_kind}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    with suppress(OSError):
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    return platform.processor() or platform.machine()
