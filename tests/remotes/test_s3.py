"""Tests of what is special about S3. test_remotes has the tests that all kinds of remotes share."""

from __future__ import annotations

import io
import os
import random
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest

from mlcbuild.build.graph import Graph
from mlcbuild.canon import bytes_digest
from mlcbuild.errors import RemoteError
from mlcbuild.remotes import client, ranges, s3
from mlcbuild.remotes.kinds import connect
from mlcbuild.store.upkeep import verify
from tests.buckets import Server
from tests.caches import Handler, serving
from tests.conftest import checked, mlcbuild
from tests.remotes.s3_content import NAME, SIZE, content
from tests.remotes.users import BUILT, CHAIN, User, statuses, step


@pytest.mark.parametrize("fast", [True, False])
def test_large_objects_go_in_parts_and_come_in_ranges(
    fast: bool, bucket: str, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "FAST", 0 if fast else 1e18)
    for module in (ranges, s3):
        monkeypatch.setattr(module, "FIRST", 3_000_000)
    graph = Graph([step("big", "big", bytes=30_000_001)])
    User(tmp_path / "one", bucket).run(graph)
    second = User(tmp_path / "two", bucket)
    with second.store.staging():
        pass
    digest = bytes_digest(b"x" * 30_000_001)
    (second.store.root / "partial").mkdir()
    (second.store.root / "partial" / digest).write_bytes(b"x" * 9_999_999)
    assert statuses(second.run(graph)) == {"big": "reused"} and second.warnings() == []
    assert verify(second.store).ok
    name = bucket[5:].partition("/")[0]
    log = (s3_server.home / "radosgw.log").read_text().splitlines()
    requests = [line for line in log if name in line and digest in line and "beast" in line]
    assert sum("PUT" in line and "partNumber" in line for line in requests) == 4
    starts = sorted(int(line.split("bytes=")[1].partition("-")[0]) for line in requests if "bytes=" in line)
    if fast:
        assert starts == [9_999_999, 12_999_999], "each is much longer than the one before"
    else:
        pieces = range(12_999_999, 30_000_001, ranges.PIECE)
        assert starts == [9_999_999, *pieces], "one piece after the other, each once"


def test_what_is_there_first_stays(bucket: str) -> None:
    """Checks that the first of two equal uploads is kept if neither found an object before, and that an
    upload which is meant to replace an object does so."""
    transport = connect(bucket)
    transport.put(NAME, io.BytesIO(b"first"), 5, new=True)
    transport.put(NAME, io.BytesIO(b"second"), 6, new=True)
    assert (content(transport, NAME), transport.size(NAME)) == (b"first", 5)
    transport.put(NAME, io.BytesIO(b"third"), 5)
    assert content(transport, NAME) == b"third" and content(transport, NAME, 2) == b"ird"
    assert transport.open("cas/" + "6" * 64) is None and transport.size("cas/" + "6" * 64) is None


def test_a_server_that_knows_no_conditions_will_do(s3_login: None, tmp_path: Path) -> None:
    def old(handler: Handler) -> bool:
        conditional = any(name.lower() == "if-none-match" for name in handler.headers)
        if conditional:
            handler.body()
            handler.answer(501, b"<Error><Code>NotImplemented</Code></Error>")
        return conditional

    with serving(old) as cache:
        first = User(tmp_path / "one", cache.bucket)
        assert statuses(first.run()) == BUILT and first.warnings() == []
        assert len(cache.names("ac")) == 3


def test_a_body_begins_at_0_where_less_is_there(bucket: str) -> None:
    transport = connect(bucket)
    for data in (b"short", b""):
        transport.put(NAME, io.BytesIO(data), len(data))
        body = transport.open(NAME, 7)
        assert body is not None and (body.start, body.read(), body.read()) == (0, data, b"")


@pytest.mark.parametrize("fast", [0, 1e18])
def test_an_object_that_is_replaced_while_it_is_read_is_no_mixture(
    fast: float, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "FAST", fast)
    transport = connect(bucket)
    size = 40 << 20
    transport.put(NAME, io.BytesIO(b"a" * size), size)
    body = transport.open(NAME)
    assert body is not None
    with body:
        assert body.read()[:1] == b"a"
        transport.put(NAME, io.BytesIO(b"b" * size), size)
        with pytest.raises(RemoteError, match=r"the object was replaced while it was read|status 412"):
            while data := body.read():
                assert set(data) == {ord("a")}


@dataclass
class Slow:
    """A server that sends at most 50 MB/s on each connection, and counts the connections that are open at one
    time."""

    now: int = 0
    most: int = 0
    guard: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, handler: Handler) -> bool:
        if handler.command != "GET":
            return False
        with self.guard:
            self.now += 1
            self.most = max(self.most, self.now)
        start, end = map(int, handler.headers["Range"][6:].split("-"))
        data = handler.cache.content[handler.path][start : end + 1]
        handler.send_response(206)
        handler.send_header("ETag", '"1"')
        handler.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{SIZE}")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        for at in range(0, len(data), 100_000):
            time.sleep(0.002)
            handler.wfile.write(data[at : at + 100_000])
        with self.guard:
            self.now -= 1
        return True


def test_a_server_that_is_slow_for_each_connection_is_read_by_several(
    s3_login: None, short_ranges: None
) -> None:
    data = random.Random(1).randbytes(SIZE)
    slow = Slow()
    with serving(slow) as cache:
        transport = connect(cache.bucket)
        transport.put(NAME, io.BytesIO(data), SIZE // 3)  # less than a part, in one request
        cache.content[f"/{NAME}"] = data
        before = len(cache.requests)
        for start in (0, 7_777_777):
            assert content(transport, NAME, start) == data[start:]
        assert 2 <= slow.most <= ranges.AHEAD
        assert len(cache.requests) - before == 20 + 13, "each range once"
        assert len(cache.clients) <= 2 + ranges.AHEAD, "connections are used again"
        transport.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("cut", "its answer ended early"),
        ("missing", "the object was removed while it was read"),
        ("longer", "it sent another range than the requested one"),
        ("all", "it does not support ranges in all responses"),
        ("elsewhere", "it sent another range than the requested one"),
        ("refused", r"it refuses the credentials \(status 403, AccessDenied\)"),
    ],
)
@pytest.mark.parametrize("fast", [0, 1e18])
def test_a_range_that_goes_wrong_is_told(
    wrong: str, words: str, fast: float, s3_login: None, short_ranges: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "FAST", fast)
    monkeypatch.setattr(client, "PAUSES", ())
    data = bytes(SIZE)

    def fault(handler: Handler) -> bool:
        start, end = map(int, handler.headers.get("Range", "bytes=0-0")[6:].split("-"))
        if handler.command != "GET" or not start:
            return False
        end = min(end, SIZE - 1)
        there = {"Content-Range": f"bytes {start}-{end}/{SIZE}"}
        if wrong == "cut":
            handler.answer(206, data[start : end - 9], there, end + 1 - start)
        elif wrong == "missing":
            handler.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif wrong == "longer":
            handler.answer(
                206, data[: end + 99 - start], there | {"Content-Range": f"bytes {start}-{end + 98}/{SIZE}"}
            )
        elif wrong == "all":
            handler.answer(200, data)
        elif wrong == "elsewhere":
            handler.answer(206, data[:10], {"Content-Range": f"bytes 10-19/{SIZE}"})
        else:
            handler.answer(403, b"<Error><Code>AccessDenied</Code><X>X-Amz-Signature</X></Error>")
        return True

    with serving(fault) as cache:
        cache.content[f"/{NAME}"] = data
        transport = connect(cache.bucket)
        with pytest.raises(RemoteError, match=words) as caught:
            content(transport, NAME)
        assert "X-Amz" not in str(caught.value)
        transport.close()


class Ends(io.BytesIO):
    def read(self, count: int | None = -1) -> bytes:
        if self.tell() > 20 << 20:
            raise RemoteError("the source ends")
        return super().read(count)


def test_an_upload_that_ends_early_leaves_nothing(bucket: str, s3_server: Server) -> None:
    transport = connect(bucket)
    sources: tuple[tuple[BinaryIO, int], ...] = (
        (Ends(b"x" * (30 << 20)), 30 << 20),
        (io.BytesIO(b"x" * (20 << 20)), 30 << 20),
        (io.BytesIO(b"x"), 2),
    )
    for source, size in sources:
        with pytest.raises(RemoteError, match=r"the source ends|bytes to send are missing"):
            transport.put(NAME, source, size)
    assert s3_server.objects(bucket[5:].partition("/")[0]) == []


def test_a_closed_transport_wakes_who_waits(s3_login: None) -> None:
    asked, answered = threading.Event(), threading.Event()

    def silent(handler: Handler) -> bool:
        asked.set()
        answered.wait()
        return True

    with serving(silent) as cache:
        transport = connect(cache.bucket)

        def close() -> None:
            asked.wait()
            transport.close()

        threading.Thread(target=close).start()
        with pytest.raises(RemoteError, match="the run ends"):
            transport.open(NAME)
        with pytest.raises(RemoteError, match="the run ends"):
            transport.size(NAME)
        answered.set()


def test_a_store_is_pushed_to_a_bucket(bucket: str, tmp_path: Path) -> None:
    user = User(tmp_path / "one")
    user.run(CHAIN)
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    said = checked(mlcbuild("cache", "push", "--all", bucket, store=user.store.root, variables=variables))
    assert re.fullmatch(rf"{re.escape(bucket)}: sent 3 records with \d+ B; 3 of 3 are there\n", said)
    assert set(statuses(User(tmp_path / "two", bucket).run()).values()) == {"reused"}
