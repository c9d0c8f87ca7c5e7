"""Looking after a store: is everything whole, what is in it, what can go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TypeAlias

from mlcbuild.canon import Entry, file_digest
from mlcbuild.links import STAMP, stamp
from mlcbuild.locks import wait_lock
from mlcbuild.records import Record
from mlcbuild.staging import living
from mlcbuild.store import Store

KEPT_RECORDS = 3600.0
"""Seconds since its last use that a record stays beside a build; far more than between two notes of a run."""
KEPT_BLOBS = 86_400.0
"""Seconds since it was placed that a blob without a record stays beside a build."""


@dataclass(frozen=True)
class Verified:
    """What a full check found. Sentences name the step and file wherever a record tells."""

    records: int
    blobs: int
    bytes: int
    damaged: tuple[str, ...]
    """Blobs and records whose bytes are not what their names say."""
    missing: tuple[str, ...]
    """Files that a record names and the store lacks: their steps run again."""
    unused: int
    """Blobs that no record names, as a killed run leaves them: `gc` removes them, or a re-run uses them."""
    mended: tuple[str, ...] = ()
    """What was damaged or missing and is right now."""

    @property
    def ok(self) -> bool:
        return not self.damaged and not self.missing


@dataclass(frozen=True)
class Kind:
    """Steps of one kind: the first part of their names."""

    records: int = 0
    bytes: int = 0
    last_used: float = 0.0
    """When any of them was made or used last, in seconds since 1970."""
    oldest_use: float = 0.0
    """When the one that gc would take first was made or used last."""


@dataclass(frozen=True)
class Status:
    root: Path
    records: int
    blobs: int
    bytes: int
    """Of all blobs, each counted once."""
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Step kind -> its records and their bytes; a blob that two kinds share is counted in both."""


@dataclass(frozen=True)
class Collected:
    """What gc removed."""

    records: int
    blobs: int
    bytes: int


Mend: TypeAlias = Callable[[Entry], str]
"""Brings a blob that is not there into the store; "" or why it could not."""


def verify(store: Store, *, repair: bool = False, mend: Mend | None = None) -> Verified:
    """Hashes every blob and checks every record against its key. May run beside builds.

    With `mend`, files of records that are damaged or missing are fetched anew. `repair` removes what is
    damaged then, so that the steps concerned run again. Raises StoreError when the store cannot be read.
    """
    damaged: list[str] = []
    missing: list[str] = []
    mended: list[str] = []
    good: dict[str, int] = {}
    bad: set[str] = set()
    with store.writing():
        named, count = _sound_records(store, damaged, repair)
        users = {row[1]: (f"{name}: {row[0]}", Entry(*row)) for name, record in named for row in record.rows}
        for blob in _files(store.root / "cas"):
            found = _check(blob)
            if found is not None:
                good[blob.name] = found
                continue
            user, entry = users.get(blob.name, ("not used", None))
            if repair or (mend is not None and entry is not None):
                blob.unlink(missing_ok=True)
            if mend is not None and entry is not None and not mend(entry):
                mended.append(f"blob {blob.name} ({user}) had other bytes than its name says")
                good[blob.name] = entry.size
                continue
            bad.add(blob.name)
            damaged.append(f"blob {blob.name} ({user}) has other bytes than its name says")
        gone = [digest for digest in users if digest not in good and digest not in bad]
        for user, entry in (users[digest] for digest in gone):
            if mend is not None and not mend(entry):
                mended.append(f"{user} (blob {entry.digest}) was missing")
                good[entry.digest] = entry.size
        for name, record in named:
            lost = [row for row in record.rows if good.get(row[1]) != row[2]]
            missing += [f"{name}: {path} (blob {digest})" for path, digest, _ in lost if digest not in bad]
            if lost and repair:
                (store.root / "ac" / record.key[:2] / record.key).unlink(missing_ok=True)
    unused = len(good.keys() - users.keys())
    return Verified(
        count, len(good), sum(good.values()), tuple(damaged), tuple(missing), unused, tuple(mended)
    )


def status(store: Store) -> Status:
    """Counts and bytes. Raises StoreError when the store cannot be read."""
    kinds: dict[str, Kind] = {}
    with store.writing():
        named, count = _sound_records(store, [], repair=False)
        for name, record in named:
            kind = name.partition("/")[0]
            used = (store.root / "ac" / record.key[:2] / record.key).stat().st_mtime
            old = kinds.get(kind, Kind(last_used=used, oldest_use=used))
            kinds[kind] = Kind(
                old.records + 1,
                old.bytes + record.size,
                max(old.last_used, used),
                min(old.oldest_use, used),
            )
        sizes = [blob.stat().st_size for blob in _files(store.root / "cas")]
    return Status(store.root, count, len(sizes), sum(sizes), dict(sorted(kinds.items())))


def gc(store: Store, *, unused_days: float | None = None, max_bytes: int | None = None) -> Collected:
    """Removes the records not used for `unused_days`, then the least recently used ones until the rest
    fits into `max_bytes`, then every blob that no record names, and old logs.

    May run beside builds. While one works in the store, what was used lately stays whatever the limits say:
    records by KEPT_RECORDS (a run notes what it builds on when it plans, and again and again until it ends),
    blobs that no record names by KEPT_BLOBS (they may belong to a record that is on its way). Plans and
    publications, which rely on what they see for a moment, wait until this is done, and this for them.
    Raises StoreError.
    """
    if not store.root.exists():
        return Collected(0, 0, 0)
    with store.writing(), wait_lock(store.root / "lock", keep=True):
        now = time.time()
        young = (now - KEPT_RECORDS, now - KEPT_BLOBS) if living(store.root) else None
        return _collect(store, unused_days, max_bytes, young)


def _collect(
    store: Store, unused_days: float | None, max_bytes: int | None, young: tuple[float, float] | None
) -> Collected:
    """`young`: since when records and blobs were used that stay whatever else is said; None for none."""
    used, placed = young or (inf, inf)
    cutoff = 0.0 if unused_days is None else time.time() - unused_days * 86400
    by_use = sorted(_files(store.root / "ac"), key=lambda path: path.stat().st_mtime, reverse=True)
    kept: dict[str, int] = {}
    held = removed = 0
    for path in by_use:
        record = store.record(path.name)
        fresh = (
            {} if record is None else {digest: size for _, digest, size in record.rows if digest not in kept}
        )
        grown = held + sum(fresh.values())
        when = path.stat().st_mtime
        old = when < cutoff or (max_bytes is not None and grown > max_bytes)
        if record is None or (old and when < used):
            path.unlink()
            removed += 1
        else:
            kept |= fresh
            held = grown
    named = ((blob, blob.stat()) for blob in _files(store.root / "cas") if blob.name not in kept)
    blobs = [(blob, found.st_size) for blob, found in named if found.st_ctime < placed]
    for blob, _ in blobs:
        blob.unlink()
    for part in _files(store.root / "partial"):
        if part.stat().st_mtime < placed:
            part.unlink()
    for name in ("logs", "known"):
        for path in _files(store.root / name):
            if path.stat().st_mtime < cutoff:
                path.unlink()
    return Collected(removed, len(blobs), sum(size for _, size in blobs))


def _sound_records(store: Store, damaged: list[str], repair: bool) -> tuple[list[tuple[str, Record]], int]:
    """(step name, record without its second line) of every sound record, and how many files there are."""
    found = []
    count = 0
    for path in _files(store.root / "ac"):
        count += 1
        record = store.record(path.name)
        store.take_warnings()
        try:
            if record is not None and record.consistent():
                found.append((record.made.step, replace(record, rest=b"")))  # the rest is most of its memory
                continue
        except ValueError:
            pass
        damaged.append(f"record {path.name} is not what its name says")
        if repair:
            path.unlink(missing_ok=True)
    return found, count


def _check(blob: Path) -> int | None:
    """The size of a blob whose bytes are right, stamped if a copy of the store lost that; or None."""
    try:
        found = blob.stat()
        if file_digest(blob) != blob.name:
            return None
        if found.st_mtime_ns != STAMP * 10**9 and os.access(blob.parent, os.W_OK):
            stamp(blob)
        return found.st_size
    except FileNotFoundError:
        return None


def _files(root: Path) -> Iterator[Path]:
    """All files below `root`, sorted, so that two reports of one state are equal."""
    for directory, names, files in os.walk(root):
        names.sort()
        yield from (Path(directory, name) for name in sorted(files))
