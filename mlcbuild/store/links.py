"""Links or copies a file, avoiding a second copy of its bytes where the filesystem allows it, and gives files
the read-only mode and the mtime that mark them as the store's."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from mlcbuild.store.stamp import STAMP, STAMP_NS

_NO_LINK = {
    errno.EXDEV,
    errno.EMLINK,
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EACCES,
}
_NO_RANGE = {
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EPERM,
    errno.EBADF,
}


def link_or_copy(source: Path, destination: Path) -> None:
    """Makes `destination` a hard link of `source`, or, where links are impossible, a clone or else a copy.
    Raises OSError if `destination` exists or cannot be created, or `source` cannot be read.

    Actions use it to pass an input through to their output: the hard link is recognised when the output is
    published, and is not hashed again.
    """
    try:
        os.link(source, destination)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        copy(source, destination)


def copy(source: Path, destination: Path) -> None:
    """Copies a file's bytes to a new file `destination`, sharing blocks on filesystems that can (XFS, btrfs).
    Raises OSError if a file cannot be read or written, or `destination` exists; what was copied before stays.

    A copy of a file with the mtime STAMP is read-only and gets the same mtime.
    """
    with source.open("rb") as reader, destination.open("xb") as writer:
        left = os.fstat(reader.fileno()).st_size
        try:
            while left > 0 and hasattr(os, "copy_file_range"):
                done = os.copy_file_range(reader.fileno(), writer.fileno(), min(left, 1 << 30))
                if done == 0:
                    break
                left -= done
        except OSError as error:
            if error.errno not in _NO_RANGE:
                raise
            reader.seek(0)
            writer.seek(0)
        if left > 0:
            shutil.copyfileobj(reader, writer, 1 << 20)
    if source.stat().st_mtime_ns == STAMP_NS:
        stamp(destination)


def stamp(path: Path) -> None:
    """Makes a file read-only and sets STAMP, the mtime that all files of a store have. Raises OSError if it
    cannot, as for another user's file."""
    path.chmod(0o444)
    os.utime(path, (STAMP, STAMP))
