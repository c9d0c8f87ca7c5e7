"""Reads files from places where anything may stand: only regular ones, up to a size, and without waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)


def kind(path: Path) -> str:
    """Returns "a regular file", or what else stands at the path. Raises OSError when nothing does."""
    return _kind(path.stat().st_mode)


def open_file(path: str | Path, *, follow_link: bool = True) -> BinaryIO:
    """Returns a regular file, open for reading.

    Raises OSError, with the number EINVAL for anything that is no regular file: a named pipe would wait for
    a writer, and opening a device may act on it. `follow_link` accepts a symbolic link to a regular file.
    """
    return os.fdopen(_open(path, follow_link)[0], "rb")


def _open(path: str | Path, follow_link: bool) -> tuple[int, int]:
    """Returns the descriptor and the size of a regular file. Raises OSError as `open_file` does."""
    _check(os.stat(path, follow_symlinks=follow_link))  # noqa: PTH116 - hundreds of records in a short run
    # What stands there may change between the two looks: O_NONBLOCK opens a pipe without waiting.
    descriptor = os.open(path, _FLAGS if follow_link else _FLAGS | getattr(os, "O_NOFOLLOW", 0))
    try:
        status = os.fstat(descriptor)
        _check(status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status.st_size


def read(path: str | Path, limit: int, *, follow_link: bool = True) -> bytes:
    """Returns the bytes of a regular file of at most `limit` bytes.

    Raises OSError, whose `strerror` ends a sentence: as `open_file` does, and with the number EFBIG for a
    larger file.
    """
    descriptor, size = _open(path, follow_link)
    try:
        # A reader allocates all that it is asked for, so it is not asked for `limit` bytes of a small file.
        wanted = min(size, limit) + 1
        data = os.read(descriptor, wanted)
        while 0 < len(data) < wanted and (more := os.read(descriptor, wanted - len(data))):
            data += more
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes")
    return data


def _kind(mode: int) -> str:
    return next((words for matches, words in _KINDS if matches(mode)), "a regular file")


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {_kind(status.st_mode)}, not a regular file")
