"""Delivers the events of submitted requests to a waiting thread or an event loop, as they arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from weakref import WeakKeyDictionary

from mlcbuild_format.errors import ServingError

from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Event, Request, Sink
from mlcbuild_runtime.openai import service

WINDOW = 512
"""Number of events that may wait for a slow client; the request pauses at that number."""


def _same(sink: Sink) -> Sink:
    return sink


class Answers:
    """Submits requests and delivers their events to a thread that waits for them."""

    def __init__(self, running: Engine, requests: Sequence[Request]) -> None:
        """Submits requests to an engine. Raises RequestError if one cannot be served, EngineError if the
        engine is closed.
        """
        self._events = SimpleQueue[tuple[int, Event]]()

        def sink(index: int) -> Sink:
            return lambda event: self._events.put((index, event))

        sinks = [sink(index) for index in range(len(requests))]
        self._tickets = service.submit(running, requests, sinks, WINDOW)

    def events(self) -> Iterator[tuple[int, Event]]:
        """Yields (index of the answer, event) until all answers have ended. Raises the error of an answer
        that fails."""
        running = len(self._tickets)
        try:
            while running:
                index, event = self._events.get()
                self._tickets[index].read()
                if event.error is not None:
                    raise event.error
                yield index, event
                running -= event.last
        finally:
            for ticket in self._tickets:
                ticket.cancel()


class _Post:
    """Carries events from other threads to an event loop, waking it once for all events of a step."""

    def __init__(self) -> None:
        self._carried, self._waking = deque[tuple[_Queue, int, Event]](), False

    def put(self, loop: asyncio.AbstractEventLoop, queue: _Queue, index: int, event: Event) -> None:
        """Passes an event of the answer with number `index` to `queue`, on the event loop's thread. May be
        called from any thread. Raises RuntimeError when the loop has ended.
        """
        self._carried.append((queue, index, event))
        if not self._waking:
            self._waking = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except BaseException:
                self._waking = False
                raise

    def _deliver(self) -> None:
        # The flag is reset before the loop below, so that a later event wakes the loop again.
        self._waking = False
        while self._carried:
            queue, index, event = self._carried.popleft()
            queue.put_nowait((index, event))


_Queue = asyncio.Queue[tuple[int, Event]]
_posts: WeakKeyDictionary[asyncio.AbstractEventLoop, _Post] = WeakKeyDictionary()


class AsyncAnswers:
    """Submits requests and delivers their events to an event loop."""

    def __init__(
        self, running: Engine, requests: Sequence[Request], watch: Callable[[Sink], Sink] = _same
    ) -> None:
        """Submits requests to an engine. watch: returns a sink that also observes the events of the sink that
        it receives. Raises RequestError if the queue is full or a request does not fit the model, EngineError
        if the engine is closed.
        """
        self._events: _Queue = asyncio.Queue()
        loop = asyncio.get_running_loop()
        post = _posts.setdefault(loop, _Post())

        def sink(index: int) -> Sink:
            return watch(partial(post.put, loop, self._events, index))

        sinks = [sink(index) for index in range(len(requests))]
        self._tickets = service.submit(running, requests, sinks, WINDOW)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yields (index of the answer, event) until all answers of the requests have ended or one has
        failed."""
        async for batch in self.batches():
            for index, event in batch:
                yield index, event

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yields lists of (index, event) that arrived together, so that one write can send them."""
        running, failed = len(self._tickets), False
        while running and not failed:
            batch = [await self._events.get()]
            while not self._events.empty() and batch[-1][1].error is None:
                batch.append(self._events.get_nowait())
            yield batch
            for index, event in batch:
                self._tickets[index].read()
                running -= event.last
            failed = batch[-1][1].error is not None

    def cancel(self) -> None:
        """Cancels all requests, because nobody reads their events any more."""
        for ticket in self._tickets:
            ticket.cancel()

    def interrupt(self, error: ServingError) -> None:
        """Ends all answers; the reader receives `error`."""
        self.cancel()
        self._events.put_nowait((0, Event(error=error)))
