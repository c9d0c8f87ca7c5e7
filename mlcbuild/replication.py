"""Copies step records and the files of their results between a store and remote caches, outside of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

from mlcbuild.build.plan import Plan
from mlcbuild.canon import Entry
from mlcbuild.errors import RemoteError
from mlcbuild.keyfile import Signer
from mlcbuild.remotes import Remote
from mlcbuild.remotes.background import Background
from mlcbuild.remotes.link import Link, UploadCount
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.store import upkeep
from mlcbuild.store.records import Record
from mlcbuild.store.store import Store

_TRANSFERS = 4
"""Number of step records (push) or files (pull) that are transferred to or from remote caches at the same
time."""
_WAITING = 256
"""Maximum number of step records that an upload of a store's results holds in memory."""


@dataclass(frozen=True)
class Pushed:
    """The outcome of sending step records of a store to remote caches, each of which has all of them now."""

    records: int
    """Number of step records that each remote cache has now, whether or not it had them before."""
    sent: Mapping[str, UploadCount]
    """Name (URL) of a remote cache -> numbers of step records, and of bytes of files without the records,
    that were uploaded to it. It already had the other records."""


@dataclass(frozen=True)
class Pulled:
    """The outcome of downloading the results of the steps of a plan: how many were downloaded, present and
    absent."""

    fetched: int
    present: int
    """Number of steps of the plan whose results the store had before."""
    absent: int
    """Number of steps of the plan whose results neither the store nor a remote cache has."""
    warnings: tuple[str, ...]
    """Messages about problems of remote caches, none of which left a result missing."""


def shareable(records: Iterable[Record]) -> Iterator[Record]:
    """Yields those of `records`, step records, that may be sent to other machines; leaves out damaged
    records, and results that are valid on this machine only."""
    for record in records:
        with suppress(ValueError):  # The record is damaged in the part that states this.
            if record.info.shared:
                yield record


def stored(store: Store) -> Iterator[Record]:
    """Yields every step record of a store whose files are there and whose result may be sent to other
    machines, sorted by key."""
    records = (store.find(path.name) for path in sorted((store.root / "ac").glob("*/*")))
    return shareable(record for record in records if record is not None)


def push(store: Store, records: Iterable[Record], remotes: Sequence[Remote], signer: Signer | None) -> Pushed:
    """Sends step records, with the files of their results, to remote caches. Returns the number of records
    and, for each remote, how many of them it received. signer: signs the records; None: they are not signed.

    Raises RemoteError with every warning of a remote, once each remote has everything that could be sent.
    """
    sharing = Sharing(store, [Link(remote, signer) for remote in remotes])
    stop, left = threading.Event(), iter(records)
    count = 0
    with Background(_TRANSFERS) as pool:
        try:
            while some := list(islice(left, _WAITING)):
                count += len(some)
                pool.all(partial(sharing.send, record, stop) for record in some)
        finally:  # An interrupt must not wait for transfers in flight.
            stop.set()
            sharing.close()
    if warnings := sharing.take_warnings():
        raise RemoteError("\n".join(warnings))
    return Pushed(count, {link.name: link.sent for link in sharing.links if link.remote.writes()})


def pull(store: Store, plan: Plan, remotes: Sequence[Remote], warnings: Sequence[str] = ()) -> Pulled:
    """Downloads into a store the results of those steps of a plan that the store lacks and remote caches
    have, and returns how many were downloaded, present before and absent. The plan must have been computed
    with these caches.

    warnings: those of the plan. Raises RemoteError with all warnings if a download failed, or if there are
    warnings and a result is absent, StoreError if the store cannot be written; the results that were
    downloaded stay in the store.
    """
    remote = [(step, step.record) for step in plan.steps if step.state == "remote" and step.record]
    sharing = Sharing(store, [Link(remote) for remote in remotes])
    failed = []
    with store.staging() as staging:
        reasons = _fetch(sharing, (entry for _, record in remote for entry in record.files))
        for step, record in remote:
            if reason := next(filter(None, (reasons[entry.digest] for entry in record.files)), ""):
                failed.append(f"{step.name}: {reason}")
            else:
                with store.writing():
                    part = staging.subdirectory() / "record"
                store.put_record(record, part)
    warnings, absent = (*warnings, *sharing.take_warnings()), plan.count("run") + plan.count("pending")
    if failed or (warnings and absent):
        raise RemoteError("\n".join([*warnings, *failed]))
    return Pulled(plan.count("remote"), plan.count("hit"), absent, warnings)


def _fetch(sharing: Sharing, entries: Iterable[Entry]) -> dict[str, str]:
    """Downloads files from remote caches in parallel, those with the same digest once. Returns digest of a
    file -> the reason why its download failed, or ""."""
    stop = threading.Event()
    distinct = {entry.digest: entry for entry in entries}
    with Background(_TRANSFERS) as pool:
        try:
            reasons = pool.all(
                partial(sharing.fetch, entry, stop, lambda _: None) for entry in distinct.values()
            )
            return dict(zip(distinct, reasons, strict=True))
        finally:  # An interrupt must not wait for transfers in flight.
            stop.set()
            sharing.close()


@dataclass(frozen=True)
class CheckedStore:
    """The result of checking every file of a store: what was damaged, missing and restored, with warnings."""

    check: upkeep.Verified
    warnings: tuple[str, ...] = ()
    """Messages about problems of remote caches from which damaged or missing files were to be downloaded
    again."""


def verify(store: Store, remotes: Sequence[Remote] = ()) -> CheckedStore:
    """Checks all bytes of a store, removes damaged files, and downloads damaged and missing files from remote
    caches, if any are passed. The result lists what was restored and what was not; also damaged files that
    cannot be removed.

    Raises StoreError when the store cannot be read or, if remote caches are passed, written.
    """
    if not remotes:
        return CheckedStore(upkeep.verify(store))
    sharing, stop = Sharing(store, [Link(remote) for remote in remotes]), threading.Event()
    try:
        with store.staging():
            check = upkeep.verify(store, mend=lambda entry: sharing.fetch(entry, stop, lambda count: None))
    finally:
        sharing.close()
    return CheckedStore(check, tuple(sharing.take_warnings()))
