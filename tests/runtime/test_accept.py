"""Tests of accepting connections up to a limit, and of closing idle ones to make room."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
from mlcbuild_runtime.http import accept
from mlcbuild_runtime.http.connection import Connection


class Opened(Connection):
    """A stand-in for a server's connection, which is idle since the time `idle_since`, or busy if that is
    None. Its method `drop` removes it from the set of open connections."""

    def __init__(self, idle_since: float | None, others: set[Any]) -> None:
        self._idle, self._others = idle_since, others
        others.add(self)

    @property
    def is_idle(self) -> bool:
        return self._idle is not None

    @property
    def idle_since(self) -> float:  # type: ignore[override]
        assert self._idle is not None
        return self._idle

    def drop(self) -> None:
        self._others.discard(self)


def test_the_connection_that_was_idle_for_longest_goes_first() -> None:
    connections: set[Any] = set()
    busy, young, _old = (Opened(since, connections) for since in (None, 20.0, 10.0))
    assert accept._drop_idle(connections) and connections == {busy, young}
    assert accept._drop_idle(connections) and connections == {busy}
    assert not accept._drop_idle(connections) and connections == {busy}


@pytest.mark.parametrize(
    ("limit", "room"),
    [(100, 50), (1024, 960), (1 << 20, accept.MAX_CONNECTIONS), (-1, accept.MAX_CONNECTIONS)],
)
def test_some_file_descriptors_are_left_for_others(
    limit: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert accept.room() == room


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


class Counting(asyncio.Protocol):
    """A connection that adds itself to a set while it is open."""

    def __init__(self, connections: set[Any]) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self)

    def drop(self) -> None:
        self._transport.close()
        self._connections.discard(self)


def test_more_connections_wait_until_one_ends(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "room", lambda: 2)
    monkeypatch.setattr(accept, "RETRY", 0.005)
    connections: set[Any] = set()
    most = 0

    async def run() -> None:
        nonlocal most
        task = asyncio.create_task(
            accept.accept(listener, lambda: cast(Any, Counting(connections)), connections)
        )
        clients = [await asyncio.open_connection(*listener.getsockname()) for _ in range(5)]
        ended = 0
        while ended < 5:
            while not connections:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)
            most = max(most, len(connections))
            connections.copy().pop().drop()
            ended += 1
        task.cancel()
        await asyncio.wait([task])
        for _, writer in clients:
            writer.close()

    asyncio.run(run())
    assert most == 2


def test_a_system_without_descriptors_is_asked_again_later(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept, "RETRY", 0.001)
    connections: set[Any] = set()
    errors = [errno.EMFILE, errno.EMFILE, errno.ECONNABORTED]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        real = loop.sock_accept

        async def failing(actual: socket.socket) -> Any:
            if errors:
                raise OSError(errors.pop(0), "no room")
            return await real(actual)

        monkeypatch.setattr(loop, "sock_accept", failing)
        task = asyncio.create_task(
            accept.accept(listener, lambda: cast(Any, Counting(connections)), connections)
        )
        _, writer = await asyncio.open_connection(*listener.getsockname())
        while not connections:
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.wait([task])
        connections.pop().drop()
        writer.close()

    asyncio.run(run())
    assert not errors and len(caplog.messages) == 1, "one line a minute"
    assert "there is no room for more: no room" in caplog.messages[0]
