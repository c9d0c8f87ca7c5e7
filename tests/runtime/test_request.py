"""Tests of a request's handle (ticket): cancellation, back-pressure, and receivers that fail."""

from __future__ import annotations

from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.request import Deadline, Event, Ticket


def ticket(window: int | None) -> tuple[Ticket, list[None]]:
    """Returns (a request's handle, a list with one item for each call of its function `wake`, which wakes the
    engine). window: maximum number of events that the client has not read; None: no limit."""
    calls: list[None] = []
    return Ticket(lambda: calls.append(None), window), calls


def test_a_request_pauses_when_its_window_is_full() -> None:
    handle, calls = ticket(2)
    events: list[Event] = []
    for _ in range(2):
        assert not handle.resting
        handle.deliver(events.append, Event("a", tokens=1))
    assert handle.resting and handle.room == 0 and handle.delivered == len(events) == 2
    handle.read()
    assert not handle.resting and handle.room == 1 and len(calls) == 1
    handle.read()
    assert handle.room == 2 and len(calls) == 1, "only the end of a pause wakes the engine"


def test_without_a_window_a_request_never_pauses() -> None:
    handle, calls = ticket(None)
    for _ in range(100):
        handle.deliver(lambda event: None, Event("a"))
    handle.read()
    assert handle.room is None and not handle.resting and not calls


def test_a_cancelled_request_gets_no_event() -> None:
    handle, calls = ticket(1)
    events: list[Event] = []
    handle.cancel()
    handle.deliver(events.append, Event("a"))
    assert handle.cancelled and len(calls) == 1 and not events and handle.delivered == 0


def test_a_receiver_that_fails_cancels_its_request() -> None:
    def gone(event: Event) -> None:
        raise RuntimeError("the event loop is closed")

    handle, calls = ticket(None)
    handle.deliver(gone, Event("a"))
    assert handle.cancelled and len(calls) == 1


def test_the_last_event_has_a_finish_or_an_error() -> None:
    assert not Event("a", tokens=1).last
    assert Event(finish="stop").last and Event(error=EngineError("broken")).last


def test_a_timeout_is_a_504_that_names_the_seconds() -> None:
    error = Deadline.after(1.5).error()
    assert (str(error), error.status, error.code) == (
        "the request was not finished after 1.5 s: send a shorter one, or raise --timeout",
        504,
        "timeout",
    )
