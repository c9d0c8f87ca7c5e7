"""Combines the remote caches of a run with one store: looks up step records, downloads files, uploads
results.

A step record describes a step's result. It suffices to know the result, and so the keys of the steps that
depend on it. The files of the result (blobs) are downloaded only when a step on this machine reads them. A
record that was used without all its blobs is stored in the store's directory `known/`, so that the next run
finds it without a remote.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild_format import regular

from mlcbuild.canon import Entry
from mlcbuild.errors import StoreError
from mlcbuild.remotes.background import Background
from mlcbuild.remotes.ledger import Ledger
from mlcbuild.remotes.transport import CancelledError
from mlcbuild.store import layout
from mlcbuild.store.records import LARGEST, Record
from mlcbuild.store.store import Store

if TYPE_CHECKING:
    from mlcbuild.remotes.link import Link

_CONCURRENT_LOOKUPS = 16
"""Number of step records (files that describe the results of steps) that are requested from all remote caches
together at the same time."""
_POLL = 0.05
_LONGEST_ORIGIN = 1 << 16
"""Maximum length in bytes of the two lines before the copy of a step record that was read from a remote
cache: the remote's URL, and the public keys that were trusted."""


@dataclass(frozen=True)
class RemoteRecord:
    """A step's record (the description of its result: key, files, inputs) in a remote cache. The files of the
    result need not be in the store of this machine."""

    record: Record
    origin: str
    """URL of the remote cache that has this step record."""


class Sharing:
    """The remote caches that a run uses, with its store: looks up step records in them, downloads files,
    uploads results. Thread-safe except for `look_up` and `find`."""

    def __init__(self, store: Store, links: Sequence[Link] = ()) -> None:
        self.store = store
        self.links = tuple(links)
        self._known = store.root / "known"
        self._unsent = store.root / "unsent"
        self._ledgers = {link.name: Ledger(store.root, link.name) for link in links}
        self._found: dict[str, RemoteRecord | None] = {}
        self._questions = Background(_CONCURRENT_LOOKUPS)
        self._ended = False

    @property
    def empty(self) -> bool:
        """Returns True if there is nothing to look up: the run has no remote caches, and the store has no
        copies of step records that earlier runs read from one."""
        return not self.links and not self._known.is_dir()

    @property
    def reads(self) -> bool:
        """Returns True if the run may download the files of results: at least one of its remote caches is
        configured to be read, even if it has failed since."""
        return any(link.remote.reads for link in self.links)

    @property
    def writers(self) -> tuple[str, ...]:
        """Returns the names (URLs) of the remote caches to which the run is configured to upload results,
        even if one has failed since."""
        return tuple(link.name for link in self.links if link.remote.writes())

    def look_up(self, keys: Iterable[str]) -> None:
        """Looks up the step records of many keys in the copies that earlier runs kept, then in the remote
        caches in parallel, and caches the answers for `find`, which looks up one key. A request that fails
        counts as no record. Keys that were looked up before, with or without success, are not requested
        again."""
        asked = [key for key in dict.fromkeys(keys) if key not in self._found]
        self._found |= {key: self._read(key) for key in asked}
        if self.links:
            self._ask([key for key in asked if self._found[key] is None])

    def find(self, key: str) -> RemoteRecord | None:
        """Returns the step record of a key from the copy that an earlier run kept of a remote cache's record,
        else from a remote cache; None if there is none, or if no remote answers. The results that the store
        itself has are not considered. This object caches each answer, None too, and does not ask again for
        this key."""
        if key not in self._found:
            self.look_up([key])
        return self._found[key]

    def interrupt(self) -> None:
        """Makes searches for step records on remote caches (`find`, `look_up`) end at once from now on;
        records that have not arrived count as missing. Safe in a signal handler, as it takes no locks."""
        self._ended = True

    def forget(self, key: str) -> None:
        """Removes the cached step record of a key, and the copy that an earlier run kept, because the files
        of the result cannot be downloaded, so that the run builds the step again. A copy that cannot be
        removed stays."""
        self._found[key] = None
        with suppress(OSError):
            self._place(key).unlink()

    def keep(self, remote: RemoteRecord) -> None:
        """Stores a step record, which describes the result of a step and was read from a remote cache, on
        this machine, so that later runs can read it without the remote, unless the store has the record
        already or cannot be written. In any case notes that this remote has it."""
        if remote.origin in self._ledgers:
            self._ledgers[remote.origin].add(remote.record.key)
        place = self._place(remote.record.key)
        if place.exists() or self.store.record(remote.record.key) is not None:
            return
        part = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            trust = " ".join(sorted(self._trust(remote.origin)))
            part.write_bytes(f"{remote.origin}\n{trust}\n".encode() + remote.record.encode())
            part.replace(place)

    def fetch(self, entry: Entry, stop: threading.Event, on_bytes: Callable[[int], None]) -> str:
        """Downloads the file that `entry` describes into the store, from the first remote cache that has it,
        unless the store has it. Returns "" if the store has the file afterwards, otherwise the reason for
        failing, also if the store cannot be written.

        stop: event that cancels the run; on_bytes: called with the number of new bytes. The caller must hold
        a working directory of the store (`Store.staging`). Waits while another process downloads the same
        file. Raises CancelledError if the run is cancelled.
        """
        try:
            (self.store.root / "partial").mkdir(exist_ok=True)
            while (lock := self.store.try_lock(entry.digest)) is None:
                if stop.is_set():
                    raise CancelledError
                time.sleep(_POLL)
            with lock:
                return self._fetch(entry, stop, on_bytes)
        except OSError as error:
            return str(self.store.explain(error))
        except StoreError as error:
            return str(error)

    def promise(self, key: str) -> None:
        """Notes in the store, before a step is built, that its result must be uploaded, by a later run if
        this one does not. Does nothing if the run uploads to no remote cache, or the store cannot be written.
        """
        if self.writers:
            with suppress(OSError):
                self._unsent.mkdir(exist_ok=True)
                (self._unsent / key).touch()

    def unsent(self, keys: Iterable[str]) -> frozenset[str]:
        """Returns those of `keys`, the keys of step results, that the store's notes do not list as uploaded
        to every writable remote cache, or list as still to be uploaded; none if there is no such remote.
        Raises OSError if the store cannot be read."""
        if not self.writers:
            return frozenset()
        sent = frozenset.intersection(*(self._ledgers[name].keys for name in self.writers))
        promised = frozenset(layout.unsent(str(self.store.root)))
        return frozenset(key for key in keys if key in promised or key not in sent)

    def kept(self, key: str) -> None:
        """Notes in the store that every writable remote cache has the step result with this key, so that no
        later run uploads it again. Does nothing if the store cannot be written."""
        for name in self.writers:
            self._ledgers[name].add(key)
        with suppress(OSError):
            (self._unsent / key).unlink(missing_ok=True)

    def send(self, record: Record, stop: threading.Event) -> tuple[str, ...]:
        """Uploads a step record with its blobs to every writable remote cache, and returns the names (URLs)
        of those for which that failed, now or earlier in this run. Notes in the store which remotes have it.
        stop: event that cancels the upload. Raises CancelledError if `stop` is set."""
        missing = []
        for link in self.links:
            if link.remote.writes():
                if link.send(record, self.store, stop):
                    self._ledgers[link.name].add(record.key)
                else:
                    missing.append(link.name)
        if not missing:
            self.kept(record.key)
        return tuple(missing)

    def offer(self, entry: Entry, place: Path, stop: threading.Event) -> bool:
        """Uploads the file at the path `place` to the first remote cache that accepts it, of those from which
        the run also reads. Returns True if such a remote has the file afterwards. entry: digest and size of
        the file; stop: event that cancels the upload. Raises CancelledError if `stop` is set."""
        chosen = [link for link in self.links if link.remote.writes() and link.remote.reads]
        return any(link.offer(entry, place, stop) for link in chosen)

    def take_warnings(self) -> list[str]:
        return [sentence for link in self.links for sentence in link.take_warnings()]

    def close(self) -> None:
        self._questions.close()
        for link in self.links:
            link.close()

    def _fetch(self, entry: Entry, stop: threading.Event, on_bytes: Callable[[int], None]) -> str:
        if self.store.hold(entry.digest, entry.size):
            return ""
        part = self.store.root / "partial" / entry.digest
        for link in self.links:
            if link.blob(entry, part, stop, on_bytes):
                self.store.put_blob(entry.digest, part, hashed=True)
                return ""
        return f"no remote gives {entry.path}" if self.reads else "this run reads no remote"

    def _ask(self, keys: Iterable[str]) -> None:
        """Requests step records of many keys from the remote caches in other threads, and caches the answers.
        Waits for all of them, in short intervals so that this thread can react to an interrupt; `interrupt`
        ends the waiting, and keys without an answer then count as having no record."""
        questions = {key: self._questions.submit(partial(self._answer, key)) for key in keys}
        for key, question in questions.items():
            while not question.done() and not self._ended:
                wait((question,), _POLL)
            if question.done() and not question.cancelled():
                self._found[key] = question.result()

    def _answer(self, key: str) -> RemoteRecord | None:
        for link in self.links:
            if (record := link.record(key)) is not None:
                return RemoteRecord(record, link.name)
        return None

    def _read(self, key: str) -> RemoteRecord | None:
        """Returns the step record with a key, as an earlier run read it from a remote cache and stored it on
        this machine, and the URL of that remote cache; None if this copy is missing or damaged, or if other
        public keys are trusted now, so that the record would have to be checked again: the copy has no
        signature."""
        try:
            data = regular.read(self._place(key), LARGEST + _LONGEST_ORIGIN, follow_link=False)
            lines = data.split(b"\n", 2)
            origin, trusted = (line.decode() for line in lines[:2])
            record = Record.checked(key, lines[2])
        except (OSError, ValueError, IndexError):
            return None
        required = self._trust(origin)
        is_trusted = not required or (bool(trusted) and required.issuperset(trusted.split(" ")))
        return RemoteRecord(record, origin) if origin.isprintable() and is_trusted else None

    def _trust(self, origin: str) -> frozenset[str]:
        """Returns the public keys of which one must have signed each record from the remote cache with the
        URL `origin`; none if any record is accepted. For a remote that this run does not have, they are the
        keys of all its remotes."""
        links = [link for link in self.links if link.name == origin] or self.links
        return frozenset(key for link in links for key in link.remote.trust)

    def _place(self, key: str) -> Path:
        return self._known / layout.shelved(key)
