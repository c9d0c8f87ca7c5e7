"""Tests of sampling the tokens of one request, without an engine."""

from __future__ import annotations

from typing import cast

import pytest
from mlcbuild_format.abi import INVALID_TOKEN, NO_TOKEN
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.constraints.grammar import Matcher
from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.engine.sampler import Backoff, Sampler, runner_up
from mlcbuild_runtime.executor.sampling_params import SKIP, Floats, Sampling

from .scripted import GREEDY, Words, logits_of, sample


def sampler(sampling: Sampling = GREEDY, words: Words | None = None, logprobs: int | None = None) -> Sampler:
    request = Request((1,), 9, sampling, logprobs=logprobs)
    return Sampler(request, sample, cast("Matcher | None", words))


def unread() -> Floats:
    raise AssertionError("the logits are not needed")


def test_what_the_device_has_drawn_is_taken_without_logits() -> None:
    token_sampler = sampler()
    assert token_sampler.plain and token_sampler.token(unread, 5, 0) == 5


def test_an_invalid_token_is_an_error() -> None:
    with pytest.raises(EngineError, match="not numbers"):
        sampler().token(unread, INVALID_TOKEN, 0)


def test_a_skipped_row_is_drawn_on_the_host() -> None:
    assert sampler().token(lambda: logits_of(3)[0], NO_TOKEN, 0) == 3


def test_a_position_has_one_random_number() -> None:
    token_sampler, other = sampler(Sampling(1.0, seed=4)), sampler(Sampling(1.0, seed=4))
    numbers = [token_sampler.params(position)[-1] for position in range(40)]
    assert token_sampler.random_numbers(3, 20) == numbers[3:23] and token_sampler.params(3)[-1] == numbers[3]
    assert [other.params(position)[-1] for position in reversed(range(40))] == numbers[::-1]
    assert len(set(numbers)) == 40 and all(0 <= number < 1 for number in numbers)


def test_penalties_count_the_tokens_of_the_answer() -> None:
    token_sampler = sampler(Sampling(temperature=0, frequency_penalty=2.0))
    assert not token_sampler.plain
    logits = logits_of(3)[0]
    logits[4] = 2
    drawn = []
    for position in range(3):
        drawn.append(token_sampler.token(logits.copy, NO_TOKEN, position))
        token_sampler.add(drawn[-1])
    assert drawn == [3, 3, 4], "5, then 3, then 1 against 2"


def test_a_token_that_fits_needs_no_mask() -> None:
    words = Words([2, 3])
    words.free = True
    token_sampler = sampler(words=words)
    assert token_sampler.first_params(0) != SKIP and token_sampler.mask is None
    assert token_sampler.token(unread, 2, 0) == 2


def test_a_token_that_does_not_fit_is_drawn_among_those_that_do() -> None:
    words = Words([2, 3])
    words.free = True
    token_sampler = sampler(words=words)
    token_sampler.first_params(0)
    assert token_sampler.token(lambda: logits_of(6)[0], 6, 0) == 2
    assert token_sampler.first_params(1) != SKIP and token_sampler.mask is not None, (
        "the next try comes later"
    )
    assert token_sampler.token(unread, 3, 1) == 3 and token_sampler.mask is None


def test_filters_need_the_mask_at_once() -> None:
    token_sampler = sampler(Sampling(1.0, top_k=3, seed=1), Words([2]))
    token_sampler.first_params(0)
    assert token_sampler.mask is not None and token_sampler.mask.tolist() == [4]


def test_log_probabilities_need_all_logits() -> None:
    token_sampler = sampler(Sampling(1.0, top_k=3, seed=1), Words([2]), logprobs=0)
    assert token_sampler.first_params(0) == SKIP and token_sampler.mask is None
    assert token_sampler.token(lambda: logits_of(6)[0], NO_TOKEN, 0) == 2
    assert token_sampler.forced(5) == []


def test_a_guided_step_ends_where_the_constraint_leaves_no_alternative() -> None:
    words = Words([2])
    token_sampler = sampler(words=words)
    assert token_sampler.next_number(0) is not None
    words.forces = True
    assert token_sampler.next_number(0) is None
    words.forces, words.left = False, []
    assert token_sampler.finished and token_sampler.next_number(0) is None


def test_a_draft_follows_the_constraint_and_changes_nothing() -> None:
    words = Words([2, 3, 4])
    token_sampler = sampler(words=words)
    assert token_sampler.allowed([2, 3, 5]) == [2, 3]
    logits = logits_of(6)[0]
    assert token_sampler.propose(logits, 0, [2]) == 3
    assert (logits == logits_of(6)[0]).all() and words.left == [2, 3, 4]


def test_backoff_doubles_its_pause() -> None:
    backoff, position, tries = Backoff(), 0, []
    while position < 100:
        if backoff.due(position):
            tries.append(position)
            backoff.settle(position, fits=False)
        position += 1
    assert tries == [0, 2, 6, 14, 30, 62], "pauses of 1, 3, 7, 15, 31 tokens"


def test_runner_up() -> None:
    logits = logits_of(3)[0]
    logits[6] = 4
    assert runner_up(logits, 3) == (1.0, 6) and runner_up(logits, 6) == (-1.0, 3)
