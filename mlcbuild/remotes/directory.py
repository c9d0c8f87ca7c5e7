"""A transport for a remote cache in a directory that several machines share, for example over NFS.

    ac/<key>  cas/<digest>  tmp/<random>

It relies only on renames within the directory, not on locks, hard links or synchronous clocks. The names are
those of the HTTP protocol, so that a web server can serve the same directory. Only regular files are read:
opening a FIFO would wait for a writer, and a device may have no end.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mlcbuild.errors import RemoteError
from mlcbuild.remotes.background import Result, within
from mlcbuild.remotes.transport import CHUNK, TIMEOUT, Body, DamagedError, SlowError

_ABANDONED = 86_400
"""Seconds after which an unfinished upload in the directory of a remote cache is removed."""
_NAME_BYTES = 16
"""Number of random bytes in the name of an unfinished upload's file, which has two hexadecimal digits for
each."""
_is_upload = re.compile(f"[0-9a-f]{{{2 * _NAME_BYTES}}}").fullmatch


class Directory:
    """The transport for a remote cache in a directory. Methods raise RemoteError if the directory does not
    exist: an empty mount point must not be mistaken for the cache, so it is not created."""

    def __init__(self, root: Path, timeout: float = TIMEOUT) -> None:
        self._root = root
        self._timeout = timeout
        self._swept = False

    def open(self, name: str, start: int = 0) -> Body | None:
        descriptor = self._in_time(lambda: _opened(self._root, name))
        if descriptor is None:
            return None
        # Closed by the body.
        file = os.fdopen(descriptor, "rb", buffering=0)

        def read() -> bytes:
            try:
                return file.read(CHUNK)
            except OSError as error:  # includes a file that the server has replaced meanwhile
                raise self._explain(error, "read") from None

        file.seek(start)
        return Body(start, read, file.close)

    def size(self, name: str) -> int | None:
        status = self._in_time(lambda: _status(self._root, name))
        return None if status is None else _regular(status).st_size

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        part = self._root / "tmp" / secrets.token_hex(_NAME_BYTES)
        self._in_time(lambda: _prepare(self._root, part.parent, (self._root / name).parent), "written")
        try:
            _write(part, source, size)
            self._sweep(part)
            part.replace(self._root / name)
        except OSError as error:
            raise self._explain(error, "written") from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def close(self) -> None:
        return

    def _in_time(self, call: Callable[[], Result], operation: str = "read") -> Result:
        """Runs a call on the file system within the timeout of the remote cache, since calls hang when a file
        server is gone, and returns its result. operation: "read" or "written", for the message. Raises
        SlowError if the time passes (the call then runs on unobserved), RemoteError if it raises OSError; its
        other exceptions pass through."""
        try:
            return within(self._timeout, call).result()
        except TimeoutError:
            raise SlowError("it does not answer") from None
        except OSError as error:
            raise self._explain(error, operation) from None

    def _sweep(self, part: Path) -> None:
        """Removes the unfinished uploads of killed processes, files more than a day old, from the directory
        of the file `part`, an upload of this process; does nothing from the second call on. Raises OSError if
        the directory cannot be listed; files that cannot be removed stay.

        Their age is measured by the file server's clock. Files with other names are left alone: whoever may
        write to the remote cache could have put a link to a directory of this user in place of its directory
        of uploads.
        """
        if self._swept:
            return
        self._swept = True
        now = part.stat().st_mtime
        for path in part.parent.iterdir():
            with suppress(OSError):
                if _is_upload(path.name) and now - path.lstat().st_mtime > _ABANDONED:
                    path.unlink()

    @staticmethod
    def _explain(error: OSError, operation: str) -> RemoteError:
        return RemoteError(f"it cannot be {operation}: {error.strerror or error}")


def _check(root: Path) -> None:
    if not root.is_dir():
        raise RemoteError(f"there is no directory {root}: create it, or mount it")


def _prepare(root: Path, *directories: Path) -> None:
    _check(root)
    for directory in directories:
        directory.mkdir(exist_ok=True)


def _opened(root: Path, name: str) -> int | None:
    """Opens the regular file `name` below `root` for reading and returns its file descriptor; None if it does
    not exist. Raises RemoteError if `root` is no directory, DamagedError for anything but a regular file, and
    OSError if it cannot be opened."""
    _check(root)
    try:
        descriptor = os.open(root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _regular(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _status(root: Path, name: str) -> os.stat_result | None:
    _check(root)
    try:
        return (root / name).stat()
    except FileNotFoundError:
        return None


def _regular(status: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError("it is not a regular file")
    return status


def _write(part: Path, source: BinaryIO, size: int) -> None:
    left = size
    with part.open("xb") as file:
        while left and (data := source.read(min(left, CHUNK))):
            file.write(data)
            left -= len(data)
        file.flush()
        os.fsync(file.fileno())  # NFS reports a full disk here.
    if left:
        raise OSError(f"{left} of {size} bytes to send are missing")
    part.chmod(0o444)
