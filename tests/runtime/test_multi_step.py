"""Tests of several decode steps in one call, for sequences without an engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mlcbuild_runtime.engine import multi_step
from mlcbuild_runtime.engine.request import Request, Ticket
from mlcbuild_runtime.engine.sequence import Sequence
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import ModelStep
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.executor.sampling_params import SKIP
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import toy
from .scripted import GREEDY


@pytest.fixture
def executor(light_toy_bundle: Path) -> Executor:
    return loading.load(light_toy_bundle)


def ready(executor: Executor, prompt: list[int], page: int, ignore_eos: bool = True) -> Sequence:
    """Returns a sequence that is ready for decoding: the keys and values of all prompt tokens but the last
    are in the KV cache. page: number of the first of its two pages."""
    tokenizer = Tokenizer.load(executor.path, executor.manifest.serving)
    request = Request(tuple(prompt), 40, GREEDY, ignore_eos=ignore_eos)
    seq = Sequence(request, lambda _: None, Ticket(lambda: None, None), tokenizer, executor.sample)
    seq.pages, seq.length = [page, page + 1], len(prompt) - 1
    executor.step(ModelStep.of([(prompt[:-1], seq.length, seq.pages)], prompt=True), [SKIP])
    return seq


def test_every_sequence_gets_a_token_for_each_step(executor: Executor) -> None:
    sequences = [ready(executor, [3, 4, 5], 0), ready(executor, [9, 9], 2)]
    multi_step.unguided(executor, sequences, 6)
    for seq, prompt in zip(sequences, ([3, 4, 5], [9, 9]), strict=True):
        assert seq.tokens == [*prompt, *toy.expected(prompt, 6)]
        assert seq.length == len(seq.tokens) - 1
        assert [event.tokens for event in seq.take_events()] == [1, 2, 3, 4, 5, 6]


def test_guided_steps_give_the_same_tokens(executor: Executor) -> None:
    sequences = [ready(executor, [3, 4, 5], 0), ready(executor, [9, 9], 2)]
    multi_step.guided(executor, sequences, 6, time.perf_counter() + 60)
    assert sequences[0].tokens == [3, 4, 5, *toy.expected([3, 4, 5], 6)]
    assert sequences[1].tokens == [9, 9, *toy.expected([9, 9], 6)]


def test_no_guided_step_begins_after_its_time(executor: Executor) -> None:
    seq = ready(executor, [3, 4, 5], 0)
    multi_step.guided(executor, [seq], 6, time.perf_counter() - 1)
    assert seq.answered == 1


def test_an_interruption_ends_guided_steps(executor: Executor) -> None:
    seq = ready(executor, [3, 4, 5], 0)
    executor.interrupt()
    multi_step.guided(executor, [seq], 6, time.perf_counter() + 60)
    assert seq.answered == 1
