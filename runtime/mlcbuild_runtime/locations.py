"""Finds bundles on this machine's disks."""

from __future__ import annotations

import os
from pathlib import Path

from mlcbuild_format.bundle import MANIFEST


def directories(path: Path) -> tuple[Path, ...]:
    """Returns the directories of bundles at `path`: `path` itself if it is a bundle, otherwise the bundles
    directly in it, sorted by name."""
    if os.path.lexists(path / MANIFEST):
        return (path,)
    return tuple(sorted(item.parent for item in path.glob(f"*/{MANIFEST}")))
