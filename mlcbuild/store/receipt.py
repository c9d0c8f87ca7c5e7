"""Receipts: what lets a run that would find everything built and in place end at once.

A run that ends well leaves a receipt in its store: every file that was read, with its stat; every record
and blob that the result rests on; every directory of a bundle; and what a run says that has nothing to do.
The same command line, in the same surroundings, later holds all of it against what is there: some ten
thousand stats, and neither recipe nor graph is read again. Whatever is not exactly as it was, whether or not
it matters, leads to an ordinary run, which decides. So a receipt promises what a run promises, by the same
rules: a file is unchanged when its stat is, and was not too young when it was read (store.statcache);
a blob is whole while it has its size and the mtime of the store's files (mlcbuild.store.store).

This module imports nothing but the rules that it shares with the store, and little of Python's: imports are
much of what such a run costs. The
rest is stats, so paths are relative where that is shorter, and of records only their directories are asked
for: names come and go with the time of the directory. A directory that changed since is read again.

The file `receipts/<digest of the command line and its surroundings>` is a line with the digest of what
follows and the length of each section, and the sections: texts between NUL, or unsigned integers of 64 bits
of this machine. A receipt that was damaged counts as none.

What a run without work takes on trust is that what has the stat of then has the bytes of then. Records and
blobs are read and hashed by runs that use them.
"""

from __future__ import annotations

import os
import sys
import time

from blake3 import blake3

from mlcbuild.store import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FORMAT = "mlcbuild-receipt/3"
KEPT = 20
_LARGEST = 1 << 30
"""Bytes of a receipt: of ten thousand steps it has some 5 million."""
_TEXTS = ("said", "watched", "absent", "records", "shelves", "blobs", "copies", "listed", "log")
_NUMBERS = ("stats", "shelf_stats", "blob_sizes", "copy_sizes")
_VARIABLES = (
    *("CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "HOME", "PATH", "PYTHONPATH"),
    *("MLCBUILD_CORES", "MLCBUILD_KEY", "MLCBUILD_STORE", "MLCBUILD_TLS"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
)
"""Of the environment, all that a run without work can depend on."""


def place(root: str, arguments: Sequence[str]) -> str:
    """Where the receipt of a command line lies, for this directory, user, machine and interpreter."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()  # what a processor can do stays the same until the machine starts again
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
    """What a run with these arguments says when there is nothing to do for it; None when there may be.

    Notes the use of the records, as a run does, and that there was a run.
    """
    started = time.monotonic()
    root = store(arguments)
    path = place(root, arguments)
    try:
        import fcntl

        texts, numbers = _read(path)
        cas = os.open(f"{root}/cas", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock = os.open(f"{root}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except (OSError, ValueError, ImportError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # gc waits, or is at work
        same = (
            stats(_split(texts["watched"])) == numbers["stats"]
            and not any(map(os.path.lexists, filter(None, _split(texts["absent"]))))
            and _whole(_split(texts["blobs"]), numbers["blob_sizes"], cas)
            and _whole(_split(texts["copies"]), numbers["copy_sizes"], None)
            and _listed([os.fsdecode(name) for name in _split(texts["listed"])])
            and _recorded(os.fsencode(f"{root}/ac/"), texts, numbers["shelf_stats"])
            and not (os.path.isdir(f"{root}/unsent") and os.listdir(f"{root}/unsent"))
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
    return f"{before}{seconds:.{2 if seconds < 1 else 1}f} s{behind}"


def write(path: str, texts: Mapping[str, Iterable[str]], numbers: Mapping[str, Sequence[int]]) -> None:
    """Leaves a receipt at `place`. Silent when it cannot: it is not needed for anything but speed.

    Any number of texts:
        said     what is printed, before and behind the seconds that the run took
        watched  paths of files and directories; stats: of each, see `stats`
        absent   paths where there is nothing
        records  keys; shelves: their directories in ac/; shelf_stats: of each, or three zeros for one whose
                 time does not tell its next state
        blobs    d0/<digest>, below cas/; copies: paths of other files that carry the store's mtime;
                 blob_sizes, copy_sizes: of each
        listed   for each directory whose stat says too little: path, number, names and inodes
        log      directory of the logs of runs, and the rest of this run's: see mlcbuild.reports.runlog
    """
    from array import array

    directory = os.path.dirname(path)
    part = f"{path}.{os.getpid()}"
    try:
        packed = [[os.fsencode(text) for text in texts[name]] for name in _TEXTS]
        if any(b"\0" in text for section in packed for text in section):
            return
        sections = [b"\0".join(section) for section in packed]
        sections += [array("Q", numbers[name]).tobytes() for name in _NUMBERS]
        os.makedirs(directory, exist_ok=True)
        with open(part, "wb") as file:
            parts = [" ".join(str(len(section)) for section in sections).encode() + b"\n", *sections]
            file.write(f"{FORMAT} {_sum(parts)} ".encode())
            file.writelines(parts)
        os.replace(part, path)
        old = sorted((entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(directory))
        for _, name in old[:-KEPT]:
            os.unlink(name)
    except (OSError, UnicodeError, OverflowError):  # a time before 1970
        return


def short(path: str) -> str:
    """A path as the next run, in the same directory, finds it soonest."""
    return path.removeprefix(os.getcwd() + "/")


def stats(paths: Iterable[str | bytes]) -> list[int]:
    """Inode, mtime and ctime, in nanoseconds, of each file. Raises OSError."""
    return [n for s in map(os.stat, paths) for n in (s.st_ino, s.st_mtime_ns, s.st_ctime_ns)]


def inodes(directory: str) -> list[str]:
    """Name and inode of everything in a directory, by name. Raises OSError."""
    found = sorted((entry.name, str(entry.inode())) for entry in os.scandir(directory))
    return [text for pair in found for text in pair]


def store(arguments: Sequence[str]) -> str:
    """The root of the store that a command line names, or the user's; a wrong guess finds no receipt."""
    named = ""
    for number, word in enumerate(arguments):
        if word == "--store":
            named = "".join(arguments[number + 1 : number + 2])
        elif word.startswith("--store="):
            named = word.partition("=")[2]
    return layout.absolute(named) if named else layout.default_root()


def _read(path: str) -> tuple[dict[str, bytes], dict[str, list[int]]]:
    """The sections of a receipt. Raises OSError, and ValueError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        data = file.read(_LARGEST)
    form, digest, data = data.split(b" ", 2)
    if form.decode() != FORMAT or digest.decode() != _sum([data]):
        raise ValueError(path)
    at = data.index(b"\n") + 1
    lengths = data[:at].split()
    sections = []
    for length in map(int, lengths):
        sections.append(data[at : at + length])
        at += length
    if at != len(data) or any(len(section) % 8 for section in sections[len(_TEXTS) :]):
        raise ValueError(path)
    texts = dict(zip(_TEXTS, sections, strict=False))
    numbers = zip(_NUMBERS, sections[len(_TEXTS) :], strict=True)
    return texts, {name: memoryview(section).cast("Q").tolist() for name, section in numbers}


def _sum(sections: Iterable[bytes]) -> str:
    hasher = blake3()
    for section in sections:
        hasher.update(section)
    return hasher.hexdigest()


def _split(section: bytes) -> list[bytes]:
    return section.split(b"\0") if section else []


def _whole(names: Sequence[bytes], sizes: Sequence[int], directory: int | None) -> bool:
    if len(names) != len(sizes):
        return False
    stat = os.stat
    stats = map(stat, names) if directory is None else (stat(name, dir_fd=directory) for name in names)
    return layout.all_as_written(stats, sizes)


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
    there: set[bytes] = set()
    for shelf in changed:
        there.update(os.listdir(ac + shelf))
    return there.issuperset(key for key in _split(texts["records"]) if key[:2] in changed)


def _touch(path: str, ac: str, records: bytes) -> None:
    """Notes the use of all records, unless the receipt's own time says that it was done minutes ago."""
    if not layout.is_use_noted(os.stat(path).st_mtime_ns):
        for key in map(os.fsdecode, _split(records)):
            layout.note_use(f"{ac}{key[:2]}/{key}")
        os.utime(path)


def _log(directory: str, rest: str, seconds: float) -> None:
    """Writes the log of this run: all but two numbers is as it was when the receipt was written."""
    try:
        layout.write_log(directory, time.time() - seconds, seconds, rest)
    except OSError:
        return  # a run whose log cannot be written is none the worse
