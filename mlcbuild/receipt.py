"""Receipts: what lets a run that would find everything built and in place end at once.

A run that ends well leaves a receipt in its store: every file that was read, with its stat; every record
and blob that the result rests on; every directory of a bundle; and what a run says that has nothing to do.
The same command line, in the same surroundings, later holds all of it against what is there: some ten
thousand stats, and neither recipe nor graph is read again. Whatever is not exactly as it was, whether or not
it matters, leads to an ordinary run, which decides. So a receipt promises what a run promises, by the same
rules: a file is unchanged when its stat is, and was not too young when it was read (mlcbuild.statcache);
a blob is whole while it has its size and the mtime of the store's files (mlcbuild.store).

This module uses no other of ours, and little of Python's: imports are most of what such a run costs.

The file `receipts/<digest of the command line and its surroundings>` holds sections between RECORD, and
fields between NUL; what has either in a path gets no receipt.
"""

from __future__ import annotations

import os
import sys
import time

from blake3 import blake3

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT = "mlcbuild-receipt/1"
KEPT = 20
_RECORD = "\x1e"
_STAMP_NS = 315_532_800 * 10**9
_TOUCH_NS = 600 * 10**9
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
    return f"{root}/receipts/{blake3(os.fsencode(_RECORD.join(parts))).hexdigest()}"


def check(arguments: Sequence[str]) -> str | None:
    """What a run with these arguments says when there is nothing to do for it; None when there may be.

    Notes the use of the records, as a run does, and that there was a run.
    """
    started = time.monotonic()
    root = store(arguments)
    path = place(root, arguments)
    try:
        import fcntl

        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            sections = [section.split("\0") for section in file.read().split(_RECORD)]
        (form,), said, watched, before, absent, records, blobs, sizes, listed, log = sections
        lock = os.open(f"{root}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except (OSError, ValueError, ImportError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # gc waits, or is at work
        same = (
            form == FORMAT
            and stats(watched) == list(map(int, before))
            and not any(map(os.path.lexists, filter(None, absent)))
            and _whole(f"{root}/cas/", blobs, sizes)
            and _listed(listed)
            and _recorded(f"{root}/ac/", records)
            and not (os.path.isdir(f"{root}/unsent") and os.listdir(f"{root}/unsent"))
        )
        if not same:
            return None
        _touch(path, f"{root}/ac/", records)
    except (OSError, ValueError):
        return None
    finally:
        os.close(lock)
    seconds = time.monotonic() - started
    _log(root, log, seconds)
    return f"{seconds:.2f} s".join(said) if seconds < 1 else f"{seconds:.1f} s".join(said)


def write(path: str, sections: Mapping[str, Sequence[str]]) -> None:
    """Leaves a receipt at `place`. Silent when it cannot: it is not needed for anything but speed.

    `sections`, each any number of texts:
        said     what is printed, before and behind the seconds that the run took
        watched  paths of files and directories; stats: of each, see `stats`
        absent   paths where there is nothing
        records  keys, sorted
        blobs    files that carry the store's mtime: d0/<digest>, or absolute paths; sizes: of each
        listed   for each directory whose stat says too little: path, number, names and inodes
        log      directory of the logs of runs, and the rest of this run's: see mlcbuild.runlog
    """
    names = ("said", "watched", "stats", "absent", "records", "blobs", "sizes", "listed", "log")
    fields = [[FORMAT], *(sections[name] for name in names)]
    if any("\0" in field or _RECORD in field for section in fields for field in section):
        return
    text = _RECORD.join("\0".join(section) for section in fields)
    directory = os.path.dirname(path)
    part = f"{path}.{os.getpid()}"
    try:
        os.makedirs(directory, exist_ok=True)
        with open(part, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.replace(part, path)
        old = sorted((entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(directory))
        for _, name in old[:-KEPT]:
            os.unlink(name)
    except (OSError, UnicodeError):
        return


def stats(paths: Sequence[str]) -> list[int]:
    """Inode, mtime and ctime, in nanoseconds, of each file. Raises OSError."""
    return [n for s in map(os.stat, paths) for n in (s.st_ino, s.st_mtime_ns, s.st_ctime_ns)]


def inodes(directory: str) -> list[str]:
    """Name and inode of everything in a directory, by name. Raises OSError."""
    found = sorted((entry.name, str(entry.inode())) for entry in os.scandir(directory))
    return [text for pair in found for text in pair]


def store(arguments: Sequence[str]) -> str:
    """The store's, as mlcbuild.store and the command line find it; a wrong guess finds no receipt."""
    given = ""
    for number, word in enumerate(arguments):
        if word == "--store":
            given = "".join(arguments[number + 1 : number + 2])
        elif word.startswith("--store="):
            given = word.partition("=")[2]
    if given:
        return os.path.abspath(given)
    if chosen := os.environ.get("MLCBUILD_STORE"):
        return os.path.abspath(os.path.expanduser(chosen))
    if sys.platform == "darwin":
        return os.path.expanduser("~/Library/Caches/mlcbuild")
    base = os.environ.get("XDG_CACHE_HOME", "")
    return os.path.expanduser(base if os.path.isabs(base) else "~/.cache") + "/mlcbuild"


def _whole(cas: str, blobs: Sequence[str], sizes: Sequence[str]) -> bool:
    found = [os.stat(name if name[0] == "/" else cas + name) for name in blobs]
    return {s.st_mtime_ns for s in found} == {_STAMP_NS} and [s.st_size for s in found] == list(
        map(int, sizes)
    )


def _listed(listed: Sequence[str]) -> bool:
    at = 0
    while at + 1 < len(listed):
        end = at + 2 + 2 * int(listed[at + 1])
        if inodes(listed[at]) != list(listed[at + 2 : end]):
            return False
        at = end
    return True


def _recorded(ac: str, records: Sequence[str]) -> bool:
    there: set[str] = set()
    for shelf in {key[:2] for key in records}:
        there.update(os.listdir(ac + shelf))
    return there.issuperset(records)


def _touch(path: str, ac: str, records: Sequence[str]) -> None:
    """As Store.touch; that the records are used is noted with the receipt."""
    if time.time_ns() - os.stat(path).st_mtime_ns > _TOUCH_NS:
        for key in records:
            try:
                os.utime(f"{ac}{key[:2]}/{key}")
            except PermissionError:  # another user's
                continue
        os.utime(path)


def _log(root: str, log: Sequence[str], seconds: float) -> None:
    """The log of this run, as mlcbuild.runlog writes it: all but two numbers is as before."""
    directory, rest = log
    now = time.time() - seconds
    name = f"{directory}/{round(now * 1000):015}-{os.getpid()}.json"
    try:
        with open(f"{name}.part", "w", encoding="utf-8") as file:
            file.write(f'{{"time": {now!r}, "seconds": {seconds!r}, {rest}')
        os.replace(f"{name}.part", name)
        for old in sorted(old for old in os.listdir(directory) if old.endswith(".json"))[:-KEPT]:
            os.unlink(f"{directory}/{old}")
    except OSError:
        return
