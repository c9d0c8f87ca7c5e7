"""Determines how many bytes of memory this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mlcbuild_format import control_groups

_UNKNOWN = 8 << 30
"""Bytes of memory that are assumed if the system reports none: 8 GiB."""
_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Names of the files that hold the memory limit, in bytes, of a Linux control group: first that of version 2,
then that of version 1."""


def available(root: Path = control_groups.ROOT) -> int:
    """Returns the bytes of memory that this process may use: the smallest of the machine's physical memory (8
    GiB if the system does not report it) and the limits of the process's control groups and their parents.
    root: the directory in which /proc and /sys are looked up."""
    counts = [_UNKNOWN]
    with suppress(ValueError, OSError, AttributeError):
        counts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in (group / name for group in control_groups.directories("memory", root) for name in _LIMITS):
        with suppress(OSError, ValueError):  # the text "max" is not a number
            counts.append(int(limit.read_text()))
    return min(counts)
