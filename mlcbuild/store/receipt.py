"""Receipts, which let a run end at once when everything is built and in place.

A successful run leaves a receipt in its store: the stat of every file that it read, every record and blob
that its result depends on, every directory of a bundle, and the text that a run without work prints. The same
command line in the same environment later compares all of this with the present state: some ten thousand
stats, and neither recipe nor graph is read. Any difference, relevant or not, leads to an ordinary run. A
receipt therefore promises the same as a run, by the same rules: a file is unchanged when its stat is, unless
it was too recently written when it was read (`stamp.is_racy`), and a blob is intact while it has its size and
the mtime of the store's files (`layout.is_as_written`).

This module imports only the rules that it shares with the store and little of Python's library, because
imports take much of the time of such a run. The rest of the time goes to stats, so paths are relative where
that is shorter, and of records only the directories are checked: a directory's mtime changes when an entry is
added or removed. A directory with another mtime is read again.

The file `receipts/<digest of the command line and its environment>` is a line with the digest of the rest and
the length of each section, followed by the sections: texts between NUL, or unsigned 64-bit integers of this
machine. A receipt that is damaged, or that another user can write, is ignored.

A run without work trusts that a file with the same stat has the same bytes. Runs that use records and blobs
read and hash them.
"""

from __future__ import annotations

import os
import sys
import time

from blake3 import blake3

from mlcbuild.durations import duration
from mlcbuild.store import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FORMAT = "mlcbuild-receipt/3"
KEPT = 20
_LARGEST = 1 << 30
"""Size in bytes of the largest receipt (the list of everything that a finished run depended on) that is read;
ten thousand steps need about 5 million."""
_TEXTS = ("said", "watched", "absent", "records", "shelves", "blobs", "copies", "listed", "log")
_NUMBERS = ("stats", "shelf_stats", "blob_sizes", "copy_sizes")
_VARIABLES = (
    *("CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "HOME", "PATH", "PYTHONPATH"),
    *("MLCBUILD_CORES", "MLCBUILD_KEY", "MLCBUILD_STORE", "MLCBUILD_TLS"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
)
"""Names of the environment variables that can change what a run does although everything is built. Their
values are part of the digest that names a receipt."""


def place(root: str, arguments: Sequence[str]) -> str:
    """Returns the path of a receipt, the file that lists what a finished run depended on, below the store
    `root`. The name is a digest of the command-line arguments, the current directory, the environment
    variables that matter, the user, the machine and the Python interpreter."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()  # The features of a processor stay the same until the machine restarts.
    except OSError:
        boot = ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [
        FORMAT,
        str(cores),
        sys.version,
        sys.executable,
        os.getcwd(),
        str(os.getuid()),
        boot,
        *os.uname(),
    ]
    parts += [*sys.path, *(f"{name}={os.environ.get(name)}" for name in _VARIABLES), *arguments]
    digest = blake3("\0".join(parts).encode(errors="surrogateescape")).hexdigest()
    return f"{root}/receipts/{digest}"


def check(arguments: Sequence[str]) -> str | None:
    """Returns the text that a run with these command-line arguments prints when nothing has changed since a
    finished run, whose receipt lists everything that it depended on; None when there may be work, or there is
    no receipt that can be read, and while garbage collection runs.

    Also marks the records of the steps as used, so that garbage collection keeps them, and logs the run.
    """
    started = time.monotonic()
    try:
        import fcntl

        root = store(arguments)
        if not root:
            return None
        path = place(root, arguments)
        texts, numbers = _read(path)
        cas = os.open(f"{root}/cas", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock = layout.open_or_create(f"{root}/lock")
    except (OSError, ValueError, ImportError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # This fails while gc runs.
        same = (
            stats(_split(texts["watched"])) == numbers["stats"]
            and not any(map(os.path.lexists, filter(None, _split(texts["absent"]))))
            and layout.all_as_written(_split(texts["blobs"]), numbers["blob_sizes"], cas)
            and layout.all_as_written(_split(texts["copies"]), numbers["copy_sizes"])
            and _listed([os.fsdecode(name) for name in _split(texts["listed"])])
            and _recorded(os.fsencode(f"{root}/ac/"), texts, numbers["shelf_stats"])
            and not layout.unsent(root)
        )
        if not same:
            return None
        _touch(path, f"{root}/ac/", texts["records"])
        before, behind, directory, rest = map(os.fsdecode, _split(texts["said"]) + _split(texts["log"]))
    except (OSError, ValueError):
        return None
    finally:
        os.close(cas)
        os.close(lock)
    seconds = time.monotonic() - started
    _log(directory, rest, seconds)
    return f"{before}{duration(seconds)}{behind}"


def write(path: str, texts: Mapping[str, Iterable[str]], numbers: Mapping[str, Sequence[int]]) -> None:
    """Writes a receipt, the list of everything that a finished run depended on, to the path `path`, and
    removes all but the newest KEPT receipts in its directory. If a text contains NUL or the file cannot be
    written, nothing is written and nothing raised, since a receipt only saves time.

    texts, numbers: name of a section -> its entries, of any number. Raises KeyError if one is missing. Texts:

        said     the text printed before and after the seconds that the run took
        watched  paths of files and directories
        absent   paths that must not exist
        records  keys of steps
        shelves  names of the directories below ac/ in which the records of these steps are
        blobs    paths of stored files, relative to cas/
        copies   paths of the bundles' files that are no links to stored files, but have the same mtime
        listed   for each directory whose mtime was too recent: its path, the number of its files, and name
                 and inode of each, by name; numbers in decimal
        log      the directory of run logs, and the JSON text of this run's log without its times

    Numbers:

        stats        inode, mtime and ctime (ns) of each path in `watched`, in one list
        shelf_stats  the same of each directory in `shelves`, or three zeros for one whose mtime is too recent
                     to detect a later change
        blob_sizes, copy_sizes  size in bytes of each file in `blobs` and `copies`
    """
    from array import array

    directory = os.path.dirname(path)
    try:
        packed = [[os.fsencode(text) for text in texts[name]] for name in _TEXTS]
        if any(b"\0" in text for section in packed for text in section):
            return
        sections = [b"\0".join(section) for section in packed]
        sections += [array("Q", numbers[name]).tobytes() for name in _NUMBERS]
        layout.own_directory(directory)
        parts = [" ".join(str(len(section)) for section in sections).encode() + b"\n", *sections]
        layout.write(path, [_head(parts), *parts])
        old = sorted((entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(directory))
        layout.remove_oldest(name for _, name in old[:-KEPT])
    except (OSError, UnicodeError, OverflowError):  # an mtime before 1970
        return


def short(path: str) -> str:
    """Returns an absolute path relative to the current directory if it lies below that, else unchanged."""
    return path.removeprefix(os.getcwd() + "/")


def stats(paths: Iterable[str | bytes]) -> list[int]:
    """Returns inode, mtime and ctime (both in nanoseconds) of each file, three integers per path in one
    list. Raises OSError if a file is missing or cannot be read.
    """
    return [n for s in map(os.stat, paths) for n in (s.st_ino, s.st_mtime_ns, s.st_ctime_ns)]


def inodes(directory: str) -> list[str]:
    """Returns the names and inodes (in decimal) of a directory's entries in one list: name, inode, name,
    inode ..., sorted by name. Raises OSError if the directory cannot be read.
    """
    entries = sorted((entry.name, str(entry.inode())) for entry in os.scandir(directory))
    return [text for pair in entries for text in pair]


def store(arguments: Sequence[str]) -> str:
    """Returns the directory of the store that the last option --store of the command line `arguments` names,
    or of the user's default store; "" if that is below a home directory which the system does not know. The
    word after --store counts even if it is another option's value. The wrong directory then has no receipt
    (the list of what an earlier run depended on), so that the command runs in full."""
    named = ""
    for number, word in enumerate(arguments):
        if word == "--store":
            named = "".join(arguments[number + 1 : number + 2])
        elif word.startswith("--store="):
            named = word.partition("=")[2]
    return layout.absolute(named) if named else layout.default_root()


def _read(path: str) -> tuple[dict[str, bytes], dict[str, list[int]]]:
    """Reads a receipt, the file that lists everything on which a finished run depended, and returns its
    sections of text and its sections of numbers, each by name. Raises OSError, and ValueError for a file that
    is damaged or larger than 1 GiB, or that another user can write."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not layout.is_private(status) or status.st_size > _LARGEST:
            raise ValueError(path)
        data = file.read(status.st_size)  # A larger limit would allocate as much.
    start = len(_head([]))
    if data[:start] != _head([memoryview(data)[start:]]):
        raise ValueError(path)
    at = data.index(b"\n") + 1
    lengths = data[start:at].split()
    sections = []
    for length in map(int, lengths):
        sections.append(data[at : at + length])
        at += length
    if at != len(data) or any(len(section) % 8 for section in sections[len(_TEXTS) :]):
        raise ValueError(path)
    texts = dict(zip(_TEXTS, sections, strict=False))
    numbers = zip(_NUMBERS, sections[len(_TEXTS) :], strict=True)
    return texts, {name: memoryview(section).cast("Q").tolist() for name, section in numbers}


def _head(sections: Iterable[bytes | memoryview]) -> bytes:
    """Returns the first bytes of a receipt, always of the same length: the version of its format, and the
    digest of all bytes that follow, `sections`, by which a damaged receipt is detected."""
    hasher = blake3()
    for section in sections:
        hasher.update(section)
    return f"{FORMAT} {hasher.hexdigest()} ".encode()


def _split(section: bytes) -> list[bytes]:
    return section.split(b"\0") if section else []


def _listed(listed: Sequence[str]) -> bool:
    at = 0
    while at + 1 < len(listed):
        end = at + 2 + 2 * int(listed[at + 1])
        if inodes(listed[at]) != list(listed[at + 2 : end]):
            return False
        at = end
    return True


def _recorded(ac: bytes, texts: Mapping[str, bytes], before: Sequence[int]) -> bool:
    shelves = _split(texts["shelves"])
    now = stats(ac + shelf for shelf in shelves)
    changed = {shelf for at, shelf in enumerate(shelves) if now[3 * at : 3 * at + 3] != before[3 * at :][:3]}
    if not changed:
        return True
    listed: set[bytes] = set()
    for shelf in changed:
        listed.update(os.listdir(ac + shelf))
    return listed.issuperset(key for key in _split(texts["records"]) if key[:2] in changed)


def _touch(path: str, ac: str, records: bytes) -> None:
    """Marks all results on which a finished run depended as used now, and then the run's receipt at `path`,
    unless the receipt's mtime shows that this was done in the last ten minutes. ac: directory of records,
    with a final slash; records: the records' keys between NUL. Raises OSError if the receipt is missing or
    cannot be changed."""
    if not layout.is_use_noted(os.stat(path).st_mtime_ns):
        for key in map(os.fsdecode, _split(records)):
            layout.note_use(f"{ac}{layout.shelved(key)}")
        os.utime(path)


def _log(directory: str, rest: str, seconds: float) -> None:
    """Writes the log of a run that found nothing to do and ends now: the log of the earlier run whose receipt
    (the list of everything that it depended on) showed this, with another start and duration. directory: that
    of the logs; rest: the earlier log's JSON text after its first two fields, start and duration; seconds:
    duration of this run. Errors are ignored."""
    try:
        layout.write_log(directory, time.time() - seconds, seconds, rest)
    except OSError:
        return  # a log that cannot be written fails no run
