"""The events of submitted requests, as they come: for a thread, or for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from queue import SimpleQueue

from mlcbuild_runtime import service
from mlcbuild_runtime.engine import Engine
from mlcbuild_runtime.request import Event, Request, Sink

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


class AsyncAnswers:
    """For an event loop."""

    def __init__(
        self, running: Engine, requests: Sequence[Request], watch: Callable[[Sink], Sink] = _same
    ) -> None:
        """`watch`: what else is to see the events. Raises RequestError or EngineError."""
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(index: int) -> Sink:
            def deliver(event: Event) -> None:
                loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

            return watch(deliver)

        sinks = [sink(index) for index in range(len(requests))]
        self._tickets = service.submit(running, requests, sinks, WINDOW)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(number of the answer, event), until all have ended or one has failed."""
        running = len(self._tickets)
        while running:
            index, event = await self._events.get()
            yield index, event
            self._tickets[index].read()
            running = 0 if event.error else running - event.last

    def cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()
