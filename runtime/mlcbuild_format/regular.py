"""Opens and reads regular files only, up to a size limit, without blocking, in untrusted directories."""

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
    """Returns in words what `path` is, or the target of a link: "a regular file", "a directory" and so on.
    Raises OSError if nothing is there, or it cannot be examined."""
    return _kind(path.stat().st_mode)


def open_file(path: str | Path, *, follow_link: bool = True) -> BinaryIO:
    """Returns a regular file, open for reading. With `follow_link`, a symbolic link to one is accepted, too;
    otherwise a link counts as no regular file.

    Raises OSError if it cannot be opened, with errno EINVAL for anything that is not a regular file: opening
    a named pipe would wait for a writer, and opening a device may act on it.
    """
    return os.fdopen(_open(path, follow_link)[0], "rb")


def _open(path: str | Path, follow_link: bool) -> tuple[int, int]:
    """Opens a regular file for reading, and returns its descriptor, which the caller closes, and its size in
    bytes. Raises OSError if it cannot be opened, with errno EINVAL for anything that is not a regular file,
    and so for a symbolic link unless `follow_link` is True and it leads to one."""
    _check(os.stat(path, follow_symlinks=follow_link))  # noqa: PTH116 - hundreds of records in a short run
    # The file may be replaced between stat and open: O_NONBLOCK opens a named pipe without waiting.
    descriptor = os.open(path, _FLAGS if follow_link else _FLAGS | getattr(os, "O_NOFOLLOW", 0))
    try:
        status = os.fstat(descriptor)
        _check(status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status.st_size


def read(path: str | Path, limit: int, *, follow_link: bool = True) -> bytes:
    """Returns the bytes of a regular file. With `follow_link`, a symbolic link to one is accepted; otherwise
    a link counts as no regular file.

    Raises OSError if the file cannot be read, with errno EINVAL for anything that is not a regular file and
    EFBIG for a file of more than `limit` bytes; `strerror` is the reason in words.
    """
    descriptor, size = _open(path, follow_link)
    try:
        # os.read allocates its whole argument, so a small file is not read with a buffer of `limit` bytes.
        expected = min(size, limit)
        data = os.read(descriptor, expected + 1)
        while 0 < len(data) < expected and (more := os.read(descriptor, expected + 1 - len(data))):
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
