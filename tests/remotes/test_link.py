"""Tests of the state of one remote during a run: what is downloaded and uploaded, and after which faults the
remote is not used any more."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from mlcbuild import keyfile
from mlcbuild.canon import Entry, bytes_digest
from mlcbuild.errors import RemoteError
from mlcbuild.remotes import Mode, Remote, link
from mlcbuild.remotes.link import Link
from mlcbuild.remotes.signing import seal
from mlcbuild.remotes.transport import Body, CancelledError
from mlcbuild.store.records import Record
from mlcbuild.store.store import Store
from tests.remotes.users import User, by_name

URL = "https://host/cache"


class Objects:
    """A remote that keeps its objects in memory. If `fault` is set, every request raises it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: RemoteError | None = None
        self.asked: list[str] = []

    def _ask(self, name: str) -> None:
        self.asked.append(name)
        if self.fault is not None:
            raise self.fault

    def open(self, name: str, start: int = 0) -> Body | None:
        self._ask(name)
        if name not in self.objects:
            return None
        return Body(start, io.BytesIO(self.objects[name][start:]).read, lambda: None)

    def size(self, name: str) -> int | None:
        self._ask(name)
        return len(self.objects[name]) if name in self.objects else None

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        self._ask(name)
        assert new == (name not in self.objects)
        self.objects[name] = source.read()

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Objects:
    objects = Objects()
    monkeypatch.setattr(link, "connect", lambda url, timeout: objects)
    return objects


@pytest.fixture
def built(tmp_path: Path) -> tuple[Record, Store]:
    user = User(tmp_path / "store")
    record = by_name(user.run())["b"].record
    assert record is not None
    return record, user.store


def test_a_signed_record_replaces_an_unsigned_one(
    there: Objects, built: tuple[Record, Store], tmp_path: Path
) -> None:
    """Checks that results which were uploaded before their sender had a key get its signature, once."""
    record, store = built
    key, other = (keyfile.create(tmp_path / name) for name in ("key", "other"))
    for signer, count in ((None, 1), (key, 1), (key, 0), (other, 0), (None, 0)):
        sender = Link(Remote(URL), signer)
        assert sender.send(record, store, threading.Event())
        assert (sender.sent.records, sender.sent.bytes > 0) == (count, signer is None and count == 1)
    assert there.objects[f"ac/{record.key}"] == seal(record, key)


@pytest.mark.parametrize("mode", ["read", "write", "readwrite"])
def test_a_remote_that_cannot_be_opened_is_not_used(
    mode: Mode, built: tuple[Record, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, store = built
    monkeypatch.setenv("MLCBUILD_LOGIN_HOST", "no colon")
    sender = Link(Remote(URL, mode))
    (warning,) = sender.take_warnings()
    assert warning.startswith(f"{URL} is not used in this run: $MLCBUILD_LOGIN_HOST must be user:password")
    assert not sender.send(record, store, threading.Event()) and sender.record(record.key) is None
    assert sender.take_warnings() == []
    monkeypatch.setenv("CI", "false")
    idle = Link(Remote(URL, "write", ci_only=True))
    assert idle.take_warnings() == [], "it would not be used anyway"


def test_a_result_is_sent_once_and_its_record_last(there: Objects, built: tuple[Record, Store]) -> None:
    record, store = built
    (entry,) = record.files
    sender = Link(Remote(URL))
    assert sender.send(record, store, threading.Event())
    assert list(there.objects) == [f"cas/{entry.digest}", f"ac/{record.key}"]
    assert (sender.sent.records, sender.sent.bytes) == (1, entry.size)
    assert sender.send(record, store, threading.Event())
    assert (sender.sent.records, sender.sent.bytes) == (1, entry.size), "everything was there"
    assert Link(Remote(URL)).record(record.key) == record
    assert Link(Remote(URL)).record("0" * 64) is None


def test_modes_and_shards_of_trust_are_kept(
    there: Objects, built: tuple[Record, Store], tmp_path: Path
) -> None:
    record, store = built
    assert not Link(Remote(URL, "read")).send(record, store, threading.Event())
    assert Link(Remote(URL, "write")).record(record.key) is None
    assert there.asked == []
    signer, other = (keyfile.create(tmp_path / name) for name in ("a.pem", "b.pem"))
    there.objects[f"ac/{record.key}"] = seal(record, signer)
    assert Link(Remote(URL, trust=(other.public, signer.public))).record(record.key) == record
    wary = Link(Remote(URL, trust=(other.public,)))
    assert wary.record(record.key) is None
    expected = f"{URL}: the record {record.key} is refused: it is not signed by a trusted key"
    assert wary.take_warnings() == [expected] and wary.take_warnings() == []


def test_a_blob_is_verified(there: Objects, tmp_path: Path) -> None:
    data, part, counts = b"bytes", tmp_path / "part", list[int]()
    entry = Entry("out.txt", bytes_digest(data), len(data))
    there.objects[f"cas/{entry.digest}"] = data
    reader = Link(Remote(URL))
    assert reader.blob(entry, part, threading.Event(), counts.append)
    assert part.read_bytes() == data and sum(counts) == len(data)
    there.objects[f"cas/{entry.digest}"] = b"wrong"
    part.unlink()
    assert not reader.blob(entry, part, threading.Event(), counts.append)
    assert reader.take_warnings() == [
        f"{URL}: out.txt (blob {entry.digest}) is refused: its content does not match its digest"
    ]
    assert not part.exists() and not reader.unread, "one damaged object is no reason to leave a remote"


@pytest.mark.parametrize(
    ("mode", "end"),
    [
        ("read", ""),
        ("readwrite", "; uploads to it continue and replace damaged files"),
    ],
)
def test_three_damaged_objects_end_the_reading_of_a_remote(
    mode: Mode, end: str, there: Objects, built: tuple[Record, Store]
) -> None:
    reader = Link(Remote(URL, mode))
    for digit in "012":
        there.objects[f"ac/{digit * 64}"] = b"nonsense"
        assert not reader.unread
        assert reader.record(digit * 64) is None
    assert reader.unread == "it holds damaged files"
    expected = f"{URL} is not read again in this run: it holds damaged files{end}"
    assert reader.take_warnings()[-1] == expected
    asked = len(there.asked)
    assert reader.record("3" * 64) is None and len(there.asked) == asked
    assert reader.send(*built, threading.Event()) == bool(end)


def test_a_damaged_object_is_replaced(there: Objects, built: tuple[Record, Store]) -> None:
    record, store = built
    there.objects[f"ac/{record.key}"] = b"nonsense"
    both = Link(Remote(URL))
    assert both.record(record.key) is None
    assert both.send(record, store, threading.Event())
    assert there.objects[f"ac/{record.key}"] == seal(record, None)


def test_a_failure_is_reported_once(there: Objects, built: tuple[Record, Store]) -> None:
    record, store = built
    there.fault = RemoteError("it does not answer")
    writer, reader = Link(Remote(URL)), Link(Remote(URL))
    assert not writer.send(record, store, threading.Event())
    assert (writer.unwritten, writer.unread) == ("it does not answer", "")
    assert writer.take_warnings() == [f"{URL} is not written to in this run: it does not answer"]
    assert not writer.send(record, store, threading.Event()) and writer.take_warnings() == []
    assert reader.record(record.key) is None
    assert reader.unread == reader.unwritten == "it does not answer"
    assert reader.take_warnings() == [f"{URL} is not used in this run: it does not answer"]


def test_a_lost_file_of_this_machine_is_no_fault_of_the_remote(
    there: Objects, built: tuple[Record, Store]
) -> None:
    record, store = built
    place = store.blob(record.files[0].digest)
    data = place.read_bytes()
    place.unlink()
    sender = Link(Remote(URL))
    assert not sender.send(record, store, threading.Event())
    assert there.objects == {} and not sender.unwritten
    assert sender.take_warnings() == [
        f"{place} is not sent: No such file or directory; run `mlcbuild cache verify`"
    ]
    place.write_bytes(data)
    assert sender.send(record, store, threading.Event())


def test_a_damaged_file_of_this_machine_is_withheld(there: Objects, built: tuple[Record, Store]) -> None:
    record, store = built
    place = store.blob(record.files[0].digest)
    place.chmod(0o644)
    place.write_bytes(b"?" * record.files[0].size)
    sender = Link(Remote(URL))
    assert not sender.send(record, store, threading.Event())
    assert there.objects == {} and not sender.unwritten
    assert sender.take_warnings() == [
        f"{place} is not sent: its content has changed since it was written; run `mlcbuild cache verify`"
    ]


def test_a_cancelled_upload_is_no_fault_of_the_remote(there: Objects, built: tuple[Record, Store]) -> None:
    record, store = built
    stop = threading.Event()
    stop.set()
    sender = Link(Remote(URL))
    with pytest.raises(CancelledError):
        sender.send(record, store, stop)
    assert there.objects == {} and sender.take_warnings() == [] and not sender.unwritten


def test_an_address_that_cannot_be_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, timeout: float) -> Objects:
        raise RemoteError("the proxy in the environment must be http://host:port")

    monkeypatch.setattr(link, "connect", refuse)
    broken = Link(Remote(URL))
    assert broken.record("0" * 64) is None and broken.unwritten
    (warning,) = broken.take_warnings()
    assert warning == f"{URL} is not used in this run: {broken.unread}"
    broken.close()
