"""Tests of downloads that are interrupted, resumed, too slow, or that bring wrong bytes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

from mlcbuild.build.execute import Options
from mlcbuild.build.graph import Graph
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
