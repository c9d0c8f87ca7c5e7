"""Advisory file locks that the operating system drops when their holder dies."""

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

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


@dataclass(frozen=True)
class Lock:
    """A held lock. The file is removed on release, so locks leave nothing behind."""

    path: Path
    descriptor: int
    keep: bool = False
    """Leave the file: for a lock that is always there."""

    def release(self) -> None:
        if not self.keep:
            # Removed while still held: whoever opened the file before sees a dead inode and tries again.
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def try_lock(path: Path, *, shared: bool = False, keep: bool = False) -> Lock | None:
    """The lock, or None when another holder has it. Writes the process id into an exclusive one.

    Raises OSError, and leaves the lock free, when the file cannot be made or written.
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
                return Lock(path, descriptor, keep)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder removed it between open and flock


def wait_lock(path: Path, *, keep: bool = False, shared: bool = False) -> Lock:
    """The lock, however long its holder takes; for locks that are held for moments."""
    while (lock := try_lock(path, shared=shared, keep=keep)) is None:
        time.sleep(0.02)
    return lock


def holder(path: Path) -> str:
    """Words for who holds a lock: "pid 42", or "pid 42 on host" when that is another machine."""
    try:
        pid, _, host = regular.read(path, 1 << 12, follow_link=False).decode(errors="replace").partition(" ")
    except OSError:
        return "just ended"
    if not pid.isdecimal():
        return "pid not known yet"
    return f"pid {pid}" if host == socket.gethostname() else f"pid {pid} on {one_line(host)}"


def _open(path: Path) -> int:
    """A descriptor of a lock's file. What lies there and is no file is damage, and is removed."""
    while True:
        try:
            descriptor = os.open(path, _FLAGS, 0o644)
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
        there = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
