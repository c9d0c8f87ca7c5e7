"""The content store: records by key, blobs by digest, any number of processes at once.

    ac/k0/<key>          record (mlcbuild.records), written last, never changed
    cas/d0/<digest>      blob: a file's bytes, read-only, mtime STAMP
    tmp/<id>/            where a running process works; tmp/<id>.lock is held while it lives
    locks/<key>          held while a step is built
    logs/                the latest log of each step
    known/k0/<key>       record of a remote whose files were not all needed here (mlcbuild.remotes.sharing)
    partial/<digest>     what has arrived of a blob; locks/<digest> is held while it grows
    receipts/, runs/     what makes a run without work short (mlcbuild.receipt); logs (mlcbuild.runlog)
    index.sqlite         remembered digests and recent keys (mlcbuild.statcache); may be deleted
    lock                 shared by builders, exclusive for gc

Files appear under their final name by an atomic rename (or link) within the store, blobs before the record
that names them, so a process may be killed anywhere: what is visible is whole. No path of this machine is
inside, so a store can be copied.

A blob is trusted while its size is right and its mtime is STAMP: any write, through a hard link in an
exported bundle too, moves the mtime. Otherwise it is hashed again, and one whose bytes are wrong counts as
missing. Damage below the filesystem (bit rot) shows only in `upkeep.verify`, which hashes everything.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlcbuild.canon import Entry, Tree, canonical, file_digest, noted_digest
from mlcbuild.errors import StepError, StoreError
from mlcbuild.links import STAMP, copy, link_or_copy, stamp
from mlcbuild.locks import Lock, holder, try_lock, wait_lock
from mlcbuild.records import Made, Record
from mlcbuild.staging import Session
from mlcbuild.statcache import StatCache

FORMAT = "mlcbuild-store/1"
_STAMP_NS = STAMP * 1_000_000_000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOTED_NS = 600 * 1_000_000_000


def default_root(environ: Mapping[str, str] = os.environ) -> Path:
    """$MLCBUILD_STORE, or the user's cache directory on this system."""
    if chosen := environ.get("MLCBUILD_STORE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path("~/Library/Caches/mlcbuild").expanduser()
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "mlcbuild"


def is_full(error: OSError) -> bool:
    """Whether an operation failed for want of space."""
    return error.errno in _FULL


@dataclass(frozen=True)
class Published:
    """The record that now stands for a key."""

    record: Record
    fault: str = ""
    """Set when another result stood there already: the step is not reproducible. Says what differs."""


class Store:
    """A directory, created when first written to. Raises StoreError when it is of an unknown format."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._ac = f"{self.root}/ac/"
        self._cas = f"{self.root}/cas/"
        self._warnings: list[str] = []
        self._told: set[str] = set()
        marker = self.root / "store.json"
        if marker.exists():
            with self.writing():
                self._check(marker.read_bytes())

    def _check(self, marker: bytes) -> None:
        try:
            found = json.loads(marker)["format"]
        except (ValueError, KeyError, TypeError):
            found = "something unreadable"
        if found != FORMAT:
            raise StoreError(
                f"{self.root}/store.json: the store's format is {found}, this mlcbuild knows {FORMAT}; "
                "update mlcbuild or set MLCBUILD_STORE to another directory"
            )

    @cached_property
    def cache(self) -> StatCache:
        return StatCache(self.root / "index.sqlite")

    def take_warnings(self) -> list[str]:
        """Sentences about damage met since the last call, each only once in the life of this object."""
        found = [sentence for sentence in dict.fromkeys(self._warnings) if sentence not in self._told]
        self._told.update(found)
        self._warnings = []
        return found

    # Reading

    def record(self, key: str) -> Record | None:
        """The record of a key, whether or not its files are all there."""
        try:
            descriptor = os.open(f"{self._ac}{key[:2]}/{key}", os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self.root}: cannot read the record {key}: {error.strerror}") from None
        try:
            data = os.read(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        try:
            return Record.decode(key, data)
        except (ValueError, KeyError, TypeError):
            self._warnings.append(f"{self.root}: the record {key} is damaged; its step is built again")
            return None

    def lost(self, record: Record) -> str:
        """Words for the first file of a record that is not in the store as it was written; "" if none."""
        for path, digest, size in record.rows:
            name = f"{self._cas}{digest[:2]}/{digest}"
            try:
                found = os.stat(name)  # noqa: PTH116 - ten thousand times in a run without work
            except OSError:
                return f"{path} is missing from the store"
            if found.st_mtime_ns == _STAMP_NS and found.st_size == size:
                continue
            if not self._restamped(Path(name), digest, size):
                self._warnings.append(
                    f"{self.root}: {path} of step {self._step(record)} was changed in the store after it was "
                    f"written (blob {digest}); it is not used"
                )
                return f"{path} is damaged in the store"
        return ""

    def find(self, key: str) -> Record | None:
        """The record of a key when it and all its files can be used."""
        record = self.record(key)
        return record if record is not None and not self.lost(record) else None

    @staticmethod
    def _step(record: Record) -> str:
        try:
            return record.made.step
        except ValueError:
            return record.key

    @staticmethod
    def _restamped(blob: Path, digest: str, size: int) -> bool:
        """Hashes a blob whose mtime was lost, as by a plain copy of the store; stamps it when it is right."""
        try:
            if blob.stat().st_size != size or file_digest(blob) != digest:
                return False
            stamp(blob)
        except PermissionError:
            return True  # another user's store: right, and hashed each time
        except OSError:
            return False
        return True

    def blob(self, digest: str) -> Path:
        return Path(f"{self._cas}{digest[:2]}/{digest}")

    def link_out(self, files: Iterable[Entry], directory: Path) -> None:
        """Makes `files` below a directory, as hard links where possible. Raises StoreError, OSError."""
        made = set()
        for entry in files:
            place = directory / entry.path
            if place.parent not in made:
                place.parent.mkdir(parents=True, exist_ok=True)
                made.add(place.parent)
            try:
                link_or_copy(self.blob(entry.digest), place)
            except FileNotFoundError:
                raise StoreError(
                    f"{self.root}: the blob {entry.digest} of {entry.path} is gone; run again"
                ) from None

    def touch(self, record: Record) -> None:
        """Notes that a record is used, unless that was noted in the last minutes: see `upkeep.gc`."""
        path = f"{self._ac}{record.key[:2]}/{record.key}"
        try:
            if time.time_ns() - os.stat(path).st_mtime_ns > _NOTED_NS:  # noqa: PTH116
                os.utime(path)
        except OSError:
            return  # gone, or another user's: nothing to note

    # Writing

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an OSError of the store itself into a StoreError that says what to do."""
        try:
            yield
        except OSError as error:
            raise self.explain(error) from error

    def explain(self, error: OSError) -> StoreError:
        if is_full(error):
            why = "no space is left; free some, run `mlcbuild cache gc`"
        else:
            why = f"{error.strerror or error}; make it writable"
        return StoreError(
            f"the store at {self.root} cannot be written: {why}, or set MLCBUILD_STORE elsewhere"
        )

    def session(self) -> Session:
        """A place to work in, until closed. Raises StoreError."""
        with self.writing():
            for name in ("ac", "cas", "tmp", "locks", "logs"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            self._mark()
            return Session.start(self.root)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Keeps gc from changing anything meanwhile, and waits while it does.

        For what must not be torn: finding records and noting their use, placing blobs and their record.
        """
        with ExitStack() as stack:
            with suppress(OSError):  # no store yet, or another user's
                stack.enter_context(wait_lock(self.root / "lock", shared=True, keep=True))
            yield

    def _mark(self) -> None:
        marker = self.root / "store.json"
        if not marker.exists():
            part = marker.with_name(f"store.json.{secrets.token_hex(4)}")
            part.write_bytes(canonical({"format": FORMAT}) + b"\n")
            part.replace(marker)

    def try_lock(self, key: str) -> Lock | None:
        """The right to build a key; None while another process has it. Raises StoreError."""
        with self.writing():
            return try_lock(self.root / "locks" / key)

    def log(self, step: str) -> Path:
        """Where the latest log of a step lies."""
        parts = [re.sub(r"[^A-Za-z0-9._+-]", "_", part).lstrip(".") or "_" for part in step.split("/")]
        return self.root / "logs" / ("/".join(parts) + ".log")

    def holder(self, key: str) -> str:
        return holder(self.root / "locks" / key)

    def publish(self, key: str, made: Made, out: Path, known: Mapping[tuple[int, int], Entry]) -> Published:
        """Takes everything below `out` into the store, blobs first, then the record; the first record wins.

        `out` lies in a session's directory. `known` maps (device, inode) of the step's inputs to what
        they are: an output that is a hard link of an input is not hashed. Raises StepError when the tree
        holds something else than files, StoreError.
        """
        with self.writing(), self.settled():
            entries = [self._adopt(path, name, known) for path, name in _walk(out, made.step)]
            record = Record.create(key, Tree.of(entries), made)
            part = out.parent / "record"
            _write(part, record.encode())
            return self._keep(record, part)

    def put_blob(self, digest: str, part: Path, *, hashed: bool = False) -> None:
        """Moves a file of the store's filesystem in as a blob. Raises StoreError when its bytes are wrong;
        with `hashed` the caller has seen to that.
        """
        with self.writing():
            if not hashed and file_digest(part) != digest:
                raise StoreError(
                    f"a file that should have the digest {digest} has other bytes: it was not taken"
                )
            self._place(part, digest)

    def put_record(self, record: Record, part: Path) -> Published:
        """Takes a record from elsewhere, staged through the new file `part`; its blobs must be there."""
        with self.writing(), self.settled():
            if missing := self.lost(record):
                raise StoreError(f"a record cannot be taken before its files: {missing}")
            _write(part, record.encode())
            return self._keep(record, part)

    def _adopt(self, path: Path, name: str, known: Mapping[tuple[int, int], Entry]) -> Entry:
        found = path.stat()
        same = known.get((found.st_dev, found.st_ino))
        if same is not None and found.st_mtime_ns == _STAMP_NS and self.hold(same.digest, same.size):
            return Entry(name, same.digest, same.size)
        noted = noted_digest(path)
        if found.st_nlink > 1:  # shares its inode with a file that is not ours to make read-only
            fresh = path.with_name(f"{path.name[:100]}.{secrets.token_hex(8)}")
            copy(path, fresh)
            path = fresh
        entry = Entry(name, noted or file_digest(path), found.st_size)
        self._place(path, entry.digest)
        return entry

    def hold(self, digest: str, size: int) -> bool:
        """As `holds`, and tells gc that the blob is wanted though no record may name it."""
        found = self.holds(digest, size)
        if found:
            with suppress(OSError):
                stamp(self.blob(digest))
        return found

    def holds(self, digest: str, size: int) -> bool:
        """Whether a blob is there as it was written."""
        try:
            found = self.blob(digest).stat()
        except OSError:
            return False
        right = found.st_mtime_ns == _STAMP_NS and found.st_size == size
        return right or self._restamped(self.blob(digest), digest, size)

    def _place(self, part: Path, digest: str) -> None:
        if self.hold(digest, part.stat().st_size):
            return
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a power cut must not leave a name without its bytes
        finally:
            os.close(descriptor)
        stamp(part)
        _move(part, self.blob(digest))

    def _keep(self, record: Record, part: Path) -> Published:
        place = Path(f"{self._ac}{record.key[:2]}/{record.key}")
        place.parent.mkdir(exist_ok=True)
        try:
            place.hardlink_to(part)  # unlike a rename, fails when a record stands there
            return Published(record)
        except FileExistsError:
            pass
        except OSError:
            if not place.exists():  # no hard links on this filesystem
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
    """Each file below `out` and its name in the tree, sorted. Raises StepError for anything else."""
    found = []
    for directory, names, files in os.walk(out):
        for name in [*files, *(n for n in names if Path(directory, n).is_symlink())]:
            path = Path(directory, name)
            relative = path.relative_to(out).as_posix()
            if not stat.S_ISREG(path.lstat().st_mode):
                raise StepError(
                    f"step {step}: its output {relative} is not a regular file; actions write only files"
                )
            try:
                relative.encode()
            except UnicodeEncodeError:
                raise StepError(f"step {step}: the name of its output {relative!r} is not UTF-8") from None
            found.append((path, relative))
    return iter(sorted(found, key=lambda item: item[1]))


def _write(path: Path, data: bytes) -> None:
    """Not synced: a record that a power cut tore does not parse, and counts as none."""
    with path.open("xb") as file:
        file.write(data)
    path.chmod(0o444)


def _move(part: Path, place: Path) -> None:
    try:
        part.replace(place)
    except FileNotFoundError:
        place.parent.mkdir(exist_ok=True)
        part.replace(place)


def _difference(first: Record, second: Record) -> str:
    before = {path: digest for path, digest, _ in first.rows}
    after = {path: digest for path, digest, _ in second.rows}
    paths = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    return (
        f"step {second.made.step} is not reproducible: built twice from the same inputs it gave different "
        f"bytes in {shown}; key {second.key}"
    )
