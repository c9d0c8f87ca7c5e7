"""Delivers the events of submitted requests to a waiting thread or an event loop, as they arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from weakref import WeakKeyDictionary, finalize

from mlcbuild_format.errors import ServingError

from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Event, Request, Sink, Ticket
from mlcbuild_runtime.openai import service

WINDOW = 512
"""Number of events of an answer that may wait for a client which reads slowly; at this number the engine
pauses the request."""


def _same(sink: Sink) -> Sink:
    return sink


def _cancel(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


def _abandonment(answers: object, tickets: Sequence[Ticket]) -> finalize[..., object]:
    """Returns a finalizer that cancels requests when the object `answers` is garbage collected before its
    events are read: a generator that never began runs no code when it is deleted. The methods that read the
    answers detach the finalizer."""
    finalizer = finalize(answers, _cancel, tickets)
    finalizer.atexit = False
    return finalizer


class Answers:
    """The answers to requests that were submitted to an engine, for a thread that waits for their events."""

    def __init__(self, running: Engine, requests: Sequence[Request]) -> None:
        """Submits requests to an engine, all or none. Raises RequestError if the queue is full, a request
        does not fit the model or the engine is draining, EngineError if the engine is stopped."""
        events = self._events = SimpleQueue[tuple[int, Event]]()

        def sink(index: int) -> Sink:
            return lambda event: events.put((index, event))

        sinks = [sink(index) for index in range(len(requests))]
        self._tickets = service.submit(running, requests, sinks, WINDOW)
        self._abandoned = _abandonment(self, self._tickets)

    def events(self) -> Iterator[tuple[int, Event]]:
        """Yields (index of the answer, event) until all answers have ended. Raises the error of the first
        answer that fails. At the end, or when the caller closes the generator, answers that still run are
        cancelled."""
        running = len(self._tickets)
        self._abandoned.detach()
        try:
            while running:
                index, event = self._events.get()
                self._tickets[index].read()
                if event.error is not None:
                    raise event.error
                yield index, event
                running -= event.last
        finally:
            _cancel(self._tickets)


class _Post:
    """Carries events from other threads to an event loop, waking it once for all events that arrive before it
    runs, usually those of one step of the engine."""

    def __init__(self) -> None:
        self._carried, self._waking = deque[tuple[_Queue, int, Event]](), False

    def put(self, loop: asyncio.AbstractEventLoop, queue: _Queue, index: int, event: Event) -> None:
        """Puts (index of the answer, event) into `queue`, on the event loop's thread. Any thread may call it.
        Raises RuntimeError if the loop has ended."""
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
    """The answers to requests that were submitted to an engine, for an event loop that waits for their
    events."""

    def __init__(
        self, running: Engine, requests: Sequence[Request], watch: Callable[[Sink], Sink] = _same
    ) -> None:
        """Submits requests to an engine, all or none; an event loop must be running in this thread. watch:
        function that receives a sink for events and returns one that also observes each event. Raises
        RequestError if the queue is full, a request does not fit the model or the engine is draining,
        EngineError if the engine is stopped."""
        self._events: _Queue = asyncio.Queue()
        loop = asyncio.get_running_loop()
        post = _posts.setdefault(loop, _Post())

        def sink(index: int) -> Sink:
            return watch(partial(post.put, loop, self._events, index))

        sinks = [sink(index) for index in range(len(requests))]
        self._tickets = service.submit(running, requests, sinks, WINDOW)
        self._abandoned = _abandonment(self, self._tickets)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yields (index of the answer, event) until all answers have ended or one has failed: its error is
        not raised, but is in the last event. Answers that still run then are not cancelled."""
        async for batch in self.batches():
            for index, event in batch:
                yield index, event

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yields lists of (index of the answer, event), each with all events that have arrived, so that one
        write can send them. Ends when all answers have ended or one has failed: its error is not raised, but
        is in the last event of the last list. Answers that still run then are not cancelled."""
        running, failed = len(self._tickets), False
        self._abandoned.detach()
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
        """Cancels all requests, because nobody reads their events any more. Cancelling ended requests has no
        effect."""
        _cancel(self._tickets)

    def interrupt(self, error: ServingError) -> None:
        """Cancels all requests; whoever reads the events receives `error` in the last one, which is not
        raised and has the answer's index 0."""
        self.cancel()
        self._events.put_nowait((0, Event(error=error)))
