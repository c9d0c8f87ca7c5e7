"""The HTTP server: the endpoints of OpenAI's and Anthropic's APIs, and the routes of all others, over one or
several engines. See runtime/README.md."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.resources import files
from typing import TextIO, TypeVar

from mlcbuild_format.errors import RequestError, ServingError
from mlcbuild_format.fields import Json
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler

from mlcbuild_runtime import release
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.served_models import Models, card
from mlcbuild_runtime.http import error_responses, middleware, reference_page
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.accesslog import Form
from mlcbuild_runtime.http.event_stream import EventStream, collected, event_lines, exhausted, unless_gone
from mlcbuild_runtime.http.handling import RequestHandling
from mlcbuild_runtime.http.llama_endpoints import LlamaEndpoints
from mlcbuild_runtime.http.metrics import CONTENT_TYPE, Metrics
from mlcbuild_runtime.http.ollama_endpoints import OllamaEndpoints
from mlcbuild_runtime.openai import (
    anthropic_request,
    anthropic_stream,
    embeddings,
    openapi,
    service,
)
from mlcbuild_runtime.openai import responses_request as responses
from mlcbuild_runtime.openai.history import History, Kept, begun, listed
from mlcbuild_runtime.openai.responses_stream import CANCELLED, ResponseOutput
from mlcbuild_runtime.openai.service import CompletionJob
from mlcbuild_runtime.openai.streams import AsyncAnswers

log = logging.getLogger(__name__)
T = TypeVar("T")

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def create_app(
    running: Engine | Models,
    access: Access | None = None,
    access_logs: Sequence[tuple[TextIO, Form]] = (),
) -> ASGIApp:
    """Returns the web application that serves a running engine, or several models.

    access: rules for access; None: clients need no key and may address any host. access_logs: (stream, form
    of its lines, "json" or "text") of each access log."""
    access = access or Access()
    models = Models.of(running) if isinstance(running, Engine) else running
    metrics = Metrics(models.states)
    server = _Server(models, access, metrics)
    handlers: dict[object, ExceptionHandler] = {
        HTTPException: error_responses.http_error,
        ServingError: error_responses.serving_error,
        RuntimeError: error_responses.runtime_error,
        ClientDisconnect: error_responses.gone,
        Exception: error_responses.unexpected_error,
    }
    app = Starlette(
        routes=[*_routes(server, bool(access.keys)), *_others(server)],
        exception_handlers=handlers,
    )
    # A redirect would repeat the host name that the client sent.
    app.router.redirect_slashes = False
    return metrics.counted(middleware.wrapped(error_responses.until_stopped(app), access, access_logs))


def _others(server: _Server) -> list[Route]:
    """Returns the routes of other servers' APIs: Ollama's, llama.cpp's, and OpenAI's paths without their
    prefix /v1."""
    without_prefix = [
        Route(route.path.removeprefix("/v1"), route.endpoint, methods=[*(route.methods or ())])
        for route in _routes(server, keys=False)
        if route.path.startswith("/v1/")
    ]
    return [
        *without_prefix,
        *LlamaEndpoints(server.requests).routes(),
        *OllamaEndpoints(server.requests).routes(),
    ]


def _routes(server: _Server, keys: bool) -> list[Route]:
    """Returns the routes (path, handler, methods) of the server's endpoints, except Ollama's, llama.cpp's,
    and OpenAI's without the prefix /v1. keys: True if the description of the API, in /openapi.json and /docs,
    is to state that requests need a key. The routes check none: the middleware does."""
    return [
        Route("/", page),
        Route("/health", server.health),
        Route("/health/live", server.live),
        Route("/health/ready", server.ready),
        Route("/ping", server.live, methods=["GET", "POST"]),
        Route("/version", server.version),
        Route("/metrics", server.metrics),
        Route("/openapi.json", _api(keys)),
        Route("/docs", _reference(keys)),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/embeddings", server.embeddings, methods=["POST"]),
        Route("/v1/messages", server.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", server.count_tokens, methods=["POST"]),
        Route("/v1/responses", server.responses, methods=["POST"]),
        Route("/v1/responses/{id}", server.response),
        Route("/v1/responses/{id}", server.forget, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", server.input_items),
        Route("/v1/responses/{id}/cancel", server.cancel, methods=["POST"]),
    ]


def _api(keys: bool) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler of /openapi.json. keys: True if the document is to state that requests need an API
    key."""
    document = openapi.document(keys)

    async def describe(_request: Request) -> Response:
        return JSONResponse(document)

    return describe


def _reference(keys: bool) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler of /docs, the OpenAPI document as an HTML page. keys: True if the page is to state
    that requests need an API key."""
    text = reference_page.page(openapi.document(keys))

    async def show(_request: Request) -> Response:
        return HTMLResponse(text, headers={"Content-Security-Policy": reference_page.POLICY})

    return show


async def page(_request: Request) -> Response:
    """Returns the chat page: one HTML file, which loads nothing from other sites."""
    text = files("mlcbuild_runtime.http").joinpath("page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": PAGE_POLICY})


async def _message_events(
    answers: AsyncAnswers, output: anthropic_stream.MessageOutput
) -> AsyncIterator[dict[str, Json]]:
    """Yields the events of a streamed answer as the JSON documents (dictionaries) of Anthropic's API; an
    error of the engine is the event `error`, the last one."""
    yield output.begin()
    async for _, event in answers.events():
        for document in output.events(event):
            yield document


class _Server:
    """The handlers of the HTTP server's endpoints, except Ollama's and llama.cpp's, with the state that they
    share: the models, the metrics, and the responses of /v1/responses."""

    def __init__(self, models: Models, access: Access, metrics: Metrics) -> None:
        self._models, self._access, self._metrics = models, access, metrics
        self._history, self._created = History(), int(time.time())
        self.requests = RequestHandling(models, access, metrics)

    async def health(self, _request: Request) -> Response:
        states, total = self._models.states(), self._models.state()
        body: dict[str, object] = {"status": "ok" if total.alive else "stopped"}
        body |= {"model": self._models.entries[0].names[0], **asdict(total)}
        body["models"] = {name: asdict(state) for name, state in states.items()}
        return JSONResponse(body, status_code=200 if total.alive else 503)

    async def live(self, _request: Request) -> Response:
        alive = self._models.state().alive
        return JSONResponse({"live": alive}, status_code=200 if alive else 503)

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": release.installed()})

    async def ready(self, _request: Request) -> Response:
        ready = self._models.ready
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, _request: Request) -> Response:
        cards: list[Json] = [card(entry, self._created) for entry in self._models.entries]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        return JSONResponse(card(self._models.find(request.path_params["name"]), self._created))

    async def tokenize(self, request: Request) -> Response:
        return await self._about_text(request, service.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._about_text(request, service.detokenize)

    async def _about_text(
        self, request: Request, work: Callable[[Engine, Mapping[str, Json]], dict[str, Json]]
    ) -> Response:
        with ExitStack() as use:
            async with self.requests.body(request) as body:
                engine = await self.requests.engine(body, use)
                return JSONResponse(await self.requests.threaded(request, work, engine, body))

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, service.chat)

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, service.completion)

    async def _respond(
        self, request: Request, prepare: Callable[[Engine, Mapping[str, Json]], CompletionJob]
    ) -> Response:
        with ExitStack() as use:
            async with self.requests.body(request) as body:
                engine = await self.requests.engine(body, use)
                job = await self.requests.prepared(request, prepare, engine, body)
            del body  # The body may be large, and the answer may take long.
            answers = self.requests.submit(request, engine, job.requests, job.stream)
            if job.stream:
                return EventStream(answers, event_lines(answers, job), use.pop_all())
            events = await unless_gone(request, answers, collected(answers, len(job.requests)))
            return JSONResponse(job.reply.whole(events))

    async def embeddings(self, request: Request) -> Response:
        with ExitStack() as use:
            async with self.requests.body(request) as body:
                engine = await self.requests.engine(body, use)
                job = await self.requests.threaded(request, embeddings.job, engine, body)
            del body
            events = await self.requests.embedded(request, engine, job)
            content = await run_in_threadpool(job.content, events)
            return Response(content, media_type="application/json")

    async def responses(self, request: Request) -> Response:
        with ExitStack() as use:
            async with self.requests.body(request) as body:
                call = await run_in_threadpool(responses.call, body)
                before = self._history.before(call.previous)
                engine = await self.requests.engine(body, use)
                job = await self.requests.prepared(request, service.chat, engine, call.body(before))
            del body
            output, entry = begun(engine.name, job, call, before)
            answers = self.requests.submit(request, engine, job.requests, job.stream)
            documents = self._making(answers, output, entry, job.stream)
            if job.stream:
                lines = (f"event: {event['type']}\ndata: {_compact(event)}\n\n" async for event in documents)
                return EventStream(answers, lines, use.pop_all())
            await unless_gone(request, answers, exhausted(documents))
            return JSONResponse(output.document)

    async def messages(self, request: Request) -> Response:
        with ExitStack() as use:
            async with self.requests.body(request) as body:
                chat = await run_in_threadpool(anthropic_request.chat_body, body)
                engine = await self.requests.engine(chat, use)
                job = await self.requests.prepared(request, service.chat, engine, chat)
            del body, chat
            output = anthropic_stream.MessageOutput(engine.name, job.reply.prompts[0])
            answers = self.requests.submit(request, engine, job.requests, job.stream)
            if job.stream:
                events = _message_events(answers, output)
                lines = (f"event: {event['type']}\ndata: {_compact(event)}\n\n" async for event in events)
                return EventStream(answers, lines, use.pop_all())
            (received,) = await unless_gone(request, answers, collected(answers, 1))
            for event in received:
                deque(output.events(event), 0)
            return JSONResponse(output.document)

    async def count_tokens(self, request: Request) -> Response:
        with ExitStack() as use:
            async with self.requests.body(request) as body:
                chat = await run_in_threadpool(anthropic_request.counted_body, body)
                engine = await self.requests.engine({"model": body.get("model")}, use)
                job = await self.requests.prepared(request, service.chat, engine, chat)
            return JSONResponse({"input_tokens": len(job.requests[0].prompt)})

    async def _making(
        self, answers: AsyncAnswers, output: ResponseOutput, entry: Kept, stream: bool
    ) -> AsyncIterator[dict[str, Json]]:
        """Yields the stream events of a response of /v1/responses, and stores the response at its end if the
        request demands it. Without `stream`, an error of the engine is raised instead of yielded. Meanwhile
        clients can cancel the response by its id."""
        cancelled = RequestError("the response was cancelled", code=CANCELLED)
        self._history.start(output, lambda: answers.interrupt(cancelled))
        try:
            for document in output.begin():
                yield document
            async for _, event in answers.events():
                if event.error is not None and event.error is not cancelled and not stream:
                    raise event.error
                for document in output.events(event):
                    yield document
            if output.document["store"]:
                self._history.keep(entry)
        finally:
            self._history.end(output)

    async def response(self, request: Request) -> Response:
        return JSONResponse(self._history.find(request.path_params["id"]).document)

    async def forget(self, request: Request) -> Response:
        name = request.path_params["id"]
        self._history.forget(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        return JSONResponse(listed(self._history.find(request.path_params["id"]).items))

    async def cancel(self, request: Request) -> Response:
        """Ends the running response of /v1/responses with the id in the path, and returns its document; a
        stored one that has ended is returned unchanged. Raises RequestError (404) if no response with this id
        is running or stored."""
        name = request.path_params["id"]
        return JSONResponse(self._history.cancel(name) or self._history.find(name).document)
