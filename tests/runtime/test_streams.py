"""Tests of passing events to a thread or an event loop, without an engine's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import cast

import pytest
from mlcbuild_format.errors import EngineError, RequestError
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Event, Request, Sink, Ticket
from mlcbuild_runtime.openai.streams import WINDOW, Answers, AsyncAnswers

REQUEST = Request((1, 2), 9)


class Submitted:
    """A stand-in for the engine that stores submitted requests and never answers them."""

    def __init__(self, places: int = 9) -> None:
        self.sinks: list[Sink] = []
        self.tickets: list[Ticket] = []
        self._places = places

    def submit(self, request: Request, sink: Sink, window: int) -> Ticket:
        assert window == WINDOW
        if len(self.tickets) == self._places:
            raise RequestError("full", status=503)
        ticket = Ticket(lambda: None, window)
        self.sinks.append(lambda event: ticket.deliver(sink, event))
        self.tickets.append(ticket)
        return ticket


def token(number: int, last: bool = False) -> Event:
    return Event(f"{number} ", number, "stop" if last else None)


def read(ticket: Ticket) -> int:
    """Returns the number of events of a request that its client has read. ticket: the request's handle, which
    pauses when WINDOW events are unread."""
    assert ticket.room is not None
    return ticket.delivered - (WINDOW - ticket.room)


def test_a_thread_gets_all_events_of_all_answers() -> None:
    engine = Submitted()
    answers = Answers(cast(Engine, engine), [REQUEST, REQUEST])
    sent = [(0, token(1)), (1, token(1, last=True)), (0, token(2, last=True))]
    for index, event in sent:
        engine.sinks[index](event)
    assert list(answers.events()) == sent
    assert [read(ticket) for ticket in engine.tickets] == [2, 1]
    assert all(ticket.cancelled for ticket in engine.tickets)


def test_a_thread_gets_the_error_and_the_other_answers_end() -> None:
    engine = Submitted()
    answers = Answers(cast(Engine, engine), [REQUEST, REQUEST])
    engine.sinks[1](Event(error=EngineError("broken")))
    with pytest.raises(EngineError, match="broken"):
        list(answers.events())
    assert all(ticket.cancelled for ticket in engine.tickets)


def test_when_one_request_is_refused_none_runs() -> None:
    engine = Submitted(places=1)
    with pytest.raises(RequestError, match="full"):
        Answers(cast(Engine, engine), [REQUEST, REQUEST])
    assert engine.tickets[0].cancelled


def in_loop(
    engine: Submitted, send: Callable[[], None], count: int = 1
) -> tuple[AsyncAnswers, list[list[tuple[int, Event]]]]:
    """Calls `send` in another thread for `count` requests of the engine's stand-in. Returns (the answers that
    collect the requests' events, the batches of (index of the request, event) that reach the event loop)."""

    async def run() -> tuple[AsyncAnswers, list[list[tuple[int, Event]]]]:
        answers = AsyncAnswers(cast(Engine, engine), [REQUEST] * count)
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        async with asyncio.timeout(60):
            return answers, [batch async for batch in answers.batches()]

    return asyncio.run(run())


def test_events_of_one_step_arrive_together() -> None:
    engine = Submitted()

    def send() -> None:
        engine.sinks[0](token(1))
        engine.sinks[1](token(1, last=True))
        engine.sinks[0](token(2, last=True))

    _, batches = in_loop(engine, send, count=2)
    assert batches == [[(0, token(1)), (1, token(1, last=True)), (0, token(2, last=True))]]
    assert [read(ticket) for ticket in engine.tickets] == [2, 1]


def test_nothing_follows_an_error() -> None:
    engine = Submitted()
    error = Event(error=EngineError("broken"))

    def send() -> None:
        engine.sinks[0](token(1))
        engine.sinks[1](error)
        engine.sinks[0](token(2))

    _, batches = in_loop(engine, send, count=2)
    assert batches == [[(0, token(1)), (1, error)]]


def test_events_are_single_where_batches_do_not_matter() -> None:
    engine = Submitted()

    async def run() -> list[tuple[int, Event]]:
        answers = AsyncAnswers(cast(Engine, engine), [REQUEST])
        for event in (token(1), token(2, last=True)):
            engine.sinks[0](event)
        return [item async for item in answers.events()]

    assert asyncio.run(run()) == [(0, token(1)), (0, token(2, last=True))]


def test_an_interruption_ends_the_answers() -> None:
    engine = Submitted()

    async def run() -> list[tuple[int, Event]]:
        answers = AsyncAnswers(cast(Engine, engine), [REQUEST] * 2)
        answers.interrupt(EngineError("deleted"))
        engine.sinks[0](token(1))
        return [item async for item in answers.events()]

    ((_, event),) = asyncio.run(run())
    assert str(event.error) == "deleted" and all(ticket.cancelled for ticket in engine.tickets)


def test_a_watcher_sees_every_event() -> None:
    engine, events = Submitted(), list[Event]()

    def watch(sink: Sink) -> Sink:
        def take(event: Event) -> None:
            events.append(event)
            sink(event)

        return take

    async def run() -> None:
        answers = AsyncAnswers(cast(Engine, engine), [REQUEST], watch)
        engine.sinks[0](token(1, last=True))
        assert [event async for _, event in answers.events()] == events

    asyncio.run(run())
    assert events == [token(1, last=True)]


def test_a_loop_that_has_ended_cancels_the_request() -> None:
    engine = Submitted()

    async def run() -> AsyncAnswers:
        return AsyncAnswers(cast(Engine, engine), [REQUEST])

    answers = asyncio.run(run())
    engine.sinks[0](token(1))
    assert engine.tickets[0].cancelled
    answers.cancel()
