"""Maintenance of a store: verification, statistics, and garbage collection."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TypeAlias

from mlcbuild.canon import Entry
from mlcbuild.store import layout
from mlcbuild.store.blobs import has_bytes
from mlcbuild.store.links import stamp
from mlcbuild.store.locks import wait_lock
from mlcbuild.store.records import Record
from mlcbuild.store.staging import living, remove
from mlcbuild.store.stamp import STAMP_NS
from mlcbuild.store.store import Store

KEPT_RECORDS = 3600.0
"""Seconds after the last use of a step's record during which garbage collection keeps the record while a
build runs. This is far longer than the interval at which a run marks the records that it uses."""
KEPT_BLOBS = 86_400.0
"""Seconds since a file was stored, or stored again (its ctime), during which garbage collection keeps it
while a build runs although no step record lists it, because its record may be about to be written."""


@dataclass(frozen=True)
class Verified:
    """The result of checking all bytes of a store. records: number of step records, damaged ones included;
    blobs, bytes: number and total size in bytes of the blobs (stored files) that are intact in the end.
    Messages name the step and file if a step's result lists the damaged file."""

    records: int
    blobs: int
    bytes: int
    damaged: tuple[str, ...]
    """Messages for blobs and step records of a store whose bytes do not match their names, except for those
    in `mended`. They were removed, unless the message says that they cannot be."""
    missing: tuple[str, ...]
    """Messages for files of step results that the store lacks and that were not downloaded again. The steps
    of these results run again."""
    unused: int
    """Number of blobs that no step's result contains, as killed runs leave them. `gc` removes them, or a
    later run uses them.
    """
    mended: tuple[str, ...] = ()
    """Messages for damaged or missing files of the store that were downloaded again."""

    @property
    def ok(self) -> bool:
        return not self.damaged and not self.missing


@dataclass(frozen=True)
class KindStatistics:
    """Statistics of the steps of one kind, the part of a step's name before its first "/". records: number of
    their step records; bytes: total size of the files that these records list, in bytes."""

    records: int = 0
    bytes: int = 0
    last_used: float = 0.0
    """The latest time at which the result of a step of one kind, such as "weights", was built or used, in
    seconds since 1970."""
    oldest_use: float = 0.0
    """The earliest last use among the results of the steps of one kind, such as "weights": that of the result
    that has been unused for longest. Building counts as use. In seconds since 1970."""


@dataclass(frozen=True)
class Status:
    """The numbers of the step records and blobs in a store, damaged ones included, and the blobs' total size
    in bytes."""

    root: Path
    records: int
    blobs: int
    bytes: int
    """Total size of all blobs in bytes, each counted once."""
    kinds: dict[str, KindStatistics] = field(default_factory=dict)
    """Kind of step, such as "weights" -> number, bytes and times of use of its step records. A blob that two
    records share is counted for each of them."""


@dataclass(frozen=True)
class Collected:
    """The number of step records and of blobs that garbage collection (gc) removed, and the total size of
    these blobs in bytes."""

    records: int
    blobs: int
    bytes: int


Mend: TypeAlias = Callable[[Entry], str]
"""Function that restores a missing or damaged file of the store from the file's entry (path, digest, size).
It returns "", or the reason why it could not."""


def verify(store: Store, mend: Mend | None = None) -> Verified:
    """Checks all of a store and returns what was damaged or missing: hashes every blob (stored file), and
    compares every step record with its key. Damaged ones are removed, and the steps whose results were
    damaged run again. It is safe while builds run.

    mend: function that restores a damaged or missing file that a record lists, for example from a remote
    cache, and returns "", or the reason why it could not; None: nothing is restored. Raises StoreError when
    the store cannot be read."""
    damaged: list[str] = []
    mended: list[str] = []
    good: dict[str, int] = {}
    bad: set[str] = set()
    with store.writing():
        layout.remove_links(str(store.root))
        named, count = _sound_records(store, damaged)
        users = {row[1]: (f"{name}: {row[0]}", Entry(*row)) for name, record in named for row in record.rows}
        for blob in _entries(store.root / "cas"):
            size = _check(blob)
            if size is not None:
                good[blob.name] = size
                continue
            if not os.path.lexists(blob):
                continue  # gc removed it meanwhile, or its damage was noticed by a run
            user, entry = users.get(blob.name, ("not used", None))
            replaced = _condemn(store, blob)
            if replaced is not None:
                good[blob.name] = replaced
                continue
            stays = "; it cannot be removed: make the store writable" if os.path.lexists(blob) else ""
            if mend is not None and entry is not None and not stays and not mend(entry):
                mended.append(f"blob {blob.name} ({user}) had content that does not match its name")
                good[blob.name] = entry.size
                continue
            bad.add(blob.name)
            damaged.append(f"blob {blob.name} ({user}) has content that does not match its name{stays}")
        named = [(name, record) for name, record in named if os.path.lexists(_place(store, record))]
        absent = {row[1] for _, record in named for row in record.rows} - good.keys() - bad
        for digest in [digest for digest in users if digest in absent]:
            user, entry = users[digest]
            if mend is not None and not mend(entry):
                mended.append(f"{user} (blob {digest}) was missing")
                good[digest] = entry.size
        missing = _missing(named, good, bad)
    unused = len(good.keys() - users.keys())
    return Verified(
        count, len(good), sum(good.values()), tuple(damaged), tuple(missing), unused, tuple(mended)
    )


def _missing(named: Iterable[tuple[str, Record]], good: Mapping[str, int], bad: Container[str]) -> list[str]:
    """Returns descriptions of the files that step records list and the store lacks, or has with another size.
    named: (step name, record) each; good: digest of an intact blob -> its size in bytes; bad: digests of
    damaged ones, which are not missing."""
    return [
        f"{name}: {path} (blob {digest})"
        for name, record in named
        for path, digest, size in record.rows
        if digest not in bad and good.get(digest) != size
    ]


def _place(store: Store, record: Record) -> Path:
    return store.root / "ac" / layout.shelved(record.key)


def _condemn(store: Store, blob: Path) -> int | None:
    """Removes a damaged blob, a path below the store's directory cas/; it stays if the store cannot be
    written. If another process has meanwhile replaced it by an intact blob, that stays, and its size in bytes
    is returned; else None."""
    with _alone(store) as alone:
        size = _check(blob)
        if alone and size is None:
            if blob == store.blob(blob.name):
                store.condemn(blob.name)
            else:
                remove(blob)
    return size


@contextmanager
def _alone(store: Store) -> Iterator[bool]:
    """Returns a context in which no other process and no other thread can publish results to the store or
    collect its garbage; waits, without a time limit, for those that do. It yields True, or False, with
    nothing locked, for a store whose lock file cannot be written."""
    with ExitStack() as stack:
        try:
            stack.enter_context(wait_lock(store.root / "lock", keep=True))
        except OSError:
            yield False
            return
        yield True


def status(store: Store) -> Status:
    """Counts the step records and blobs of a store, and returns their numbers and sizes, 0 if there is no
    store. Waits for a running garbage collection. Raises StoreError when the store cannot be read."""
    kinds: dict[str, KindStatistics] = {}
    with store.writing(), store.settled():
        named, count = _sound_records(store)
        for name, record in named:
            kind = name.partition("/")[0]
            used = _place(store, record).lstat().st_mtime
            old = kinds.get(kind, KindStatistics(last_used=used, oldest_use=used))
            kinds[kind] = KindStatistics(
                old.records + 1,
                old.bytes + record.size,
                max(old.last_used, used),
                min(old.oldest_use, used),
            )
        sizes = [blob.lstat().st_size for blob in _entries(store.root / "cas")]
    return Status(store.root, count, len(sizes), sum(sizes), dict(sorted(kinds.items())))


def gc(store: Store, *, unused_days: float | None = None, max_bytes: int | None = None) -> Collected:
    """Removes old and damaged records, then every blob that no step record names, abandoned downloads, old
    logs, and old copies of records of remote caches. Returns how many records and blobs it removed and the
    bytes of these blobs, 0 for a store that does not exist.

    Records not used for `unused_days` go, and those whose blobs alone exceed `max_bytes`. Of the rest, the
    most recently used stay as long as their blobs, each counted once, have at most `max_bytes`; from the
    first that does not fit on, only records stay whose blobs all belong to more recently used ones, since
    their removal frees nothing. Logs and copies go if they are older than `unused_days`. None: no limit
    of age, or of size. It is safe while builds run: then, whatever the limits, records used within
    KEPT_RECORDS stay (a run marks its records when it plans and repeatedly until it ends), and so do blobs
    without a record that are younger than KEPT_BLOBS (their record may be about to be written). Planning and
    publishing wait for gc, and gc waits for them. Raises StoreError if the store cannot be read or written.
    """
    if not store.root.exists():
        return Collected(0, 0, 0)
    with store.writing(), wait_lock(store.root / "lock", keep=True):
        layout.remove_links(str(store.root))
        now = time.time()
        young = (now - KEPT_RECORDS, now - KEPT_BLOBS) if living(store.root) else None
        return _collect(store, unused_days, max_bytes, young)


@dataclass
class _KeptBlobs:
    """The blobs of the records that garbage collection keeps. Records must be passed to `keep` from the most
    recently used one on."""

    limit: float
    """Maximum total size in bytes, each blob counted once, of the blobs of the step records that garbage
    collection keeps. It removes less recently used records whose blobs would exceed this, unless a running
    build may use them. Infinite: no limit."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Digest of each blob of the kept records -> its size in bytes."""
    total: int = 0
    is_full: bool = False
    """True once garbage collection met a record whose blobs alone would fit into the limit of total size, but
    not into the room left below it. Records used earlier than this one are removed, too, unless they add no
    bytes or must be kept."""

    def keep(self, record: Record, always: bool) -> bool:
        """Decides whether garbage collection keeps a record, adds its blobs to those kept if so, and returns
        True if so. A record is kept if it adds no bytes, or if its blobs fit into the room left below the
        limit and so did those of all more recently used records, except those whose blobs alone exceed the
        limit. always: True to keep it in any case."""
        sizes = {digest: size for _, digest, size in record.rows}
        added = sum(size for digest, size in sizes.items() if digest not in self.sizes)
        if added and not always:
            if sum(sizes.values()) > self.limit:
                return False
            self.is_full = self.is_full or self.total + added > self.limit
            if self.is_full:
                return False
        self.total += added
        self.sizes |= sizes
        return True


def _collect(
    store: Store, unused_days: float | None, max_bytes: int | None, young: tuple[float, float] | None
) -> Collected:
    """Removes damaged step records, those that were not used for `unused_days`, and those that exceed
    `max_bytes` by the rule of `gc`. Then removes every blob that no record names, partial downloads, and logs
    and copies of remote caches' records older than `unused_days`. None: no limit. Returns the numbers of
    removed records and blobs, and the blobs' bytes.

    young: (time, time) in seconds since 1970: records used after the first, and blobs and partial downloads
    written after the second, stay in any case; None: none is protected."""
    used, placed = young or (inf, inf)
    cutoff = 0.0 if unused_days is None else time.time() - unused_days * 86400
    by_use = sorted(_entries(store.root / "ac"), key=lambda path: path.lstat().st_mtime, reverse=True)
    kept_blobs = _KeptBlobs(inf if max_bytes is None else max_bytes)
    removed = 0
    for path in by_use:
        record = store.record(path.name)
        when = path.lstat().st_mtime
        is_old = when < min(used, cutoff)
        if record is None or is_old or not kept_blobs.keep(record, always=when >= used):
            remove(path)
            removed += 1
    named = (
        (blob, blob.lstat()) for blob in _entries(store.root / "cas") if blob.name not in kept_blobs.sizes
    )
    blobs = [(blob, stat_result.st_size) for blob, stat_result in named if stat_result.st_ctime < placed]
    for blob, _ in blobs:
        remove(blob)
    for part in _files(store.root / "partial"):
        if part.lstat().st_mtime < placed:
            part.unlink()
    for name in ("logs", "known"):
        for path in _files(store.root / name):
            if path.lstat().st_mtime < cutoff:
                path.unlink()
    return Collected(removed, len(blobs), sum(size for _, size in blobs))


def _sound_records(store: Store, damaged: list[str] | None = None) -> tuple[list[tuple[str, Record]], int]:
    """Returns a list of (step name, step record) for every intact record of a store, and the number of all
    records that it had, damaged ones included. To save memory, the records are without the inputs that they
    list. The store's pending warnings are discarded.

    damaged: list to which a message about each damaged record is appended; these records are removed. None:
    they stay."""
    records = []
    count = 0
    for path in _entries(store.root / "ac"):
        count += 1
        record = store.record(path.name)
        if record is not None and path.parent.name == path.name[:2]:
            # The second line is most of a record's memory.
            records.append((record.info.step, replace(record, rest=b"")))
        elif damaged is not None and os.path.lexists(path):
            with _alone(store) as alone:
                if alone and (store.record(path.name) is None or path.parent.name != path.name[:2]):
                    remove(path)
            stays = "; it cannot be removed: make the store writable" if os.path.lexists(path) else ""
            damaged.append(f"record {path.name} does not match its name{stays}")
    store.take_warnings()
    return records, count


def _check(blob: Path) -> int | None:
    """Hashes a blob, and returns its size in bytes if its bytes and its path match its digest, None if they
    do not or it is gone. Also restores its mtime if a copy of the store lost it and this user may set it.
    Raises OSError if it cannot be read."""
    try:
        stat_result = blob.lstat()
        if blob.parent.name != blob.name[:2] or not has_bytes(blob, blob.name, stat_result.st_size):
            return None
        if stat_result.st_mtime_ns != STAMP_NS:
            with suppress(OSError):  # The store is read-only, or the blob another user's.
                stamp(blob)
        return stat_result.st_size
    except FileNotFoundError:
        return None


def _entries(root: Path) -> Iterator[Path]:
    """Yields the sorted paths of all that can be a step record or blob. root: the store's directory ac/ or
    cas/; everything in its subdirectories with names of two characters is yielded, and whatever else, a file
    or a directory, is in it; nothing if it is missing."""
    for shelf in sorted(root.iterdir()) if root.is_dir() else []:
        if shelf.is_dir() and len(shelf.name) == 2 and not shelf.is_symlink():
            yield from sorted(shelf.iterdir())
        else:
            yield shelf


def _files(root: Path) -> Iterator[Path]:
    """Yields all files below the directory `root`, sorted, so that two reports of one state are equal; none
    if it is missing."""
    for directory, names, files in os.walk(root):
        names.sort()
        yield from (Path(directory, name) for name in sorted(files))
