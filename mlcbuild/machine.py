"""What this machine has to share out among steps."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

_UNKNOWN_MEMORY = 8 << 30
"""Bytes assumed where the system does not say."""


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> int:
    """Bytes that steps may hold in all: nine tenths of the machine's, or of the container's."""
    found = [_UNKNOWN_MEMORY]
    with suppress(ValueError, OSError, AttributeError):
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" is no number
            found.append(int(Path(limit).read_text()))
    return min(found) * 9 // 10


def kind() -> str:
    """Machines that print the same are taken to be equally fast: "Some Processor, 8 cores"."""
    return f"{_processor()}, {cores()} cores"


def label(found: str) -> str:
    """What a worker on such a machine says that it has."""
    return f"machine {found}"


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
