"""Tests of several decode steps in one call of the library: answers are the same, and no client waits longer
for its tokens."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from mlcbuild_runtime.devices.cpu import CpuExecutor
from mlcbuild_runtime.engine import loop
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.executor.sampling_params import SKIP, Sampling, SamplingRow

from . import shared
from .burst_engines import CONSTRAINTS, Counted, begin, engine, greedy, patience, settle, text
from .test_engine import EVERY, ask, drain, text_of, toy_bundle, wait_idle

__all__ = ["engine", "patience", "toy_bundle"]  # fixtures, with both devices


SAMPLINGS = [Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9), Sampling(1.5, top_k=9)]


Part = tuple[list[int], int, list[int]]
"""One sequence's part of a step: (its new tokens, its length in tokens after them, the numbers of its KV
cache pages in order)."""


@pytest.fixture(params=[*shared.TOYS, "tiny_bundle", "window_bundle"])
def bundle(request: pytest.FixtureRequest) -> Path:
    actual: Path = request.getfixturevalue(request.param)
    return actual


def single(executor: Executor, parts: list[Part], params: list[list[SamplingRow]]) -> list[list[int]]:
    """Returns the tokens that the executor samples if each decode step is a call of its own, as
    [step][sequence]. parts: (new tokens, length after them, KV cache pages) of each sequence; params:
    sampling parameters for each step and sequence."""
    drawn, last = list[list[int]](), [tokens for tokens, _, _ in parts]
    for number, rows in enumerate(params):
        lengths = [length + number for _, length, _ in parts]
        inputs = zip(last, lengths, [pages for _, _, pages in parts], strict=True)
        drawn.append(executor.step(ModelStep.of(list(inputs), prompt=False), rows).tokens)
        last = [[token] for token in drawn[-1]]
    return drawn


def filled(executor: Executor, source: random.Random, count: int) -> list[Part]:
    """Computes random prompts of 4 to 8 tokens for `count` sequences, and returns what a decode step needs
    next: (one new token, length after it, KV cache pages) of each sequence."""
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


def requests(engine: Engine, seed: int, limits: int, share: float) -> list[Request]:
    """Returns thirteen random requests, of which the last repeats the first with log-probabilities. share:
    fraction of the requests that have a constraint (0 .. 1); limits: maximum length of prompt and answer
    together, in tokens; seed: of the random numbers."""
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


CASES = [(0, 0, None), (3, 1, None), (2, 0.5, 14)]
"""Cases of a test as (seed of the random requests, share of them that have a constraint, number of KV cache
pages or None for enough): without constraints, with constraints, and both with too few pages."""
if EVERY:
    SEEDS = [(seed, share) for seed, share, _ in CASES] + [(1, 0), (4, 1)]
    CASES = [(seed, share, pages) for seed, share in SEEDS for pages in (None, 14)]


@pytest.mark.parametrize(("seed", "share", "pages"), CASES)
def test_answers_are_what_they_are_step_by_step(
    bundle: Path, seed: int, share: float, pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that answers do not depend on bursts (several decode steps in one call of the library), whatever
    happens to requests: they end, meet a stop string, have a constraint, arrive and leave, or too few pages
    are free."""

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
        if share in (0, 1):  # else it depends on the arrival times which kinds of requests share a step
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
    """Checks that a request with a stop string is decoded in bursts of at most 4 steps in one call of the
    library, because the steps after a stop string are wasted."""
    drain(ask(engine, replace(greedy([1, 2], 100), stop=("never there",))))
    counted: Any = engine.executor
    assert max(counted.bursts) == 4


def test_slow_steps_are_told_one_by_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "BURST_SECONDS", 1e-9)
    drain(ask(engine, greedy([1], 20)))
    counted: Any = engine.executor
    assert not counted.bursts


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
