"""Tests of access to a server: API keys, and what is open without one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from mlcbuild_format.errors import SetupError
from mlcbuild_runtime.http import serve
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.keys import Keys


def answer(path: str, headers: dict[str, str], *keys: str, kind: str = "http") -> tuple[int, Any]:
    """Sends a request through the middleware that checks API keys, in front of an application that answers
    200 to everything. Returns (status, body). keys: the API keys that the server accepts; kind: type of the
    connection in ASGI."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Keys(app, keys)({"type": kind, "path": path, "headers": raw}, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body or b"null")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer  two "}, 200),
        ({"x-api-key": "two"}, 200),
        ({"authorization": "Bearer onetwo"}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "one"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
)
def test_a_request_needs_one_of_the_keys(headers: dict[str, str], status: int) -> None:
    assert answer("/v1/models", headers, "one", "two")[0] == status


def test_keys_have_no_white_space_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.KEY_VARIABLE, "two\n")
    assert serve._with_keys(Access(("one ",))).keys == ("one", "two")
    for value, keys in (("", ("", "one")), (" \n", ())):
        monkeypatch.setenv(serve.KEY_VARIABLE, value)
        with pytest.raises(SetupError, match="an API key is empty"):
            serve._with_keys(Access(keys))
    monkeypatch.setenv(serve.KEY_VARIABLE, "")
    assert serve._with_keys(Access()) == Access()


def test_a_refusal_says_which_header_is_missing() -> None:
    _, body = answer("/v1/chat/completions", {}, "one")
    assert body["error"]["code"] == "invalid_api_key"
    assert "send the header 'Authorization: Bearer KEY'" in body["error"]["message"]
    assert answer("/v1/messages", {}, "one")[1]["error"]["type"] == "authentication_error"
    assert answer("/api/chat", {}, "one")[1]["error"].startswith("this server needs a key")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *[(path, 200) for path in ("/", "/docs", "/openapi.json", "/ping", "/health", "/health/ready")],
        *[(path, 401) for path in ("/metrics", "/v1/health", "/docs/x", "/openapi.json/x")],
    ],
)
def test_pages_and_health_checks_are_open(path: str, status: int) -> None:
    assert answer(path, {}, "one")[0] == status


def test_other_scopes_pass() -> None:
    assert answer("/v1/models", {}, "one", kind="lifespan")[0] == 200


def test_without_options_nothing_is_restricted_but_the_size_of_bodies() -> None:
    access = Access()
    assert (access.keys, access.origins, access.hosts) == ((), (), None)
    assert (access.timeout, access.max_tokens, access.lenient) == (None, None, False)
    assert access.max_body == 8 * 1024 * 1024
