"""Tests of recognising requests from web pages of other origins by their headers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from mlcbuild_runtime.http.sites import Sites, host_name, is_loopback


def status(headers: list[tuple[str, str]], hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> Any:
    """Sends a request with the given headers through the middleware that refuses requests of other sites.
    Returns 200 if the request reaches the application, or else (HTTP status, error code). hosts, origins: the
    host names and origins that are allowed."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append(200)

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "headers": raw, "method": "GET", "path": "/"}
    asyncio.run(Sites(app, hosts, origins)(scope, None, send))  # type: ignore[arg-type]
    if sent == [200]:
        return 200
    start, body = sent
    return start["status"], json.loads(body["body"])["error"]["code"]


HOST, ORIGIN = (403, "host_not_allowed"), (403, "origin_not_allowed")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], 200),
        ([("Host", "localhost:8000")], 200),
        ([("Host", "[::1]:8000")], 200),
        ([("Host", "evil.example")], HOST),
        ([("Host", "localhost.evil.example")], HOST),
        ([("Host", "LocalHost")], 200),
        ([("Host", "localhost:8000"), ("Origin", "http://localhost:8000")], 200),
        ([("Host", "localhost:8000"), ("Origin", "http://LOCALHOST:8000")], 200),
        ([("Host", "localhost:8000"), ("Origin", "http://localhost:9000")], ORIGIN),
        ([("Host", "localhost:8000"), ("Origin", "null")], ORIGIN),
        ([("Host", "localhost"), ("Host", "localhost")], (400, None)),
        ([("Origin", "http://a.example"), ("Origin", "http://a.example")], (400, None)),
    ],
)
def test_only_this_machine_and_its_own_pages_may_call(headers: list[tuple[str, str]], expected: Any) -> None:
    assert status(headers) == expected


def test_options_allow_other_hosts_and_origins() -> None:
    host, page = [("Host", "Box.example:80")], [("Host", "localhost"), ("Origin", "http://page.example")]
    assert status(host, hosts=("box.example",)) == 200
    assert status(page, origins=("http://page.example",)) == 200
    assert status(page, origins=("*",)) == 200
    assert status(page, origins=("http://other.example",)) == ORIGIN


def test_what_is_no_http_passes() -> None:
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    asyncio.run(Sites(app, (), ())({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert reached == ["lifespan"]


def test_names_of_hosts() -> None:
    assert [host_name(h) for h in ("A.b:1", "[FE80::1]:2", "x.", "")] == ["a.b", "fe80::1", "x", ""]
    assert not is_loopback("localhost.example") and not is_loopback("") and is_loopback("::1")
    assert is_loopback("a.localhost") and is_loopback("127.9.9.9") and not is_loopback("128.0.0.1")
