"""The HTTP side: OpenAI's endpoints over one engine. See runtime/README.md."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ExceptionHandler, Receive, Scope, Send

from mlcbuild_runtime import api
from mlcbuild_runtime import request as requests
from mlcbuild_runtime.engine import Engine
from mlcbuild_runtime.errors import RequestError, ServingError
from mlcbuild_runtime.fields import Json
from mlcbuild_runtime.replies import Reply, error_document
from mlcbuild_runtime.request import Event

log = logging.getLogger(__name__)

MAX_BODY = 8 << 20
"""Bytes of a request's body."""
COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for /v1/completions."""
RETRY_AFTER = 1
"""Seconds after which to try again when the server is full or stopping."""


def create_app(running: Engine) -> Starlette:
    """The application over an engine that has been started."""
    server = _Server(running)
    routes = [
        Route("/health", server.health),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
    ]
    handlers: dict[object, ExceptionHandler] = {
        HTTPException: _http_error,
        ServingError: _serving_error,
        ClientDisconnect: _gone,
        Exception: _unexpected_error,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


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


class _Answer:
    """A submitted request and its events."""

    def __init__(self, running: Engine, request: requests.Request) -> None:
        """Raises RequestError or EngineError."""
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._ticket = running.submit(request, deliver)

    async def events(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if event.last:
                return

    def cancel(self) -> None:
        self._ticket.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events that end the request when the client leaves, even before the first event."""

    def __init__(self, answer: _Answer, reply: Reply, include_usage: bool) -> None:
        super().__init__(_lines(answer, reply, include_usage), media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


async def _lines(answer: _Answer, reply: Reply, include_usage: bool) -> AsyncIterator[str]:
    async for event in answer.events():
        for document in reply.chunks(event, include_usage):
            yield f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"
    yield "data: [DONE]\n\n"


async def _whole(request: Request, answer: _Answer, reply: Reply) -> Response:
    """The complete answer. When the client leaves before, the request ends."""

    async def collect() -> list[Event]:
        return [event async for event in answer.events()]

    collector = asyncio.create_task(collect())
    watcher = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({collector, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not collector.done():
            raise ClientDisconnect
        events = collector.result()
    finally:
        answer.cancel()
        watcher.cancel()
        collector.cancel()
    error = events[-1].error
    if error is not None:
        raise error
    return JSONResponse(reply.whole(events))


async def _disconnect(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Server:
    """The endpoints."""

    def __init__(self, running: Engine) -> None:
        self._engine, self._name = running, running.model.manifest.name
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

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card)

    async def chat(self, request: Request) -> Response:
        body = api.parse_body(await _read(request))
        call = api.chat_call(body, self._engine.model.manifest.serving)
        self._check_model(body.get("model"))
        prompt = await run_in_threadpool(self._engine.tokenizer.chat, call.messages, call.template_options)
        return await self._respond(request, prompt, call.options, chat=True)

    async def completions(self, request: Request) -> Response:
        body = api.parse_body(await _read(request))
        call = api.completion_call(body, self._engine.model.manifest.serving)
        self._check_model(body.get("model"))
        prompt = (
            await run_in_threadpool(self._engine.tokenizer.encode, call.prompt)
            if isinstance(call.prompt, str)
            else list(call.prompt)
        )
        return await self._respond(request, prompt, call.options, chat=False)

    async def _respond(
        self, request: Request, prompt: list[int], options: api.Options, chat: bool
    ) -> Response:
        max_tokens = options.max_tokens
        if max_tokens is None and not chat:
            room = self._engine.model.limits.context_window - len(prompt)
            max_tokens = max(1, min(COMPLETION_TOKENS, room))
        wanted = requests.Request(
            tuple(prompt), max_tokens, options.sampling, options.stop, chat, options.logprobs
        )
        answer = _Answer(self._engine, wanted)
        reply = Reply(chat, self._name, len(prompt), self._engine.tokenizer.vocabulary)
        if options.stream:
            return _EventStream(answer, reply, options.include_usage)
        return await _whole(request, answer, reply)

    def _check_model(self, name: Json) -> None:
        if name is not None and name != self._name:
            raise RequestError(
                f"the model {name!r} is not here: this server has '{self._name}'",
                param="model",
                code="model_not_found",
                status=404,
            )
