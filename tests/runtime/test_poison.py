"""Tests of requests that are wrong on purpose: each is refused with its reason, and does not affect a client
that streams an answer."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlcbuild_runtime.http import body_reader
from mlcbuild_runtime.http.server import create_app
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import shared
from .shared import Server
from .test_engine import start
from .test_server import CHAT, COMPLETION, HI, text_of

PROMPT = [1, 2, 3]
GAP = shared.WAIT
"""Maximum seconds between two tokens of a well-behaved client's answer; a longer wait counts as a stall."""


class Bystander:
    """A well-behaved client that streams the same answer repeatedly while other clients misbehave, and
    records the longest wait for a token."""

    def __init__(self, server: Server, expected: str) -> None:
        self.longest, self.streams = 0.0, 0
        self._url, self._expected = f"{server.url}{COMPLETION}", expected
        self._wrong: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Bystander:
        self._thread.start()
        end = time.monotonic() + shared.WAIT
        while not self.streams and time.monotonic() < end:
            time.sleep(0.002)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        self._thread.join()
        assert self.streams and not self._wrong

    def _work(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
        with httpx.Client(timeout=shared.WAIT) as client:
            while not self._stopping.is_set():
                text, last = "", time.monotonic()
                with client.stream("POST", self._url, json=body) as response:
                    for line in response.iter_lines():
                        now = time.monotonic()
                        self.longest, last = max(self.longest, now - last), now
                        if line.startswith("data: {"):
                            chunk = json.loads(line.removeprefix("data: "))
                            text += chunk["choices"][0]["text"] if "choices" in chunk else str(chunk)
                self.streams += 1
                time.sleep(0.01)
                if text != self._expected:
                    self._wrong.append(text)


@pytest.fixture(scope="module")
def bystander(server: Server, toy_bundle: Path) -> Iterator[Bystander]:
    with Bystander(server, text_of(toy_bundle, PROMPT, 200)) as actual:
        yield actual


def nested(depth: int) -> dict[str, Any]:
    by_name: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        by_name = {"type": "object", "properties": {"a": by_name}}
    return by_name


def schema(actual: object) -> dict[str, Any]:
    return {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": actual}}}


def form(kind: str, source: str) -> dict[str, Any]:
    return {"prompt": "x", "response_format": {"type": kind, kind: source}}


def tool(name: str, **more: object) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name, **more}}]
    return {"messages": HI, "tools": listed, "tool_choice": "required"}


def said(text: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


POISON: list[tuple[str, str, object, int, str]] = [
    ("bad UTF-8", COMPLETION, b'{"prompt": "\xc3\x28"}', 400, "the body is not UTF-8: .* at byte 12"),
    ("UTF-16", COMPLETION, '{"prompt": "x"}'.encode("utf-16"), 400, "the body is not UTF-8"),
    ("a byte order mark", COMPLETION, b'\xef\xbb\xbf{"prompt": "x"}', 400, "not valid JSON: .*BOM"),
    ("no body", CHAT, b"", 400, "not valid JSON"),
    ("a form", CHAT, b"messages=hi&model=x", 400, "not valid JSON"),
    ("a 2 MB prompt", COMPLETION, {"prompt": "x " * (1 << 20)}, 400, "the prompt has 2097152 bytes, and"),
    ("a 2 MB message", CHAT, said("x" * (2 << 20)), 400, "no room for more than 3328: shorten it"),
    ("a million tokens", COMPLETION, {"prompt": [5] * 1_000_000}, 400, "the prompt has 1000000 tokens"),
    ("a body that is too large", COMPLETION, b" " * (9 << 20), 413, "more than 8388608 bytes"),
    ("context overflow", COMPLETION, {"prompt": "x", "max_tokens": 1 << 30}, 400, "ask for at most 254"),
    ("a NaN", COMPLETION, b'{"prompt": "x", "temperature": NaN}', 400, "NaN is not JSON"),
    ("infinity", COMPLETION, b'{"prompt": "x", "temperature": 1e400}', 400, "found inf"),
    ("a huge integer", COMPLETION, {"prompt": "x", "max_tokens": 10**300}, 400, "max_tokens must be an int"),
    ("a longer one", COMPLETION, b'{"prompt": "x", "seed": ' + b"7" * 9000 + b"}", 400, "not valid JSON: "),
    ("a huge bias", COMPLETION, {"prompt": "x", "logit_bias": {"1": 10**300}}, 400, "from -100 to 100"),
    ("10,000 stop texts", COMPLETION, {"prompt": "x", "stop": ["a"] * 10_000}, 400, "at most 16 strings"),
    ("a stop text of 2 MB", COMPLETION, {"prompt": "x", "stop": "a" * (2 << 20)}, 400, "found '2097152 char"),
    ("an empty stop text", CHAT, {"messages": HI, "stop": [""]}, 400, "stop must be made of non-empty"),
    ("n below 0", COMPLETION, {"prompt": "x", "n": -1}, 400, "n must be an integer from 1 to 128"),
    ("n above all", COMPLETION, {"prompt": "x", "n": 1 << 40}, 400, "n must be an integer from 1 to 128"),
    ("n times prompts", COMPLETION, {"prompt": ["x"] * 2, "n": 65}, 400, "more than 128 answers"),
    ("a bias of no token", COMPLETION, {"prompt": "x", "logit_bias": {"999999999": 1}}, 400, "vocabulary"),
    ("a bias of -1", COMPLETION, {"prompt": "x", "logit_bias": {"-1": 1}}, 400, "an object of at most 1024"),
    ("Arabic digits", COMPLETION, {"prompt": "x", "logit_bias": {"\u0663": 1}}, 400, "an object of at most"),
    ("biases", COMPLETION, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "1025"),
    ("token -1", COMPLETION, {"prompt": [-1]}, 400, "prompt must be"),
    ("token 2^31", COMPLETION, {"prompt": [1 << 31]}, 400, "prompt must be"),
    ("half a surrogate", CHAT, said("\ud800"), 400, "half of a surrogate pair"),
    ("half in a stop", COMPLETION, {"prompt": "x", "stop": "\udc00"}, 400, "half of a surrogate pair"),
    ("half in a tool", CHAT, tool("f", description="\ud800"), 400, "half of a surrogate pair"),
    ("half in a schema", COMPLETION, schema({"enum": ["\ud800"]}), 400, "surrogate|cannot be compiled"),
    ("half in a regex", COMPLETION, form("regex", "\ud800"), 400, "half of a surrogate pair"),
    ("half in arguments", CHAT, {"messages": HI, "chat_template_kwargs": {"x": "\ud800"}}, 400, "surrogate"),
    ("a key twice", COMPLETION, b'{"prompt": "x", "n": 1, "n": 2}', 400, "the key 'n' is there twice"),
    ("an unknown field", CHAT, {"messages": HI, "temprature": 1}, 400, "did you mean 'temperature'"),
    ("brackets", CHAT, b'{"messages": ' + b"[" * 50_000, 400, "nested too deeply"),
    ("900 levels", CHAT, {"messages": HI, "metadata": nested(450)}, 400, "at most 200 lists and objects"),
    ("a deep schema", COMPLETION, schema(nested(150)), 400, "nested too deeply"),
    ("a less deep schema", COMPLETION, schema(nested(95)), 400, "cannot be compiled"),
    ("a schema without a type", COMPLETION, schema({"type": "no"}), 400, "Invalid type: no"),
    ("a schema that goes in circles", COMPLETION, schema({"$ref": "#"}), 400, "cannot be compiled"),
    ("a schema in the network", COMPLETION, schema({"$ref": "http://127.0.0.1:1/x"}), 400, "cannot be comp"),
    ("a schema of 1 MB", COMPLETION, schema({"enum": ["x" * 99] * 9999}), 400, "at most 262144 are accepted"),
    ("a regex without end", COMPLETION, form("regex", "(" * 1000), 400, "regex cannot be compiled"),
    ("a regex counts", COMPLETION, form("regex", "(((a{999}){999}){999}){999}"), 400, "too many|takes|took"),
    ("looking back", COMPLETION, form("regex", r"(a)\1(?=b)"), 400, "cannot be compiled"),
    ("a grammar that is none", COMPLETION, form("grammar", "start: %%%"), 400, "cannot be compiled"),
    ("a file", COMPLETION, form("grammar", "%import /etc/passwd\nstart: x"), 400, "cannot be compiled"),
    ("a tool's name", CHAT, tool('f"}}{{ 7 * 7 }}'), 400, "1 to 64 letters, digits"),
    ("a tool of two lines", CHAT, tool("f\ng"), 400, "1 to 64 letters, digits"),
    ("a tool's schema", CHAT, tool("f", parameters={"properties": {"a": 1}}), 400, "tools cannot be"),
    ("template in place of one", CHAT, {"messages": HI, "chat_template": "{{ 7 }}"}, 400, "unknown field"),
    ("a role of code", CHAT, {"messages": [{"role": "{{ 7 }}", "content": "x"}]}, 400, "one of system"),
    ("messages in messages", CHAT, said([{"type": "text", "text": ["x"]}]), 400, "reads text only"),
    ("a model of code", COMPLETION, {"prompt": "x", "model": "../../etc/passwd"}, 404, "is not here"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "message"), [p[1:] for p in POISON], ids=[p[0] for p in POISON]
)
def test_poison(
    server: Server, bystander: Bystander, path: str, body: object, status: int, message: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{server.url}{path}", content=content, timeout=shared.WAIT, verify=shared.PLAIN)
    assert response.status_code == status, response.text[:300]
    assert bystander.longest < GAP
    if status >= 400:
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert re.search(message, error["message"]), error["message"]
        assert "\n" not in error["message"] and len(error["message"]) < 800
    assert bystander.streams


@pytest.mark.parametrize(
    "text", ["{{ 7 * 7 }}", "{% for x in range(10**9) %}x{% endfor %}", "{{ ''.__class__ }}"]
)
def test_what_is_said_is_no_template(
    server: Server, bystander: Bystander, toy_bundle: Path, text: str
) -> None:
    document = httpx.post(f"{server.url}/tokenize", json=said(text)).json()["tokens"]
    assert text in Tokenizer.load(toy_bundle).decode(document)
    assert bystander.streams


def test_compressed_bodies(server: Server, bystander: Bystander) -> None:
    for coding in ("gzip", "br"):
        content = gzip.compress(b'{"prompt": "x"}')
        response = httpx.post(
            f"{server.url}{COMPLETION}", content=content, headers={"Content-Encoding": coding}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")
        assert f"the encoding '{coding}'" in response.json()["error"]["message"]
    response = httpx.post(f"{server.url}{COMPLETION}", content=gzip.compress(b"{}"))
    assert (response.status_code, response.json()["error"]["code"]) == (400, None)
    assert bystander.streams


def test_the_type_of_a_body_does_not_matter(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "?"):
        content = b'{"prompt": "x", "max_tokens": 1}'
        response = httpx.post(f"{server.url}{COMPLETION}", content=content, headers={"Content-Type": kind})
        assert response.status_code == 200


RAW = [
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
    (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", b"'chunked' alone"),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n{}", b"400"),
    (b"POST /v1/completions HTTP/9.9\r\n\r\n\r\n", b"400"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n", b""),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"pro", b""),
]  # fmt: skip


@pytest.mark.parametrize(("data", "answer"), RAW, ids=[str(data[:20]) for data, _ in RAW])
def test_what_is_hardly_http(server: Server, bystander: Bystander, data: bytes, answer: bytes) -> None:
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=shared.WAIT) as connection:
        connection.sendall(data)
        if answer:
            assert answer in connection.recv(1000)
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert bystander.streams


def test_a_body_without_end(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "BODY_SECONDS", 0.2)
    engine = start(toy_bundle)

    async def halves() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.sleep(shared.WAIT)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(COMPLETION, content=halves())

    try:
        response = asyncio.run(ask())
        assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")
        assert "did not arrive completely within 0.2 s" in response.json()["error"]["message"]
    finally:
        engine.close()


def test_a_costly_constraint_stalls_nobody(server: Server, bystander: Bystander) -> None:
    """Checks that a constraint whose compilation would take half a minute and half a gigabyte is refused
    without delaying other clients."""
    bystander.longest = 0
    with httpx.Client(timeout=shared.WAIT) as client:
        began = time.monotonic()
        for _ in range(2):  # the second time it is known
            response = client.post(f"{server.url}{COMPLETION}", json=schema({"multipleOf": 999983}))
            assert response.status_code == 400, response.text
            assert "it takes more than 2 s or 128 MiB to compile" in response.json()["error"]["message"]
        assert bystander.longest < (time.monotonic() - began) / 2
        easy = client.post(f"{server.url}{COMPLETION}", json=form("regex", "[0-9]{4}"))
        assert re.fullmatch("[0-9]{4}", easy.json()["choices"][0]["text"])
