"""Tests of the engine on all devices, with the toy model, whose tokens depend on all tokens before them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.errors import EngineError, RequestError, StoppingError
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.devices.cpu import CpuExecutor
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.executor import Executor, StepOutput
from mlcbuild_runtime.executor.sampling_params import Sampling, SamplingRow
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import shared, toy
from .wrapped import Stepwise, is_decode

GREEDY = Sampling(temperature=0)
EVERY = "MLCBUILD_TEST_EVERY" in os.environ
"""True if the environment variable MLCBUILD_TEST_EVERY is set. Then the tests of the engine that use
`toy_bundle` also run on a GPU adapter."""
POISON = 111
"""Token number that makes the test's faulty model raise an exception if it is in a prompt; the next number
makes its logits NaN."""


class Faulty(Stepwise):
    """An executor that fails at two token numbers as a library can fail: at one it raises an exception, at
    the next one its logits are NaN."""

    def step(self, step: ModelStep, params: List[SamplingRow], masks: Any = ()) -> StepOutput:
        if POISON in step.tokens:
            raise RuntimeError("a kernel has failed")
        result: StepOutput = self.inner.step(step, params, masks)
        if POISON + 1 in step.tokens:
            logits = result.logits().copy()
            logits[list(step.tokens).index(POISON + 1) if is_decode(step) else 0] = float("nan")
            result = StepOutput(self.sample(logits, params), lambda: logits)
        return result


def same(executor: Executor) -> Executor:
    return executor


def start(
    bundle: Path, wrap: Callable[[Executor], Any] = same, pages: int | None = None, **options: Any
) -> Engine:
    """Starts an engine with the toy bundle, in which no token ends an answer. wrap: function that replaces
    the loaded executor, for example by one that records its calls; pages: pages of the KV cache, None for the
    default."""
    executor = loading.load(bundle, pages=pages)
    tokenizer = Tokenizer.load(bundle, executor.manifest.serving)
    tokenizer.eos = frozenset()
    return Engine(wrap(executor), tokenizer, EngineOptions(**options)).start()


@pytest.fixture(scope="module", params=[*shared.TOYS, *(["webgpu_toy_bundle"] if EVERY else [])])
def toy_bundle(request: pytest.FixtureRequest) -> Path:
    """Returns the directory of the toy bundle (a trivial model whose answers follow from a formula), once for
    each device: every test that uses this fixture runs on each of them."""
    bundle: Path = request.getfixturevalue(request.param)
    return bundle


@pytest.fixture(scope="module")
def engine(toy_bundle: Path) -> Iterator[Engine]:
    running = start(toy_bundle)
    yield running
    assert running.close()


def ask(engine: Engine, request: Request) -> SimpleQueue[Event]:
    events: SimpleQueue[Event] = SimpleQueue()
    engine.submit(request, events.put)
    return events


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Blocks the engine's thread while the context is open, so that all requests submitted in it arrive at
    the same time."""
    reached, release = threading.Event(), threading.Event()

    def hold(_event: Event) -> None:
        reached.set()
        release.wait(60)

    engine.submit(greedy([1], 1), hold)
    assert reached.wait(60)
    try:
        yield
    finally:
        release.set()


def drain(events: SimpleQueue[Event]) -> list[Event]:
    results = [events.get(timeout=120)]
    while not results[-1].last:
        results.append(events.get(timeout=120))
    return results


def tokens_of(events: list[Event]) -> list[int]:
    """Returns the tokens that an answer's events report with their log-probabilities; events without a
    log-probability are left out."""
    return [event.logprob.token for event in events if event.logprob is not None]


def test_an_idle_engine_prepares_pages(cpu_toy_bundle: Path) -> None:
    executor = CpuExecutor.load(cpu_toy_bundle, pages=64)
    tokenizer = Tokenizer.load(cpu_toy_bundle, executor.manifest.serving)
    tokenizer.eos = frozenset()
    cache = np.from_dlpack(executor._cache)
    cache[:] = 7
    running = Engine(executor, tokenizer).start()
    try:
        # Of 41 tokens all but the last one have keys and values: three pages.
        drain(ask(running, Request(tuple(range(3, 38)), 6, GREEDY)))
        deadline = time.monotonic() + 120
        while cache[0, 5].any() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not cache[:, 3:6].any()
        assert (cache[:, 6:] == 7).all()
        assert cache[0, 0].any()
    finally:
        assert running.close()


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events)


def greedy(prompt: list[int], count: int) -> Request:
    return Request(tuple(prompt), count, GREEDY, logprobs=0)


def wait_idle(engine: Engine) -> None:
    end = time.monotonic() + 120
    while engine.state().running or engine.state().waiting:
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 250])
def test_every_length_of_prompt(engine: Engine, size: int) -> None:
    prompt = [random.Random(size).randrange(256) for _ in range(size)]
    count = min(20, 256 - size)
    assert tokens_of(drain(ask(engine, greedy(prompt, count)))) == toy.expected(prompt, count)


def test_the_context_can_be_used_up(engine: Engine) -> None:
    events = drain(ask(engine, Request((1, 2, 3), None, GREEDY, logprobs=0)))
    assert tokens_of(events) == toy.expected([1, 2, 3], 253)
    assert (events[-1].finish, events[-1].tokens) == ("length", 253)


def test_many_requests_at_once_answer_as_alone(engine: Engine) -> None:
    source = random.Random(5)
    jobs = []
    for _ in range(24):
        prompt = [source.randrange(256) for _ in range(source.randrange(1, 90))]
        jobs.append((prompt, source.randrange(1, 60)))
    queues = [ask(engine, greedy(prompt, count)) for prompt, count in jobs]
    for (prompt, count), events in zip(jobs, queues, strict=True):
        assert tokens_of(drain(events)) == toy.expected(prompt, count)
    wait_idle(engine)
    assert engine.state().free_pages == engine.state().pages


def test_sampling_in_a_batch_is_as_alone(engine: Engine) -> None:
    def request(seed: int) -> Request:
        return Request((5, 6, 7), 30, Sampling(temperature=1.5, top_p=0.9, seed=seed), logprobs=0)

    alone = [tokens_of(drain(ask(engine, request(seed)))) for seed in range(4)]
    queues = [ask(engine, request(seed)) for seed in range(4)]
    assert [tokens_of(drain(events)) for events in queues] == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_requests_wait_for_pages(toy_bundle: Path) -> None:
    engine = start(toy_bundle, pages=4)
    try:
        queues = [ask(engine, greedy([i, i + 1], 40)) for i in range(6)]
        for i, events in enumerate(queues):
            assert tokens_of(drain(events)) == toy.expected([i, i + 1], 40)
        wait_idle(engine)
        assert engine.state().free_pages == 4
        with pytest.raises(RequestError, match="the context has 64"):
            ask(engine, greedy([1] * 60, 40))
    finally:
        engine.close()


def test_max_batch_is_respected(toy_bundle: Path) -> None:
    engine = start(toy_bundle, max_batch=2)
    try:
        queues = [ask(engine, greedy([i], 200)) for i in range(5)]
        names_read = set()
        while engine.state().running or engine.state().waiting:
            names_read.add(engine.state().running)
        assert max(names_read) <= 2
        assert all(drain(events)[-1].finish == "length" for events in queues)
    finally:
        engine.close()


def test_cancelled_requests_free_their_pages(engine: Engine) -> None:
    events: SimpleQueue[Event] = SimpleQueue()
    tickets = [engine.submit(greedy([i], 255), events.put) for i in range(10)]
    events.get(timeout=120)
    for ticket in tickets:
        ticket.cancel()
    wait_idle(engine)
    assert engine.state().free_pages == engine.state().pages


def test_a_sink_that_fails_cancels_its_request(engine: Engine) -> None:
    def sink(event: Event) -> None:
        raise RuntimeError("the event loop is closed")

    engine.submit(greedy([1], 255), sink)
    wait_idle(engine)
    assert engine.state().free_pages == engine.state().pages
    assert engine.state().alive


def test_a_failing_step_ends_its_own_requests_only(toy_bundle: Path) -> None:
    engine = start(toy_bundle, Faulty)
    try:
        good = ask(engine, greedy([1, 2], 250))
        good.get(timeout=120)
        bad = drain(ask(engine, greedy([POISON], 9)))
        assert isinstance(bad[-1].error, EngineError)
        assert str(bad[-1].error) == "the model has failed: a kernel has failed"
        assert drain(good)[-1].finish == "length"
        wait_idle(engine)
        assert engine.state().free_pages == engine.state().pages
    finally:
        engine.close()


def test_logits_that_are_not_numbers_end_one_request(toy_bundle: Path) -> None:
    engine = start(toy_bundle, Faulty)
    try:
        bad = drain(ask(engine, greedy([POISON + 1], 9)))
        assert "logits are not numbers" in str(bad[-1].error)
        assert tokens_of(drain(ask(engine, greedy([1], 3)))) == toy.expected([1], 3)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), None, "the prompt has no tokens"),
        ((1,) * 256, None, "the prompt has 256 tokens, but the context has 256, answer included"),
        ((1,) * 200, 57, "200 tokens and max_tokens is 57, 257 together, but the context has 256: .* 56"),
        ((1, 260), None, "token 260 is outside the vocabulary of 260 tokens"),
        ((-1,), None, "token -1 is outside the vocabulary"),
    ],
)
def test_requests_that_cannot_be_served(
    engine: Engine, prompt: tuple[int, ...], max_tokens: int | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.submit(Request(prompt, max_tokens), lambda event: None)


def test_close_ends_what_runs_and_what_waits(toy_bundle: Path) -> None:
    engine = start(toy_bundle)
    queues = [ask(engine, greedy([i], 255)) for i in range(50)]
    assert engine.close()
    ends = [drain(events)[-1] for events in queues]
    assert [type(event.error) for event in ends].count(StoppingError) > 40
    assert {type(event.error) for event in ends} <= {StoppingError, type(None)}
    with pytest.raises(EngineError, match="the engine is stopped"):
        ask(engine, greedy([1], 1))
    assert not engine.state().alive


def test_submitting_from_many_threads(engine: Engine) -> None:
    results: SimpleQueue[bool] = SimpleQueue()

    def work(first: int) -> None:
        for i in range(5):
            prompt = [first, i]
            tokens = tokens_of(drain(ask(engine, greedy(prompt, 10))))
            results.put(tokens == toy.expected(prompt, 10))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert [results.get(timeout=120) for _ in range(40)] == [True] * 40


def test_too_many_waiting_requests_are_turned_away(toy_bundle: Path) -> None:
    engine = start(toy_bundle, max_batch=1, max_waiting=3)
    try:
        with pytest.raises(RequestError, match="3 requests are waiting already") as caught:
            for i in range(50):
                ask(engine, greedy([i], 255))
        assert caught.value.status == 503
    finally:
        engine.close()


FORCING = (
    "the answer is certainly (yes|no)",
    "(abcdefghij{1,3}[0-9]){2,5}",
    "[a-f]{3}(-[0-9]+ units of ){2}x{20}[yz]",
)


@pytest.mark.parametrize("pages", [None, 10])
def test_what_a_constraint_forces_is_not_asked_of_the_model(toy_bundle: Path, pages: int | None) -> None:
    """Checks that tokens which a constraint forces are not sampled from the model, unless their
    log-probabilities are requested, and that the answer is the same in both cases, also with too few pages.
    """
    executor = loading.load(toy_bundle, pages=pages)
    engine = Engine(executor, Tokenizer.load(toy_bundle, executor.manifest.serving)).start()
    try:
        asked: list[list[SimpleQueue[Event]]] = [[], []]
        constraints = [engine.grammars.compiled(Constraint("regex", p, "x"), False) for p in FORCING]
        with held(engine):
            for seed, compiled in enumerate(constraints * 3):
                sampling = Sampling(1.0 if seed % 4 else 0.0, seed=seed)
                plain = Request(tuple(range(seed, 30 + 2 * seed)), 70, sampling, constraint=compiled)
                for queues, logprobs in zip(asked, (None, 0), strict=True):
                    queues.append(ask(engine, replace(plain, logprobs=logprobs)))
        actual, expected = ([drain(queue) for queue in queues] for queues in asked)
        for few, all_ in zip(actual, expected, strict=True):
            assert text_of(few) == text_of(all_)
            assert (len(few), few[-1].tokens, few[-1].finish) == (len(all_), all_[-1].tokens, all_[-1].finish)
        wait_idle(engine)
        before = engine.state()
        compiled = engine.grammars.compiled(Constraint("regex", FORCING[0], "x"), message=False)
        events = drain(ask(engine, Request((1,), 60, GREEDY, constraint=compiled)))
        assert text_of(events).startswith("the answer is certainly ")
        wait_idle(engine)
        assert engine.state().decode_steps - before.decode_steps <= 6
        assert engine.state().answer_tokens - before.answer_tokens == len(events) >= 26
        assert engine.state().free_pages == engine.state().pages
        assert pages is None or before.preemptions > 0
    finally:
        engine.close()


def test_forced_tokens_end_where_the_answer_may_be_no_longer(toy_bundle: Path) -> None:
    executor = loading.load(toy_bundle)
    engine = Engine(executor, Tokenizer.load(toy_bundle, executor.manifest.serving)).start()
    try:
        compiled = engine.grammars.compiled(Constraint("regex", "a{200}", "x"), message=False)
        for limit in (1, 2, 3, 15, 16, 17, 18, 40):
            events = drain(ask(engine, Request((1,), limit, GREEDY, constraint=compiled)))
            assert text_of(events) == "a" * limit
            assert [event.tokens for event in events] == list(range(1, limit + 1))
            assert events[-1].finish == "length"
        stopped = drain(ask(engine, Request((1,), 40, GREEDY, ("aaaa",), constraint=compiled)))
        assert (stopped[-1].finish, text_of(stopped)) == ("stop", "")
        queue: SimpleQueue[Event] = SimpleQueue()
        ticket = engine.submit(Request((1,), 40, GREEDY, constraint=compiled), queue.put, window=5)
        output: list[Event] = []
        while not output or not output[-1].last:
            output.append(queue.get(timeout=120))
            assert queue.qsize() + len(output) <= ticket.delivered <= len(output) + 5
            ticket.read()
        assert text_of(output) == "a" * 40
    finally:
        engine.close()
