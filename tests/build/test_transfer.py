"""Tests of downloads and uploads during a run: each request gets exactly one answer, whether or not its files
arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest

from mlcbuild.build.events import StepProgress, StepResult, Warned
from mlcbuild.build.transfer import Fetched, Message, Transfers
from mlcbuild.canon import Entry, Tree
from mlcbuild.remotes.sharing import Sharing
from mlcbuild.remotes.transport import CancelledError
from mlcbuild.store.records import BuildInfo, Preimage, Record
from mlcbuild.store.store import Store

PATIENCE = 60.0
KEYS = [f"{number:064x}" for number in range(4)]


def entry(name: str, size: int = 10) -> Entry:
    return Entry(name, name * 64, size)


def record(key: str = KEYS[0]) -> Record:
    return Record.create(key, Tree.of(()), BuildInfo("s", Preimage("m:f", {}, {}, {}, {})))


@dataclass
class Remotes:
    """A replacement for `Sharing` with which a test decides which files can be sent and fetched."""

    missing: dict[str, str] = field(default_factory=dict)
    """Digest of a file -> the reason why it cannot be fetched."""
    refused: tuple[str, ...] = ()
    """Names of remotes that accept no uploads."""
    gate: threading.Event = field(default_factory=threading.Event)
    """The event for which every transfer waits before it begins."""
    fetched: list[str] = field(default_factory=list)
    kept_keys: list[str] = field(default_factory=list)
    promises: frozenset[str] = frozenset()
    writers: tuple[str, ...] = ("one", "two")
    store: Store = field(default_factory=lambda: cast(Store, _Whole()))

    def fetch(self, expected: Entry, stop: threading.Event, output: Callable[[int], None]) -> str:
        self._wait(stop)
        self.fetched.append(expected.digest)
        why = self.missing.get(expected.digest, "")
        if why == "defect":
            raise ZeroDivisionError("no")
        output(expected.size)
        return why

    def send(self, sent: Record, stop: threading.Event) -> tuple[str, ...]:
        self._wait(stop)
        return self.refused

    def _wait(self, stop: threading.Event) -> None:
        while not self.gate.wait(0.01):
            if stop.is_set():
                raise CancelledError

    def kept(self, key: str) -> None:
        self.kept_keys.append(key)

    def unsent(self, keys: Iterable[str]) -> frozenset[str]:
        return self.promises & frozenset(keys)

    def close(self) -> None:
        pass


class _Whole:
    """A replacement for a store that claims to have the files of every record."""

    def lost(self, record: Record) -> str:
        return ""


@pytest.fixture
def remotes() -> Remotes:
    return Remotes()


@pytest.fixture
def transfers(remotes: Remotes) -> Iterator[Transfers]:
    transfers = Transfers(cast(Sharing, remotes), lambda: None)
    yield transfers
    transfers.close()


def messages(transfers: Transfers, count: int) -> list[Message]:
    """Returns all messages of the transfers until `count` requests have ended. Fails after PATIENCE
    seconds."""
    heard: list[Message] = []
    end = time.monotonic() + PATIENCE
    while sum(isinstance(item, Fetched) for item in heard) < count:
        assert time.monotonic() < end, heard
        heard += transfers.messages()
        time.sleep(0.005)
    return heard


def settled(transfers: Transfers) -> None:
    end = time.monotonic() + PATIENCE
    while transfers.uploading:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_request_ends_once_and_equal_files_come_once(remotes: Remotes, transfers: Transfers) -> None:
    remotes.gate.set()
    first = transfers.fetch("a", [entry("1"), entry("2"), entry("2")])
    second = transfers.fetch("b", [])
    ended = [item for item in messages(transfers, 2) if isinstance(item, Fetched)]
    assert sorted((item.request, item.why) for item in ended) == [(first, ""), (second, "")]
    assert sorted(remotes.fetched) == ["1" * 64, "2" * 64]


@pytest.mark.parametrize(
    ("why", "words"), [("no remote gives 1", "no remote gives 1"), ("defect", "ZeroDivisionError: no")]
)
def test_one_missing_file_fails_its_request_alone(
    remotes: Remotes, transfers: Transfers, why: str, words: str
) -> None:
    remotes.missing["1" * 64] = why
    remotes.gate.set()
    bad = transfers.fetch("a", [entry("1"), entry("2")])
    good = transfers.fetch("b", [entry("3")])
    ended = {item.request: item.why for item in messages(transfers, 2) if isinstance(item, Fetched)}
    assert ended == {bad: words, good: ""}


def test_progress_counts_the_bytes_of_a_request(
    remotes: Remotes, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlcbuild.build.transfer._PROGRESS_INTERVAL", 0.0)
    remotes.gate.set()
    transfers.fetch("a", [entry("1", 30), entry("2", 70)])
    reports = [item for item in messages(transfers, 1) if isinstance(item, StepProgress)]
    assert [(item.name, item.total, item.unit) for item in reports] == [("a", 100, "B")] * 2
    assert reports[-1].done == 100 and reports[0].done in (30, 70)


@pytest.mark.parametrize("refused", [(), ("two",)])
def test_an_upload_keeps_its_promise_or_names_who_lacks_it(
    remotes: Remotes, transfers: Transfers, refused: tuple[str, ...]
) -> None:
    remotes.refused = refused
    remotes.gate.set()
    transfers.upload("a", record())
    settled(transfers)
    assert remotes.kept_keys == ([] if refused else [KEYS[0]])
    assert transfers.not_uploaded == ({"a": refused} if refused else {})


def test_a_defect_of_an_upload_is_a_warning(remotes: Remotes, transfers: Transfers) -> None:
    def send(sent: Record, stop: threading.Event) -> tuple[str, ...]:
        raise ZeroDivisionError("no")

    remotes.send = send  # type: ignore[method-assign]
    transfers.upload("a", record())
    settled(transfers)
    assert transfers.messages() == [Warned("a was not uploaded: ZeroDivisionError: no")]
    assert transfers.not_uploaded == {"a": ("one", "two")}


def test_what_is_on_its_way_at_the_end_was_not_uploaded(remotes: Remotes) -> None:
    transfers = Transfers(cast(Sharing, remotes), lambda: None)
    for name in ("a", "b", "c"):
        transfers.upload(name, record())
    transfers.fetch("d", [entry("1")])
    transfers.close()  # the gate is never opened
    assert set(transfers.not_uploaded) == {"a", "b", "c"} and not remotes.kept_keys
    assert all(names == ("one", "two") for names in transfers.not_uploaded.values())


def test_without_remotes_that_take_uploads_nothing_is_sent(remotes: Remotes, transfers: Transfers) -> None:
    remotes.writers = ()
    transfers.upload("a", record())
    assert transfers.uploading == 0 and not transfers._threads


def test_what_an_earlier_run_promised_is_sent(remotes: Remotes, transfers: Transfers) -> None:
    remotes.promises = frozenset(KEYS[:1])
    remotes.gate.set()
    results = [
        StepResult(str(number), "reused", KEYS[number], record=record(KEYS[number])) for number in (0, 1)
    ]
    assert transfers.resume(results) == 1
    settled(transfers)
    assert remotes.kept_keys == KEYS[:1]
