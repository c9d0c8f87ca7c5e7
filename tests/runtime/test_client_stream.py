"""Tests of the part of a sequence that serves the client: where an answer ends, and the times of a
request."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

import pytest
from mlcbuild_runtime.engine.client_stream import ClientStream, Stopwatch
from mlcbuild_runtime.engine.request import Event, Request, Ticket
from mlcbuild_runtime.text.tokenizer import Tokenizer

from .scripted import Letters

REQUEST = Request((1, 2), max_tokens=3)


def stream(request: Request = REQUEST, ignore_eos: bool = False) -> tuple[ClientStream, list[Event]]:
    events: list[Event] = []
    ticket = Ticket(lambda: None, None)
    text_stream = ClientStream(request, events.append, ticket, cast(Tokenizer, Letters()), ignore_eos)
    return text_stream, events


@pytest.mark.parametrize(
    ("position", "done", "expected"),
    [(0, False, ("c", None)), (2, False, ("c.", "length")), (0, True, ("c.", "stop"))],
)
def test_text_of_a_token(position: int, done: bool, expected: tuple[str, str | None]) -> None:
    assert stream()[0].text(2, position, done) == expected


def test_a_stop_text_ends_the_answer_rather_than_its_length() -> None:
    text_stream, _ = stream(replace(REQUEST, stop=("c",)))
    assert text_stream.text(2, 2, False) == ("", "stop")


def test_end_tokens_are_those_of_the_tokenizer_and_of_the_request() -> None:
    text_stream, _ = stream(replace(REQUEST, stop_tokens=(4,)))
    assert [token for token in range(8) if text_stream.is_end(token)] == [4, 7]
    assert text_stream.text(7, 0, False) == (".", "stop")
    text_stream, _ = stream(replace(REQUEST, stop_tokens=(4,)), ignore_eos=True)
    assert [token for token in range(8) if text_stream.is_end(token)] == [4]


def test_events_go_to_the_sink_until_the_client_has_gone() -> None:
    text_stream, events = stream()
    assert (text_stream.unsent, text_stream.error) == (0, None)
    text_stream.deliver(Event("a"))
    text_stream.ticket.cancel()
    text_stream.deliver(Event("b"))
    assert events == [Event("a")]


def test_the_times_of_prompt_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([13.0, 14.0, 16.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    watch = Stopwatch()
    assert watch.times() is None
    watch.begin(10.0)
    watch.begin(12.0)  # a later chunk of the prompt
    assert watch.times() is None
    watch.token()
    assert watch.times() == (3.0, 0.0)
    watch.token()
    watch.token()
    assert watch.times() == (3.0, 3.5)
