"""Tests of scheduling with the toy model on two devices: prefix cache, preemption, priorities, clients that
read slowly, deadlines."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Deadline, Event, Request
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.executor import Executor, StepOutput
from mlcbuild_runtime.executor.sampling_params import Sampling, SamplingRow

from . import shared, toy
from .test_engine import GREEDY, ask, drain, greedy, held, start, tokens_of, toy_bundle, wait_idle
from .wrapped import Stepwise, is_decode


class Recorder(Stepwise):
    """An executor that records the inputs of each step in `executed`, and sleeps for `pause` seconds after
    recording them."""

    pause = 0.0

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.executed: list[ModelStep] = []

    def step(self, step: ModelStep, params: List[SamplingRow], masks: Any = ()) -> StepOutput:
        self.executed.append(step)
        time.sleep(self.pause)
        return self.inner.step(step, params, masks)


__all__ = ["toy_bundle"]  # the fixture of test_engine, with both devices


@pytest.fixture
def engine(toy_bundle: Path) -> Iterator[Engine]:
    running = start(toy_bundle, Recorder)
    yield running
    assert running.close()


def prompt(seed: int, size: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(size)]


@pytest.mark.parametrize(("size", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (90, 80)])
def test_a_prompt_is_computed_once(engine: Engine, size: int, cached: int) -> None:
    first = drain(ask(engine, greedy(prompt(1, size), 20)))
    again = drain(ask(engine, greedy(prompt(1, size), 20)))
    assert tokens_of(first) == tokens_of(again) == toy.expected(prompt(1, size), 20)
    assert [first[-1].cached, again[-1].cached] == [0, cached]
    assert engine.state().prompt_tokens == 2 * size - cached
    assert engine.state().cached_tokens == cached
    assert engine.state().free_pages == engine.state().pages


def test_only_what_is_common_is_shared(engine: Engine) -> None:
    base = prompt(2, 64)
    drain(ask(engine, greedy(base, 5)))
    for place in (0, 15, 16, 40, 63):
        other = [*base]
        other[place] ^= 1
        events = drain(ask(engine, greedy(other, 5)))
        assert tokens_of(events) == toy.expected(other, 5)
        assert events[-1].cached == place // 16 * 16


def test_an_answer_is_prefilled_when_it_comes_back_as_a_prompt(engine: Engine) -> None:
    """Checks that the pages of an answer are not shared with a later prompt that contains it, because keys
    and values from decoding may be rounded in another way."""
    first = tokens_of(drain(ask(engine, greedy(prompt(3, 32), 40))))
    events = drain(ask(engine, greedy(prompt(3, 32) + first, 5)))
    assert events[-1].cached == 32
    assert tokens_of(events) == toy.expected(prompt(3, 32) + first, 5)


def test_equal_prompts_at_once_are_computed_once(engine: Engine) -> None:
    base = prompt(4, 100)
    queues = [
        ask(engine, Request(tuple(base), 20, Sampling(1.0, seed=1, choice=i), logprobs=0)) for i in range(4)
    ]
    answers = [tokens_of(drain(events)) for events in queues]
    assert engine.state().prompt_tokens == 100 + 3 * 4
    alone = [
        tokens_of(drain(ask(engine, Request(tuple(base), 20, Sampling(1.0, seed=1, choice=i), logprobs=0))))
        for i in range(4)
    ]
    assert answers == alone
    assert len({tuple(tokens) for tokens in answers}) > 1


def test_old_prompts_make_room(toy_bundle: Path) -> None:
    engine = start(toy_bundle, pages=8)
    try:
        for seed in range(12):
            assert tokens_of(drain(ask(engine, greedy(prompt(seed, 60), 9)))) == toy.expected(
                prompt(seed, 60), 9
            )
        assert engine.state().free_pages == 8
        assert drain(ask(engine, greedy(prompt(11, 60), 1)))[-1].cached == 48
        assert drain(ask(engine, greedy(prompt(0, 60), 1)))[-1].cached == 0
    finally:
        engine.close()


@pytest.mark.parametrize("pages", [16, 21])
def test_answers_are_the_same_when_pages_run_out(toy_bundle: Path, pages: int) -> None:
    engine = start(toy_bundle, pages=pages)
    source = random.Random(pages)
    try:
        jobs = [(prompt(i % 5, source.randrange(1, 80)), source.randrange(40, 170)) for i in range(8)]
        sampling = Sampling(1.2, seed=5, repetition_penalty=1.1)
        with held(engine):
            queues = [ask(engine, greedy(*job)) for job in jobs]
            sampled = [ask(engine, Request(tuple(job[0]), job[1], sampling, logprobs=0)) for job in jobs]
        for (tokens, count), events in zip(jobs, queues, strict=True):
            assert tokens_of(drain(events)) == toy.expected(tokens, count)
        crowded = [tokens_of(drain(events)) for events in sampled]
        wait_idle(engine)
        assert engine.state().free_pages == pages
        assert engine.state().preemptions > 0
        for (tokens, count), answer in zip(jobs, crowded, strict=True):
            alone = ask(engine, Request(tuple(tokens), count, sampling, logprobs=0))
            assert tokens_of(drain(alone)) == answer
    finally:
        engine.close()


def test_what_was_given_up_is_computed_again_many_tokens_at_a_time(tiny_bundle: Path) -> None:
    """Checks that a preempted request computes its old tokens again in large steps, with kernels that give
    the same bits, so that its answer does not change."""
    requests = [
        Request(
            tuple(3 + token % 200 for token in prompt(i, 30)),
            120,
            Sampling(0.9, seed=i),
            ignore_eos=True,
            logprobs=0,
        )
        for i in range(5)
    ]
    answers = []
    for pages in (64, 16):
        engine = start(tiny_bundle, Recorder, pages=pages)
        try:
            answers.append([drain(events) for events in [ask(engine, each) for each in requests]])
            assert bool(engine.state().preemptions) == (pages == 16)
            recorder: Any = engine.executor
            again = [step for step in recorder.executed if not step.prompt and not is_decode(step)]
            assert bool(again) == (pages == 16)
            assert max((len(step.tokens) for step in again), default=16) == 16
        finally:
            engine.close()
    plain, crowded = answers
    for a, b in zip(plain, crowded, strict=True):
        assert tokens_of(a) == tokens_of(b)
        assert [event.logprob for event in a] == [event.logprob for event in b]


def test_a_long_prompt_delays_others_by_one_chunk_at_a_time(engine: Engine) -> None:
    recorder: Any = engine.executor
    recorder.pause = 0.002
    running = ask(engine, greedy([1], 200))
    running.get(timeout=120)
    drain(ask(engine, greedy(prompt(6, 250), 3)))
    drain(running)
    kinds = "".join("d" if is_decode(step) else "p" for step in recorder.executed[1:])
    assert "p" in kinds and "pp" not in kinds
    assert max(len(step.tokens) for step in recorder.executed) <= 32


def test_priorities(toy_bundle: Path) -> None:
    engine = start(toy_bundle, max_batch=1)
    try:
        ended_priorities: SimpleQueue[int] = SimpleQueue()
        blocker = ask(engine, greedy([9], 200))
        blocker.get(timeout=120)
        for priority in (5, 0, -5, 0):

            def sink(event: Event, priority: int = priority) -> None:
                if event.last:
                    ended_priorities.put(priority)

            engine.submit(Request((1, 2), 2, GREEDY, priority=priority), sink)
        assert [ended_priorities.get(timeout=120) for _ in range(4)] == [-5, 0, 0, 5]
    finally:
        engine.close()


def test_a_client_that_does_not_read_stops_only_itself(toy_bundle: Path) -> None:
    engine = start(toy_bundle, max_batch=1, pages=16)
    try:
        slow: SimpleQueue[Event] = SimpleQueue()
        ticket = engine.submit(greedy([1], 200), slow.put, window=8)
        while slow.qsize() < 8:
            time.sleep(0.002)
        # Its place in the batch and its pages are used by others, one of which needs nearly all pages.
        for i in range(3):
            assert tokens_of(drain(ask(engine, greedy([i, 7], 230)))) == toy.expected([i, 7], 230)
        assert slow.qsize() == 8
        events: list[Event] = []
        while not events or not events[-1].last:
            events.append(slow.get(timeout=120))
            ticket.read()
        assert tokens_of(events) == toy.expected([1], 200)
        assert engine.state().preemptions > 0
    finally:
        engine.close()


def test_a_resting_request_costs_no_time(engine: Engine) -> None:
    events: SimpleQueue[Event] = SimpleQueue()
    ticket = engine.submit(greedy([1], 200), events.put, window=2)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    rest = time.process_time() - before
    assert rest < shared.busy(0.3) / 4
    ticket.cancel()
    wait_idle(engine)
    assert events.qsize() == 2


def test_time_runs_out_for_running_waiting_and_resting(toy_bundle: Path) -> None:
    engine = start(toy_bundle, max_batch=1)
    try:
        resting: SimpleQueue[Event] = SimpleQueue()
        engine.submit(Request((1,), 200, GREEDY, deadline=Deadline.after(0.15)), resting.put, window=2)
        late = [ask(engine, Request((i,), 200, GREEDY, deadline=Deadline.after(1e-9))) for i in range(3)]
        for events in [*late, resting]:
            error = drain(events)[-1].error
            assert isinstance(error, RequestError)
            assert (error.status, error.code) == (504, "timeout")
            assert str(error).startswith("the request was not finished after ")
        wait_idle(engine)
        assert engine.state().free_pages == engine.state().pages
    finally:
        engine.close()


def test_draining_takes_nothing_new_and_ends_what_runs(engine: Engine) -> None:
    events = ask(engine, greedy([1], 100))
    engine.drain()
    with pytest.raises(RequestError, match="the server is stopping") as caught:
        ask(engine, greedy([1], 1))
    assert caught.value.status == 503
    assert tokens_of(drain(events)) == toy.expected([1], 100)


def test_answers_go_on_after_their_end_token(toy_bundle: Path) -> None:
    engine = start(toy_bundle)
    engine.tokenizer.eos = frozenset(range(260))
    try:
        assert len(drain(ask(engine, greedy([1], 9)))) == 1
        request = Request((1,), 9, GREEDY, ignore_eos=True, logprobs=0)
        assert tokens_of(drain(ask(engine, request))) == toy.expected([1], 9)
    finally:
        engine.close()


def test_random_cancellations_leave_no_trace(toy_bundle: Path) -> None:
    engine = start(toy_bundle, pages=20)
    source = random.Random(9)
    try:
        kept = []
        for i in range(60):
            job = prompt(i % 4, source.randrange(1, 100)), source.randrange(1, 100)
            events: SimpleQueue[Event] = SimpleQueue()
            ticket = engine.submit(greedy(*job), events.put)
            if i % 3:
                with contextlib.suppress(Empty):
                    events.get(timeout=source.random() * 0.01)
                ticket.cancel()
            else:
                kept.append((job, events))
        for (tokens, count), events in kept:
            assert tokens_of(drain(events)) == toy.expected(tokens, count)
        wait_idle(engine)
        assert engine.state().free_pages == 20
    finally:
        engine.close()


def test_pages_outside_of_a_window_are_free_for_others(window_bundle: Path) -> None:
    """Checks a model with attention windows: pages outside of the window are released and used again, and the
    answers equal those of an engine that keeps all pages."""
    sampled = Sampling(0.8, seed=4)
    jobs = [(prompt(i // 2, 20 + 40 * (i % 3)), 130 + i) for i in range(8)]
    requests = [
        Request(tuple(3 + token % 200 for token in tokens), count, sampled, ignore_eos=True, logprobs=0)
        for tokens, count in jobs
    ]
    answers = []
    for pages, kept in ((None, True), (28, False)):
        engine = start(window_bundle, pages=pages) if pages else start(window_bundle)
        try:
            assert engine.manifest.window == engine._schedule._window == 32
            if kept:
                engine._schedule._window = None
            answers.append([tokens_of(drain(events)) for events in [ask(engine, each) for each in requests]])
            state = engine.state()
            assert state.preemptions == 0
            # 8 sequences of at most 4 pages each: without a window they would need 100.
            again = [tokens_of(drain(ask(engine, each))) for each in requests[:3]]
            assert again == answers[-1][:3]
            wait_idle(engine)
            assert engine.state().free_pages == engine.state().pages
        finally:
            engine.close()
    assert answers[0] == answers[1]


def test_a_prompt_longer_than_the_window_is_shared(window_bundle: Path) -> None:
    engine = start(window_bundle, pages=16)
    try:
        tokens = tuple(3 + token % 200 for token in prompt(9, 150))
        first = drain(ask(engine, Request(tokens, 40, GREEDY, logprobs=0)))
        again = drain(ask(engine, Request(tokens, 40, GREEDY, logprobs=0)))
        assert tokens_of(first) == tokens_of(again)
        assert again[-1].cached == 144
        longer = Request((*tokens, 7, 8, 9), 40, GREEDY, logprobs=0)
        with_cache = tokens_of(drain(ask(engine, longer)))
    finally:
        engine.close()
    fresh = start(window_bundle)
    try:
        assert tokens_of(drain(ask(fresh, longer))) == with_cache
    finally:
        fresh.close()
