"""Implements the steps that all endpoints have in common: reading the body, choosing the model, working on a
thread, and submitting requests to the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from math import inf
from typing import TypeVar

from anyio import CapacityLimiter, move_on_after, to_thread
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from starlette.requests import Request

from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Deadline, Event
from mlcbuild_runtime.engine.request import Request as EngineRequest
from mlcbuild_runtime.engine.served_models import Models, Use
from mlcbuild_runtime.http.access import Access
from mlcbuild_runtime.http.accesslog import record
from mlcbuild_runtime.http.body_reader import BodyReader
from mlcbuild_runtime.http.event_stream import collected, unless_gone
from mlcbuild_runtime.http.metrics import Metrics
from mlcbuild_runtime.openai import openapi, service
from mlcbuild_runtime.openai.body import wrong
from mlcbuild_runtime.openai.embeddings import EmbeddingsJob
from mlcbuild_runtime.openai.foreign_fields import translated, without_unknown
from mlcbuild_runtime.openai.service import CompletionJob
from mlcbuild_runtime.openai.streams import AsyncAnswers

log = logging.getLogger(__name__)
T = TypeVar("T")

_SCOPE = "mlcbuild.deadline"

COMPILERS, MAX_COMPILING = 200, 128
"""COMPILERS is the maximum number of requests with constraints (grammars, JSON schemas) whose bodies are
processed at a time, and MAX_COMPILING the maximum number of further ones that wait; beyond both, requests are
refused (503). COMPILERS is a little more than 192, the number of requests that may wait for the compilation
of their constraints: see constraints/stages.py."""
RENDERERS = 80
"""Maximum number of requests with chat messages, but without constraints, whose bodies are processed at a
time; further ones wait. It is more than 64, the number of requests that the queues for rendering the chat
template hold, in which most of them wait."""


class RequestHandling:
    """Implements the steps that all HTTP endpoints share: reading a request's body, choosing and loading its
    model, creating the engine's requests, and returning their answers."""

    def __init__(self, models: Models, access: Access, metrics: Metrics) -> None:
        self.models = models
        self._access, self._metrics = access, metrics
        self._compiling, self._rendering = CapacityLimiter(COMPILERS), CapacityLimiter(RENDERERS)
        # Models are loaded one at a time: requests that wait for it must not take all threads.
        self._loading, self._unlimited = CapacityLimiter(1), CapacityLimiter(inf)
        self._intake = BodyReader(access.max_body)

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[dict[str, Json]]:
        """Yields the JSON object in the body of a request, as an async context manager; with --lenient,
        without the fields that the server would refuse by name, which are logged. Raises RequestError for a
        body that is invalid, or that exceeds a limit, ClientDisconnect if the client disconnects before its
        end. If the server's time limit for a request passes before the context ends, what is awaited in it is
        cancelled, and RequestError (504) is raised."""
        deadline = self._deadline(request)
        with move_on_after(None if deadline is None else deadline.left):
            async with self._intake.body(request) as body:
                yield self._supported(request, body) if self._access.lenient else body
                return
        assert deadline is not None
        raise deadline.error()

    def _deadline(self, request: Request) -> Deadline | None:
        """Returns the time limit of a request, which begins with the first call for it; None if the server
        has no limit."""
        seconds = self._access.timeout
        if seconds is not None:
            request.scope.setdefault(_SCOPE, Deadline.after(seconds))
        return request.scope.get(_SCOPE)

    def _supported(self, request: Request, body: dict[str, Json]) -> dict[str, Json]:
        """Returns a body without the fields that the request's endpoint does not have, which are logged."""
        path, table = request.url.path, openapi.table(request.url.path)
        if table is None:
            return body
        # Only endpoints with OpenAI's response_format translate fields of other servers.
        fields = translated(body) if "response_format" in table else body
        supported, dropped = without_unknown(fields, table)
        if dropped:
            log.warning("%s: dropped fields: %s", path, ", ".join(name[:60] for name in dropped[:20]))
        return supported

    async def prepared(
        self,
        request: Request,
        prepare: Callable[[Engine, Mapping[str, Json]], CompletionJob],
        engine: Engine,
        body: Mapping[str, Json],
    ) -> CompletionJob:
        """Calls `prepare` with an engine and a request's body on another thread, and returns its result,
        which holds the requests for the engine and the reply that they fill. Raises the exceptions of
        `prepare`, such as RequestError for a body that cannot be served, and RequestError if too many
        requests wait for their constraints (grammars, JSON schemas) to be compiled (503).

        Constraints may take seconds to compile, and chat templates to render: they have threads of their own,
        so that other requests do not wait for them."""
        waiting = self._compiling.statistics().tasks_waiting
        if service.constrained(body) and waiting >= MAX_COMPILING:
            raise RequestError(
                f"{MAX_COMPILING} requests with constraints are waiting to be compiled: try again later",
                code="overloaded",
                status=503,
            )
        return await self.threaded(request, prepare, engine, body)

    async def threaded(
        self,
        request: Request,
        work: Callable[[Engine, Mapping[str, Json]], T],
        engine: Engine,
        body: Mapping[str, Json],
    ) -> T:
        """Calls `work` with an engine and a body on another thread, and returns its result or raises its
        exception. The number of such threads is limited, by what the body needs. If the caller is cancelled,
        the thread ends soon after, since constraints and templates are bounded."""
        others = self._rendering if body.get("messages") else to_thread.current_default_thread_limiter()
        limiter = self._compiling if service.constrained(body) else others
        service.serve_in_turn(request.client.host if request.client else "")
        return await self._on_thread(limiter, partial(work, engine, body))

    async def _on_thread(
        self, limiter: CapacityLimiter, work: Callable[[], T], drop: Callable[[T], None] | None = None
    ) -> T:
        """Calls `work` on another thread, and returns its result or raises its exception. If the caller is
        cancelled, the thread goes on, and counts in `limiter` until it ends; its result is then passed to
        `drop`, if that is not None."""
        place = object()
        await limiter.acquire_on_behalf_of(place)
        running = asyncio.create_task(to_thread.run_sync(work, limiter=self._unlimited))
        running.add_done_callback(lambda _: limiter.release_on_behalf_of(place))
        try:
            # asyncio.shield of Python 3.14 logs a traceback if the work fails after the caller was cancelled.
            await asyncio.wait([running])
        except asyncio.CancelledError:
            running.add_done_callback(partial(_dropped, drop))
            raise
        return running.result()

    async def engine(self, body: Mapping[str, Json], use: ExitStack) -> Engine:
        """Returns the engine of the model that a body names, or of the first model if it names none, loaded
        if necessary; it stays loaded until `use` is closed. Raises RequestError for a name that is not a text
        (400), if the server has no such model (404), if the model cannot be loaded (500), or if there is no
        memory for it now or the server is stopping (503)."""
        name = body.get("model")
        if name is not None and not isinstance(name, str):
            raise wrong("model", "a text", name)
        reference = self.models.at_once(name)
        if reference is None:
            reference = await self._on_thread(self._loading, partial(self.models.use, name), _end)
        use.callback(reference.end)
        return reference.engine

    def submit(
        self, request: Request, engine: Engine, requests: Sequence[EngineRequest], stream: bool = False
    ) -> AsyncAnswers:
        """Submits requests to an engine, with the server's limits of tokens and time, and returns at once the
        object from which their answers' events are read; the metrics and the access log also receive the
        events. stream: True if the answer is streamed, for the log. Raises RequestError if the queue is full
        or a request does not fit the model, EngineError if the engine is stopped."""
        line, name = record(request.scope), engine.name
        line.model(name, requests, stream)
        limited = [
            replace(self._limited(engine, each), deadline=self._deadline(request)) for each in requests
        ]
        return AsyncAnswers(engine, limited, lambda sink: self._metrics.watched(name, line.watched(sink)))

    async def embedded(self, request: Request, engine: Engine, job: EmbeddingsJob) -> list[Event]:
        """Computes the embeddings of all texts of an HTTP request, up to 64 at a time, and returns the
        engine's event for each text, in their order, which holds its embedding. Raises RequestError if the
        queue is full or a text does not fit the model, EngineError if the engine is stopped, ClientDisconnect
        if the client disconnects."""
        last_events: list[Event] = []
        for wave in job.waves():
            answers = self.submit(request, engine, wave)
            received = await unless_gone(request, answers, collected(answers, len(wave)))
            last_events += [events[-1] for events in received]
        return last_events

    def _limited(self, engine: Engine, request: EngineRequest) -> EngineRequest:
        """Returns a request for the engine that generates at most as many tokens as the server allows, except
        for an embedding."""
        most, room = self._access.max_tokens, engine.manifest.limits.context_window - len(request.prompt)
        if most is not None and request.pooling is None and room > 0:
            count = room if request.max_tokens is None else request.max_tokens
            request = replace(request, max_tokens=min(most, count))
        return request


def _end(use: Use) -> None:
    use.end()


def _dropped(drop: Callable[[T], None] | None, ended: asyncio.Task[T]) -> None:
    """Passes the result of a task, which nobody reads any more, to `drop`, if that is not None; does nothing
    if the task failed."""
    if not ended.cancelled() and ended.exception() is None and drop is not None:
        drop(ended.result())
