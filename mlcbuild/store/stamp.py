"""Defines how the store reads the times of files: which mtimes mark a stored file as unchanged or as damaged,
and when a file was changed so shortly before it was read that a later change may leave its times as they are.
"""

from __future__ import annotations

STAMP = 315_532_800
"""The mtime of every blob of a store, in seconds since 1970: 1980-01-01 UTC, the earliest that all archive
formats can hold. (The mtime of a record is the time of its last use.)

Any write changes a file's mtime, so a blob with this mtime was not written to since it was stored."""
STAMP_NS = STAMP * 1_000_000_000
SPOILT = STAMP + 2
"""The mtime, in seconds since 1970, that the hard links of a stored file get when its bytes turn out to be
wrong although its own mtime is unchanged, as after a fault of the disk.

In a bundle it distinguishes a damaged file from one that a user changed. It is two seconds later than the
mtime of intact files, a difference that even the coarsest clock of a filesystem shows."""
RACY_NS = 2_000_000_000
"""Minimum nanoseconds between a file's last change and its reading with which any later change shows in the
file's times: 2 s, the resolution of the coarsest clock in use (FAT), or the skew of a file server."""


def is_racy(changed_ns: int, read_ns: int) -> bool:
    """Returns True if a file was changed at most RACY_NS before it was read, or after, so that a later write
    may leave its times as they are (git's racy-timestamp rule).

    changed_ns: the later one of its mtime and ctime; read_ns: time of reading; both in nanoseconds since
    1970.
    """
    return changed_ns + RACY_NS >= read_ns
