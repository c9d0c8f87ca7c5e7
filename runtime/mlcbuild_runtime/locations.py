"""Finds the bundles in a directory."""

from __future__ import annotations

import os
from pathlib import Path

from mlcbuild_format.bundle import MANIFEST


def directories(path: Path) -> tuple[Path, ...]:
    """Returns the directories of bundles at `path`: `path` itself if it is a bundle, otherwise the bundles
    directly in it, sorted by name; () if there are none, or if `path` does not exist. Hidden directories in
    it are left out: they hold bundles that failed their verification, or that are being downloaded."""
    if os.path.lexists(path / MANIFEST):
        return (path,)
    below = sorted(item.parent for item in path.glob(f"*/{MANIFEST}"))
    return tuple(bundle for bundle in below if not bundle.name.startswith("."))
