"""Executors for tests that record the number of steps in each burst (several decode steps in one call of the
library), and engines that use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.devices.cpu import CpuExecutor
from mlcbuild_runtime.engine import loop
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.engine.threads import Turns
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.executor.sampling_params import SamplingRow
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import toy
from .test_engine import GREEDY
from .wrapped import Wrapped


class Counted(Wrapped):
    """An executor that wraps another one, records how many decode steps each call executed, and sleeps for
    `pause` seconds before each call.

    It prevents the wrapped device from trying another number of threads: during such a trial, which other
    work on the machine can trigger, a device executes single steps.
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
    """Returns the text of the answer of `count` tokens that greedy decoding of the toy model must produce for
    `prompt`."""
    stream = engine.tokenizer.stream()
    return "".join(map(stream.push, toy.expected(prompt, count))) + stream.finish()


def settle(executor: Executor) -> None:
    """Makes an executor for CPUs behave as shortly after a step: it then does not try another number of
    threads at its next call. Other executors are not changed."""
    if isinstance(executor, CpuExecutor):
        workers = executor._workers()
        workers._ended, workers._trying = time.perf_counter(), False


def begin(
    bundle: Path, wrap: Callable[[Executor], Any], pages: int | None = None, turns: Turns | None = None
) -> Engine:
    executor = loading.load(bundle, pages=pages)
    options = EngineOptions(turns=turns or Turns())
    return Engine(wrap(executor), Tokenizer.load(bundle, executor.manifest.serving), options).start()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes, for a test, the time limit of bursts (several decode steps in one call of the library),
    because decode steps are slow while other tests run."""
    monkeypatch.setattr(loop, "BURST_SECONDS", 60.0)


@pytest.fixture
def engine(toy_bundle: Path) -> Iterator[Engine]:
    running = begin(toy_bundle, Counted)
    yield running
    assert running.close()


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
