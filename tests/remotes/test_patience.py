"""Tests that a server or a directory which never responds only delays a run: the run completes after the
remote's timeout, with one warning, and Ctrl-C ends it at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlcbuild.errors import RemoteError
from mlcbuild.remotes import client
from mlcbuild.remotes.kinds import connect
from tests.caches import Handler, serving
from tests.forkserver import COMMANDS
from tests.remotes.endless import ENDLESS, LONG, Endless, dead_mount, endless


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.01, 0.02))
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextmanager
def mute() -> Iterator[str]:
    """Yields the address of a server that accepts connections and never sends anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def full_backlog() -> Iterator[str]:
    """Yields the address of a listening socket whose queue is full, so that further connections are neither
    accepted nor refused."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        for one in waiting:
            one.close()


STALLS = ("silence", "header", "fast continue", "one byte")


def interrupted(store: Path, url: str, until: Callable[[], object], note: Path) -> float:
    """Interrupts a run that waits for a remote with SIGINT, and returns the seconds until it has ended."""
    return ended(until, "tests.builder", store, "chain", note, "pool", url)


def ended(until: Callable[[], object], module: str, *arguments: str | Path) -> float:
    """Starts `python -m module arguments...`, sends SIGINT soon after `until()` is true, and returns the
    seconds from then to the end of the process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MLCBUILD_TEST_TIMEOUT": "900"}
    with Path(os.devnull).open("w") as output:
        process = COMMANDS.start(
            module, [str(argument) for argument in arguments], Path.cwd(), environment, output
        )
    try:
        end = time.monotonic() + LONG
        while not until():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.3)
        assert process.poll() is None, "it waits"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(LONG)
        return time.monotonic() - began
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", STALLS)
def test_ctrl_c_ends_a_run_that_asks_a_remote(name: str, tmp_path: Path) -> None:
    with endless(name) as (cache, _):
        assert interrupted(tmp_path / "s", cache.url, lambda: cache.requests, tmp_path / "note") < LONG


def test_ctrl_c_ends_a_run_that_asks_in_its_loop(tmp_path: Path) -> None:
    """Checks that Ctrl-C ends a run whose own loop waits for a remote. That happens for the keys of later
    steps, which are known only once earlier steps are built."""
    drip = Endless(*ENDLESS["silence"])
    names: set[str] = set()

    def fault(handler: Handler) -> bool:
        names.add(handler.path)
        return drip(handler) if len(names) > 4 and handler.command == "GET" else False

    with serving(fault) as cache:
        until = lambda: len(names) > 4  # noqa: E731
        try:
            assert interrupted(tmp_path / "s", cache.url, until, tmp_path / "note") < LONG
        finally:
            drip.over.set()


def test_ctrl_c_ends_a_download(tmp_path: Path) -> None:
    with serving() as cache:
        url, note = cache.url, tmp_path / "note"
        build = [sys.executable, "-m", "tests.builder", str(tmp_path / "1"), "chain", str(note), "pool", url]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(build, env=environment, check=True, capture_output=True, timeout=LONG)
        (last,) = [name for name in cache.names("ac") if b'"text":"2/0"' in cache.content[name]]
        del cache.content[last]  # a step that runs, and needs files
        drip, asked = Endless(*ENDLESS["header"]), threading.Event()

        def fault(handler: Handler) -> bool:
            if handler.command != "GET" or "/cas/" not in handler.path:
                return False
            asked.set()
            return drip(handler)

        cache.fault = fault
        try:
            assert interrupted(tmp_path / "2", url, asked.is_set, note) < LONG
        finally:
            drip.over.set()


@pytest.mark.parametrize("name", STALLS)
def test_ctrl_c_ends_a_pull(name: str, tmp_path: Path) -> None:
    """Checks that Ctrl-C ends a pull while four layers of a bundle are being downloaded."""
    drip = Endless(*ENDLESS[name])
    title = "org.opencontainers.image.title"
    layers = [
        {"digest": f"sha256:{n:064x}", "size": 3_000_000, "annotations": {title: file}}
        for n, file in enumerate(("bundle.json", "a", "b", "c", "d"))
    ]

    def fault(handler: Handler) -> bool:
        if "/blobs/" in handler.path:
            return drip(handler)
        handler.answer(200, json.dumps({"layers": layers}).encode())
        return True

    with serving(fault) as cache:
        try:
            url, out = f"oci://{cache.url[7:]}/r:v1", tmp_path / "out"
            assert ended(lambda: len(cache.requests) > 4, "tests.remotes.patient_pull", url, out) < LONG
        finally:
            drip.over.set()


@pytest.mark.parametrize("server", [mute, full_backlog])
def test_ctrl_c_ends_a_run_that_connects(server: Callable[[], object], tmp_path: Path) -> None:
    with server() as place:  # type: ignore[attr-defined]
        began = time.monotonic()
        passed = lambda: time.monotonic() - began > 3  # noqa: E731
        assert interrupted(tmp_path / "s", f"https://{place}", passed, tmp_path / "note") < LONG


def test_ctrl_c_ends_a_run_that_waits_for_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    with dead_mount(root):
        began = time.monotonic()
        passed = lambda: time.monotonic() - began > 3  # noqa: E731
        url = (root / "cache").as_uri()
        assert interrupted(tmp_path / "s", url, passed, tmp_path / "note") < LONG


def test_closing_wakes_who_waits() -> None:
    with endless("silence") as (cache, _):
        transport = connect(cache.url, 10 * LONG)  # more than a test may take
        threading.Timer(0.2, transport.close).start()
        with pytest.raises(RemoteError, match="the run ends"):
            transport.size("cas/x")
