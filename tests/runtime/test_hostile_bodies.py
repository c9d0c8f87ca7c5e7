"""Tests of hostile request bodies: large, deep or odd ones are refused, and other clients are not
affected."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import describe, printable
from mlcbuild_runtime.openai import api, embeddings, responses_request, service
from mlcbuild_runtime.openai import body as body_module

from . import shared
from .attacks import EMBEDDINGS, MB, RESPONSES, post, resident
from .shared import Server
from .test_server import CHAT, COMPLETION, HI

EVERY = "MLCBUILD_TEST_EVERY" in os.environ


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
        data += b"1" * random.choice((0, 199, 200, 201)) + b"x" * random.randrange(70)
        assert body_module._matches(body_module._VAST, data) == bool(body_module._VAST.search(data))


def test_no_call_on_a_large_body_keeps_other_threads_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that no single call of a regular expression on a large body is long, because it blocks all other
    threads until it returns."""
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
    """Checks that a large body waits for other bodies only if it has many values: another client's constraint
    may take a minute."""
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
            with pytest.raises(RequestError, match="as many large bodies as it is allowed to"):
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


LONG = "\x1b" + "a" * 100_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": "a", "model": LONG}),
        ("/api/show", {"model": LONG}),
        ("/v1/messages", {"messages": HI, "max_tokens": 1, "model": LONG}),
        (CHAT, {"messages": [{"role": "user", "content": "a", LONG: 1}]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "a", LONG: 1}]}),
        (COMPLETION, {"prompt": "a", "structured_outputs": {LONG: 1}}),
        ("/api/chat", {"messages": HI, "options": {LONG: 1}}),
    ],
)
def test_long_names_are_not_sent_back(server: Server, path: str, body: object) -> None:
    response = post(server, path, body)
    assert 400 <= response.status_code < 500 and len(response.content) < 1000, response.text[:300]
    document = response.json()["error"]
    message = document if isinstance(document, str) else document["message"]
    assert message.isprintable() and "aaa" in message


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
TABLES = {CHAT: api.CHAT, COMPLETION: api.COMPLETION, RESPONSES: responses_request.TABLE}
"""Path -> its fields by name, for paths that have many fields in common."""


def wrong_values(path: str, field: str) -> list[object]:
    """Returns the values to try in a field. Paths that declare a field in the same way share them out; with
    MLCBUILD_TEST_EVERY each tries all."""
    declared = TABLES.get(path, {}).get(field)
    equal = [other for other, table in TABLES.items() if declared and table.get(field) == declared]
    if EVERY or path not in equal:
        return WRONG
    return WRONG[equal.index(path) :: len(equal)]


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
    # 8,000 requests take 11 CPU seconds with http.client, the server included, and 27 with httpx.
    address = urlsplit(server.url).netloc
    with closing(http.client.HTTPConnection(address, timeout=shared.WAIT)) as client:

        def send(document: dict[str, object]) -> tuple[int, str]:
            client.request("POST", path, json.dumps(document))
            with client.getresponse() as response:
                return response.status, response.read().decode()

        for value in wrong_values(path, field):
            sent = {**body, field: value}
            status, text = send(sent)
            assert status < 500, (value, text)
            if status >= 400:
                message = json.loads(text)["error"]["message"]
                assert message.isprintable() and len(message) < 1000, message
            elif path in (CHAT, COMPLETION, RESPONSES) and field != "stream":
                # What is refused is refused before it is known whether the answer is a stream.
                status, text = send({**sent, "stream": True})
                assert status < 500, (value, text)
            assert '"server_error"' not in text, (value, text)


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


def test_descriptions_are_short_at_once() -> None:
    large: list[object] = [[[]] * 1_000_000, "x" * 20_000_000, {"a": [1] * 1_000_000}]
    started = time.process_time()
    descriptions = [describe(value) for value in large]
    described = time.process_time()
    assert [len(description) for description in descriptions] == [60] * 3 and len(repr(large)) > 20_000_000
    assert described - started < (time.process_time() - described) / 10, "the whole of it is much more work"
    small: list[object] = [1, "a'b", [1, "a"], {"a": None, "b": [True]}, 1.5]
    for value in small:
        assert describe(value) == repr(value)
    assert describe(-(10**5000)) == "an integer of 16610 bits"
    assert printable("a\x1b\n\u00e9") == "a\\x1b\\n\u00e9"
