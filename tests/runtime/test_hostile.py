"""Tests of hostile connections to a real server: what they send is limited, and other clients are not
affected."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from . import shared
from .attacks import HOST, MB, answer, connect, repeated, resident, send
from .shared import Server
from .test_server import COMPLETION

CHUNK = b"1000\r\n" + b" " * 4096 + b"\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS: list[tuple[str, bytes, bytes, bytes]] = [
    ("header fields", b"GET /health HTTP/1.1\r\n" + HOST, b"a: b\r\n", b"431"),
    ("one header", b"GET /health HTTP/1.1\r\n" + HOST + b"A: ", b"b", b"431"),
    ("a header's name", b"GET /health HTTP/1.1\r\n" + HOST, b"a", b"431"),
    ("a request line", b"GET /", b"a", b"414"),
    ("a query", b"GET /health?", b"a=b&", b"414"),
    ("a method", b"", b"GET", b"400"),
    ("empty lines", b"", b"\r\n", b"431"),
    ("trailers", CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n", b""),
    ("one trailer", CHUNKED + b"2\r\n{}\r\n0\r\na: ", b"b", b""),
    ("an extension", CHUNKED + b"2;", b"a=b;", b""),
    ("extensions", CHUNKED, b"1;" + b"a" * 500 + b"\r\n1\r\n", b""),
    ("a chunk's size", CHUNKED, b"0", b""),
    ("folded lines", b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\r\n", b" c\r\n", b"400"),
    ("a body", CHUNKED, CHUNK, b"413"),
    ("a body for nobody", CHUNKED.replace(b"tokenize", b"nowhere"), CHUNK, b"404"),
    ("a body of a GET", CHUNKED.replace(b"POST", b"GET"), CHUNK, b"405"),
]  # fmt: skip


@pytest.mark.parametrize(("begin", "more", "status"), [e[1:] for e in ENDLESS], ids=[e[0] for e in ENDLESS])
def test_what_has_no_end_is_ended(server: Server, begin: bytes, more: bytes, status: bytes) -> None:
    before = resident(server)
    with connect(server) as client:
        with suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(begin)
        sent = send(client, repeated(more))
        reply = answer(client)
    # Operating systems buffer some megabytes on their way.
    assert sent < 48 * MB
    assert not reply or reply.split(b" ")[1] in (status or b"400", b"431"), reply[:200]
    assert resident(server) < before + 40
    assert server.health()["status"] == "ok"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"a: " + b"b" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", b"414"),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 99 + b"\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"a: " + b"b" * 60_000 + b"\r\n\r\n", b"200"),
    ],
    ids=["200 fields", "a long field", "a long line", "100 fields", "60 kB"],
)
def test_heads_have_limits(server: Server, head: bytes, status: bytes) -> None:
    with connect(server) as client:
        client.sendall(head)
        if status == b"200":
            client.shutdown(socket.SHUT_WR)
        reply = answer(client)  # a refusal closes the connection
    assert reply.split(b" ")[1] == status, reply[:200]
    if status != b"200":
        assert b"connection: close" in reply.lower()
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


PROTOCOLS = (
    *(b"RTSP/1.0", b"RTSP/1.1", b"HTP/1.1", b"HTTP/2.0", b"HTTP/1.10", b"HTTP/11.1", b"http/1.1", b""),
    *(b"HTTP/0.9", b"HTTP/1.2", b"HTTP/1", b"HTTPS/1.1"),
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_http_is_spoken(server: Server, protocol: bytes) -> None:
    """Checks that a request line with another protocol or version is refused, also after a valid request and
    when it arrives in pieces, and that what follows it is not answered."""
    valid = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    other = valid.replace(b"HTTP/1.1", protocol)
    for parts in ((other, valid), (valid + b"\r\n" + other + valid,), (*other.partition(b"/1"), valid)):
        with connect(server) as client:
            for part in parts:
                send(client, iter([part]))
                time.sleep(0.01)
            reply = answer(client)  # a refusal closes the connection
        statuses = re.findall(rb"HTTP/1.1 (\d+)", reply)
        assert statuses == [b"200"] * parts[0].startswith(valid) + [b"400"], reply[:200]
        assert b"connection: close" in reply.lower()


def test_ice_is_not_spoken(server: Server) -> None:
    """Checks that the other protocol which the HTTP parser accepts, with its only method, is refused."""
    with connect(server) as client:
        client.sendall(b"SOURCE / ICE/1.0\r\n" + HOST + b"\r\n")
        reply = answer(client)
    assert reply.startswith(b"HTTP/1.1 400 ") and b"ICE/1.0" in reply


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_http_is_spoken_after_empty_lines_and_in_pieces(server: Server, version: bytes) -> None:
    head = b"\r\n\n\r\nGET /health HTTP/" + version + b"\r\n" + HOST + b"Connection: close\r\n\r\n"
    with connect(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(head)):
            client.sendall(head[at : at + 1])
        assert answer(client).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order_and_wait_unparsed(server: Server) -> None:
    count = 3000
    request = b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(server) as client:
        client.sendall(b"".join(request % i for i in range(count // 2)))
        client.sendall(b"POST /tokenize HTTP/1.1\r\n" + HOST + b'Content-Length: 15\r\n\r\n{"prompt": "a"}')
        client.sendall(CHUNKED + b'6\r\n{"prom\r\n9;x=y\r\npt": "a"}\r\n0\r\nAuthorization: x\r\n\r\n')
        client.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        client.shutdown(socket.SHUT_WR)
        reply = answer(client)
    statuses = re.findall(rb"HTTP/1.1 (\d+)", reply)
    assert statuses == [b"404"] * (count // 2) + [b"200"] * 3


def test_a_flood_of_pipelined_requests_takes_no_memory(server: Server) -> None:
    before = resident(server)
    with connect(server) as client:
        client.setblocking(False)
        end = time.monotonic() + 3
        while time.monotonic() < end:  # reads none of the answers
            try:
                client.send(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
            except BlockingIOError:
                time.sleep(0.01)
        assert server.health()["status"] == "ok"
        assert resident(server) < before + 40


@pytest.mark.parametrize("path", ["/health/ready", "/tokenize", COMPLETION])
def test_who_closes_the_sending_half_gets_the_answer(server: Server, path: str) -> None:
    body = b"" if path.startswith("/health") else json.dumps({"prompt": "a"}).encode()
    method = b"POST" if body else b"GET"
    head = b"%s %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (method, path.encode(), HOST, len(body))
    with connect(server) as client:
        client.sendall(head + body)
        client.shutdown(socket.SHUT_WR)
        reply = answer(client)
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n"), reply[:200]
    assert json.loads(reply.partition(b"\r\n\r\n")[2])


def test_half_closed_streams_go_on_to_their_end(server: Server) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
    with connect(server) as client:
        client.sendall(
            b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (COMPLETION.encode(), HOST, len(body))
        )
        client.sendall(body)
        client.shutdown(socket.SHUT_WR)
        assert b"data: [DONE]" in answer(client)


def test_an_upgrade_is_ignored_and_none_with_a_body(server: Server) -> None:
    upgrade = HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    with connect(server) as client:
        client.sendall(b"GET /health/ready HTTP/1.1\r\n" + upgrade + b"\r\n")
        client.sendall(b"GET /health/ready HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
        assert answer(client).count(b"HTTP/1.1 200") == 2
    with connect(server) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\n" + upgrade + b"Content-Length: 2\r\n\r\n{}")
        assert b"cannot upgrade" in answer(client)


def test_a_body_that_nobody_wants_ends_the_connection(server: Server) -> None:
    for line, status in ((b"POST /nowhere", b"404"), (b"PUT /tokenize", b"405"), (b"POST /tokenize", b"413")):
        with connect(server) as client:
            client.sendall(line + b" HTTP/1.1\r\n" + HOST + b"Content-Length: 10000000000\r\n\r\n")
            sent = send(client, repeated(b" "))
            reply = answer(client)
        assert sent < 48 * MB
        assert not reply or (status in reply[:15] and b"connection: close" in reply.lower())


# Time


SLOW = {"HEAD_SECONDS": 1.0, "IDLE_SECONDS": 2.0}


@pytest.fixture(scope="module")
def hasty(toy_bundle: Path) -> Iterator[Server]:
    """Yields a server process with short deadlines: 1 second to receive a request's head, 1 second for its
    body, and 2 seconds for an idle connection."""
    code = "import sys; from mlcbuild_runtime.http import body_reader, connection;"
    code += "body_reader.BODY_SECONDS = 1.0;"
    code += f"vars(connection).update({SLOW!r});"
    code += "from mlcbuild_runtime.__main__ import main; sys.exit(main())"
    with shared.program("-c", code, str(toy_bundle), "--port", "0") as running:
        yield running


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", b""),
        (b"GET /hea", b"408"),
        (b"GET /health HTTP/1.1\r\nHos", b"408"),
        (b"GET /health/ready HTTP/1.1\r\n" + HOST + b"\r\n", b"200"),
        (b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: 10\r\n\r\n{", b"408"),
        (CHUNKED + b"1\r\n{", b"408"),
    ],
    ids=["silence", "half a line", "half a head", "idle", "half a body", "half a chunk"],
)
def test_who_says_no_more_is_disconnected(hasty: Server, data: bytes, status: bytes) -> None:
    with connect(hasty) as client:
        client.sendall(data)
        reply = answer(client)
    assert status in reply[:15], reply[:100]


def test_a_head_that_drips_has_no_longer(hasty: Server) -> None:
    with connect(hasty) as client:
        client.settimeout(0.2)
        end = time.monotonic() + shared.WAIT
        closed = False
        while not closed:
            assert time.monotonic() < end
            with suppress(TimeoutError):
                with suppress(ConnectionResetError, BrokenPipeError):
                    client.sendall(b"a")
                closed = not client.recv(1) or closed


def test_without_descriptors_others_wait_and_the_log_is_short(toy_bundle: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    command = (
        f'ulimit -n 64; exec "{sys.executable}" -m mlcbuild_runtime "{toy_bundle}" --port 0 2> "{errors}"'
    )
    with subprocess.Popen(
        ["bash", "-c", command], stdout=subprocess.PIPE, text=True, env=shared.environment()
    ) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+", ready := process.stdout.readline())
            assert match, (ready, errors.read_text())
            server = Server(process, process.stdout, match[0], ready, "toy")
            clients = [connect(server) for _ in range(100)]
            assert server.health()["status"] == "ok"  # idle connections were closed
            for client in clients:
                client.close()
            assert server.health()["status"] == "ok"
            assert errors.read_text().count("\n") <= 2, errors.read_text()[:2000]
            assert "no room for more" in errors.read_text()
        finally:
            process.kill()


def test_all_at_once(toy_bundle: Path) -> None:
    """Runs all attacks of ci/bench/hostile at once for a short time, with generous limits."""
    script = shared.ROOT / "ci" / "bench" / "hostile"
    result = subprocess.run(
        [sys.executable, str(script), str(toy_bundle), "--seconds=3", "--latency=60", "--growth=500"],
        capture_output=True, text=True, env=shared.environment(), timeout=4 * shared.WAIT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "honest answers" in result.stdout
