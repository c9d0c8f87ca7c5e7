"""The content store: records by key and blobs by digest, shared by any number of processes.

    ac/k0/<key>          record (mlcbuild.store.records), written last, never changed
    cas/d0/<digest>      blob: a file's bytes, read-only, mtime STAMP
    tmp/<id>/            working directory of a running process, which holds tmp/<id>.lock
    locks/<key>          held while a step is built
    logs/                the latest log of each step
    known/k0/<key>       record of a remote whose files were not all needed here (mlcbuild.remotes.sharing)
    partial/<digest>     downloaded part of a blob; locks/<digest> is held while it grows
    receipts/, runs/     receipts of runs (receipt.py); logs of runs (reports/runlog.py)
    index.sqlite         cached digests and recent keys (mlcbuild.store.statcache); may be deleted
    user-UID/            the same file of each user, in a store that several users can write
    lock                 shared by builders, exclusive for gc

`k0` and `d0` stand for the first two characters of the key and of the digest.

Files get their final name by an atomic rename (or link) within the store, blobs before the record that names
them, so a process may be killed at any point and every visible file is complete. The store holds no path of
this machine, so it can be copied.

Everything is checked before it is used. A record must match its key: see records.py; any other counts as
missing, with a warning. Every blob is hashed when its bytes are used: as an input of a step, in a bundle, in
an archive, or in an upload (`link_out`, `sound`). A damaged blob is removed, and the run that met it builds
it again (`Session.run`).

Only the question whether there is any work is decided by stats instead of hashes: a run that finds everything
in place trusts a regular file with the right size and the mtime STAMP. Any write, even through a hard link in
an exported bundle, changes the mtime, and such a blob is hashed. Bytes that change without a write (bit rot)
are detected when they are used, or by `upkeep.verify`, which hashes everything.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlcbuild_format import regular

from mlcbuild.canon import Entry, Tree, canonical, file_digest, noted_digest
from mlcbuild.errors import SetupError, StepError, StoreError
from mlcbuild.store import layout
from mlcbuild.store.blobs import Blobs, make_shelf, make_way, restamped
from mlcbuild.store.links import copy
from mlcbuild.store.locks import HeldLock, holder, try_lock, wait_lock
from mlcbuild.store.record_form import path_fault, same_but_for_case
from mlcbuild.store.records import LARGEST, BuildInfo, Expected, Record
from mlcbuild.store.staging import StagingArea
from mlcbuild.store.stamp import STAMP_NS
from mlcbuild.store.statcache import StatCache

FORMAT = "mlcbuild-store/1"


def default_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the absolute path of the store: that in $MLCBUILD_STORE, in which ~ stands for the home
    directory and a relative path starts from the current directory, or, if it is not set, one in the user's
    cache directory. Raises SetupError if that path starts with a home directory which the system does not
    know."""
    root = layout.default_root(environ)
    if not root:
        raise SetupError(
            "this system knows no home directory for the store: set MLCBUILD_STORE to a directory, or name "
            "one with --store"
        )
    return Path(root)


@dataclass(frozen=True)
class Published:
    """The outcome of publishing a step's result: the record that the store now has for the key, which may be
    an earlier one, and a message if an earlier result had other files."""

    record: Record
    fault: str = ""
    """An error message with the files that differ from an earlier result that the store had for the same
    cache key, if the step is not reproducible; "" otherwise."""


class Store(Blobs):
    """A store of the results of build steps in a directory, which the first write creates: records, each with
    a step's inputs and the digests of its files, and blobs, the files' contents. Raises StoreError if the
    directory is a store of another format or its format cannot be read, or if its path is too long or not
    UTF-8.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root.absolute())
        if fault := layout.root_fault(str(self.root)):
            raise StoreError(
                f"{self.root}: the store's path {fault}; set MLCBUILD_STORE to another directory"
            )
        self._ac = f"{self.root}/ac/"
        self._warnings: list[str] = []
        self._reported: set[str] = set()
        marker = self.root / "store.json"
        if os.path.lexists(marker):
            try:
                self._check(regular.read(marker, 1 << 16, follow_link=False))
            except OSError as error:
                raise StoreError(
                    f"{marker}: cannot be read: {error.strerror or error}; restore it, or set MLCBUILD_STORE "
                    "to another directory"
                ) from None

    def _check(self, marker: bytes) -> None:
        try:
            version_ = json.loads(marker)["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            version_ = "something unreadable"
        if version_ != FORMAT:
            raise StoreError(
                f"{self.root}/store.json: the store's format is {version_}, but this mlcbuild "
                f"reads {FORMAT}; "
                "update mlcbuild or set MLCBUILD_STORE to another directory"
            )

    @cached_property
    def cache(self) -> StatCache:
        return StatCache(Path(layout.private_directory(str(self.root)), "index.sqlite"))

    def take_warnings(self) -> list[str]:
        """Returns the warnings about damage in the store since the last call; each is returned only once."""
        sentences = [sentence for sentence in dict.fromkeys(self._warnings) if sentence not in self._reported]
        self._reported.update(sentences)
        self._warnings = []
        return sentences

    # Reading

    def record(self, key: str, expected: Callable[[], Expected] | None = None) -> Record | None:
        """Returns the step record with the cache key `key`, whether or not its files are in the store; None
        if there is none. A record that is damaged, cannot be read, or does not match its key counts as
        missing, with a warning.

        expected: function that returns the texts which the record must contain, for a caller that has just
        computed the key from them; comparing texts is faster than parsing the record.
        """
        path = f"{self._ac}{layout.shelved(key)}"
        try:
            return Record.checked(key, regular.read(path, LARGEST, follow_link=False), expected)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            if not self.root.is_dir():
                return None  # The first write reports a path that cannot be a store.
            why = error.strerror if isinstance(error, OSError) else error
            self._warnings.append(f"{path}: the record is not used: {why}; its step is built again")
            return None

    def lost(self, record: Record) -> str:
        """Returns a description of the first file of a step record that is missing or damaged in the store;
        "" if all are intact. Only files whose stat is not as the store wrote it are read; a damaged one is
        also noted as a warning.
        """
        for path, digest, size in record.rows:
            name = f"{self._cas}{layout.shelved(digest)}"
            try:
                stat_result = os.lstat(name)  # called ten thousand times in a run without work
            except OSError:
                return f"{path} is missing from the store"
            if layout.is_as_written(stat_result, size):
                continue
            if not restamped(Path(name), digest, size):
                self._warnings.append(
                    f"{self.root}: {path} of step {self._step(record)} was changed in the store after it was "
                    f"written (blob {digest}); it is not used"
                )
                return f"{path} is damaged in the store"
        return ""

    def find(self, key: str) -> Record | None:
        """Returns the step record of a step's key if all its files are in the store and unchanged; None
        otherwise. A file whose size and mtime are as the store wrote them counts as unchanged; others are
        hashed."""
        record = self.record(key)
        return record if record is not None and not self.lost(record) else None

    @staticmethod
    def _step(record: Record) -> str:
        try:
            return record.info.step
        except ValueError:
            return record.key

    def touch(self, record: Record) -> None:
        """Marks a step record as used now, so that garbage collection keeps it, unless that was done in the
        last ten minutes. Raises nothing if it cannot, as for a record that is gone or another user's."""
        layout.note_use(f"{self._ac}{layout.shelved(record.key)}")

    # Writing

    def staging(self) -> StagingArea:
        """Creates and returns a working directory for this process in the store, which exists until it is
        closed; creates the store if it is missing. Raises StoreError if the store cannot be written."""
        with self.writing():
            layout.remove_links(str(self.root))
            for name in ("ac", "cas", "tmp", "locks", "logs"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            self._mark()
            return StagingArea.start(self.root)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Returns a context during which no garbage collection of the store runs; several processes may be in
        it. It first waits for a running one, without a time limit. If the store does not exist or its lock
        cannot be opened, nothing is locked.

        Used around operations that garbage collection must not split: looking up records and marking them as
        used, and placing blobs and their record."""
        with ExitStack() as stack:
            with suppress(OSError):  # There is no store yet, or it belongs to another user.
                stack.enter_context(wait_lock(self.root / "lock", shared=True, keep=True))
            yield

    def _mark(self) -> None:
        marker = self.root / "store.json"
        if not marker.exists():
            part = marker.with_name(f"store.json.{secrets.token_hex(4)}")
            part.write_bytes(canonical({"format": FORMAT}) + b"\n")
            part.replace(marker)

    def try_lock(self, key: str) -> HeldLock | None:
        """Acquires the lock that the builder of a step's key holds, and returns it, for the caller to
        release; returns None at once while it is held, by another process or this one. Raises StoreError if
        the lock file cannot be created."""
        with self.writing():
            return try_lock(self.root / "locks" / key)

    def log(self, step: str) -> Path:
        """Returns the path of the latest log of the step called `step`, which may not exist."""
        parts = [re.sub(r"[^A-Za-z0-9._+-]", "_", part).lstrip(".") or "_" for part in step.split("/")]
        return self.root / "logs" / ("/".join(parts) + ".log")

    def holder(self, key: str) -> str:
        return holder(self.root / "locks" / key)

    def publish(
        self, key: str, info: BuildInfo, out: Path, linked: Mapping[tuple[int, int], Entry]
    ) -> Published:
        """Moves all files below the directory `out` into the store as a step's result (copies those that have
        other hard links): the files first, then the record that lists them. Returns the record that the store
        then has for the key: an older one stays if it and its files are intact. The emptied directories stay.

        out: inside a working directory of the store. linked: (device, inode) of a file of the step's inputs
        -> its path, digest and size; an output that is a hard link of one is not hashed. Raises StoreError if
        the store cannot be written, StepError when `out` holds anything but regular files, or a file name
        that records do not allow."""
        with self.writing(), self.settled():
            entries = [self._adopt(path, name, linked) for path, name in _walk(out, info.step)]
            record = Record.create(key, Tree.of(entries), info)
            part = out.parent / "record"
            _write(part, record.encode())
            return self._keep(record, part)

    def put_record(self, record: Record, part: Path) -> Published:
        """Stores a step record that was built elsewhere, unless the store has an intact one for the key, and
        returns the one that it then has. The record's blobs must already be in the store. part: path of a new
        temporary file on the store's filesystem, in which the record is written before it is linked or moved
        to its place; it may stay. Raises StoreError if a blob is missing or damaged, or the record cannot be
        written."""
        with self.writing(), self.settled():
            if missing := self.lost(record):
                raise StoreError(f"a record cannot be stored before its files: {missing}")
            _write(part, record.encode())
            return self._keep(record, part)

    def _adopt(self, path: Path, name: str, linked: Mapping[tuple[int, int], Entry]) -> Entry:
        stat_result = path.stat()
        same = linked.get((stat_result.st_dev, stat_result.st_ino))
        if same is not None and stat_result.st_mtime_ns == STAMP_NS and self.hold(same.digest, same.size):
            return Entry(name, same.digest, same.size)
        noted = noted_digest(path)
        # A file outside the store has the same inode and must not become read-only.
        if stat_result.st_nlink > 1:
            fresh = path.with_name(f"{path.name[:100]}.{secrets.token_hex(8)}")
            copy(path, fresh)
            path = fresh
        entry = Entry(name, noted or file_digest(path), stat_result.st_size)
        self._place(path, entry.digest)
        return entry

    def _keep(self, record: Record, part: Path) -> Published:
        place = Path(f"{self._ac}{layout.shelved(record.key)}")
        make_shelf(place.parent)
        make_way(place)
        try:
            place.hardlink_to(part)  # Unlike a rename, this fails if a record already exists.
            return Published(record)
        except FileExistsError:
            pass
        except OSError:
            if not place.exists():  # this filesystem has no hard links
                part.replace(place)
                return Published(record)
        first = self.record(record.key)
        if first is not None and not self.lost(first):
            return Published(first, "" if first.tree == record.tree else _difference(first, record))
        part.replace(place)
        return Published(
            record, "" if first is None or first.tree == record.tree else _difference(first, record)
        )


def _walk(out: Path, step: str) -> Iterator[tuple[Path, str]]:
    """Returns an iterator of (path, path relative to `out`) of the files below `out`, sorted. Raises
    StepError at once for anything but directories and regular files, for names that records do not allow, and
    for two that differ only in case. step: name of the step, for the error."""
    outputs = []
    for directory, names, files in os.walk(out):
        if same := same_but_for_case([*files, *names]):
            first, second = (Path(directory, name).relative_to(out).as_posix() for name in same)
            raise StepError(
                f"step {step}: its outputs {first!r} and {second!r} differ only in case, and are one file on"
                " some file systems: rename one"
            )
        for name in [*files, *(n for n in names if Path(directory, n).is_symlink())]:
            path = Path(directory, name)
            relative = path.relative_to(out).as_posix()
            if not stat.S_ISREG(path.lstat().st_mode):
                raise StepError(
                    f"step {step}: its output {relative} is not a regular file; actions write only files"
                )
            if fault := path_fault(relative):
                raise StepError(f"step {step}: the name of its output {relative!r} {fault}")
            outputs.append((path, relative))
    return iter(sorted(outputs, key=lambda item: item[1]))


def _write(path: Path, data: bytes) -> None:
    """Writes `data` to a new, read-only file without fsync. Raises OSError, also if the file exists. A step
    record that a power failure cuts short does not parse and is ignored."""
    with path.open("xb") as file:
        file.write(data)
    path.chmod(0o444)


def _difference(first: Record, second: Record) -> str:
    before = {path: digest for path, digest, _ in first.rows}
    after = {path: digest for path, digest, _ in second.rows}
    paths = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    return (
        f"step {second.info.step} is not reproducible: built twice from the same inputs it gave different "
        f"bytes in {shown}; key {second.key}"
    )
