"""Tests of delivering events without an engine: the last event frees the pages, and every request is in the
trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.counters import Counters
from mlcbuild_runtime.engine.delivery import Delivery
from mlcbuild_runtime.engine.pages import Pages
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.engine.scheduler import Schedule
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.engine.trace import Trace

from .scripted import sequence


class Log:
    """A stand-in for the engine's trace that writes no file and stores the arguments of each call in
    `calls`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def request(self, *arguments: object) -> None:
        self.calls.append(arguments)

    def step(self, *arguments: object) -> None:
        self.calls.append(("step", *arguments))

    def counters(self, args: object) -> None:
        self.calls.append(("counters", args))


class Setting:
    """Objects for tests of delivery: a schedule with one admitted sequence of five tokens on two pages of
    four tokens, in a cache of six pages."""

    def __init__(self) -> None:
        self.schedule, self.counters, self.log = Schedule(Pages(6), 4, 2), Counters(), Log()
        self.delivery = Delivery(self.schedule, self.counters)
        self.delivery.trace = cast(Trace, self.log)
        self.sequence, self.events = sequence(Request((1, 2, 3, 4, 5), 9))
        self.sequence.order = 3
        self.schedule.add(self.sequence)
        self.schedule.admit()
        self.schedule.computed(self.sequence, 5)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def free(state: Setting) -> tuple[list[Sequence], int, int]:
    return state.schedule.active, state.schedule.pages.available, state.schedule.pages.cached


def test_an_arrival_is_traced(setting: Setting) -> None:
    setting.delivery.announce(3, setting.sequence)
    assert setting.log.calls == [(3, "b", {"prompt_tokens": 5})]


def test_tokens_are_counted_and_the_first_is_traced(setting: Setting) -> None:
    setting.delivery.deliver(setting.sequence, [Event("a", tokens=1), Event("b", tokens=2)])
    assert [event.text for event in setting.events] == ["a", "b"]
    assert setting.counters.answer_tokens == 2
    assert setting.log.calls == [(3, "n")]
    assert setting.schedule.active == [setting.sequence]


def test_the_last_event_frees_the_pages(setting: Setting) -> None:
    setting.delivery.deliver(setting.sequence, [Event("a", tokens=1, finish="stop")])
    assert free(setting) == ([], 6, 1), "the full page of the prompt stays in the prefix cache"
    assert setting.events[-1].finish == "stop" and setting.counters.answer_tokens == 1
    end = (3, "e", {"end": "stop", "cached_tokens": 0, "answer_tokens": 0})
    assert setting.log.calls == [(3, "n"), end]


def test_an_event_without_tokens_counts_none(setting: Setting) -> None:
    setting.delivery.deliver(setting.sequence, [Event(finish="length")])
    assert setting.counters.answer_tokens == 0


def test_a_failing_model_leaves_nothing_to_share(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    setting.delivery.fail([setting.sequence], ValueError("bad weights"))
    assert free(setting) == ([], 6, 0)
    error = setting.events[-1].error
    assert isinstance(error, EngineError) and str(error) == "the model has failed: bad weights"
    assert setting.counters.answer_tokens == 0
    assert setting.log.calls[-1][2]["end"] == "error"
    assert "a step has failed" in caplog.text


def test_a_client_that_left_gets_no_event(setting: Setting) -> None:
    setting.sequence.cached = 4
    setting.delivery.cancel(setting.sequence)
    assert free(setting) == ([], 6, 1) and not setting.events
    assert setting.log.calls[-1][2] == {"end": "cancelled", "cached_tokens": 4, "answer_tokens": 0}


def test_a_step_is_traced_with_the_load(setting: Setting) -> None:
    setting.delivery.trace_step("decode", [], (1.0, 2.0, 3.0))
    assert not setting.log.calls
    setting.delivery.trace_step("decode", [(setting.sequence, 2)], (1.0, 2.0, 3.0))
    counters = {"running": 1, "waiting": 0, "free pages": 4}
    assert setting.log.calls == [("step", "decode", {3: 2}, (1.0, 2.0, 3.0)), ("counters", counters)]


def test_nothing_is_traced_without_a_trace(setting: Setting, tmp_path: Path) -> None:
    setting.delivery.trace = None
    setting.delivery.announce(3, setting.sequence)
    setting.delivery.trace_step("decode", [(setting.sequence, 1)], (1.0, 2.0, 3.0))
    setting.delivery.deliver(setting.sequence, [Event("a", tokens=1, finish="stop")])
    assert not setting.log.calls and setting.events
