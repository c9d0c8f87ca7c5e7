"""Tests of the benchmark's HTTP client: URLs of servers, and answers that arrive in pieces of any size."""

from __future__ import annotations

import asyncio
import json
import ssl

import pytest

from mlcbuild.bench import exchange as exchange_module
from mlcbuild.bench.exchange import ExchangeError, Server, TimedReply, exchange
from mlcbuild.bench.figures import sample


def stream(*documents: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(document)}\r\n\r\n" for document in documents]
    return b"HTTP/1.1 200 OK\r\n\r\n" + "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


SAID = {"choices": [{"text": "a"}]}


def test_events_may_come_in_any_pieces() -> None:
    body = stream(SAID, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
    data = body.partition(b"\r\n\r\n")[2]
    for size in (1, 2, 3, 17, 1000):
        pieces = [(float(i), data[i : i + size]) for i in range(0, len(data), size)]
        actual = sample(0.0, 0.0, 99.0, TimedReply(200, tuple(pieces)))
        assert (actual.error, actual.prompt_tokens, actual.answer_tokens, len(actual.texts)) == (
            None,
            7,
            2,
            1,
        )


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_every_kind_of_generated_text_is_an_arrival(field: str) -> None:
    chunks = ({"choices": [{"delta": {field: text}}]} for text in ("a", "b", ""))
    body = stream({"choices": [{"delta": {"role": "assistant"}}]}, *chunks).partition(b"\r\n\r\n")[2]
    actual = sample(0.0, 0.0, 9.0, TimedReply(200, ((1.0, body),)))
    assert (actual.error, actual.texts) == (None, (1.0, 1.0))


def test_urls() -> None:
    assert Server.of("https://[::1]/x/v1", "k") == Server("::1", 443, True, "/x", "k")
    assert Server.of("https://[::1]/x").name == "[::1]:443"
    assert "secret" not in repr(Server.of("http://h", "secret"))


def test_a_host_that_is_no_name_cannot_be_reached() -> None:
    for host in ("a" * 64, "a..b"):
        with pytest.raises(ExchangeError, match=rf"{host}:80 cannot be reached: "):
            asyncio.run(exchange(Server.of(f"http://{host}"), "/v1/models"))


def test_a_body_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "LARGEST_BODY", 1000)

    async def ask(head: bytes, part: bytes) -> TimedReply:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + 20 * part)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            return await exchange(Server("127.0.0.1", port, False, ""), "/v1/models")

    for head, part in (
        (b"", b"x" * 99),
        (b"Transfer-Encoding: chunked\r\n", b"63\r\n" + b"x" * 99 + b"\r\n"),
    ):
        with pytest.raises(ExchangeError, match="the server sent a body of more than 1000 bytes"):
            asyncio.run(ask(head, part))


def test_certificates_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [ssl.create_default_context()]
    exchange_module._certificates.cache_clear()
    monkeypatch.setattr(ssl, "create_default_context", contexts.pop)
    for _ in range(2):
        with pytest.raises(ExchangeError, match="cannot be reached"):
            asyncio.run(exchange(Server.of("https://127.0.0.1:1"), "/v1/models"))
    assert contexts == []
