"""Where a process works inside a store before its results are published."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from mlcbuild.store.locks import Lock, try_lock


class StagingArea:
    """A directory of one living process below the store's tmp/.

    Its lock file appears before it and goes after it, so a directory whose lock is free, or has none, was
    left by a process that died.
    """

    def __init__(self, directory: Path, lock: Lock) -> None:
        self.directory = directory
        self._lock = lock
        self._count = 0

    @classmethod
    def start(cls, root: Path) -> StagingArea:
        """Also removes what killed processes left."""
        tmp = root / "tmp"
        while True:
            directory = tmp / secrets.token_hex(8)
            lock = try_lock(directory.with_suffix(".lock"))
            if lock is not None:
                break
        directory.mkdir()
        _collect(tmp)
        for path in (root / "locks").iterdir():
            with suppress(OSError):  # another user's
                if (stale := try_lock(path)) is not None:
                    stale.release()
        return cls(directory, lock)

    def subdirectory(self) -> Path:
        """Creates an empty directory in this area, and returns it."""
        self._count += 1
        path = self.directory / str(self._count)
        path.mkdir()
        return path

    def close(self) -> None:
        remove_tree(self.directory)
        self._lock.release()

    def __enter__(self) -> StagingArea:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_tree(path: Path) -> None:
    """Removes a directory of ours, read-only parts included; what resists is left for a later session."""
    shutil.rmtree(path, ignore_errors=True)
    if path.is_dir() and not path.is_symlink():
        for directory, _, _ in os.walk(path):
            with suppress(OSError):
                Path(directory).chmod(0o755)
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Removes whatever has this name, if that is possible; of a link, the link."""
    with suppress(OSError):
        path.unlink()
    if os.path.lexists(path):
        remove_tree(path)


def living(root: Path) -> bool:
    """Whether a process works in the store: a run, a worker, an import."""
    for path in (root / "tmp").glob("*.lock"):
        try:
            lock = try_lock(path)
        except OSError:  # another user's
            return True
        if lock is None:
            return True
        remove_tree(path.with_suffix(""))
        lock.release()
    return False


def _collect(tmp: Path) -> None:
    for path in list(tmp.iterdir()):
        if path.suffix != ".lock":
            if not os.path.lexists(path.with_suffix(".lock")):
                remove(path)
            continue
        with suppress(OSError):  # another user's
            if (stale := try_lock(path)) is not None:
                remove(path.with_suffix(""))
                stale.release()
