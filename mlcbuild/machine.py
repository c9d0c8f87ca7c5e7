"""What this machine has to share out among steps."""

from __future__ import annotations

import os
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
