"""Tests of downloading objects in ranges: how objects are divided on fast and slow connections, and which
answers are accepted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import ranges
from mlcbuild.remotes.background import Background
from mlcbuild.remotes.ranges import Range, Ranges
from mlcbuild.remotes.transport import Body

DATA = bytes(i * i % 251 for i in range(20_000))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "FIRST", 1000)
    monkeypatch.setattr(ranges, "PIECE", 600)


@pytest.fixture
def pool() -> Iterator[Background]:
    with Background(4) as threads:
        yield threads


class Server:
    """A simulated file server that sends byte ranges of the constant DATA (20,000 bytes) in pieces of 250
    bytes, and records the requests."""

    def __init__(self, shift: int = 0, length: int = 0) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.open = 0
        self._shift, self._length = shift, length

    def ask(self, start: int, end: int, version: str = "v1", share: int = 1) -> Range:
        assert version == "v1"
        self.asked.append((start, end, share))
        self.open += 1
        begin = start if start == 0 else start + self._shift
        left = [DATA[start : end + (self._length if start else 0)]]

        def read() -> bytes:
            data, left[0] = left[0][:250], left[0][250:]
            return data

        def close() -> None:
            self.open -= 1

        return Range(Body(begin, read, close), len(DATA), "v1")


def everything(reading: Ranges) -> bytes:
    data = b""
    while piece := reading.read():
        data += piece
    return data


def test_a_fast_connection_is_kept_with_growing_ranges(
    pool: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "FAST", 0)
    server = Server()
    assert everything(Ranges(server.ask(0, 1000), server.ask, pool)) == DATA
    assert server.asked == [(0, 1000, 1), (1000, 9000, 1), (9000, 20_000, 1)]
    assert server.open == 0


def test_a_slow_connection_is_followed_by_several(pool: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "FAST", 1e18)
    server = Server()
    assert everything(Ranges(server.ask(0, 1000), server.ask, pool)) == DATA
    expected = [(start, min(start + 600, 20_000), ranges.AHEAD) for start in range(1000, 20_000, 600)]
    assert sorted(server.asked[1:]) == expected and server.open == 0


def test_an_object_within_the_first_range_needs_no_other(pool: Background) -> None:
    server = Server()
    whole = Range(server.ask(0, 20_000).body, 900, "v1")
    reading = Ranges(whole, server.ask, pool)
    everything(reading)
    assert len(server.asked) == 1


@pytest.mark.parametrize("fast", [0, 1e18])
def test_a_range_begins_where_it_should(
    pool: Background, monkeypatch: pytest.MonkeyPatch, fast: float
) -> None:
    monkeypatch.setattr(ranges, "FAST", fast)
    server = Server(shift=1)
    with pytest.raises(RemoteError, match="does not support ranges"):
        everything(Ranges(server.ask(0, 1000), server.ask, pool))


@pytest.mark.parametrize("length", [-1, 1, 300])
def test_a_range_is_as_long_as_it_should_be(
    pool: Background, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(ranges, "FAST", 1e18)
    server = Server(length=length)
    with pytest.raises(RemoteError, match="another range"):
        everything(Ranges(server.ask(0, 1000), server.ask, pool))


def test_the_end_of_the_pool_ends_the_reading(pool: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "FAST", 1e18)
    server = Server()
    reading = Ranges(server.ask(0, 1000), server.ask, pool)
    for _ in range(4):
        reading.read()
    pool.close()
    with pytest.raises(RemoteError, match="the run ends"):
        reading.read()


def test_closing_closes_the_first_range(pool: Background) -> None:
    server = Server()
    reading = Ranges(server.ask(0, 1000), server.ask, pool)
    reading.close()
    assert server.open == 0
