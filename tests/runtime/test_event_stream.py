"""Tests of the HTTP streams of events, and of clients that disconnect, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.http.event_stream import EventStream, collected, event_lines, exhausted, unless_gone
from mlcbuild_runtime.openai.service import CompletionJob
from mlcbuild_runtime.openai.streams import AsyncAnswers
from starlette.requests import ClientDisconnect, Request


class Batches:
    """A stand-in for the answers of one call of the engine: it yields prepared batches of events, each event
    with the index of its answer, and records whether it was cancelled."""

    def __init__(self, *batches: list[tuple[int, Event]]) -> None:
        self._batches, self.cancelled = batches, False

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        for batch in self._batches:
            yield batch

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        for batch in self._batches:
            for item in batch:
                yield item

    def cancel(self) -> None:
        self.cancelled = True


def answers(*batches: list[tuple[int, Event]]) -> AsyncAnswers:
    return cast(AsyncAnswers, Batches(*batches))


def cancelled(submitted: AsyncAnswers) -> bool:
    return cast(Batches, submitted).cancelled


def job() -> CompletionJob:
    """Returns a simulated job of the server. Each event of an answer becomes the document {answer's index:
    text of the event, "usage": True}; an event without text becomes none."""

    def chunks(index: int, event: Event, include_usage: bool) -> Iterator[dict[str, object]]:
        if event.text:
            yield {str(index): event.text, "usage": include_usage}

    return cast(CompletionJob, SimpleNamespace(reply=SimpleNamespace(chunks=chunks), include_usage=True))


def request(*messages: str) -> Request:
    """Returns an HTTP request whose connection delivers messages of these types, such as "http.disconnect",
    and then nothing, so that waiting for another one never ends."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return {"type": left.pop(0)}

    return Request({"type": "http", "headers": []}, receive)


def test_documents_that_arrive_together_are_one_line_of_text() -> None:
    async def run() -> list[str]:
        submitted = answers([(0, Event("é")), (1, Event("b"))], [(0, Event(""))], [(0, Event("c"))])
        return [line async for line in event_lines(submitted, job())]

    assert asyncio.run(run()) == [
        'data: {"0":"é","usage":true}\n\ndata: {"1":"b","usage":true}\n\n',
        'data: {"0":"c","usage":true}\n\n',
        "data: [DONE]\n\n",
    ]


def test_complete_answers_are_sorted_by_index() -> None:
    one, two, three = Event("a", 1), Event("b", 1, "stop"), Event("c", 2, "stop")
    submitted = answers([(0, one), (1, two)], [(0, three)])
    assert asyncio.run(collected(submitted, 2)) == [[one, three], [two]]
    with pytest.raises(EngineError, match="broken"):
        asyncio.run(collected(answers([(0, Event(error=EngineError("broken")))]), 1))


def test_a_client_that_leaves_ends_its_request() -> None:
    submitted, ended = answers(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def run() -> None:
        with pytest.raises(ClientDisconnect):
            await unless_gone(request("http.request", "http.disconnect"), submitted, work())
        await asyncio.sleep(0)
        assert ended == ["work"]

    asyncio.run(run())
    assert cancelled(submitted)


def test_a_client_that_stays_gets_the_result() -> None:
    async def work() -> int:
        for _ in range(9):
            await asyncio.sleep(0)
        return 7

    async def broken() -> int:
        raise EngineError("broken")

    submitted = answers()
    assert asyncio.run(unless_gone(request("http.request"), submitted, work())) == 7 and cancelled(submitted)
    with pytest.raises(EngineError):
        asyncio.run(unless_gone(request("http.request"), answers(), broken()))


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_stream_ends_the_request_and_frees_the_model(fails: bool) -> None:
    submitted, freed, sent = answers(), list[str](), list[Any]()
    use = ExitStack()
    use.callback(freed.append, "model")

    async def lines() -> AsyncIterator[str]:
        yield "data: 1\n\n"

    async def send(message: Any) -> None:
        sent.append(message)
        if fails:
            raise OSError("gone")

    async def run() -> None:
        stream = EventStream(submitted, lines(), use)
        assert stream.headers["cache-control"] == "no-cache"
        assert stream.headers["content-type"].startswith("text/event-stream")
        await stream({"type": "http", "asgi": {"spec_version": "2.4"}}, request().receive, send)

    if fails:
        with pytest.raises(ClientDisconnect):
            asyncio.run(run())
    else:
        asyncio.run(run())
        assert b"".join(message.get("body", b"") for message in sent) == b"data: 1\n\n"
    assert cancelled(submitted) and freed == ["model"]


def test_events_that_nobody_needs_are_consumed() -> None:
    reached: list[int] = []

    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            reached.append(number)
            yield number

    asyncio.run(exhausted(numbers()))
    assert reached == [0, 1, 2]


def test_proxies_are_told_to_pass_events_on() -> None:
    async def lines() -> AsyncIterator[str]:
        yield "data: [DONE]\n\n"

    stream = EventStream(answers(), lines(), ExitStack())
    assert stream.headers["x-accel-buffering"] == "no" and stream.headers["cache-control"] == "no-cache"
