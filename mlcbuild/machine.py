"""What this machine has to share out among steps."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

from mlcbuild_format import memory as memory_of_machine


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> int:
    """Bytes that steps may hold in all: nine tenths of the machine's, or of the container's."""
    return memory_of_machine.available() * 9 // 10


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
