"""Tests of bursts of decode steps that end early: for new requests, for other engines, and after failures."""

from __future__ import annotations

import threading
import timeit
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.engine.threads import Turns
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from mlcbuild_runtime.executor.executor import Executor, StepOutput
from mlcbuild_runtime.executor.sampling_params import SamplingRow

from .burst_engines import CONSTRAINTS, Counted, begin, engine, greedy, patience, settle, text
from .test_engine import ask, drain, text_of, toy_bundle, wait_idle
from .wrapped import Wrapped

__all__ = ["engine", "patience", "toy_bundle"]  # fixtures, with both devices


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


def test_who_comes_ends_the_steps_at_once(tiny_bundle: Path) -> None:
    """Checks that a new request interrupts a running burst: the call of the library executes no further
    steps."""
    executor, counts = loading.load(tiny_bundle), set[int]()
    step, params = ModelStep.of([([5], 1, [1, 2])], prompt=False), [(0.0, -np.inf, 1.0, 0.0, 0.0)]

    def made() -> int:
        settle(executor)
        following = FollowingSteps([[0.0]] * (executor.burst - 1), [True], ())
        return len(executor.steps(step, params, following))

    took = min(timeit.repeat(made, number=1, repeat=9))  # seconds of all steps
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
    """An executor that records the names of the threads that interrupt it, and the order of its calls."""

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
    """Checks that at most one decode step is executed between two chunks of a prompt that is being
    computed."""
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
    """An executor whose calls of several decode steps fail after the first `left` ones: each raises an error
    or, if `wrong` is set, returns -1, which stands for NaN logits, as the tokens of its third step."""

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
