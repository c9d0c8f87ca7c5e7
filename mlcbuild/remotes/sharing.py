"""All remotes of a run, in order, before one store: find a record, fetch blobs, send what was built.

A record is enough to know a step's result, and so the keys of the steps behind it. Its blobs are fetched
only when something here reads them. A record that was used without all of its blobs is kept under `known/`,
so that the next run needs no remote to know it.
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
from mlcbuild.remotes.transport import CancelledError
from mlcbuild.store.records import LARGEST, Record
from mlcbuild.store.store import Store

if TYPE_CHECKING:
    from mlcbuild.remotes.link import Link

_QUESTIONS = 16
"""Records asked for at the same time."""
_POLL = 0.05
_LONGEST_ORIGIN = 1 << 16
"""Bytes of the line that names a remote."""


@dataclass(frozen=True)
class Found:
    """A record that is not, or not with all of its files, in the store."""

    record: Record
    origin: str
    """The remote that has it."""


class Sharing:
    """Safe to use from several threads, but for `look_up`."""

    def __init__(self, store: Store, links: Sequence[Link] = ()) -> None:
        self.store = store
        self.links = tuple(links)
        self._known = store.root / "known"
        self._unsent = store.root / "unsent"
        self._found: dict[str, Found | None] = {}
        self._questions = Background(_QUESTIONS)
        self._ended = False

    @property
    def empty(self) -> bool:
        """Whether nothing can be found."""
        return not self.links and not self._known.is_dir()

    @property
    def writers(self) -> tuple[str, ...]:
        """The remotes that results are sent to."""
        return tuple(link.name for link in self.links if link.remote.writes())

    def look_up(self, keys: Iterable[str]) -> None:
        """Finds many keys at once, for `find` to answer."""
        asked = [key for key in dict.fromkeys(keys) if key not in self._found]
        self._found |= {key: self._read(key) for key in asked}
        if self.links:
            self._ask([key for key in asked if self._found[key] is None])

    def find(self, key: str) -> Found | None:
        """The record of a key that was used before without its files, or that a remote has."""
        if key not in self._found:
            self.look_up([key])
        return self._found[key]

    def interrupt(self) -> None:
        """Has `find` and `look_up` return at once, from now on. A signal handler may call it: no locks."""
        self._ended = True

    def forget(self, key: str) -> None:
        """Its files cannot be had: a step that must be built."""
        self._found[key] = None
        with suppress(OSError):
            self._place(key).unlink()

    def keep(self, found: Found) -> None:
        """Remembers a record that was used, for runs to come."""
        place = self._place(found.record.key)
        if place.exists() or self.store.record(found.record.key) is not None:
            return
        part = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(found.origin.encode() + b"\n" + found.record.encode())
            part.replace(place)

    def fetch(self, entry: Entry, stop: threading.Event, told: Callable[[int], None]) -> str:
        """Brings one blob into the store, from the first remote that has it whole; "" or why it could not.

        A staging area must be open. Another process that fetches the same blob is waited for.
        Raises CancelledError.
        """
        try:
            (self.store.root / "partial").mkdir(exist_ok=True)
            while (lock := self.store.try_lock(entry.digest)) is None:
                if stop.is_set():
                    raise CancelledError
                time.sleep(_POLL)
            with lock:
                return self._fetch(entry, stop, told)
        except OSError as error:
            return str(self.store.explain(error))
        except StoreError as error:
            return str(error)

    def promise(self, key: str) -> None:
        """Notes, before a step is built, that its result is to be sent: by a later run, if this one dies."""
        if self.writers:
            with suppress(OSError):
                self._unsent.mkdir(exist_ok=True)
                (self._unsent / key).touch()

    def promised(self) -> frozenset[str]:
        """Keys of results that no run has sent to all the remotes that it should have been sent to."""
        if not self.writers or not self._unsent.is_dir():
            return frozenset()
        return frozenset(path.name for path in self._unsent.iterdir())

    def kept(self, key: str) -> None:
        """The promise is kept."""
        with suppress(OSError):
            (self._unsent / key).unlink(missing_ok=True)

    def send(self, record: Record, stop: threading.Event) -> tuple[str, ...]:
        """Sends a record with its blobs to every remote that is written to; those that lack it now.

        Raises CancelledError.
        """
        chosen = [link for link in self.links if link.remote.writes()]
        return tuple(link.name for link in chosen if not link.send(record, self.store, stop))

    def offer(self, entry: Entry, place: Path, stop: threading.Event) -> bool:
        """Whether the file `place`, which has the entry's bytes, is now a blob of a remote that is read, too.

        Raises CancelledError.
        """
        chosen = [link for link in self.links if link.remote.writes() and link.remote.reads]
        return any(link.offer(entry, place, stop) for link in chosen)

    def take_warnings(self) -> list[str]:
        return [sentence for link in self.links for sentence in link.take_warnings()]

    def close(self) -> None:
        self._questions.close()
        for link in self.links:
            link.close()

    def _fetch(self, entry: Entry, stop: threading.Event, told: Callable[[int], None]) -> str:
        if self.store.hold(entry.digest, entry.size):
            return ""
        part = self.store.root / "partial" / entry.digest
        for link in self.links:
            if link.blob(entry, part, stop, told):
                self.store.put_blob(entry.digest, part, hashed=True)
                return ""
        return f"no remote gives {entry.path}"

    def _ask(self, keys: Iterable[str]) -> None:
        """Asks the links, in other threads: what a signal says is seen here while they wait."""
        questions = {key: self._questions.submit(partial(self._answer, key)) for key in keys}
        for key, question in questions.items():
            while not question.done() and not self._ended:
                wait((question,), _POLL)
            if question.done() and not question.cancelled():
                self._found[key] = question.result()

    def _answer(self, key: str) -> Found | None:
        for link in self.links:
            if (record := link.record(key)) is not None:
                return Found(record, link.name)
        return None

    def _read(self, key: str) -> Found | None:
        """Returns the record that `keep` has written; None also where it is damaged."""
        try:
            data = regular.read(self._place(key), LARGEST + _LONGEST_ORIGIN, follow_link=False)
            line, _, data = data.partition(b"\n")
            origin = line.decode()
            return Found(Record.checked(key, data), origin) if origin.isprintable() else None
        except (OSError, ValueError):
            return None

    def _place(self, key: str) -> Path:
        return self._known / key[:2] / key
