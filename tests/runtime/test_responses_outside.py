"""Tests of what a server does around its endpoints: error responses, the order of middleware, log lines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from typing import Any, cast

import pytest
from mlcbuild_runtime.http import error_responses, logs, middleware
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.accesslog import AccessLog
from mlcbuild_runtime.http.keys import Keys
from mlcbuild_runtime.http.sites import Sites
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message


async def endpoint(_: Request) -> Response:
    return Response()


def request(path: str, method: str = "GET") -> Request:
    paths = ("/v1/models", "/models", "/v1/models/{name}", "/api/chat", "/health")
    app = Starlette(routes=[Route(each, endpoint) for each in paths])
    server = ("localhost", 1)
    return Request({
        "type": "http", "app": app, "path": path, "method": method, "headers": [], "server": server,
        "scheme": "http", "query_string": b"", "root_path": "",
    })  # fmt: skip


def message(response: Response) -> str:
    return str(json.loads(bytes(response.body))["error"]["message"])


def test_an_unknown_path_is_answered_with_those_that_exist() -> None:
    response = asyncio.run(error_responses.http_error(request("/v1/model"), HTTPException(404)))
    assert response.status_code == 404
    assert message(response) == (
        "there is no path /v1/model: there are /v1/models, /api/..., /health; /openapi.json describes them"
    )
    long = asyncio.run(error_responses.http_error(request("/" + "x" * 5000), HTTPException(404)))
    assert len(message(long)) < 300


def test_errors_have_the_form_of_the_path_s_api() -> None:
    ollama = asyncio.run(error_responses.http_error(request("/api/pull", "POST"), HTTPException(404)))
    assert str(json.loads(bytes(ollama.body))["error"]).startswith("there is no path /api/pull")
    for path in ("/v1/messages/batches", "/messages/batches"):
        response = asyncio.run(error_responses.http_error(request(path), HTTPException(404)))
        document = json.loads(bytes(response.body))
        assert (document["type"], document["error"]["type"]) == ("error", "not_found_error")
    defect = asyncio.run(error_responses.unexpected_error(request("/api/chat"), ValueError()))
    assert json.loads(bytes(defect.body)) == {"error": "the server has failed: see its log"}


def test_a_wrong_method_is_answered_with_the_right_one() -> None:
    error = HTTPException(405, headers={"Allow": "POST"})
    response = asyncio.run(error_responses.http_error(request("/v1/models", "PUT"), error))
    assert message(response) == "/v1/models does not take PUT: it takes POST"
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_a_defect_reveals_nothing() -> None:
    response = asyncio.run(error_responses.unexpected_error(request("/"), ValueError("secret")))
    assert response.status_code == 500 and message(response) == "the server has failed: see its log"


def test_a_client_that_has_gone_gets_no_answer() -> None:
    """Checks that nothing is sent, so that neither the access log nor the metrics have a status for it."""
    sent: list[Message] = []

    async def answer() -> None:
        response = await error_responses.gone(request("/"), ValueError())

        async def send(message: Message) -> None:
            sent.append(message)

        await response({"type": "http"}, never, send)

    async def never() -> Message:
        raise AssertionError("nobody reads")

    asyncio.run(answer())
    assert not sent


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_that_the_end_of_the_server_cancels_is_answered(has_begun: bool) -> None:
    sent = list[Any]()
    begin: Message = {"type": "http.response.start", "status": 200, "headers": []}

    async def send(message: Message) -> None:
        sent.append(message)

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await send(begin)
        await asyncio.sleep(60)

    async def talk() -> None:
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": []}
        handling = asyncio.create_task(
            cast(Any, error_responses.until_stopped(wait)(scope, cast(Any, None), send))
        )
        await asyncio.sleep(0)
        handling.cancel()
        await handling

    asyncio.run(talk())
    assert [message.get("status") for message in sent] == ([200] if has_begun else [503, None])


def test_requests_pass_the_log_the_sites_cors_and_the_keys() -> None:
    """Checks the order in which requests pass the server's middleware: the access log comes first, so that it
    lists refused requests, and CORS comes before the API keys, because a browser's preflight request has no
    key."""
    access = Access(keys=("k",), origins=("http://a",), hosts=("h",))
    layers = middleware.stack(access, [(sys.stderr, "text"), (io.StringIO(), "json")])
    classes: list[Any] = [layer.cls for layer in layers]
    assert classes == [AccessLog, AccessLog, Sites, CORSMiddleware, Keys]
    (only,) = middleware.stack(Access(hosts=()), [])
    assert only.cls is cast(Any, Sites)
    assert middleware.stack(Access(), []) == []


def test_log_lines_are_one_line() -> None:
    formatter = logs.OneLineFormatter("%(levelname)s: %(message)s")
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "x\n\x1b[31mERROR: forged", None, None)
    line = formatter.format(record)
    assert line.startswith("ERROR: x") and line.isprintable()
    try:
        raise ValueError("a\x1bb\nc")
    except ValueError:
        failed = logging.LogRecord("a", logging.ERROR, "f", 1, "failed", None, sys.exc_info())
    lines = formatter.format(failed).split("\n")
    assert lines[0] == "ERROR: failed" and lines[1].startswith("Traceback")
    assert all(each.isprintable() for each in lines) and "ValueError: a" in "".join(lines)


def test_a_log_that_is_configured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: calls.append(options))
    levels: list[int] = []
    monkeypatch.setattr(logging.getLogger("mlcbuild_runtime"), "setLevel", levels.append)
    logs.to_stderr()
    assert levels == [logging.INFO], "a model that was loaded is a line"
    (handler,) = calls[0]["handlers"]
    assert isinstance(handler.formatter, logs.OneLineFormatter) and "force" not in calls[0]
