"""The handle of a request: cancellation, back-pressure, and receivers that have gone."""

from __future__ import annotations

from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.request import Event, Ticket, late


def ticket(window: int | None) -> tuple[Ticket, list[None]]:
    """Returns a ticket, and a list that grows with each call of its `wake`."""
    calls: list[None] = []
    return Ticket(lambda: calls.append(None), window), calls


def test_a_request_pauses_when_its_window_is_full() -> None:
    own, calls = ticket(2)
    events: list[Event] = []
    for _ in range(2):
        assert not own.resting
        own.deliver(events.append, Event("a", tokens=1))
    assert own.resting and own.room == 0 and own.delivered == len(events) == 2
    own.read()
    assert not own.resting and own.room == 1 and len(calls) == 1
    own.read()
    assert own.room == 2 and len(calls) == 1, "only the end of a pause wakes the engine"


def test_without_a_window_a_request_never_pauses() -> None:
    own, calls = ticket(None)
    for _ in range(100):
        own.deliver(lambda event: None, Event("a"))
    own.read()
    assert own.room is None and not own.resting and not calls


def test_a_cancelled_request_gets_no_event() -> None:
    own, calls = ticket(1)
    events: list[Event] = []
    own.cancel()
    own.deliver(events.append, Event("a"))
    assert own.cancelled and len(calls) == 1 and not events and own.delivered == 0


def test_a_receiver_that_fails_cancels_its_request() -> None:
    def gone(event: Event) -> None:
        raise RuntimeError("the event loop is closed")

    own, calls = ticket(None)
    own.deliver(gone, Event("a"))
    assert own.cancelled and len(calls) == 1


def test_the_last_event_has_a_finish_or_an_error() -> None:
    assert not Event("a", tokens=1).last
    assert Event(finish="stop").last and Event(error=EngineError("broken")).last


def test_a_timeout_is_a_504_that_names_the_seconds() -> None:
    error = late(1.5)
    assert (str(error), error.status, error.code) == (
        "the request was not finished after 1.5 s: send a shorter one, or raise --timeout",
        504,
        "timeout",
    )
