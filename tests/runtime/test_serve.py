"""Tests of a server process: its options, clients that disconnect, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from . import shared
from .shared import Server

LONG = {"prompt": [1], "max_tokens": 255, "stream": True}


def test_a_client_that_leaves_a_stream_frees_its_pages(toy_bundle: Path) -> None:
    with shared.serving(toy_bundle, "--max-batch", "1", "--max-pages", "16") as server:
        for _ in range(3):
            with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG) as response:
                next(response.iter_lines())
        assert server.wait_idle()["free_pages"] == 16


def test_a_client_that_leaves_without_a_stream_frees_its_pages(server: Server) -> None:
    body = json.dumps({"prompt": [2], "max_tokens": 250}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = server.url.removeprefix("http://").split(":")
    before = server.health()["answer_tokens"]
    for _ in range(20):
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head + body)
    state = server.wait_idle()
    assert state["free_pages"] == state["pages"]
    assert int(state["answer_tokens"]) - int(before) < 20 * 250


def test_a_client_that_leaves_in_its_body_does_no_harm(server: Server) -> None:
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.health()["status"] == "ok"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_amid_streams(toy_bundle: Path, number: signal.Signals) -> None:
    """Checks that SIGINT ends a server without waiting for requests, and that SIGTERM waits for them only as
    long as --drain states. The clients' streams would take longer than the test waits."""
    with shared.serving(toy_bundle) as server:
        assert server.stop(number) == 0
    drain = {signal.SIGINT: str(10 * shared.WAIT), signal.SIGTERM: "0.5"}[number]
    with shared.serving(toy_bundle, "--drain", drain) as server, ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(_stream_until_the_end, server.url) for _ in range(4)]
        end = time.monotonic() + shared.WAIT
        while server.health()["running"] == 0:
            assert time.monotonic() < end
        assert server.stop(number) == 0
        assert {job.result(shared.WAIT) for job in jobs} <= {"the server is stopping", "cut"}


def _stream_until_the_end(url: str) -> str:
    """Streams answers repeatedly until the server stops. Returns how the last stream ended: "the server is
    stopping" if the server sent this message, or else "cut"."""
    last = "cut"
    try:
        while True:
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG) as response:
                for line in response.iter_lines():
                    if "server is stopping" in line:
                        return "the server is stopping"
    except httpx.HTTPError:
        return last


def test_a_client_that_reads_nothing_does_not_delay_the_end(toy_bundle: Path) -> None:
    with shared.serving(toy_bundle) as server:
        address = server.url.removeprefix("http://").split(":")
        body = json.dumps(LONG).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head + body)
            connection.recv(100)
            assert server.stop() == 0


def test_a_port_in_use_is_one_sentence(toy_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = shared.run("-m", "mlcbuild_runtime", str(toy_bundle), "--port", str(port))
    assert done.returncode == 3
    assert done.stderr == f"mlcbuild-serve: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


@pytest.mark.parametrize(
    "option",
    [["--port", "70000"], ["--host", "no.such.host.invalid"], ["--host", "a" * 64], ["--host", "a..b"]],
)
def test_an_address_that_cannot_be(toy_bundle: Path, option: list[str]) -> None:
    done = shared.run("-m", "mlcbuild_runtime", str(toy_bundle), *option)
    assert done.returncode == 3
    assert done.stderr.startswith("mlcbuild-serve: cannot listen on")
    assert done.stderr.count("\n") == 1


def test_options_that_make_no_sense(toy_bundle: Path) -> None:
    done = shared.run("-m", "mlcbuild_runtime", str(toy_bundle), "--threads", "0")
    assert done.returncode == 2
    assert "must be at least 1, found 0" in done.stderr
    done = shared.run("-m", "mlcbuild_runtime", str(toy_bundle), "--draft-tokens", "4")
    assert done.returncode == 2
    assert "--draft-tokens limits the drafts of --speculate, which is missing" in done.stderr
    done = shared.run("-m", "mlcbuild_runtime", "--help")
    assert done.returncode == 0
    assert "example: mlcbuild-serve" in done.stdout
