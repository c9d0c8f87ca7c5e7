"""Tests of receiving data on connections that share one buffer, with a real server."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.http.connection import Connection
from mlcbuild_runtime.http.serve import ServerOptions, serve
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

BUFFER = 1 << 14


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    size = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(protocol: type[HttpToolsProtocol]) -> Iterator[int]:
    """Yields the port of a server that returns the body of each request."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(echo, http=protocol, lifespan="off", log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def test_bodies_come_as_they_were_sent() -> None:
    """Checks that bodies of many clients, which send at the same time in pieces of any size, are never
    mixed."""

    def send(seed: int) -> bool:
        chosen = random.Random(seed)
        sizes = [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER, chosen.randrange(20 * BUFFER)]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for size in chosen.sample(sizes, len(sizes)):
                body = chosen.randbytes(size)
                ends = sorted(chosen.randrange(size + 1) for _ in range(chosen.randrange(5)))
                pieces = [body[a:b] for a, b in zip([0, *ends], [*ends, size], strict=True)]
                if client.post("/", content=iter(pieces)).content != body:
                    return False
        return True

    with serving(Connection) as port, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(send, range(16)))


def test_the_server_has_such_connections(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # the server sets it; this restores it
    served: list[object] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.append(self.config.http))
    assert serve(toy_bundle, ServerOptions(port=0)) == 0
    assert served == [Connection]


@pytest.mark.parametrize(
    ("protocol", "lean"), [(Connection, True), (HttpToolsProtocol, False)], ids=["ours", "plain"]
)
def test_a_small_request_takes_little_memory(protocol: type[HttpToolsProtocol], lean: bool) -> None:
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    with serving(protocol) as port, socket.create_connection(("127.0.0.1", port)) as client:
        tracemalloc.start()
        try:
            for _ in range(3):  # the first round includes what is allocated once
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                client.sendall(request)
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
                taken = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
    assert (taken < BUFFER) == lean, taken


@contextmanager
def connected(loop: asyncio.AbstractEventLoop, **options: Any) -> Iterator[tuple[socket.socket, Any]]:
    """Yields a client's socket, and an awaitable that opens the server's side of its connection in the event
    loop."""
    config = uvicorn.Config(echo, lifespan="off", log_level="error", **options)
    config.load()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client:
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            yield (
                client,
                loop.connect_accepted_socket(lambda: Connection(config, ServerState(), {}), accepted),
            )


@pytest.mark.parametrize("way", ["late", "refuse", "end", "unsent", "stream"])
def test_a_client_that_resets_a_connection_while_it_ends(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Checks that a client which resets its connection while it is being closed, or written to, causes no
    exception in the event loop and no line in the log, and that the connection is closed."""
    raised: list[dict[str, Any]] = []

    async def talk() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: raised.append(context))
        with connected(loop) as (client, opening):
            wire, connection = await opening
            client.sendall(b"GET /h")
            while not connection._input.framing:
                await asyncio.sleep(0.001)
            if way == "unsent":
                wire.write(b"x" * (8 << 20))
                connection.end(unread=True)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # resets the connection before the event loop can notice
            if way == "late":
                connection._late()
            elif way == "refuse":
                connection._refuse(RequestError("no"))
            elif way == "end":
                connection.end(unread=True)
            elif way == "stream":  # without a turn of the loop in which the reset would be noticed
                for _ in range(9):
                    connection.transport.write(b"x")
            while not wire.is_closing():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(talk(), 60))
    assert not raised and not caplog.messages


def test_the_last_answer_arrives_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a client that reads slowly receives the last answer completely, and then the end of the
    connection."""
    monkeypatch.setattr("mlcbuild_runtime.http.connection.LINGER_SECONDS", 60.0)

    async def talk() -> int:
        with connected(asyncio.get_running_loop()) as (client, opening):
            wire, connection = await opening
            wire.write(b"x" * (8 << 20))
            connection.end(unread=True)
            client.setblocking(False)
            size = 0
            while part := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                size += len(part)
            return size

    assert asyncio.run(asyncio.wait_for(talk(), 60)) == 8 << 20
