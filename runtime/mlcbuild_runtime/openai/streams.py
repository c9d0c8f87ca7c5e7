"""The events of submitted requests, as they come: for a thread, or for an event loop."""

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
"""Events of an answer that may wait for a client that reads slowly; then the answer rests."""


def _same(sink: Sink) -> Sink:
    return sink


class Answers:
    """For a thread that waits."""

    def __init__(self, running: Engine, requests: Sequence[Request]) -> None:
        """Raises RequestError or EngineError."""
        self._events = SimpleQueue[tuple[int, Event]]()

        def sink(index: int) -> Sink:
            return lambda event: self._events.put((index, event))

        sinks = [sink(index) for index in range(len(requests))]
        self._tickets = service.submit(running, requests, sinks, WINDOW)

    def events(self) -> Iterator[tuple[int, Event]]:
        """(number of the answer, event), to the end of all. Raises what an answer has failed with."""
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
    """Carries events from other threads to an event loop: it is woken once for all that a step has made."""

    def __init__(self) -> None:
        self._carried, self._waking = deque[tuple[_Queue, int, Event]](), False

    def put(self, loop: asyncio.AbstractEventLoop, queue: _Queue, index: int, event: Event) -> None:
        """Raises RuntimeError when the loop has ended."""
        self._carried.append((queue, index, event))
        if not self._waking:
            self._waking = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except BaseException:
                self._waking = False
                raise

    def _deliver(self) -> None:
        self._waking = False  # first: who comes after the last look wakes the loop again
        while self._carried:
            queue, index, event = self._carried.popleft()
            queue.put_nowait((index, event))


_Queue = asyncio.Queue[tuple[int, Event]]
_posts: WeakKeyDictionary[asyncio.AbstractEventLoop, _Post] = WeakKeyDictionary()


class AsyncAnswers:
    """For an event loop."""

    def __init__(
        self, running: Engine, requests: Sequence[Request], watch: Callable[[Sink], Sink] = _same
    ) -> None:
        """`watch`: what else is to see the events. Raises RequestError or EngineError."""
        self._events: _Queue = asyncio.Queue()
        loop = asyncio.get_running_loop()
        post = _posts.setdefault(loop, _Post())

        def sink(index: int) -> Sink:
            return watch(partial(post.put, loop, self._events, index))

        sinks = [sink(index) for index in range(len(requests))]
        self._tickets = service.submit(running, requests, sinks, WINDOW)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(number of the answer, event), until all have ended or one has failed."""
        async for batch in self.batches():
            for index, event in batch:
                yield index, event

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """As `events`; together what is there together, which one write can send."""
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
        """Nobody waits for the rest."""
        for ticket in self._tickets:
            ticket.cancel()

    def interrupt(self, error: ServingError) -> None:
        """Ends all answers; who waits for them gets the error."""
        self.cancel()
        self._events.put_nowait((0, Event(error=error)))
