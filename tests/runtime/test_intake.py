"""Tests of the queue through which requests reach an engine."""

from __future__ import annotations

from queue import Empty

import pytest
from mlcbuild_format.errors import EngineError, RequestError
from mlcbuild_runtime.engine.intake import Intake
from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.engine.sequence import Sequence

from .scripted import GREEDY, sequence


class Door:
    """A queue with room for three requests, through which they reach the engine. It records how often the
    engine was interrupted, and the numbers of the requests that were announced to it, counted from 0 in order
    of arrival."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.announced: list[int] = []
        self.intake = Intake(3, self.interrupt)

    def interrupt(self) -> None:
        self.interrupts += 1

    def submit(self, waiting: int | None = None, continues: bool = False) -> Sequence:
        seq, _ = sequence(Request((1,), 2, GREEDY, continues=continues))
        count = self.intake.pending if waiting is None else waiting
        self.intake.submit(seq, lambda: count, lambda number, _: self.announced.append(number))
        return seq


def test_requests_come_out_in_the_order_of_their_arrival() -> None:
    door = Door()
    submitted = [door.submit() for _ in range(3)]
    assert (door.announced, door.interrupts, door.intake.pending) == ([0, 1, 2], 3, 3)
    for number, seq in enumerate(submitted):
        assert door.intake.get(wait=False, timeout=None) is seq
        door.intake.received()
        assert seq.order == number
    assert door.intake.empty and door.intake.pending == 0
    with pytest.raises(Empty):
        door.intake.get(wait=True, timeout=0.001)


def test_a_full_intake_refuses() -> None:
    door = Door()
    with pytest.raises(RequestError, match="3 requests are waiting already: try again later") as caught:
        door.submit(waiting=3)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    assert not door.announced and door.intake.empty


def test_a_draining_intake_refuses_and_keeps_what_it_has() -> None:
    door = Door()
    seq = door.submit()
    door.intake.drain()
    with pytest.raises(RequestError, match="the server is stopping") as caught:
        door.submit()
    assert caught.value.status == 503
    assert door.intake.get(wait=False, timeout=None) is seq
    later = door.submit(continues=True)
    assert door.intake.get(wait=False, timeout=None) is later


def test_a_closed_intake_refuses_and_wakes_the_engine() -> None:
    door = Door()
    door.intake.close()
    assert door.intake.closed and door.interrupts == 1
    assert door.intake.get(wait=False, timeout=None) is None
    with pytest.raises(EngineError, match="the engine is stopped"):
        door.submit()


def test_a_wake_up_is_no_request() -> None:
    door = Door()
    door.intake.wake()
    assert not door.intake.empty and door.intake.pending == 0
    assert door.intake.get(wait=False, timeout=None) is None
