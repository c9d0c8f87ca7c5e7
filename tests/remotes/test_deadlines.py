"""Tests of servers that never finish: every phase of an answer has a deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import client
from mlcbuild.remotes.background import within
from mlcbuild.remotes.transport import SLOWEST, Attempts, Pace, SlowError
from tests.caches import Cache, Handler, serving
from tests.remotes.endless import ENDLESS, LONG, TIMEOUT, Endless, endless
from tests.remotes.test_patience import full_backlog, mute
from tests.remotes.users import BIG, BUILT, User, statuses


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.01, 0.02))
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(params=["http", "s3", "oci"])
def address(request: pytest.FixtureRequest) -> Callable[[Cache], str]:
    if request.param == "oci":
        return lambda cache: f"oci://{cache.url[7:]}/r"
    return url_of(request)


@pytest.fixture(params=["http", "s3"])
def plain_address(request: pytest.FixtureRequest) -> Callable[[Cache], str]:
    return url_of(request)


def url_of(request: pytest.FixtureRequest) -> Callable[[Cache], str]:
    if request.param == "http":
        return lambda cache: cache.url
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'mlcbuild[s3]'")
    request.getfixturevalue("s3_login")
    return lambda cache: cache.bucket


def test_every_phase_of_an_answer_ends(address: Callable[[Cache], str], tmp_path: Path) -> None:
    for number, name in enumerate(ENDLESS):
        with endless(name) as (cache, _):
            user = User(tmp_path / str(number), address(cache))
            user.timeout = TIMEOUT
            began = time.monotonic()
            result = user.run()
            assert time.monotonic() - began < LONG, name
            assert statuses(result) == BUILT, name
            (warning,) = user.warnings()
            assert warning.startswith(f"{address(cache)} is not used in this run: it "), (name, warning)


@pytest.mark.parametrize("name", ["header", "continue", "chunk size", "trailers", "one byte"])
def test_every_phase_of_a_blob_ends(name: str, plain_address: Callable[[Cache], str], tmp_path: Path) -> None:
    address = plain_address
    with serving() as cache:
        User(tmp_path / "one", address(cache)).run(BIG)
        drip = Endless(*ENDLESS[name])
        cache.fault = lambda handler: "/cas/" in handler.path and handler.command == "GET" and drip(handler)
        second = User(tmp_path / "two", address(cache))
        second.timeout = TIMEOUT
        try:
            assert statuses(second.run(BIG)) == {"big": "built"}
        finally:
            drip.over.set()
        (warning,) = second.warnings()
        assert warning.startswith(f"{address(cache)} is not used in this run: it ")


def test_a_server_that_breaks_off_after_each_byte_is_given_up(tmp_path: Path) -> None:
    """Checks that a client gives up a server which closes the connection after each byte, although every
    request transfers something: a large file would need millions of requests."""
    with serving() as cache:
        User(tmp_path / "one", cache.url).run(BIG)
        asked = []

        def fault(handler: Handler) -> bool:
            if "/cas/" not in handler.path or handler.command != "GET":
                return False
            time.sleep(0.01)
            start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
            data = handler.cache.content[handler.path][start:]
            extra = {"Content-Range": f"bytes {start}-2999999/3000000"}
            handler.answer(206 if start else 200, data[:1], extra, len(data))
            asked.append(start)
            return True

        cache.fault = fault
        second = User(tmp_path / "two", cache.url)
        assert statuses(second.run(BIG)) == {"big": "built"}
        (warning,) = second.warnings()
        assert "its answer ended early" in warning and asked == [0, 1, 2]


def test_pace_is_measured_in_windows_and_attempts_by_what_they_bring() -> None:
    pace = Pace(0.2)
    pace.add(10 * SLOWEST)
    time.sleep(0.25)
    pace.add(0)
    time.sleep(0.25)
    with pytest.raises(SlowError, match="it is too slow: 1 bytes in 0 seconds"):
        pace.add(1)
    attempts, error = Attempts(), RemoteError("broken off")
    for count in (0, 0, 1_000_000, 0, 0):
        attempts.failed(error, count, time.monotonic())
    with pytest.raises(RemoteError, match="broken off"):
        attempts.failed(error, 0, time.monotonic())
    with pytest.raises(SlowError):
        Attempts().failed(SlowError("slow"), 1_000_000, time.monotonic())


def test_a_request_is_not_repeated_after_its_time(tmp_path: Path) -> None:
    """Checks that a request is not repeated once its time is over: three answers just within the timeout
    would take three times as long."""

    def busy(handler: Handler) -> bool:
        time.sleep(0.5 * TIMEOUT)
        handler.answer(503)
        return True

    with serving(busy) as cache:
        user = User(tmp_path / "one", cache.url, mode="read")
        user.timeout = 0.4 * TIMEOUT + 0.2
        assert statuses(user.run()) == BUILT
        assert len({path for _, path in cache.requests}) == 1 and len(cache.requests) <= 3


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("server", [mute, full_backlog])
def test_connecting_ends(server: Callable[[], object], scheme: str, tmp_path: Path) -> None:
    with server() as place:  # type: ignore[attr-defined]
        user = User(tmp_path / "one", f"{scheme}://{place}")
        user.timeout = TIMEOUT
        assert statuses(user.run()) == BUILT
        (warning,) = user.warnings()
        assert warning == f"{scheme}://{place} is not used in this run: it does not answer"


def test_a_name_that_is_looked_up_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a run continues if resolving a host name never ends. The name lookup is replaced by a
    function that waits."""
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: over.wait(LONG) and [])
    user = User(tmp_path / "one", "http://somewhere.example")
    user.timeout = TIMEOUT
    try:
        assert statuses(user.run()) == BUILT
    finally:
        over.set()
    (warning,) = user.warnings()
    assert warning.endswith("is not used in this run: it does not answer")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_stalls(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks a proxy whose answers arrive byte by byte, those to CONNECT and those that it forwards."""
    with endless("header") as (cache, inputs):

        def tunnel(handler: Handler) -> None:
            inputs(handler)

        monkeypatch.setattr(Handler, "do_CONNECT", tunnel, raising=False)
        monkeypatch.setenv(f"{scheme}_proxy", cache.url)
        user = User(tmp_path / "one", f"{scheme}://somewhere.example")
        user.timeout = TIMEOUT
        assert statuses(user.run()) == BUILT
        (warning,) = user.warnings()
        assert "it does not answer" in warning
        assert scheme == "http" or "the proxy 127.0.0.1: it does not answer" in warning


def test_redirects_in_a_circle_and_slow_ones_end(tmp_path: Path) -> None:
    for number, pause in enumerate((0.0, 0.3 * TIMEOUT)):

        def circle(handler: Handler, pause: float = pause, number: int = number) -> bool:
            if "/blobs/" in handler.path:
                time.sleep(pause)
                handler.answer(307, extra={"Location": f"{handler.path.partition('?')[0]}?{number}"})
                return True
            layer = {"mediaType": "x", "digest": "sha256:" + "0" * 64, "size": 9}
            handler.answer(200, b'{"layers": [%s]}' % str(layer).replace("'", '"').encode())
            return True

        with serving(circle) as cache:
            user = User(tmp_path / str(number), f"oci://{cache.url[7:]}/r")
            user.timeout = TIMEOUT
            assert statuses(user.run()) == BUILT
            (warning,) = user.warnings()
            assert "it redirects clients (status 307)" in warning or "it does not answer" in warning


def test_a_call_without_a_timeout_of_its_own_is_left_alone() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, over.wait)
    over.set()
    assert within(LONG, lambda: 7).result() == 7
    with pytest.raises(ValueError, match="no"):
        within(LONG, lambda: int("no")).result()
