"""Responds to requests that end outside of an endpoint: unknown paths, clients that have disconnected,
defects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mlcbuild_format.errors import RequestError, ServingError, StoppingError
from mlcbuild_format.fields import Json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlcbuild_runtime.openai import anthropic_stream, chat_documents, ollama_stream

SHOWN = 100
"""Maximum characters of a request's URL path that an error message repeats; the rest of the path is left out.
"""

RETRY_AFTER = 1
"""Seconds after which clients should retry while the server is full or stopping."""


def error_document(path: str, error: ServingError) -> dict[str, Json]:
    """Returns an error as the JSON document of the API to which the URL path of the request belongs: Ollama's
    for paths below /api, Anthropic's for those that begin with /v1/messages or /messages, OpenAI's for all
    others."""
    if path.startswith("/api/"):
        return ollama_stream.error_document(error)
    if path.removeprefix("/v1").startswith("/messages"):
        return anthropic_stream.error_document(error)
    return chat_documents.error_document(error)


async def http_error(request: Request, error: Exception) -> Response:
    """Returns the response, an error document with a message, to a request whose path (404) or method (405)
    the server does not have."""
    assert isinstance(error, HTTPException)
    path, status = request.url.path[:SHOWN], error.status_code
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} does not take {request.method}: it takes {allowed}"
    else:
        message = f"there is no path {path}: {_paths(request.app.routes)}"
    document = error_document(request.url.path, RequestError(message, status=status))
    return JSONResponse(document, status, headers=error.headers)


def _paths(routes: Sequence[BaseRoute]) -> str:
    """Returns a clause for an error message that names the paths which the server has. Paths of Ollama's API
    are named by their common prefix, /api; paths with parameters, and OpenAI's without /v1, are left out."""
    paths = [route.path for route in routes if isinstance(route, Route) and "{" not in route.path]
    openai = [path for path in paths if path.startswith("/v1/")]
    same = {path.removeprefix("/v1") for path in openai}
    others = [path for path in paths if path not in same and not path.startswith(("/v1/", "/api/"))]
    names = ", ".join([*openai, "/api/...", *others])
    return f"there are {names}; /openapi.json describes them"


class _Unsent(Response):
    """A response that is never sent, so that neither the access log nor the metrics record a status."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


async def gone(_request: Request, _error: Exception) -> Response:
    """Ends the handling of a request whose client has disconnected without an answer."""
    return _Unsent()


async def unexpected_error(request: Request, _error: Exception) -> Response:
    """Returns the response (500) after a defect of the server: the log has the traceback, and the client
    learns only that the server failed."""
    return _response(request.url.path, ServingError("the server has failed: see its log"))


async def runtime_error(request: Request, error: Exception) -> Response:
    """Returns the response (503) to a request for which the system starts no thread, since the limit of
    processes or memory is reached. Raises any other RuntimeError again: it is a defect."""
    if "can't start new thread" not in str(error):
        raise error
    return _response(
        request.url.path,
        RequestError(
            "this machine starts no further thread for the server: try again later, or raise the limit of "
            "processes or memory under which the server runs",
            code="overloaded",
            status=503,
        ),
    )


async def serving_error(request: Request, error: Exception) -> Response:
    """Returns the response to a request that is refused or fails, with an error document and its status."""
    assert isinstance(error, ServingError)
    return _response(request.url.path, error)


def _response(path: str, error: ServingError) -> Response:
    status = error.status if isinstance(error, RequestError) else 500
    headers = {"Retry-After": str(RETRY_AFTER)} if status == 503 else None
    return JSONResponse(error_document(path, error), status, headers=headers)


def until_stopped(app: ASGIApp) -> ASGIApp:
    """Returns an ASGI application that passes requests to `app`, and answers those that a stopping server
    cancels: with an error (503), or with the end of an answer that has begun. uvicorn would log a traceback
    for each, and answer 500."""

    async def pass_on(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def answer(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, answer)
        except asyncio.CancelledError:
            if not has_begun:
                await _response(scope["path"], StoppingError())(scope, receive, send)

    return pass_on
