"""Several steps of decoding in one call of the library: the same answers, and nobody waits for them."""

from __future__ import annotations

import random
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.devices.cpu import CpuExecutor
from mlcbuild_runtime.engine import loop
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.engine.threads import Turns
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from mlcbuild_runtime.executor.executor import Executor, StepOutput
from mlcbuild_runtime.executor.sampling_params import SKIP, Sampling, SamplingRow
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import toy
from .test_engine import EVERY, GREEDY, ask, drain, text_of, toy_bundle, wait_idle
from .wrapped import Wrapped

__all__ = ["toy_bundle"]  # the fixture of test_engine, with both devices
SAMPLINGS = [Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9), Sampling(1.5, top_k=9)]
Part = tuple[list[int], int, list[int]]
"""New tokens of a sequence, its length after them, and its pages."""


class Counted(Wrapped):
    """Records how many steps each call executed, and may sleep before each call.

    The number of threads is never on trial: a device on trial executes steps one by one, and other work on
    the machine begins trials.
    """

    pause = 0.0

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.bursts: list[int] = []
        self.guided: list[int] = []

    def steps(
        self, step: ModelStep, params: Sequence[SamplingRow], following: FollowingSteps
    ) -> list[list[int]]:
        time.sleep(self.pause)
        settle(self.inner)
        tokens = self.inner.steps(step, params, following)
        self.bursts.append(len(tokens))
        return tokens

    def guided_steps(self, *arguments: Any) -> Any:
        steps, inputs = self.inner.guided_steps(*arguments), None
        self.guided.append(0)
        try:
            while True:
                result = next(steps) if inputs is None else steps.send(inputs)
                self.guided[-1] += 1
                inputs = yield result
        finally:
            steps.close()


def greedy(prompt: list[int], count: int) -> Request:
    return Request(tuple(prompt), count, GREEDY, ignore_eos=True)


def text(engine: Engine, prompt: list[int], count: int) -> str:
    """Returns the text of the toy's answer."""
    stream = engine.tokenizer.stream()
    return "".join(map(stream.push, toy.expected(prompt, count))) + stream.finish()


def settle(executor: Executor) -> None:
    """Makes the executor behave as after a recent step, so that the number of threads is settled."""
    if isinstance(executor, CpuExecutor):
        workers = executor._workers()
        workers._ended, workers._trying = time.perf_counter(), False


def begin(
    bundle: Path, wrap: Callable[[Executor], Any], pages: int | None = None, turns: Turns | None = None
) -> Engine:
    executor = loading.load(bundle, pages=pages)
    options = EngineOptions(turns=turns or Turns())
    return Engine(wrap(executor), Tokenizer.load(bundle, executor.manifest.serving), options).start()


@pytest.fixture(params=["cpu_toy_bundle", "numpy_toy_bundle", "tiny_bundle", "window_bundle"])
def bundle(request: pytest.FixtureRequest) -> Path:
    actual: Path = request.getfixturevalue(request.param)
    return actual


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows decode steps to be slow, as they are beside other tests."""
    monkeypatch.setattr(loop, "BURST_SECONDS", 60.0)


@pytest.fixture
def engine(toy_bundle: Path) -> Iterator[Engine]:
    running = begin(toy_bundle, Counted)
    yield running
    assert running.close()


def single(executor: Executor, parts: list[Part], params: list[list[SamplingRow]]) -> list[list[int]]:
    """Returns the tokens of steps that are executed one by one."""
    drawn, last = list[list[int]](), [tokens for tokens, _, _ in parts]
    for number, rows in enumerate(params):
        lengths = [length + number for _, length, _ in parts]
        inputs = zip(last, lengths, [pages for _, _, pages in parts], strict=True)
        drawn.append(executor.step(ModelStep.of(list(inputs), prompt=False), rows).tokens)
        last = [[token] for token in drawn[-1]]
    return drawn


def filled(executor: Executor, source: random.Random, count: int) -> list[Part]:
    """Returns sequences that have some tokens in the cache, and one to come."""
    vocab, pages = executor.manifest.vocab_size, [[1 + 4 * n, 3 + 4 * n, 2 + 4 * n] for n in range(count)]
    prompts = [[source.randrange(vocab) for _ in range(source.randrange(4, 9))] for _ in range(count)]
    step = ModelStep.of([(p, len(p), own) for p, own in zip(prompts, pages, strict=True)], prompt=True)
    executor.step(step, [SKIP] * count)
    return [([source.randrange(vocab)], len(p) + 1, own) for p, own in zip(prompts, pages, strict=True)]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_steps_are_what_they_are_one_by_one(bundle: Path, count: int) -> None:
    executor, source = loading.load(bundle), random.Random(count)
    parts, burst = filled(executor, source, count), executor.burst
    columns = [source.choice(SAMPLINGS).columns for _ in range(count)]
    params: list[list[SamplingRow]] = [[(*own, source.random()) for own in columns] for _ in range(burst)]

    def steps(most: int, stops_at_eos: list[bool], eos: set[int]) -> list[list[int]]:
        settle(executor)
        numbers = [[row[4] for row in rows] for rows in params[1:most]]
        following = FollowingSteps(numbers, stops_at_eos, eos)
        return executor.steps(ModelStep.of(parts, prompt=False), params[0], following)

    expected = single(executor, parts, params)
    first_stops = [True] + [False] * (count - 1)
    for most in (burst, 5, 1):
        assert steps(most, first_stops, set()) == expected[:most]
    end = expected[2][0]
    first = next(number for number, row in enumerate(expected) if row[0] == end)
    assert steps(burst, first_stops, {end}) == expected[: first + 1]
    assert steps(burst, [False] * count, {end}) == expected
    executor.interrupt()
    assert steps(burst, first_stops, set()) == expected[:1]
    executor.resume()
    assert steps(burst, first_stops, set()) == expected


def test_few_steps_while_threads_look_for_cores(cpu_toy_bundle: Path) -> None:
    executor = CpuExecutor.load(cpu_toy_bundle)
    step, params = ModelStep.of([([5], 1, [1])], prompt=False), [(0.0, -np.inf, 1.0, 0.0, 0.0)]
    executor._workers()._ended = time.perf_counter() - 60
    assert len(executor.steps(step, params, FollowingSteps([[0.0]] * 9, [True], ()))) == 1
    assert len(executor.steps(step, params, FollowingSteps([[0.0]] * 9, [True], ()))) == 10


CONSTRAINTS = [
    Constraint("regex", "([a-z]{1,9} ){2,30}", "response_format"),
    Constraint("regex", "(one|two|three)(, (one|two|three))*", "response_format"),
    Constraint("json_schema", '{"type": "array", "items": {"type": "integer"}}', "response_format"),
    Constraint(
        "json_schema",
        '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}',
        "response_format",
    ),
]


def requests(engine: Engine, seed: int, limits: int, share: float) -> list[Request]:
    """Returns random requests. `share`: fraction of those with constraints."""
    source = random.Random(seed)
    results = []
    for _ in range(12):
        size = source.randrange(1, 60)
        prompt = tuple(source.randrange(256) for _ in range(size))
        stop = ("a",) if source.random() < 0.2 else ()
        sampling = replace(source.choice(SAMPLINGS), seed=source.randrange(99))
        count, on = source.randrange(1, limits - size), source.random() < 0.5
        whole = Request(prompt, count, sampling, stop, ignore_eos=on)
        if source.random() < share:
            compiled = engine.grammars.compiled(source.choice(CONSTRAINTS), message=False)
            whole = replace(whole, constraint=compiled)
        results.append(whole)
    return [*results, replace(results[0], logprobs=1, max_tokens=9)]


SEEDS = [(0, 0), (2, 0.5), (3, 1), *([(1, 0), (4, 1)] if EVERY else [])]


@pytest.mark.parametrize("pages", [None, 14])
@pytest.mark.parametrize(("seed", "share"), SEEDS)
def test_answers_are_what_they_are_step_by_step(
    bundle: Path, seed: int, share: float, pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that happens to requests: ends, stop strings, constraints, others that come and go, too few
    pages."""

    def answers(seconds: float) -> list[list[tuple[str, int, str | None]]]:
        monkeypatch.setattr(loop, "BURST_SECONDS", seconds)
        engine = begin(bundle, Counted, pages)
        counted: Any = engine.executor
        context = min(engine.manifest.limits.context_window, counted.pages * 16, 200)
        inputs = requests(engine, seed, context, share)
        results = [drain(queue) for queue in [ask(engine, request) for request in inputs]]
        wait_idle(engine)
        assert all(event.error is None for events in results for event in events)
        assert engine.state().free_pages == engine.state().pages
        free, constrained = max(counted.bursts, default=0) > 2, max(counted.guided, default=0) > 2
        assert (free or constrained) == (seconds > 1)
        if share in (0, 1):  # else it depends on when they came whether some are alone with their kind
            assert (free, constrained) == (seconds > 1 and share == 0, seconds > 1 and share == 1)
        assert engine.close()
        return [[(event.text, event.tokens, event.finish) for event in events] for events in results]

    assert answers(60.0) == answers(1e-9)


def test_an_answer_takes_few_calls(engine: Engine) -> None:
    assert text_of(drain(ask(engine, greedy([1, 2], 100)))) == text(engine, [1, 2], 100)
    counted: Any = engine.executor
    assert len(counted.bursts) < 30 and max(counted.bursts) == counted.burst
    assert engine.state().decode_steps == 99


def test_texts_that_may_end_an_answer_are_looked_for_often(engine: Engine) -> None:
    """Tokens after such a text are computed in vain."""
    drain(ask(engine, replace(greedy([1, 2], 100), stop=("never there",))))
    counted: Any = engine.executor
    assert max(counted.bursts) == 4


class Interrupted(Counted):
    interrupted = True


def test_who_comes_ends_the_steps_of_constraints_too(toy_bundle: Path) -> None:
    for kind in (Counted, Interrupted):
        engine = begin(toy_bundle, kind)
        compiled = engine.grammars.compiled(CONSTRAINTS[0], message=False)
        drain(ask(engine, replace(greedy([1, 2], 60), constraint=compiled)))
        counted: Any = engine.executor
        assert (max(counted.guided) == 1) == (kind is Interrupted)
        assert engine.close()


def test_slow_steps_are_told_one_by_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "BURST_SECONDS", 1e-9)
    drain(ask(engine, greedy([1], 20)))
    counted: Any = engine.executor
    assert not counted.bursts


def test_who_comes_ends_the_steps_at_once(tiny_bundle: Path) -> None:
    """An arrival interrupts the steps of others: the call that runs executes no more of them."""
    executor, counts = CpuExecutor.load(tiny_bundle), set[int]()
    step, params = ModelStep.of([([5], 1, [1, 2])], prompt=False), [(0.0, -np.inf, 1.0, 0.0, 0.0)]

    def made() -> int:
        settle(executor)
        following = FollowingSteps([[0.0]] * (executor.burst - 1), [True], ())
        return len(executor.steps(step, params, following))

    took = min(timeit.repeat(made, number=1, repeat=9))  # of all steps
    for attempt in range(500):
        executor.resume()
        thread = threading.Timer(took * (attempt % 10) / 10, executor.interrupt)
        thread.start()
        counts.add(made())
        thread.join()
        if counts - {1, executor.burst}:
            break
    assert counts - {1, executor.burst}, counts


class Watched(Counted):
    """Records which threads interrupt it, and the order of its calls."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.interrupts: list[str] = []
        self.calls: list[str | int] = []
        self.resumed = 0

    def interrupt(self) -> None:
        self.interrupts.append(threading.current_thread().name)
        self.inner.interrupt()

    def resume(self) -> None:
        self.resumed += 1
        self.inner.resume()

    def step(self, step: ModelStep, params: Sequence[SamplingRow], masks: Any = ()) -> StepOutput:
        self.calls.append("p" if step.prompt else 1)
        return self.inner.step(step, params, masks)

    def steps(
        self, step: ModelStep, params: Sequence[SamplingRow], following: FollowingSteps
    ) -> list[list[int]]:
        tokens = super().steps(step, params, following)
        self.calls.append(len(tokens))
        return tokens


def test_news_interrupt_the_executor(toy_bundle: Path) -> None:
    engine = begin(toy_bundle, Watched)
    watched: Any = engine.executor
    ticket = engine.submit(greedy([1], 30), SimpleQueue[Event]().put)
    wait_idle(engine)
    assert watched.interrupts and watched.resumed
    count = len(watched.interrupts)
    ticket.cancel()
    assert len(watched.interrupts) == count + 1
    engine.close()
    assert len(watched.interrupts) >= count + 2


def test_who_waits_for_a_turn_halts_the_model_that_has_it(toy_bundle: Path) -> None:
    turns = Turns()
    engine = begin(toy_bundle, Watched, turns=turns)
    watched: Any = engine.executor
    watched.pause = 0.02

    over = threading.Event()

    def wait() -> None:
        while not over.wait(0.001):
            with turns:
                pass

    other = threading.Thread(target=wait, name="other")
    other.start()
    for _ in range(50):  # on a busy machine the other may come in vain
        assert text_of(drain(ask(engine, greedy([1], 120)))) == text(engine, [1], 120)
        if "other" in watched.interrupts:
            break
    over.set()
    other.join(120)
    assert "other" in watched.interrupts
    assert engine.close()


def test_prompts_are_not_kept_waiting(toy_bundle: Path) -> None:
    """While there is a prompt to compute, there is one step of decoding between two chunks of it."""
    engine = begin(toy_bundle, Watched)
    first = ask(engine, greedy([1], 200))
    first.get(timeout=120)
    watched: Any = engine.executor
    calls = watched.calls
    before = len(calls)
    drain(ask(engine, greedy([2] * 200, 5)))
    drain(first)
    own = calls[before:]
    prompts = [place for place, call in enumerate(own) if call == "p"]
    assert len(prompts) >= 6, "chunks of 32 tokens"
    assert set(own[prompts[0] : prompts[-1]]) <= {"p", 1}
    assert max(call for call in calls if call != "p") > 2
    assert engine.close()


class Broken(Wrapped):
    """Fails after some calls, or computes NaN."""

    left, wrong = 2, False

    def steps(
        self, step: ModelStep, params: Sequence[SamplingRow], following: FollowingSteps
    ) -> list[list[int]]:
        self.left -= 1
        if self.left < 0 and not self.wrong:
            raise RuntimeError("a kernel has failed")
        tokens = self.inner.steps(step, params, following)
        return [*tokens[:2], [-1] * len(step.lengths)] if self.left < 0 else tokens


@pytest.mark.parametrize("wrong", [False, True])
def test_a_failure_ends_its_requests_and_no_others(toy_bundle: Path, wrong: bool) -> None:
    engine = begin(toy_bundle, Broken)
    broken: Any = engine.executor
    broken.wrong = wrong
    try:
        queues = [ask(engine, greedy([n], 120)) for n in range(3)]
        results = [drain(queue)[-1] for queue in queues]
        words = "the model's logits are not numbers" if wrong else "the model has failed: a kernel has failed"
        assert any(isinstance(event.error, EngineError) and str(event.error) == words for event in results)
        wait_idle(engine)
        assert engine.state().free_pages == engine.state().pages
        broken.left = 1000
        assert text_of(drain(ask(engine, greedy([7, 8], 60)))) == text(engine, [7, 8], 60)
    finally:
        assert engine.close()


def test_a_client_that_does_not_read_is_told_no_more_than_it_has_room_for(engine: Engine) -> None:
    queue = SimpleQueue[Event]()
    ticket = engine.submit(greedy([1], 100), queue.put, window=5)
    end = time.monotonic() + 120
    while queue.qsize() < 5 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert queue.qsize() == 5
    for _ in range(100):
        queue.get(timeout=120)
        ticket.read()
