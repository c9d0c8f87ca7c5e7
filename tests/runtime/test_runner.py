"""Tests of executing batches on the NumPy device, without the engine's thread."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.pages import Pages
from mlcbuild_runtime.engine.request import Event, Request, Ticket
from mlcbuild_runtime.engine.runner import Runner
from mlcbuild_runtime.engine.scheduler import Schedule
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.engine.speculation import Speculation
from mlcbuild_runtime.engine.threads import Turns
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import toy
from .scripted import GREEDY
from .wrapped import Wrapped


class Bench:
    """Objects for tests of executing batches without the engine's thread: the runner, its schedule, the
    executor, and the list of events that each request has received."""

    def __init__(self, bundle: Path, wrap: Any = lambda executor: executor) -> None:
        executor: Executor = wrap(loading.load(bundle, pages=16))
        self.tokenizer = Tokenizer.load(bundle, executor.manifest.serving)
        self.schedule = Schedule(Pages(16), 16, 4)
        self.runner = Runner(executor, self.schedule, Speculation(4, 16), Turns())
        self.events: list[list[Event]] = []

    def add(self, prompt: list[int], count: int = 9, **more: Any) -> Sequence:
        request, events = Request(tuple(prompt), count, GREEDY, ignore_eos=True, **more), list[Event]()
        self.events.append(events)
        ticket = Ticket(lambda: None, None)
        sequence = Sequence(request, events.append, ticket, self.tokenizer, self.runner.executor.sample)
        sequence.order = len(self.events)
        self.schedule.add(sequence)
        self.schedule.admit()
        return sequence


def test_prompts_and_then_tokens(light_toy_bundle: Path) -> None:
    bench = Bench(light_toy_bundle)
    first, second = bench.add([3, 4, 5]), bench.add(list(range(20, 50)))
    bench.runner.step([(first, 3), (second, 16)], prompt=True)
    assert first.answered == 1 and second.answered == 0 and second.length == 16
    bench.runner.step([(second, 14)], prompt=True)
    for _ in range(3):
        bench.runner.step(bench.schedule.decodes(16))
    assert first.tokens == [3, 4, 5, *toy.expected([3, 4, 5], 4)]
    assert second.tokens[30:] == toy.expected(list(range(20, 50)), 4)
    assert bench.runner.counters.prompt_tokens == 33 and bench.runner.counters.decode_steps == 3


def test_the_outcome_of_a_draft(light_toy_bundle: Path) -> None:
    bench = Bench(light_toy_bundle)
    seq = bench.add([3, 4, 5])
    bench.runner.step([(seq, 3)], prompt=True)
    right = toy.expected([3, 4, 5], 3)
    seq.draft.tokens = [right[1], right[2] ^ 1]
    assert bench.schedule.stretch(seq, 2) == 2
    (outcome,) = bench.runner.step([(seq, 3)])
    assert (outcome.drafted, outcome.accepted, outcome.branched, outcome.gained) == (2, 1, 0, 0)
    assert seq.tokens[3:] == right
    assert (bench.runner.counters.drafted_tokens, bench.runner.counters.accepted_tokens) == (2, 1)


class Failing(Wrapped):
    def step(self, *_: Any) -> Any:
        raise RuntimeError("a kernel has failed")


def test_a_failing_step_ends_its_requests_and_frees_their_pages(light_toy_bundle: Path) -> None:
    bench = Bench(light_toy_bundle, Failing)
    seq, other = bench.add([3, 4, 5]), bench.add([6])
    assert bench.runner.step([(seq, 3)], prompt=True) == []
    (event,) = bench.events[0]
    assert isinstance(event.error, EngineError)
    assert str(event.error) == "the model has failed: a kernel has failed"
    assert seq.pages == [] and bench.schedule.active == [other] and bench.events[1] == []


class Unreadable(Wrapped):
    """An executor whose device fails when logits are read, after the step."""

    def step(self, *arguments: Any) -> Any:
        def logits() -> Any:
            raise MemoryError

        return self.inner.step(*arguments)._replace(logits=logits)


def test_logits_that_cannot_be_read_end_the_request_that_needs_them(light_toy_bundle: Path) -> None:
    bench = Bench(light_toy_bundle, Unreadable)
    scored, other = bench.add([3, 4, 5], logprobs=0), bench.add([6])
    (outcome,) = bench.runner.step([(scored, 3), (other, 1)], prompt=True)
    assert [str(event.error) for event in bench.events[0]] == ["the model has failed: MemoryError"]
    assert outcome.sequence is other and bench.schedule.active == [other]
    assert [event.error for event in bench.events[1]] == [None]


def test_the_last_event_frees_the_place(light_toy_bundle: Path) -> None:
    bench = Bench(light_toy_bundle)
    seq = bench.add([3, 4, 5], count=1)
    bench.runner.step([(seq, 3)], prompt=True)
    assert bench.events[0][-1].finish == "length"
    assert bench.schedule.active == [] and bench.schedule.pages.available == 16


def test_a_burst_delivers_its_events_at_the_end(light_toy_bundle: Path) -> None:
    bench = Bench(light_toy_bundle)
    seq = bench.add([3, 4, 5], count=20)
    bench.runner.step([(seq, 3)], prompt=True)
    assert bench.schedule.stretch(seq, 4) == 4
    bench.runner.burst([seq], 5, 60)
    assert seq.tokens[3:] == toy.expected([3, 4, 5], 6)
    assert [event.tokens for event in bench.events[0]] == [1, 2, 3, 4, 5, 6]
    assert bench.runner.counters.decode_steps == 5


def test_waiting_for_another_engine_does_not_shorten_a_burst(
    light_toy_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]

    class Waiting(Turns):
        """A lock for which this engine waits 7 seconds of the simulated clock."""

        def __enter__(self) -> None:
            clock[0] += 7
            super().__enter__()

    bench = Bench(light_toy_bundle)
    seq = bench.add([3, 4, 5], count=20)
    bench.runner.step([(seq, 3)], prompt=True)
    assert bench.schedule.stretch(seq, 4) == 4
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Sequence, "constrained", True)
    monkeypatch.setattr(bench.runner, "_turns", Waiting())
    bench.runner.burst([seq], 5, 1)
    assert seq.tokens[3:] == toy.expected([3, 4, 5], 6)


@pytest.mark.parametrize("chunks", [[3], [2, 1]])
def test_hidden_states_are_pooled_over_the_chunks_of_a_prompt(
    numpy_toy_bundle: Path, chunks: list[int]
) -> None:
    bench = Bench(numpy_toy_bundle)
    seq = bench.add([3, 4, 5], 0, pooling="mean")
    for count in chunks:
        bench.runner.pool([(seq, count)])
    (event,) = bench.events[0]
    sums = np.cumsum([3, 2 * 4, 3 * 5])
    states = np.stack([sums, sums % 7, np.ones(3)], axis=1).mean(axis=0)
    assert event.vector is not None
    assert np.allclose(event.vector, cast(Any, states / np.linalg.norm(states)), rtol=1e-6)
