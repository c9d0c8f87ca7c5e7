"""Advisory file locks, which the operating system releases when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from mlcbuild_format import regular

from mlcbuild.errors import one_line
from mlcbuild.store import layout


@dataclass(frozen=True)
class HeldLock:
    """A file lock that this process holds. Releasing it removes the lock file, unless `keep` is set."""

    path: Path
    descriptor: int
    keep: bool = False
    """True if the lock file stays after the lock is released."""

    def release(self) -> None:
        if not self.keep:
            # The file is removed while the lock is held. A process that opened it before notices the removed
            # inode and tries again.
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def try_lock(path: Path, *, shared: bool = False, keep: bool = False) -> HeldLock | None:
    """Acquires a file lock and returns it, or returns None at once if a lock that excludes it is held, by
    another process or this one. shared: True for a lock that may be held several times at once, as long as
    none holds it exclusively; keep: True if its file stays after the release.

    The process id and host are written to an exclusive lock's file. Raises OSError when the file cannot be
    created or written.
    """
    mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, mode)
            if _is_at(descriptor, path):
                if not shared:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
                return HeldLock(path, descriptor, keep)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # Its last holder removed it between open and flock.


def wait_lock(path: Path, *, keep: bool = False, shared: bool = False) -> HeldLock:
    """Waits without a time limit until a file lock can be acquired, and returns it; meant for locks that are
    held for moments. keep: True if the lock file stays after the release; shared: True for a lock that
    several processes may hold together. Raises OSError if the lock file cannot be opened or written."""
    while (lock := try_lock(path, shared=shared, keep=keep)) is None:
        time.sleep(0.02)
    return lock


def holder(path: Path) -> str:
    """Returns a description of the process that holds a lock, according to the lock's file: "pid 42", or
    "pid 42 on host" for another machine; "just ended" if there is no such file, "pid not known yet" if it is
    still empty."""
    try:
        pid, _, host = regular.read(path, 1 << 12, follow_link=False).decode(errors="replace").partition(" ")
    except OSError:
        return "just ended"
    if not pid.isdecimal():
        return "pid not known yet"
    return f"pid {pid}" if host == socket.gethostname() else f"pid {pid} on {one_line(host)}"


def _open(path: Path) -> int:
    """Opens a lock file, creates it if it does not exist, and returns its descriptor. Anything but a regular
    file at its path is damage and is removed. Raises OSError, also for a directory there that is not
    empty."""
    while True:
        try:
            descriptor = layout.open_or_create(path)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO):
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))
