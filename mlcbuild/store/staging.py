"""Creates working directories of processes inside a store, which they use before results are published."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from mlcbuild.store.locks import HeldLock, try_lock


class StagingArea:
    """A working directory of one live process, below the store's tmp/.

    Its lock file is created before it and removed after it. A directory whose lock nobody holds was left by a
    process that died.
    """

    def __init__(self, directory: Path, lock: HeldLock) -> None:
        self.directory = directory
        self._lock = lock
        self._count = 0

    @classmethod
    def start(cls, root: Path) -> StagingArea:
        """Creates a working directory for this process in tmp/ of the store `root` and returns it as a
        `StagingArea`. Also removes the directories and lock files that killed processes left. Raises OSError
        if the store lacks tmp/ or locks/, or cannot be written."""
        tmp = root / "tmp"
        while True:
            directory = tmp / secrets.token_hex(8)
            lock = try_lock(directory.with_suffix(".lock"))
            if lock is not None:
                break
        directory.mkdir()
        _collect(tmp)
        for path in (root / "locks").iterdir():
            with suppress(OSError):  # belongs to another user
                if (stale := try_lock(path)) is not None:
                    stale.release()
        return cls(directory, lock)

    def subdirectory(self) -> Path:
        """Creates and returns a new, empty directory inside this working directory. Raises OSError if it
        cannot be created."""
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
    """Removes a working directory, including read-only directories in it. Whatever cannot be removed is
    left for a later process.
    """
    shutil.rmtree(path, ignore_errors=True)
    if path.is_dir() and not path.is_symlink():
        for directory, _, _ in os.walk(path):
            with suppress(OSError):
                Path(directory).chmod(0o755)
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Removes the file, directory or link at a path if possible; raises nothing. The target of a link
    stays.
    """
    with suppress(OSError):
        path.unlink()
    if os.path.lexists(path):
        remove_tree(path)


def living(root: Path) -> bool:
    """Returns True if any process, which may be this one, is working in the store `root`: a run, a worker, or
    an import; True also if another user's lock cannot be tested, False if there is no store. Removes working
    directories of killed processes on the way."""
    for path in (root / "tmp").glob("*.lock"):
        try:
            lock = try_lock(path)
        except OSError:  # belongs to another user
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
        with suppress(OSError):  # belongs to another user
            if (stale := try_lock(path)) is not None:
                remove(path.with_suffix(""))
                stale.release()
