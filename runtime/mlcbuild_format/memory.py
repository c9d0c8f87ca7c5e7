"""Determines how many bytes of memory this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_UNKNOWN = 8 << 30
"""Bytes of memory that are assumed if the system reports none: 8 GiB."""
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available() -> int:
    """Returns the bytes of memory that this process may use: the smaller of the machine's memory and the
    limits of the process's cgroup."""
    counts = [_UNKNOWN]
    with suppress(ValueError, OSError, AttributeError):
        counts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # the text "max" is not a number
            counts.append(int(Path(limit).read_text()))
    return min(counts)
