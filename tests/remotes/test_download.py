"""Tests of downloads that are interrupted, resumed, too slow, or that bring wrong bytes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from mlcbuild.build.execute import Options
from mlcbuild.build.graph import Graph
from mlcbuild.canon import Entry, bytes_digest
from mlcbuild.errors import RemoteError
from mlcbuild.remotes.download import download
from mlcbuild.remotes.transport import Body, DamagedError
from mlcbuild.store.upkeep import verify
from tests.caches import Cache, Handler, serving
from tests.remotes.users import BIG, User, statuses, step


def drops(count: int) -> Callable[[Handler], bool]:
    """Returns a function that makes a file server faulty: the answer to each download of a blob ends after
    `count` bytes, although its Content-Length states more."""

    def fault(handler: Handler) -> bool:
        data = handler.cache.content.get(handler.path, b"")
        start = int(handler.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        if handler.command != "GET" or "/cas/" not in handler.path or start + count >= len(data):
            return False
        asked = "Range" in handler.headers
        extra = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if asked else {}
        handler.answer(206 if asked else 200, data[start : start + count], extra, len(data) - start)
        return True

    return fault


class Blob:
    """A transport for a remote with one blob. breaks_after: number of bytes after which an answer that begins
    at offset 0 breaks off; 0 for none. Ends the test when a download goes on for ever."""

    def __init__(self, data: bytes, breaks_after: int = 0) -> None:
        self.starts: list[int] = []
        self._data = data
        self._breaks_after = breaks_after

    def open(self, name: str, start: int = 0) -> Body:
        assert len(self.starts) < 10
        self.starts.append(start)
        breaks_off = self._breaks_after > 0 and start == 0
        pieces = iter([self._data[start : self._breaks_after if breaks_off else None]])

        def read() -> bytes:
            if (piece := next(pieces, None)) is None and breaks_off:
                raise RemoteError("it closed the connection")
            return piece or b""

        return Body(start, read, lambda: None)

    def size(self, name: str) -> int:
        return len(self._data)

    def put(self, name: str, source: BinaryIO, size: int, *, new: bool = False) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


def test_a_download_goes_on_where_it_broke_off(address: Callable[[Cache], str], tmp_path: Path) -> None:
    with serving() as cache:
        User(tmp_path / "one", address(cache)).run(BIG)
        cache.fault = drops(1_000_000)
        cache.headers.clear()
        second = User(tmp_path / "two", address(cache))
        assert statuses(second.run(BIG)) == {"big": "reused"}
        starts = [h["Range"].partition("-")[0] for h in cache.headers if "Range" in h]
        assert [start for start in starts if start != "bytes=0"] == ["bytes=1000000", "bytes=2000000"]
        assert second.warnings() == []
    assert verify(second.store).ok


def test_a_download_goes_on_where_an_earlier_run_ended(tmp_path: Path) -> None:
    with serving() as cache:
        User(tmp_path / "one", cache.url).run(BIG)
        second = User(tmp_path / "two", cache.url)
        for begun, ranges in ((b"x" * 2_000_000, ["bytes=2000000-"]), (b"wrong", ["bytes=5-"])):
            second = User(tmp_path / str(len(begun)), cache.url)
            with second.store.staging():
                pass
            partial = second.store.root / "partial" / cache.names("cas")[0].removeprefix("/cas/")
            partial.parent.mkdir()
            partial.write_bytes(begun)
            cache.headers.clear()
            assert statuses(second.run(BIG)) == {"big": "reused"}
            assert [h["Range"] for h in cache.headers if "Range" in h] == ranges
            assert second.warnings() == [] and verify(second.store).ok


def test_a_damaged_partial_download_of_full_length_is_not_the_remotes_fault(tmp_path: Path) -> None:
    blob, part = Entry("big", bytes_digest(b"right"), 5), tmp_path / "part"
    part.write_bytes(b"wrong")
    remote = Blob(b"right")
    assert download(remote, blob, part, threading.Event(), lambda count: None)
    assert remote.starts == [0] and part.read_bytes() == b"right"


def test_a_wrong_blob_whose_answers_break_off_is_downloaded_twice(tmp_path: Path) -> None:
    blob, part = Entry("big", bytes_digest(b"right"), 5), tmp_path / "part"
    remote = Blob(b"wrong", breaks_after=3)
    with pytest.raises(DamagedError, match=r"^its content does not match its digest$"):
        download(remote, blob, part, threading.Event(), lambda count: None)
    assert remote.starts == [0, 3, 0, 3] and not part.exists()


def test_a_server_without_ranges_will_do(tmp_path: Path) -> None:
    with serving() as cache:
        User(tmp_path / "one", cache.url).run(BIG)
        calls = iter(range(10))

        def fault(handler: Handler) -> bool:
            if "/cas/" not in handler.path or handler.command != "GET":
                return False
            data = handler.cache.content[handler.path]
            handler.answer(200, data[:1000] if next(calls) == 0 else data, length=len(data))
            return True

        cache.fault = fault
        assert statuses(User(tmp_path / "two", cache.url).run(BIG)) == {"big": "reused"}


def test_a_cache_that_sends_drop_by_drop_is_given_up(address: Callable[[Cache], str], tmp_path: Path) -> None:
    given_up = threading.Event()

    def fault(handler: Handler) -> bool:
        if handler.command != "GET" or "/cas/" not in handler.path:
            return False
        handler.send_response(206 if "Range" in handler.headers else 200)
        start = int(handler.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        handler.send_header("Content-Range", f"bytes {start}-2999999/3000000")
        handler.send_header("Content-Length", str(3_000_000 - start))
        handler.end_headers()
        while not given_up.wait(0.05):
            handler.wfile.write(b"x")
        return True

    with serving() as cache:
        User(tmp_path / "one", address(cache)).run(BIG)
        cache.fault = fault
        second = User(tmp_path / "two", address(cache))
        second.timeout = 2.0
        assert statuses(second.run(BIG)) == {"big": "built"}
        given_up.set()
        assert "it is too slow: " in second.warnings()[0]


def test_one_wrong_byte_in_a_thousand_never_gets_in(tmp_path: Path) -> None:
    """Checks that the store is right in the end although a proxy changes some of the bytes that it
    forwards."""
    dice = random.Random(7)
    graph = Graph(
        [step(f"s{n}", "big", bytes=500 * n) for n in range(1, 9)]
        + [step("end", "names", *(f"s{n}" for n in range(1, 9)))]
    )

    def fault(handler: Handler) -> bool:
        data = bytearray(handler.cache.content.get(handler.path, b""))
        if handler.command != "GET" or not data:
            return False
        for _ in range(len(data)):
            if dice.random() < 0.001:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        handler.answer(200, bytes(data))
        return True

    with serving() as cache:
        truth = User(tmp_path / "one", cache.url).run(graph)
        cache.fault = fault
        for turn in range(6):
            user = User(tmp_path / f"user{turn}", cache.url)
            result = user.run(graph, Options(executor="inline", outputs=("*",)))
            assert result.ok
            assert [s.record.tree for s in result.steps if s.record] == [
                s.record.tree for s in truth.steps if s.record
            ]
            assert verify(user.store).ok
