"""Tests of the engine's loop with the NumPy device, executed in the test's thread: which steps it computes,
and how it ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format.errors import DeviceLostError, StoppingError
from mlcbuild_runtime.engine import loop
from mlcbuild_runtime.engine.intake import Intake
from mlcbuild_runtime.engine.loop import Loop
from mlcbuild_runtime.engine.pages import Pages
from mlcbuild_runtime.engine.prompt_turns import TurnLength
from mlcbuild_runtime.engine.request import Deadline, Event, Request, Ticket
from mlcbuild_runtime.engine.runner import Runner
from mlcbuild_runtime.engine.scheduler import Schedule
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.engine.speculation import Speculation
from mlcbuild_runtime.engine.threads import Turns
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import toy
from .scripted import GREEDY
from .wrapped import Wrapped

CHUNK, PAGES = 16, 32


class Recorded(Wrapped):
    """An executor that records its calls in order: ("prompt" or "decode", number of new tokens) for one step,
    ("burst", number of steps) for several decode steps in one call."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.recorded: list[tuple[str, int]] = []
        self.fault: Exception | None = None

    def step(self, step: ModelStep, params: Any, masks: Any = ()) -> Any:
        if self.fault is not None:
            raise self.fault
        self.recorded.append(("prompt" if step.prompt else "decode", len(step.tokens)))
        return self.inner.step(step, params, masks)

    def steps(self, step: ModelStep, params: Any, following: FollowingSteps) -> list[list[int]]:
        self.recorded.append(("burst", 1 + len(following.random_numbers)))
        return self.inner.steps(step, params, following)


class Engine:
    """An engine's loop, its queue and its executor, run in the test's thread. A test submits requests first;
    `run` returns after the last of their events."""

    def __init__(self, bundle: Path) -> None:
        self.executor = Recorded(loading.load(bundle, pages=PAGES))
        self.tokenizer = Tokenizer.load(bundle, self.executor.manifest.serving)
        self.schedule = Schedule(Pages(PAGES), self.executor.manifest.limits.page_size, 4)
        self.runner = Runner(self.executor, self.schedule, Speculation(4, 16), Turns())
        self.intake = Intake(8, self.executor.interrupt)
        self.loop = Loop(self.runner, self.intake, CHUNK)
        self.open, self.sequences = 0, list[Sequence]()

    def submit(
        self,
        prompt: list[int],
        count: int,
        on_event: Callable[[Event], None] = lambda event: None,
        **more: Any,
    ) -> tuple[list[Event], Ticket]:
        events: list[Event] = []

        def sink(event: Event) -> None:
            events.append(event)
            if on_event is not None:
                on_event(event)
            if event.last:
                self.done()

        ticket = Ticket(self.intake.wake, None)
        request = Request(tuple(prompt), count, GREEDY, ignore_eos=True, **more)
        seq = Sequence(request, sink, ticket, self.tokenizer, self.executor.sample)
        self.open += 1
        self.sequences.append(seq)
        self.intake.submit(seq, lambda: 0, lambda number, sequence: None)
        return events, ticket

    def done(self) -> None:
        self.open -= 1
        if not self.open:
            self.intake.close()

    def run(self) -> None:
        self.loop.run()
        assert self.schedule.idle


@pytest.fixture
def engine(light_toy_bundle: Path) -> Engine:
    return Engine(light_toy_bundle)


def texts(events: list[Event]) -> int:
    return sum(event.error is None for event in events)


def test_requests_are_answered_and_the_loop_ends_with_the_intake(engine: Engine) -> None:
    answers = [engine.submit([3, 4, 5], 6)[0], engine.submit([9], 3)[0]]
    engine.run()
    assert [events[-1].finish for events in answers] == ["length", "length"]
    assert [events[-1].tokens for events in answers] == [6, 3]
    assert engine.schedule.pages.available == PAGES


def test_a_long_prompt_delays_the_others_by_one_turn_at_a_time(engine: Engine) -> None:
    def arrive(event: Event) -> None:
        if event.tokens == 1:
            long.append(engine.submit(list(range(50)), 1)[0])

    long: list[list[Event]] = []
    short, _ = engine.submit([3, 4, 5], 8, arrive)
    engine.run()
    assert short[-1].finish == long[0][-1].finish == "length"
    begun, turn, token = engine.executor.recorded.index(("prompt", CHUNK)), ("prompt", CHUNK), ("decode", 1)
    assert engine.executor.recorded[begun : begun + 6] == [turn, token, turn, token, turn, token]


def test_a_lone_request_is_decoded_in_bursts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "BURST_SECONDS", 600.0)  # a busy machine makes no burst shorter
    events, _ = engine.submit([3, 4, 5], 20, speculate=False)
    engine.run()
    bursts = [count for kind, count in engine.executor.recorded if kind == "burst"]
    assert bursts and max(bursts) <= engine.executor.burst and sum(bursts) >= 12
    assert [event.tokens for event in events] == list(range(1, 21))
    assert engine.sequences[0].tokens[3:] == toy.expected([3, 4, 5], 20)


def test_a_cancelled_request_gets_no_further_event(engine: Engine) -> None:
    def stop(event: Event) -> None:
        if event.tokens == 2:
            ticket.cancel()
            engine.done()

    events, ticket = engine.submit([3, 4, 5], 200, stop)
    other, _ = engine.submit([6, 7], 9)
    engine.run()
    assert len(events) == 2 and other[-1].finish == "length"
    assert engine.schedule.pages.available == PAGES


def test_a_deadline_ends_a_request_wherever_it_is(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    events, _ = engine.submit([3, 4, 5], 200, deadline=Deadline.after(0.0))
    time.sleep(0.01)
    engine.run()
    (event,) = events
    assert event.error is not None and "not finished after 0 s" in str(event.error)


def test_closing_ends_running_and_waiting_requests(engine: Engine) -> None:
    def close(event: Event) -> None:
        if event.tokens == 1:
            engine.intake.close()

    running, _ = engine.submit([3, 4, 5], 200, close)
    waiting = [engine.submit([7, number], 200)[0] for number in range(6)]
    engine.run()
    assert all(isinstance(events[-1].error, StoppingError) for events in (running, *waiting))
    assert texts(running) >= 1


def test_a_fault_of_the_loop_is_logged_and_ends_everything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.schedule, "admit", fail)
    events, _ = engine.submit([3, 4, 5], 9)
    engine.run()
    assert str(events[-1].error) == "the engine has failed: see the server's log" and engine.intake.closed
    assert "the engine has failed" in caplog.text and "a bug" in caplog.text


def test_a_failed_step_does_not_count_as_a_fast_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a step which fails at once changes no price of drafts and no number of steps."""
    seconds = list[float]()
    monkeypatch.setattr(Speculation, "settle", lambda *arguments: seconds.append(arguments[-1]))

    def fail(_: Event) -> None:
        engine.executor.fault = RuntimeError("a kernel has failed")

    events, _ = engine.submit([3, 4, 5], 9, fail)
    engine.run()
    assert [event.error is None for event in events] == [True, False]
    assert not seconds and not engine.runner.counters.decode_steps


def test_a_failed_step_shows_no_speed_of_prompts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = list[int]()
    monkeypatch.setattr(TurnLength, "record", lambda _, tokens, seconds: recorded.append(tokens))

    def mend(event: Event) -> None:
        engine.executor.fault = None
        if event.error is not None:
            engine.submit([4] * CHUNK, 1)

    engine.executor.fault = RuntimeError("a kernel has failed")
    engine.submit([3] * CHUNK, 1, mend)
    engine.run()
    assert recorded == [CHUNK]


def test_failures_at_any_moment_end_single_requests(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Checks many requests of several kinds while every twentieth call of the device fails, also one that
    reads logits after a step."""
    source, executor = random.Random(5), engine.executor

    def risky(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if source.random() < 0.05:
                raise source.choice([RuntimeError("a kernel has failed"), MemoryError()])
            result = call(*arguments)
            return result._replace(logits=risky(result.logits)) if call == step else result

        return run

    step = executor.step
    executor.step, executor.steps = risky(step), risky(executor.steps)  # type: ignore[method-assign]
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 1},
        {"prompt_logprobs": True, "logprobs": 0},
        {"prediction": (1,) * 9},
    ]
    answers = [
        engine.submit([number % 3] * source.randrange(1, 60), source.randrange(1, 30), **kinds[number % 4])[0]
        for number in range(60)
    ]
    engine.run()
    errors = [events[-1].error for events in answers if events[-1].last]
    assert len(errors) == 60 and 9 < errors.count(None) < 51
    assert engine.schedule.pages.available == PAGES and "the engine has failed" not in caplog.text


def test_a_lost_device_ends_everything(engine: Engine) -> None:
    engine.executor.fault = DeviceLostError("the GPU is lost")
    answers = [engine.submit([3, number], 9)[0] for number in range(5)]  # of which a batch has four
    engine.run()
    errors = [str(events[-1].error) for events in answers]
    assert errors[0] == "the model has failed: the GPU is lost"
    assert errors[4] == "the engine has failed: see the server's log"


def test_a_failed_step_ends_its_request_and_not_the_loop(engine: Engine) -> None:
    def mend(event: Event) -> None:
        engine.executor.fault = None
        later.append(engine.submit([6, 7], 3)[0])

    later: list[list[Event]] = []
    engine.executor.fault = RuntimeError("a kernel has failed")
    events, _ = engine.submit([3, 4, 5], 9, mend)
    engine.run()
    assert str(events[-1].error) == "the model has failed: a kernel has failed"
    assert later[0][-1].finish == "length"
