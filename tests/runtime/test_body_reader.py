"""Tests of reading request bodies: they arrive in parts, are limited in size, and are parsed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.http import body_reader
from mlcbuild_runtime.http.body_reader import MAX_LARGE, SMALL, BodyReader
from starlette.requests import Request

MB = 1_000_000


def request(*parts: bytes, headers: dict[str, str] | None = None) -> Request:
    """Returns a simulated HTTP request whose body arrives in `parts`, one after the other."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "headers": raw}, receive)


def parsed(reader: BodyReader, request: Request) -> Any:
    async def run() -> Any:
        async with reader.body(request) as body:
            return body

    return asyncio.run(run())


def refusal(reader: BodyReader, request: Request) -> tuple[int, str | None]:
    with pytest.raises(RequestError) as caught:
        parsed(reader, request)
    return caught.value.status, caught.value.code


def test_a_body_in_parts_is_one() -> None:
    reader = BodyReader(MB)
    assert parsed(reader, request(b'{"a":', b" [1]", b"}")) == {"a": [1]}
    large = b'{"a": "' + b"x" * SMALL + b'"}'
    assert parsed(reader, request(large[:9], large[9:])) == {"a": "x" * SMALL}
    assert reader._kept == 0


def test_invalid_json_is_a_400() -> None:
    assert refusal(BodyReader(MB), request(b"{"))[0] == 400
    assert refusal(BodyReader(MB), request(b" " * (SMALL + 1)))[0] == 400


def test_a_body_has_a_maximum_size() -> None:
    reader = BodyReader(10)
    assert parsed(reader, request(b'{"a":', b"1234}")) == {"a": 1234}
    assert refusal(reader, request(b'{"a":', b"12345}")) == (413, "request_too_large")
    unread = request(headers={"content-length": "11"})  # receiving would fail
    assert refusal(reader, unread) == (413, "request_too_large")


def test_an_encoded_body_is_refused() -> None:
    reader = BodyReader(MB)
    assert refusal(reader, request(headers={"content-encoding": "gzip"})) == (415, "unsupported_encoding")
    assert parsed(reader, request(b"{}", headers={"content-encoding": "IDENTITY"})) == {}
    second = [(b"content-encoding", b"identity"), (b"content-encoding", b"gzip")]
    twice = Request({"type": "http", "headers": second})
    assert refusal(reader, twice) == (415, "unsupported_encoding")


def test_a_body_that_does_not_end_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "BODY_SECONDS", 0.01)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    assert refusal(BodyReader(MB), Request({"type": "http", "headers": []}, receive)) == (408, "timeout")


def test_many_large_bodies_at_once_are_refused() -> None:
    async def run() -> list[int]:
        taken, statuses, gate = BodyReader(8 * MB), list[int](), asyncio.Event()

        async def one() -> None:
            sent = False

            async def receive() -> dict[str, Any]:
                nonlocal sent
                if sent:
                    await gate.wait()
                    return {"type": "http.request", "body": b"", "more_body": False}
                sent = True
                return {"type": "http.request", "body": b" " * 7 * MB, "more_body": True}

            try:
                async with taken.body(Request({"type": "http", "headers": []}, receive)):
                    pass
            except RequestError as error:
                statuses.append(error.status)

        tasks = [asyncio.create_task(one()) for _ in range(20)]
        while len(statuses) < 20 - MAX_LARGE // (7 * MB):
            await asyncio.sleep(0)
        refused = len(statuses)
        gate.set()
        await asyncio.gather(*tasks)
        await one()  # there is room again
        return [refused, *statuses]

    refused, *statuses = asyncio.run(run())
    assert refused == 20 - MAX_LARGE // (7 * MB)
    assert statuses.count(503) == refused and statuses[-1] == 400
