"""Clients that mean harm, with a real server: what they send is bounded, and costs nobody else anything."""

from __future__ import annotations

import json
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import describe, printable
from mlcbuild_runtime.openai import api, embeddings, responses_request, service
from mlcbuild_runtime.openai import body as body_module

from . import shared
from .shared import Server
from .test_server import CHAT, COMPLETION, HI

HOST = b"Host: localhost\r\n"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
MB = 1 << 20


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=shared.WAIT)


def answer(client: socket.socket) -> bytes:
    """Returns all bytes that the server sends until it closes the connection."""
    actual = b""
    with suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            actual += part
    return actual


def send(client: socket.socket, parts: Iterator[bytes]) -> int:
    """Sends bytes until the server stops accepting them, and returns their number."""
    count = 0
    with suppress(ConnectionResetError, BrokenPipeError):
        for part in parts:
            client.sendall(part)
            count += len(part)
    return count


def repeated(part: bytes, most: int = 64 * MB) -> Iterator[bytes]:
    block = part * max(1, (1 << 16) // len(part))
    for _ in range(most // len(block)):
        yield block


def resident(server: Server) -> float:
    """Returns the resident memory of the server process in MB."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MB


def post(server: Server, path: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{server.url}{path}", content=content, headers=headers, timeout=shared.WAIT, verify=shared.PLAIN
    )


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
    # Of what is on its way, systems keep some megabytes.
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
    """Yields a server with short deadlines."""
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
            server = Server(process, match[0], ready, "toy")
            clients = [connect(server) for _ in range(100)]
            assert server.health()["status"] == "ok"  # idle ones had to go
            for client in clients:
                client.close()
            assert server.health()["status"] == "ok"
            assert errors.read_text().count("\n") <= 2, errors.read_text()[:2000]
            assert "no room for more" in errors.read_text()
        finally:
            process.kill()


# Bodies


def test_large_texts_are_refused_before_they_are_tokens(server: Server) -> None:
    before = resident(server)
    text = "a b " * (2 * MB - 100)
    # A chat template may take two seconds, which 8 MB can exceed on a busy machine.
    message = text[: 2 * MB]
    for path, body in (
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [{"role": "user", "content": message}]}),
        (EMBEDDINGS, {"input": text}),
        (RESPONSES, {"input": message}),
        (COMPLETION, {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": message}]}),
        ("/detokenize", {"tokens": [1] * 1_000_000}),
    ):
        response = post(server, path, body)
        assert response.status_code == 400, (path, response.text[:200])
        assert re.search("shorten it|at most 65536 tokens", response.text), (path, response.text[:200])
    assert resident(server) < before + 300


VALUES = [
    b'{"prompt":[' + b"[]," * 2_600_000 + b"[]]}",
    b'{"x":[' + b"{}," * 2_600_000 + b"{}]}",
    b'{"prompt":[' + b"1," * 3_900_000 + b"1]}",
    b"[" * 8_000_000,
    b'{"a":' * 1_600_000,
    b'{"messages":[{"role":"user","content":"a"}]' + b',"k":1' * 65_536 + b"}",
    b'{"x":[' + b'{"a":{"b":1}},' * 33_000 + b"{}]}",
    b'{"x":"' + b'\\"' * 4_000_000,
    b'{"x":"' + b'\\",[{' * 1_600_000,
]


@pytest.mark.parametrize("body", VALUES, ids=[str(value[:12]) for value in VALUES])
def test_bodies_of_many_values(server: Server, body: bytes) -> None:
    before = resident(server)
    response = post(server, COMPLETION, body)
    assert response.status_code in (400, 413), response.text[:200]
    assert len(response.text) < 1000
    assert resident(server) < before + 300


def test_punctuation_in_a_text_is_no_value(server: Server) -> None:
    response = post(server, "/tokenize", {"prompt": "[{," * 400_000})
    assert "the prompt has 1200000 bytes" in response.text


@pytest.mark.parametrize("window", [1, 2, 5, 17, 64])
def test_windows_of_a_body_hide_nothing(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_WINDOW", window)
    random = Random(window)
    for _ in range(200):
        data = bytes(random.choices(b'"\\,[{ax}]e9', k=random.randrange(200)))
        assert b"".join(body_module._without_texts(data)) == body_module._TEXT.sub(b"", data)
        data = bytes(random.choices(b"0123456789e+", k=random.randrange(400)))
        data += b"1" * random.choice((0, 299, 300, 301)) + b"x" * random.randrange(70)
        assert body_module._matches(body_module._VAST, data) == bool(body_module._VAST.search(data))


def test_no_call_on_a_large_body_keeps_other_threads_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regular expression holds the interpreter's lock until it returns."""
    lengths: list[int] = []

    class Watched:
        def __init__(self, pattern: re.Pattern[bytes]) -> None:
            self.pattern = pattern

        def search(self, data: bytes, start: int, end: int) -> re.Match[bytes] | None:
            lengths.append(min(end, len(data)) - start)
            return self.pattern.search(data, start, end)

        def match(self, data: bytes, start: int, end: int) -> re.Match[bytes] | None:
            lengths.append(min(end, len(data)) - start)
            return self.pattern.match(data, start, end)

    for name in ("_HALF", "_VAST", "_WHOLE_TEXTS"):
        monkeypatch.setattr(body_module, name, Watched(getattr(body_module, name)))
    with pytest.raises(RequestError, match="has more than 1048576 values"):
        body_module.parse_body(b'{"prompt":[' + b'"a",' * 1_100_000 + b'"a"]}')
    body_module.parse_body(b'{"prompt":"' + b"," * 1_100_000 + b'"}')
    assert len(lengths) > 80 and max(lengths) < 100_000


def test_large_bodies_wait_for_no_other_but_one_with_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constraint of another client's body may take a minute."""
    import asyncio

    from mlcbuild_runtime.http import body_reader
    from starlette.requests import Request

    def asking(body: object) -> Request:
        data = json.dumps(body).encode()
        assert len(data) > body_reader.SMALL

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        return Request({"type": "http", "headers": []}, receive)

    many, long = {"prompt": [1] * 20_000}, {"prompt": "a" * 100_000}

    async def run() -> None:
        reader = body_reader.BodyReader(8 * MB)

        async def read(body: object) -> object:
            async with reader.body(asking(body)) as actual:
                return actual

        async with reader.body(asking(many)):
            assert await asyncio.create_task(read(long)) == long
            with pytest.raises(RequestError, match="as many large bodies as it may"):
                await asyncio.create_task(read(many))
        assert await read(many) == many

    monkeypatch.setattr(body_reader, "TURN_SECONDS", 0.05)
    asyncio.run(run())


HALF = "\ud800"
NO_TEXT: list[tuple[str, object]] = [
    (CHAT, {"messages": HI, HALF: 1}),
    (COMPLETION, {HALF: 1}),
    ("/tokenize", {"prompt": "a", HALF: None}),
    ("/detokenize", {HALF: HALF}),
    (EMBEDDINGS, {"input": HALF}),
    (EMBEDDINGS, {"input": "a", "user": HALF}),
    (CHAT, {"messages": [{"role": "user", "content": "a", HALF: 1}]}),
    (CHAT, {"messages": [{"role": HALF, "content": "a"}]}),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"bos_token": HALF}}),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"eos_token": {"a": [HALF]}}}),
    ("/tokenize", {"messages": HI, "chat_template_kwargs": {"bos_token": HALF}}),
    ("/tokenize", {"messages": HI, "chat_template_kwargs": {HALF: "a"}}),
    (RESPONSES, {"input": "a", "metadata": {"a": HALF}}),
    (RESPONSES, {"input": "a", "metadata": {"a": HALF}, "stream": True}),
    (RESPONSES, {"input": "a", "metadata": {HALF: "a"}, "stream": True}),
    (RESPONSES, {"input": "a", "metadata": {"a": float("1e999")}}),
    (RESPONSES, {"input": [{"type": "reasoning", "x": HALF}, {"role": "user", "content": "a"}]}),
    (RESPONSES, {"input": "a", "previous_response_id": HALF}),
    (COMPLETION, {"prompt": "a", "model": HALF}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"id": HALF, "function": {"name": "f", "arguments": "{}"}}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 100_000}}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), NO_TEXT)
def test_what_is_no_text_is_refused_everywhere(server: Server, path: str, body: object) -> None:
    content = json.dumps(body).replace("Infinity", "1e999").encode()
    response = post(server, path, content)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert "\n" not in message and len(message) < 500


WRONG: list[object] = [
    None, True, 0, -1, 1.5, 1e308, -(10**300), 10**4000, "", "x", "\u0000\u001b[31m", [], [[]], [None], {},
    {"": {}},
    [{"type": []}], {"type": {}}, {"type": "function", "function": 1},
    [{"type": "function", "function": {"name": []}}],
    {"type": "json_schema", "json_schema": {"schema": []}}, {"type": "text", "text": {}}, [[1, 2], "a"],
    ["a", None], {"role": "user"}, [{"role": ["user"]}],
    {"content": [{"type": "text", "text": None}], "type": "content"}, [{"role": "user"}],
    [{"role": "assistant", "tool_calls": [[]]}], [{"role": "tool", "content": "a", "tool_call_id": {}}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}], {"format": 1},
    {"format": {"type": "json_schema"}}, {"format": []}, {"type": "allowed_tools", "mode": 1, "tools": [1]},
    [{"type": "function_call"}], [{"type": "function_call_output", "output": [1]}], {"include_usage": []},
]  # fmt: skip
FIELDS = [
    *((CHAT, field, {"messages": HI, "max_tokens": 1}) for field in api.CHAT),
    *((COMPLETION, field, {"prompt": "a", "max_tokens": 1}) for field in api.COMPLETION),
    *((RESPONSES, field, {"input": "a", "max_output_tokens": 1}) for field in responses_request.TABLE),
    *((EMBEDDINGS, field, {"input": "a"}) for field in embeddings.TABLE),
    *(("/tokenize", field, {"prompt": "a"}) for field in service.TOKENIZE),
    *(("/detokenize", field, {"tokens": [1]}) for field in service.DETOKENIZE),
]


@pytest.mark.parametrize(
    ("path", "field", "body"), FIELDS, ids=[f"{path}-{field}" for path, field, _ in FIELDS]
)
def test_no_value_of_a_field_is_the_servers_fault(
    server: Server, path: str, field: str, body: dict[str, object]
) -> None:
    with httpx.Client(base_url=server.url, timeout=shared.WAIT) as client:
        for value in WRONG:
            for stream in (False, True):
                sent = {**body, field: value}
                if stream and path in (CHAT, COMPLETION, RESPONSES) and field != "stream":
                    sent["stream"] = True
                response = client.post(path, content=json.dumps(sent).encode())
                assert response.status_code < 500, (value, response.text)
                assert '"server_error"' not in response.text, (value, response.text)
                if response.status_code >= 400:
                    message = response.json()["error"]["message"]
                    assert message.isprintable() and len(message) < 1000, message


def test_escapes_never_reach_a_terminal_or_a_log(toy_bundle: Path, tmp_path: Path) -> None:
    log, errors = tmp_path / "access.log", tmp_path / "errors"
    evil = "\x1b[31m\x7f\x9b2J\u202e\r\n"
    with errors.open("w") as out:
        command = [
            sys.executable,
            "-m",
            "mlcbuild_runtime",
            str(toy_bundle),
            "--port",
            "0",
            "--access-log",
            str(log),
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=out, text=True, env=shared.environment()
        ) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split("ready at ")[1].split()[0]
                for body in ({evil: 1}, {"prompt": "a", "model": evil}, {"prompt": "a", "stop": [evil, 1]}):
                    message = httpx.post(f"{url}{COMPLETION}", json=body, verify=shared.PLAIN).json()[
                        "error"
                    ]["message"]
                    assert message.isprintable()
                httpx.get(f"{url}/%1b%5b31m%7f%c2%9b%0d%0a")
                httpx.get(f"{url}/v1/models/%1b%5b31m%7f%0a")
            finally:
                process.kill()
    for text in (log.read_text(), errors.read_text()):
        assert all(line.isprintable() for line in text.split("\n"))


def test_a_name_with_escapes_is_printed_with_none(toy_copy: Path) -> None:
    document = json.loads((toy_copy / "bundle.json").read_bytes())
    document["name"] = "toy\x1b[31m"
    (toy_copy / "bundle.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "mlcbuild_runtime", str(toy_copy), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=shared.environment()
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().rstrip("\n").isprintable()
        finally:
            process.kill()


# Whose pages


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "0.0.0.0"}, 403),
        ({"Host": "[::2]:80"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "LOCALHOST."}, 200),
        ({"Host": "chat.localhost"}, 200),
        ({"Host": "127.8.9.1"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1", "Host": "localhost:2"}, 403),
        ({"Origin": "http://localhost:2", "Host": "localhost:2"}, 200),
        ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 403),
    ],
)
def test_pages_of_other_sites_may_not_call(server: Server, headers: dict[str, str], status: int) -> None:
    response = post(server, "/tokenize", {"prompt": "a"}, **headers)
    assert response.status_code == status, response.text
    if status == 403:
        assert re.search("--allowed-host|--cors", response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost\r\nhOST: localhost\r\n", b"400"),
        (b"HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: local host\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost, evil.example\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: a@localhost\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost/\xe9\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost:x\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: [::1\r\n", b"400"),
        (b"HTTP/1.0\r\n", b"200"),
        (b"HTTP/1.1\r\nHost: [::1]:8000\r\n", b"200"),
        (b"HTTP/1.1\r\nHost: LOCALHOST:\r\n", b"200"),
    ],
)
def test_a_request_names_one_host(server: Server, head: bytes, status: bytes) -> None:
    """Requests with a missing, repeated or invalid Host field are refused (RFC 9112, 3.2); HTTP/1.0 requires
    none.
    """
    with connect(server) as client:
        client.sendall(b"GET /health " + head + b"Connection: close\r\n\r\n")
        reply = answer(client)
    assert reply.split(b" ")[1] == status, reply[:200]
    if status == b"400":
        assert b"Host" in reply.partition(b"\r\n\r\n")[2]


def test_options_allow_other_names_and_pages(toy_bundle: Path) -> None:
    options = ("--allowed-host", "box.example", "--cors", "http://page.example")
    with shared.serving(toy_bundle, *options) as server:
        for headers, status in (
            ({"Host": "box.example:80"}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Origin": "http://page.example"}, 200),
            ({"Origin": "http://evil.example"}, 403),
        ):
            assert post(server, "/tokenize", {"prompt": "a"}, **headers).status_code == status
    with shared.serving(toy_bundle, "--api-key", "k") as server:
        headers = {"Host": "evil.example", "Origin": "http://evil.example", "Authorization": "Bearer k"}
        assert post(server, "/tokenize", {"prompt": "a"}, **headers).status_code == 200
        with connect(server) as client:  # nobody reads the body of who has no key
            client.sendall(b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: 100000000\r\n\r\n")
            reply = answer(client)
        assert reply.startswith(b"HTTP/1.1 401") and b"connection: close" in reply.lower()


def test_nothing_redirects_to_the_clients_host(server: Server) -> None:
    for path in ("/health/", "/v1/models/", "/tokenize/", "//evil.example/"):
        response = httpx.get(f"{server.url}{path}", follow_redirects=False, verify=shared.PLAIN)
        assert response.status_code in (404, 405) and "location" not in response.headers


def test_descriptions_are_short_at_once() -> None:
    large: list[object] = [[[]] * 5_000_000, "x" * 100_000_000, {"a": [1] * 5_000_000}]
    started = time.process_time()
    descriptions = [describe(value) for value in large]
    described = time.process_time()
    assert [len(description) for description in descriptions] == [60] * 3 and len(repr(large)) > 100_000_000
    assert described - started < (time.process_time() - described) / 10, "the whole of it is much more work"
    small: list[object] = [1, "a'b", [1, "a"], {"a": None, "b": [True]}, 1.5]
    for value in small:
        assert describe(value) == repr(value)
    assert describe(-(10**5000)) == "an integer of 16610 bits"
    assert printable("a\x1b\n\u00e9") == "a\\x1b\\n\u00e9"


def test_all_at_once(toy_bundle: Path) -> None:
    """Runs all attacks of ci/bench/hostile at once for a short time, with generous limits."""
    script = shared.ROOT / "ci" / "bench" / "hostile"
    done = subprocess.run(
        [sys.executable, str(script), str(toy_bundle), "--seconds=3", "--latency=60", "--growth=500"],
        capture_output=True, text=True, env=shared.environment(), timeout=4 * shared.WAIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "honest answers" in done.stdout
