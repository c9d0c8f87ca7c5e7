"""Sends the events of a running request to its client as they arrive, and cancels the request when the client
disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.openai.service import CompletionJob
from mlcbuild_runtime.openai.streams import AsyncAnswers

T = TypeVar("T")

_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class EventStream(StreamingResponse):
    """A streaming response with server-sent events, or other lines. When the client disconnects, even before
    the first event, the requests are cancelled."""

    def __init__(
        self,
        answers: AsyncAnswers,
        lines: AsyncIterator[str],
        use: ExitStack,
        media_type: str = "text/event-stream",
    ) -> None:
        """Creates an HTTP response that streams events. answers: the requests to the engine, which are
        cancelled when the stream ends; lines: the events as text; use: the context that keeps the model
        loaded, closed when the stream ends.
        """
        super().__init__(lines, media_type=media_type)
        self.headers["cache-control"] = "no-cache"
        # Without this field nginx holds an answer back until its buffer of 4 KiB is full or the answer ends.
        self.headers["x-accel-buffering"] = "no"
        self._answers, self._use = answers, use

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()
            self._use.close()


async def event_lines(answers: AsyncAnswers, job: CompletionJob) -> AsyncIterator[str]:
    """Yields the answers of a completion as server-sent events, the last of which is "data: [DONE]", also
    after an error, which is an event, too. Events of several answers that arrive together are yielded as one
    text."""
    async for batch in answers.batches():
        documents = (
            document
            for index, event in batch
            for document in job.reply.chunks(index, event, job.include_usage)
        )
        if lines := "".join([f"data: {_compact(document)}\n\n" for document in documents]):
            yield lines
    yield "data: [DONE]\n\n"


async def unless_gone(request: Request, answers: AsyncAnswers, work: Coroutine[None, None, T]) -> T:
    """Awaits `work`, which reads the answers, and returns its result or raises its exception. Raises
    ClientDisconnect, and cancels `work`, if the client disconnects first. In any case answers that have not
    ended are then cancelled."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        answers.cancel()
        watcher.cancel()
        worker.cancel()


async def collected(answers: AsyncAnswers, count: int) -> list[list[Event]]:
    """Returns one list of events for each of `count` answers, in their order, once all have ended. Raises the
    error of an answer as soon as one fails; the caller must cancel the others."""
    received: list[list[Event]] = [[] for _ in range(count)]
    async for index, event in answers.events():
        received[index].append(event)
        if event.error is not None:
            raise event.error
    return received


async def exhausted(events: AsyncIterator[object]) -> None:
    """Reads an iterator to its end, and ignores its items."""
    async for _ in events:
        pass


async def _disconnect(request: Request) -> None:
    """Waits until the client has closed the connection; other messages of the request are discarded."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
