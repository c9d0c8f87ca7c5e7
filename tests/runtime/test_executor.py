"""Tests of the Executor interface, which the engine requires of every device. They run for each executor that
exists."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from mlcbuild_format import abi
from mlcbuild_runtime.executor import loading
from mlcbuild_runtime.executor.batch import FollowingSteps, ModelStep, NextInput
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.executor.sampling_params import SKIP, Floats, SamplingRow

from . import toy
from .test_gpu import has_adapter

GREEDY: SamplingRow = (0.0, -np.inf, 1.0, 0.0, 0.0)


# One process runs all tests on a GPU adapter: one in software compiles the kernels for 1.5 CPU seconds.
ON_GPU = pytest.param("webgpu", marks=pytest.mark.xdist_group("gpu-executor"))


@pytest.fixture(params=["cpu", "numpy", ON_GPU])
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "webgpu" and not has_adapter():
        pytest.skip("this machine has no GPU adapter, not even one in software")
    bundle: Path = request.getfixturevalue(f"{request.param}_toy_bundle")
    return loading.load(bundle, pages=8)


def prefill(executor: Executor, tokens: list[int], pages: list[int]) -> None:
    executor.step(ModelStep.of([(tokens, len(tokens), pages)], prompt=True), [SKIP])


def mask_of(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    bits = np.zeros(-(-toy.VOCAB // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_a_step_draws_from_the_rows_that_it_names(executor: Executor) -> None:
    tokens = [3, 5, 7, 9]
    result = executor.step(ModelStep.of([(tokens, 4, [2])], [3]), [GREEDY, SKIP, GREEDY])
    expected = [toy.expected(tokens[:end], 1)[0] for end in (2, 3, 4)]
    assert result.tokens == [expected[0], abi.NO_TOKEN, expected[2]]
    assert result.logits().shape == (3, toy.VOCAB) and result.logits().argmax(1).tolist() == expected


def test_keys_and_values_are_in_the_pages_of_the_step(executor: Executor) -> None:
    """Checks that an executor reads and writes exactly the KV cache pages that a step names, with two
    sequences whose pages are interleaved; each sequence is computed in two steps."""
    first, second = list(range(40, 80)), list(range(9, 42))
    prefill(executor, first[:20], [5, 1])
    prefill(executor, second[:32], [0, 6])
    parts = [(first[20:], 40, [5, 1, 3]), (second[32:], 33, [0, 6, 2])]
    result = executor.step(ModelStep.of(parts), [GREEDY, GREEDY])
    assert result.tokens == [toy.expected(first, 1)[0], toy.expected(second, 1)[0]]


def test_logits_stay_after_later_steps(executor: Executor) -> None:
    kept = executor.step(ModelStep.of([([1, 2], 2, [0])]), [GREEDY]).logits()
    copy = kept.copy()
    for token in range(9):
        executor.step(ModelStep.of([([token], 1, [1])]), [GREEDY])
    assert (kept == copy).all()


def test_a_mask_removes_tokens_of_its_row(executor: Executor) -> None:
    parts = [([4], 1, [0]), ([4], 1, [1])]
    result = executor.step(ModelStep.of(parts, prompt=False), [GREEDY] * 2, [(1, mask_of(9, 250))])
    assert result.tokens[0] == 4 and result.tokens[1] in (9, 250)
    assert np.isfinite(result.logits()[1]).nonzero()[0].tolist() == [9, 250]


def test_forks_copy_the_beginning_of_a_page(executor: Executor) -> None:
    text = [11, 12, 13, 14]
    prefill(executor, text, [0])
    # The draft 20 21 on page 0, and a branch 30 after 20 on page 4.
    parts = [([20, 21], 6, [0]), ([30], 6, [4])]
    step = ModelStep.of(parts, [2, 1], prompt=False)._replace(forks=[(0, 4, 5)])
    result = executor.step(step, [GREEDY] * 3)
    paths = ([*text, 20], [*text, 20, 21], [*text, 20, 30])
    assert result.tokens == [toy.expected(path, 1)[0] for path in paths]


def test_several_steps_are_what_single_ones_are(executor: Executor) -> None:
    count = executor.burst - 1
    executor.resume()
    following = FollowingSteps([[0.0]] * count, [False], ())
    for _ in range(2):  # at first the number of a CPU's threads may not be settled
        rows = executor.steps(ModelStep.of([([5], 1, [3, 4])], prompt=False), [GREEDY], following)
    assert rows == [[token] for token in toy.expected([5], len(rows))]


def test_an_end_token_ends_the_steps(executor: Executor) -> None:
    answer = toy.expected([5], executor.burst)
    following = FollowingSteps([[0.0]] * (executor.burst - 1), [True], {answer[2]})
    for _ in range(2):
        rows = executor.steps(ModelStep.of([([5], 1, [3, 4])], prompt=False), [GREEDY], following)
    assert [row[0] for row in rows] == answer[: answer.index(answer[2]) + 1][: len(rows)]
    assert len(rows) <= 3


def test_an_interruption_ends_the_steps_until_they_resume(executor: Executor) -> None:
    following = FollowingSteps([[0.0]] * 3, [False], ())
    executor.interrupt()
    assert executor.interrupted
    assert len(executor.steps(ModelStep.of([([5], 1, [3])], prompt=False), [GREEDY], following)) == 1
    executor.resume()
    assert not executor.interrupted


def test_guided_steps_follow_what_they_are_sent(executor: Executor) -> None:
    steps = executor.guided_steps(ModelStep.of([([5], 1, [3])], prompt=False), [GREEDY], (), 3)
    first = next(steps)
    assert first.tokens == toy.expected([5], 1)
    # The caller may continue with a token of its own, and restrict the next one.
    second = steps.send([NextInput(8, 0.0, mask_of(100))])
    assert second.tokens == [100]
    third = steps.send([NextInput(100, 0.0, None)])
    assert third.tokens == toy.expected([5, 8, 100], 1)
    assert int(third.logits()[0].argmax()) == third.tokens[0]
    steps.close()


def test_logits_of_the_caller_can_be_sampled(executor: Executor) -> None:
    logits: Floats = np.zeros((2, 50), np.float32)
    logits[0, 7], logits[1, 9] = 3, np.nan
    assert executor.sample(logits.copy(), [GREEDY] * 2) == [7, abi.INVALID_TOKEN]
    assert executor.sample(logits[:1].copy(), [GREEDY], [(0, np.array([1 << 12, 0], np.int32))]) == [12]


def test_the_clock_runs_while_the_device_computes(executor: Executor) -> None:
    before, begun = executor.seconds(), time.monotonic()
    executor.step(ModelStep.of([([1] * 32, 32, [0, 1])]), [GREEDY])
    passed = time.monotonic() - begun
    assert 0 < executor.seconds() - before < 100 * passed, "it counts seconds"


def test_pages_are_prepared_in_parts(executor: Executor) -> None:
    """Checks that preparing further pages of the KV cache for later use does not change the pages that are
    already in use."""
    text = list(range(30, 46))
    prefill(executor, text, [0])
    for _ in executor.prepare_pages(1):
        pass
    result = executor.step(ModelStep.of([([7], 17, [0, 1])], prompt=False), [GREEDY])
    assert result.tokens == toy.expected([*text, 7], 1)


def test_limits_are_stated(executor: Executor) -> None:
    assert executor.pages == 8 and executor.burst >= 1 and executor.exact_rows >= 1
    assert executor.capabilities <= set(abi.CAPABILITIES) and "generate" in executor.capabilities
    assert executor.manifest.name == "toy-q0f32-host" and executor.description
