"""Tests of chatting with another server, whatever that server sends."""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from mlcbuild_format.errors import ServingError
from mlcbuild_runtime.chat import chat, server_model
from mlcbuild_runtime.chat.chat_options import ChatOptions
from mlcbuild_runtime.chat.server_model import ServerModel

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


@contextmanager
def sending(answer: bytes, more: bytes = b"") -> Iterator[str]:
    """Starts a server that sends the bytes `answer` to each request, and then `more` again and again. Yields
    its URL."""

    def work() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, suppress(OSError):
                    client.recv(1 << 16)
                    client.sendall(answer)
                    while more:
                        client.sendall(more)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(1 << 16):  # The rest of the request: closing before it resets.
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def answered(url: str) -> str:
    with ServerModel.connect(url, name="m") as model:
        parts = model.answer([{"role": "user", "content": "a"}], {})
        return "".join(f"({part.text})" if part.is_reasoning else part.text for part in parts)


def test_reasoning_is_told_apart() -> None:
    """Checks both names of the field with reasoning; a server that sends both sends the same text twice."""
    deltas: list[dict[str, object]] = [
        {"reasoning_content": "a"},
        {"reasoning": "b", "reasoning_content": "b"},
        {"reasoning": "c"},
        {"content": "d", "reasoning_content": None},
        {"content": None},
        {"reasoning": 1},
    ]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    with sending(OK + "".join(f"data: {text}\n\n" for text in events).encode()) as url:
        assert answered(url) == "(a)(b)(c)d"


def test_a_stream_is_read_to_its_end() -> None:
    other = b'data: {"choices":[{"delta":{}}]}\n\n: comment\n\n'
    with sending(OK + event("a") + other + event("\ud800b") + b"data: [DONE]\n\n" + event("late")) as url:
        assert answered(url) == "a?b"


def test_letters_that_the_output_cannot_encode_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="latin-1"))
    with sending(OK + event("für 🙂") + b"data: [DONE]\n\n") as url:
        assert chat(url, options=ChatOptions(prompt="hi", model="m")) == 0
    assert out.getvalue() == b"f\xfcr \\U0001f642\n"


def test_ten_interim_responses_are_accepted() -> None:
    with sending(b"HTTP/1.1 100 Continue\r\n\r\n" * 10 + OK + event("yes") + b"data: [DONE]\n\n") as url:
        assert answered(url) == "yes"


@pytest.mark.parametrize(
    ("answer", "more", "message"),
    [
        (OK + b"<html>", b"", "answers without an event: is it an OpenAI-compatible server"),
        (OK + b"data: ", b"x" * 65536, "sends a line of more than 1048576 bytes"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99, "cannot be reached: it sends interim responses without"),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 999, "cannot be reached: got more than 100 headers"),
        (OK[:-4] + b"\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n", b"", "the answer broke off"),
        (OK + b"data: " + b"[" * 100_000 + b"\n\n", b"", "is not a JSON object"),
        (OK + b"data: " + b"9" * 10_000 + b"\n\n", b"", "is not a JSON object"),
        (OK + b'data: {"error":{"message":"\\u001b[31m"}}\n\n', b"", r"\\x1b\[31m"),
        (b"HTTP/1.1 400 \x1b[31m\r\n\r\n\x1b[31m", b"", r"answers 400: \\x1b\[31m"),
        (b'HTTP/1.1 404 a\r\n\r\n{"detail":"Not Found"}', b"", r'answers 404: {"detail":"Not Found"}'),
    ],
    ids=[
        "HTML",
        "a line",
        "interim",
        "headers",
        "a chunk",
        "depth",
        "a number",
        "an error",
        "a status",
        "no error",
    ],
)
def test_whatever_a_server_sends_is_a_sentence(
    answer: bytes, more: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_model, "_LARGEST", 1 << 20)
    with sending(answer, more) as url, pytest.raises(ServingError, match=message) as caught:
        answered(url)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "url",
    [
        "http://[x",
        "http://[::1",
        "http://a:b",
        "http://a:99999",
        "http://127.0.0.1:1/ü",
        "http://a..b",
        f"http://{'a' * 70}",
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ServingError, match="is not the address of a server"):
        answered(url)


@pytest.mark.parametrize("key", ["secret\n", "€"])
def test_a_key_that_no_request_can_carry(key: str) -> None:
    with pytest.raises(ServingError, match="correct --api-key or MLCBUILD_API_KEY"):
        ServerModel.connect("http://127.0.0.1:1", key)
