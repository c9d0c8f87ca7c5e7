"""Rules that the store, receipts and logs of runs share: where a store lies, and what times mean in it.

It imports little, because a run that ends by its receipt imports nothing else of the store.
"""

from __future__ import annotations

import os
import stat
import sys
import time

from mlcbuild.store.stamp import STAMP_NS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

USE_NOTED_NS = 600 * 1_000_000_000
"""Minimum time between two updates of a record's last use; `upkeep.gc` spares what was used in the last hour.
"""
KEPT_LOGS = 20
"""Number of run logs that are kept for each recipe."""


def default_root(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the path in $MLCBUILD_STORE, or the store in the user's cache directory on this system."""
    if chosen := environ.get("MLCBUILD_STORE"):
        return absolute(os.path.expanduser(chosen))
    if sys.platform == "darwin":
        return os.path.expanduser("~/Library/Caches/mlcbuild")
    base = environ.get("XDG_CACHE_HOME", "")
    return os.path.expanduser(base if os.path.isabs(base) else "~/.cache") + "/mlcbuild"


def absolute(path: str) -> str:
    """Returns a path from the root, with its links and its `..` as they are."""
    return os.path.join(os.getcwd(), path)


def is_as_written(stat_result: os.stat_result, size: int) -> bool:
    """Tells by its stat whether a blob is unchanged since it was written."""
    return (
        stat_result.st_mtime_ns == STAMP_NS
        and stat_result.st_size == size
        and stat.S_ISREG(stat_result.st_mode)
    )


def all_as_written(stats: Iterable[os.stat_result], sizes: Iterable[int]) -> bool:
    """Returns True when `is_as_written` holds for each; a loop, for thousands of blobs of a short run."""
    stamp, kind_bits, regular = STAMP_NS, 0o170000, stat.S_IFREG
    for item, size in zip(stats, sizes, strict=True):
        if item.st_mtime_ns != stamp or item.st_size != size or item.st_mode & kind_bits != regular:
            return False
    return True


def is_use_noted(mtime_ns: int) -> bool:
    """Tells whether a record's last use, which is its file's mtime, was updated recently."""
    return time.time_ns() - mtime_ns <= USE_NOTED_NS


def note_use(path: str) -> None:
    """Updates the time of a record's last use, unless that was done recently."""
    try:
        if not is_use_noted(os.stat(path).st_mtime_ns):
            os.utime(path)
    except OSError:
        return  # the record is gone, or another user's


def write_log(directory: str, began: float, seconds: float, rest: str) -> str:
    """Writes the log of a run that began at `began`, in seconds since 1970, and removes the oldest ones.

    rest: the end of its JSON document, after the two times. Returns the file's path. Raises OSError.
    """
    # Names sort by time.
    path = f"{directory}/{round(began * 1e6):018}-{os.getpid()}.json"
    part = f"{path}.part"
    with open(part, "w", encoding="utf-8") as file:
        file.write(f'{{"time": {began!r}, "seconds": {seconds!r}, {rest}')
    os.replace(part, path)
    for old in sorted(name for name in os.listdir(directory) if name.endswith(".json"))[:-KEPT_LOGS]:
        os.unlink(f"{directory}/{old}")
    return path
