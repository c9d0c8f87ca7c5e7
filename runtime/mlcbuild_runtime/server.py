"""The HTTP side: OpenAI's endpoints over one engine. See runtime/README.md."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from importlib.resources import files

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ExceptionHandler, Receive, Scope, Send

from mlcbuild_runtime import embeddings, service
from mlcbuild_runtime.access import Access
from mlcbuild_runtime.answers import AsyncAnswers
from mlcbuild_runtime.body import parse_body
from mlcbuild_runtime.engine import Engine
from mlcbuild_runtime.errors import RequestError, ServingError
from mlcbuild_runtime.fields import Json
from mlcbuild_runtime.keys import Keys
from mlcbuild_runtime.metrics import CONTENT_TYPE, Metrics
from mlcbuild_runtime.replies import error_document
from mlcbuild_runtime.request import Event
from mlcbuild_runtime.request import Request as Wanted
from mlcbuild_runtime.service import Job

log = logging.getLogger(__name__)

MAX_BODY = 8 << 20
"""Bytes of a request's body."""
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
RETRY_AFTER = 1
"""Seconds after which to try again when the server is full or stopping."""


def create_app(running: Engine, access: Access | None = None) -> Starlette:
    """The application over an engine that has been started."""
    access = access or Access()
    server = _Server(running, access.timeout)
    routes = [
        Route("/", page),
        Route("/health", server.health),
        Route("/health/live", server.live),
        Route("/health/ready", server.ready),
        Route("/metrics", server.metrics),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/embeddings", server.embeddings, methods=["POST"]),
    ]
    handlers: dict[object, ExceptionHandler] = {
        HTTPException: _http_error,
        ServingError: _serving_error,
        ClientDisconnect: _gone,
        Exception: _unexpected_error,
    }
    middleware = []
    if access.origins:
        # Before the keys: a browser asks for leave without one.
        every = ["*"]
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=access.origins, allow_methods=every, allow_headers=every)
        )
    if access.keys:
        middleware.append(Middleware(Keys, keys=access.keys))
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


async def page(_request: Request) -> Response:
    """A chat in the browser: one file, which loads nothing from elsewhere."""
    text = files("mlcbuild_runtime").joinpath("page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": PAGE_POLICY})


async def _http_error(_request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    document = error_document(
        RequestError(f"{error.detail}: see /v1/models, /v1/chat/completions and /v1/completions")
    )
    return JSONResponse(document, error.status_code, headers=error.headers)


async def _serving_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    status = error.status if isinstance(error, RequestError) else 500
    headers = {"Retry-After": str(RETRY_AFTER)} if status == 503 else None
    return JSONResponse(error_document(error), status, headers=headers)


async def _gone(_request: Request, _error: Exception) -> Response:
    """Nobody is there to read it."""
    return Response(status_code=400)


async def _unexpected_error(_request: Request, _error: Exception) -> Response:
    """A defect: the log has its traceback, the client learns only that it is not at fault."""
    return JSONResponse(error_document(ServingError("the server has failed: see its log")), 500)


async def _read(request: Request) -> bytes:
    """The body, up to MAX_BODY. Raises RequestError (413)."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise RequestError(
                f"the body has more than {MAX_BODY} bytes", code="request_too_large", status=413
            )
        parts.append(part)
    return b"".join(parts)


class _EventStream(StreamingResponse):
    """Server-sent events that end the request when the client leaves, even before the first event."""

    def __init__(self, answers: AsyncAnswers, job: Job) -> None:
        super().__init__(_lines(answers, job), media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def _lines(answers: AsyncAnswers, job: Job) -> AsyncIterator[str]:
    async for index, event in answers.events():
        documents = job.reply.chunks(index, event, job.include_usage)
        if lines := "".join([f"data: {_compact(document)}\n\n" for document in documents]):
            yield lines
    yield "data: [DONE]\n\n"


async def _collected(request: Request, answers: AsyncAnswers, count: int) -> list[list[Event]]:
    """The events of `count` complete answers. When the client leaves before, the request ends."""
    found: list[list[Event]] = [[] for _ in range(count)]

    async def collect() -> None:
        async for index, event in answers.events():
            found[index].append(event)
            if event.error is not None:
                raise event.error

    collector = asyncio.create_task(collect())
    watcher = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({collector, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not collector.done():
            raise ClientDisconnect
        collector.result()
    finally:
        answers.cancel()
        watcher.cancel()
        collector.cancel()
    return found


async def _disconnect(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Server:
    """The endpoints."""

    def __init__(self, running: Engine, timeout: float | None) -> None:
        self._engine, self._name, self._timeout = running, running.model.manifest.name, timeout
        self._metrics = Metrics(running.state)
        self._card: dict[str, Json] = {
            "id": self._name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "mlcbuild",
        }

    async def health(self, _request: Request) -> Response:
        state = self._engine.state()
        status = "ok" if state.alive else "stopped"
        body = {"status": status, "model": self._name, **asdict(state)}
        return JSONResponse(body, status_code=200 if state.alive else 503)

    async def live(self, _request: Request) -> Response:
        alive = self._engine.state().alive
        return JSONResponse({"live": alive}, status_code=200 if alive else 503)

    async def ready(self, _request: Request) -> Response:
        ready = self._engine.ready
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        service.check_model(self._engine, request.path_params["name"])
        return JSONResponse(self._card)

    async def tokenize(self, request: Request) -> Response:
        body = parse_body(await _read(request))
        return JSONResponse(await run_in_threadpool(service.tokenize, self._engine, body))

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(await _read(request))
        return JSONResponse(await run_in_threadpool(service.detokenize, self._engine, body))

    async def chat(self, request: Request) -> Response:
        body = parse_body(await _read(request))
        return await self._respond(request, await run_in_threadpool(service.chat, self._engine, body))

    async def completions(self, request: Request) -> Response:
        body = parse_body(await _read(request))
        return await self._respond(request, await run_in_threadpool(service.completion, self._engine, body))

    async def embeddings(self, request: Request) -> Response:
        body = parse_body(await _read(request))
        service.check_model(self._engine, body.get("model"))
        job = await run_in_threadpool(embeddings.job, self._engine, body)
        found: list[Event] = []
        for wave in job.waves():
            answers = AsyncAnswers(self._engine, self._timed(wave), self._metrics.watched)
            found += [events[-1] for events in await _collected(request, answers, len(wave))]
        return JSONResponse(await run_in_threadpool(job.document, found))

    def _timed(self, requests: Sequence[Wanted]) -> Sequence[Wanted]:
        return [replace(wanted, timeout=self._timeout) for wanted in requests]

    async def _respond(self, request: Request, job: Job) -> Response:
        answers = AsyncAnswers(self._engine, self._timed(job.requests), self._metrics.watched)
        if job.stream:
            return _EventStream(answers, job)
        return JSONResponse(job.reply.whole(await _collected(request, answers, len(job.requests))))
