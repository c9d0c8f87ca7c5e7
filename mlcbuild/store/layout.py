"""Defines where a store lies and what its file times mean, for the store, receipts and logs of runs.

It imports little, because a run that finds by its receipt (the list of what an earlier run depended on) that
there is nothing to do imports nothing else of the store."""

from __future__ import annotations

import os
import stat
import sys
import time

from mlcbuild.store.stamp import STAMP_NS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

USE_NOTED_NS = 600 * 1_000_000_000
"""Minimum nanoseconds between two updates of the time at which a step record was last used; while a build
runs, `upkeep.gc` keeps what was used in the last hour."""
LONGEST_ROOT = 3072
"""Maximum bytes of a store's path, of the 4096 that Linux allows for the path of a file in it."""
KEPT_LOGS = 20
"""Number of run logs that are kept for each recipe."""
_CLEANED = ("tmp", "locks", "logs", "known", "partial", "unsent", "sent", "receipts", "runs")
"""Directories, below the root of a store, from which old or abandoned files are removed."""


def default_root(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the absolute path in $MLCBUILD_STORE, in which ~ stands for the home directory, or the store's
    path in the user's cache directory on this system; "" if that path starts with a home directory which the
    system does not know."""
    base = environ.get("XDG_CACHE_HOME", "")
    if sys.platform == "darwin":
        base = "~/Library/Caches"
    elif not os.path.isabs(base):
        base = "~/.cache"
    path = os.path.expanduser(environ.get("MLCBUILD_STORE") or f"{base}/mlcbuild")
    return "" if path.startswith("~") else absolute(path)


def absolute(path: str) -> str:
    """Returns `path` as an absolute path; a relative one starts from the current directory. Symbolic links
    and `..` stay as they are."""
    return os.path.join(os.getcwd(), path)


def root_fault(root: str) -> str:
    """Returns the reason why a store cannot be in the directory `root`, an absolute path, as words that
    follow the path in an error message, such as "is not UTF-8"; "" if it can. Its length is limited, and
    compilers, which work on files in the store, accept UTF-8 only."""
    try:
        lengths = [len(part.encode()) for part in root.split("/")]
    except UnicodeEncodeError:
        return "is not UTF-8"
    if max(lengths) > 255 or sum(lengths) + len(lengths) > LONGEST_ROOT:
        return f"is too long: at most {LONGEST_ROOT} bytes, and 255 between two '/'"
    return ""


def shelved(name: str) -> str:
    """Returns the path, relative to ac/, of the step record with the key `name`, or, relative to cas/, of the
    blob with the digest `name`: "ab/abcdef...", since the directories there are named after the first two
    characters."""
    return f"{name[:2]}/{name}"


def unsent(root: str) -> list[str]:
    """Returns the keys of results of steps that a run has marked for upload to remote caches and that are not
    uploaded yet. root: directory of the store. Raises OSError if the store cannot be read.
    """
    directory = f"{root}/unsent"
    return os.listdir(directory) if os.path.isdir(directory) else []


def open_or_create(path: str | os.PathLike[str]) -> int:
    """Opens a file for reading and writing, creates it if it does not exist, and returns its descriptor. A
    pipe is opened, too, without waiting for its other end. Raises OSError, also for a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)


def is_as_written(stat_result: os.stat_result, size: int) -> bool:
    """Returns True if a file's stat shows that nobody has written to it since the store created it: a
    regular file of `size` bytes with the mtime STAMP.
    """
    return (
        stat_result.st_mtime_ns == STAMP_NS
        and stat_result.st_size == size
        and stat.S_ISREG(stat_result.st_mode)
    )


def all_as_written(paths: Iterable[str | bytes], sizes: Iterable[int], directory: int | None = None) -> bool:
    """Returns True if every file is a regular one of the corresponding size in bytes with the mtime STAMP, a
    constant that the store sets on its files: nobody has written to them since. It calls no other function of
    this module, since a short run checks thousands of files. directory: descriptor of the directory to which
    the paths are relative; None: the current directory. Raises OSError if a file is missing or cannot be
    examined, ValueError unless there are as many sizes as paths."""
    examine, stamp, kind_bits, regular = os.stat, STAMP_NS, 0o170000, stat.S_IFREG
    for path, size in zip(paths, sizes, strict=True):
        item = examine(path, dir_fd=directory)
        if item.st_mtime_ns != stamp or item.st_size != size or item.st_mode & kind_bits != regular:
            return False
    return True


def is_use_noted(mtime_ns: int) -> bool:
    """Returns True if a step record's last use was updated in the last ten minutes. mtime_ns: the mtime of
    the record's file.
    """
    return time.time_ns() - mtime_ns <= USE_NOTED_NS


def note_use(path: str) -> None:
    """Sets a step record's time of last use, which is the mtime of its file, to now, unless it was set in the
    last ten minutes. If it cannot, as for a record that is missing or belongs to another user, nothing is
    raised."""
    try:
        if not is_use_noted(os.stat(path).st_mtime_ns):
            os.utime(path)
    except OSError:
        return  # The record was removed, or belongs to another user.


def own_directory(path: str) -> None:
    """Creates a directory of the store, with its parents. A file or link at its path, though not at those of
    its parents, is removed first.

    Files are removed from the store's directories, so a link among them must not lead to somebody else's
    directory. Raises OSError if the directory cannot be created.
    """
    try:
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        is_directory = False
    else:
        if not is_directory:
            os.unlink(path)
    if not is_directory:
        os.makedirs(path, exist_ok=True)


def is_private(stat_result: os.stat_result) -> bool:
    """Returns True if a file or directory belongs to the user of this process, and neither its group nor
    other users have permission to write it."""
    return stat_result.st_uid == os.geteuid() and not stat_result.st_mode & 0o022


def private_directory(root: str) -> str:
    """Returns the directory for files that a run trusts without a check, such as cached digests, with
    symbolic links resolved: the store itself if only this user can write it or it does not exist yet,
    otherwise user-UID in it, a directory of this user. root: directory of the store."""
    root = os.path.realpath(root)
    try:
        is_shared = not is_private(os.stat(root))
    except OSError:
        return root  # There is no store yet.
    return f"{root}/user-{os.geteuid()}" if is_shared else root


def make_private(path: Path) -> None:
    """Creates `path`, the directory for files that a run trusts without a check, unless it exists. path: as
    `private_directory` returned it: the store itself, which is created with its parents, or user-UID in an
    existing store, which only this user can read and write. Raises OSError if it cannot be created."""
    if path.name == f"user-{os.geteuid()}":
        path.mkdir(0o700, exist_ok=True)
    else:
        path.mkdir(parents=True, exist_ok=True)


def remove_links(root: str) -> None:
    """Removes links and files that stand in place of directories in a store, so that removing old files
    reaches no other directory. At the paths of directories such as tmp/ and logs/, a directory is created
    instead; links to directories anywhere below logs/, known/ and runs/ are only removed. root: directory of
    the store.

    Raises OSError, and StoreError for a link in place of the directories of records or blobs, since gc would
    remove files behind it.
    """
    for name in ("ac", "cas"):
        if os.path.islink(f"{root}/{name}"):
            from mlcbuild.errors import StoreError

            raise StoreError(f"{root}/{name} is a symbolic link: move the whole store instead")
    for name in _CLEANED:
        if os.path.lexists(f"{root}/{name}"):
            own_directory(f"{root}/{name}")
    for name in ("logs", "known", "runs"):
        for directory, names, _ in os.walk(f"{root}/{name}"):
            for linked in filter(os.path.islink, (f"{directory}/{each}" for each in names)):
                os.unlink(linked)


def create(path: str) -> int:
    """Creates a file and returns its descriptor, opened for writing. A file, link or pipe at its path is
    removed first. Raises OSError if a directory is there or the file cannot be created."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o644)


def write(path: str, parts: Iterable[bytes]) -> None:
    """Writes a file of the store: first under a temporary name, then renamed to `path`, without fsync. parts:
    its bytes, in pieces. Raises OSError if the file cannot be written; the temporary file may then stay."""
    part = f"{path}.{os.urandom(4).hex()}.part"  # Other threads may write the same path.
    with open(create(part), "wb") as file:
        file.writelines(parts)
    os.replace(part, path)


def remove_oldest(paths: Iterable[str]) -> None:
    """Removes files, such as the oldest logs. A path that cannot be removed, such as a directory, stays."""
    for path in paths:
        try:
            os.unlink(path)
        except OSError:
            continue


def write_log(directory: str, began: float, seconds: float, rest: str) -> str:
    """Writes the log of a run to `directory`, which is created, and removes all but the newest KEPT_LOGS
    there. began: start of the run, in seconds since 1970; seconds: its duration; rest: JSON text that follows
    these two fields and a comma: all other fields and the closing brace. Returns the file's path. Raises
    OSError if it cannot be written."""
    # Sorting by name is sorting by time.
    path = f"{directory}/{round(began * 1e6):018}-{os.getpid()}.json"
    own_directory(os.path.dirname(directory))
    own_directory(directory)
    write(path, [f'{{"time": {began!r}, "seconds": {seconds!r}, {rest}'.encode()])
    logs = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
    remove_oldest(f"{directory}/{name}" for name in logs[:-KEPT_LOGS])
    return path
