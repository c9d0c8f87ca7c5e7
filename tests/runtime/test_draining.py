"""Tests of the end of a server: SIGTERM lets requests finish, SIGINT and a second signal do not."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlcbuild_runtime.engine.memory_modes import LimitOverrides
from mlcbuild_runtime.engine.served_models import Models as ServedModels
from mlcbuild_runtime.http import draining


class Models:
    """A stand-in for the models of a server: a test sets the numbers of running and waiting requests, and
    `calls` lists what the server calls to drain and close the models."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ready, self.running, self.waiting = True, 0, 0

    def drain(self) -> None:
        self.calls.append("drain")
        self.ready = False

    def close(self, timeout: float) -> None:
        self.calls.append(f"close {timeout}")

    def state(self) -> Any:
        return SimpleNamespace(running=self.running, waiting=self.waiting)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener


async def app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def server(listener: socket.socket, models: Models, drain: float) -> Any:
    return draining._ModelServer(app, cast(Any, models), listener, drain, lambda: "ready")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the clock of the server module that ends a process, `draining`. Returns a list whose only
    value is the simulated time in seconds; a test changes it."""
    times = [100.0]
    monkeypatch.setattr(draining, "time", SimpleNamespace(monotonic=lambda: times[0], time=lambda: times[0]))
    return times


def tick(actual: Any) -> bool:
    asyncio.run(actual.on_tick(1))
    return bool(actual.should_exit)


def test_a_draining_server_ends_with_its_last_request(listener: socket.socket, now: list[float]) -> None:
    models = Models()
    actual = server(listener, models, 5)
    models.running = 1
    assert not tick(actual)
    actual.handle_exit(signal.SIGTERM, None)
    assert not tick(actual) and models.calls == ["drain"]
    models.running, models.waiting = 0, 1
    assert not tick(actual)
    models.waiting = 0
    assert not tick(actual), "a request for embeddings may be between two of its parts"
    models.waiting = 1
    assert not tick(actual)
    models.waiting = 0
    assert not tick(actual) and tick(actual) and not actual.force_exit


def test_a_server_goes_on_if_nobody_reads_its_output(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with os.fdopen(writable, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        server(listener, Models(), 5)._announce()
        assert caplog.messages == ["standard output cannot be written: Broken pipe"]
        output.flush()  # As at the end of the process: what is left of the line raises no error.


def test_an_idle_server_without_a_signal_goes_on(listener: socket.socket, now: list[float]) -> None:
    assert not tick(server(listener, Models(), 5))


def test_the_time_for_draining_is_limited(listener: socket.socket, now: list[float]) -> None:
    models = Models()
    actual = server(listener, models, 5)
    models.running = 1
    actual.handle_exit(signal.SIGTERM, None)
    assert not tick(actual)
    now[0] += 5
    assert not tick(actual)
    now[0] += 0.1
    assert tick(actual)


@pytest.mark.parametrize(
    ("signals", "drain", "forced"),
    [
        ((signal.SIGINT,), 5, False),
        ((signal.SIGTERM,), 0, False),
        ((signal.SIGTERM, signal.SIGTERM), 5, False),
        ((signal.SIGINT, signal.SIGINT), 5, True),
    ],
)
def test_other_signals_end_at_once(
    signals: tuple[signal.Signals, ...], drain: float, forced: bool, listener: socket.socket
) -> None:
    actual = server(listener, Models(), drain)
    for number in signals:
        actual.handle_exit(number, None)
    assert actual.should_exit and actual.force_exit == forced


def test_a_signal_may_interrupt_code_that_holds_a_lock(listener: socket.socket) -> None:
    """Python runs the handler of a signal amid the main thread's code, which may hold a lock of the models or
    of an engine: a handler that takes one would wait for ever."""
    models: Any = ServedModels([], LimitOverrides())
    actual = draining._ModelServer(app, models, listener, 5, lambda: "ready")
    with models._door:
        handling = threading.Thread(target=actual.handle_exit, args=(signal.SIGTERM, None), daemon=True)
        handling.start()
        handling.join(10)
        assert not handling.is_alive()
    assert models.ready
    tick(actual)
    assert not models.ready


def test_sigterm_ends_a_server_without_a_ready_model(listener: socket.socket) -> None:
    models = Models()
    models.ready = False
    actual = server(listener, models, 5)
    actual.handle_exit(signal.SIGTERM, None)
    assert tick(actual) and not models.calls


def test_a_server_answers_and_closes_its_engines_first(
    listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks a server from its start to its end within one event loop: it answers a request, and after SIGINT
    it closes its engines and ends."""
    models, answers = Models(), list[bytes]()

    async def live() -> None:
        actual = server(listener, models, 0)
        serving = asyncio.create_task(actual._serve([listener]))
        while not getattr(actual, "started", False):
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answers.append(await reader.read())
        writer.close()
        actual.handle_exit(signal.SIGINT, None)
        await serving

    asyncio.run(live())
    assert answers[0].startswith(b"HTTP/1.1 200") and answers[0].endswith(b"ok")
    assert models.calls == ["close 0"]
    assert capsys.readouterr().out == "ready\n"
