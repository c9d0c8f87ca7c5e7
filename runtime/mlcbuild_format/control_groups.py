"""Finds the control groups of this process, which limit its memory and its processors (Linux).

Source: Linux's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/cgroups.rst.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def directories(controller: str, root: Path = ROOT) -> list[Path]:
    """Returns the directories of the process's control groups, each followed by its parents up to the mount
    point, whose limits apply, too; some may not exist; [] on other systems than Linux. controller: its name
    in version 1, such as "memory"; version 2 has one group for all.

    root: the directory that contains proc/ and sys/; another than / only in tests."""
    places = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = base / path.lstrip("/")
        # In a container the path may be the host's, so that only `base` exists.
        places += [place for place in (group, *group.parents) if place.is_relative_to(base)]
    return places


def _lines(path: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return [line for line in path.read_text().splitlines() if line.count(":") >= 2]
    return []
