"""Tests of log-probabilities, penalties and random numbers of a request."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mlcbuild_runtime.executor.sampling_params import (
    Sampling,
    adjusted,
    generator,
    logprobs,
)


def test_logprobs_are_of_the_whole_softmax() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    token_logprob, top = logprobs(logits, 0, 2)
    assert (token_logprob.token, round(float(np.exp(token_logprob.logprob)), 4)) == (0, 0.1)
    assert [(item.token, round(float(np.exp(item.logprob)), 4)) for item in top] == [(1, 0.6), (2, 0.3)]
    assert logprobs(logits, 0, 0)[1] == ()
    assert len(logprobs(logits, 0, 20)[1]) == 3


@given(st.integers(1, 700), st.integers(0, 70), st.integers(1, 60), st.integers(0, 9), st.integers(0, 999))
def test_the_most_likely_of_many(size: int, count: int, different: int, masked: int, seed: int) -> None:
    """Checks log-probabilities and the most likely tokens, with many equal logits, against a complete sort
    and sums in float64."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 9, different).astype(np.float32)[random.integers(different, size=size)]
    logits[1:][random.random(size - 1) < masked / 9] = -np.inf
    token_logprob, top = logprobs(logits, 0, count)
    exact = logits.astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    expected = sorted(range(size), key=lambda i: (-logits[i], i))[:count]
    assert [item.token for item in top] == expected
    results = [token_logprob.logprob, *(item.logprob for item in top)]
    np.testing.assert_allclose(results, exact[[0, *expected]], rtol=1e-6, atol=1e-6)


def test_penalties_by_their_definition() -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.0, 3.0], np.float32)
    prompt, answer = [0, 1], {1: 3, 4: 1}

    def changed(**options: object) -> list[float]:
        sampling = Sampling(**options)  # type: ignore[arg-type]  # names and values vary
        return [round(float(value), 5) for value in adjusted(logits, sampling, prompt, answer)]

    assert changed(repetition_penalty=2.0) == [1.0, -2.0, 0.5, 0.0, 1.5]
    assert changed(frequency_penalty=0.5) == [2.0, -2.5, 0.5, 0.0, 2.5]
    assert changed(presence_penalty=0.5) == [2.0, -1.5, 0.5, 0.0, 2.5]
    assert changed(bias=((3, 100.0), (0, -100.0))) == [-98.0, -1.0, 0.5, 100.0, 3.0]
    assert adjusted(logits, Sampling(), prompt, answer) is logits
    assert logits.tolist() == [2.0, -1.0, 0.5, 0.0, 3.0]


def test_choices_of_one_seed_differ_and_hold() -> None:
    def numbers(choice: int) -> list[float]:
        return list(generator(Sampling(seed=3, choice=choice)).random(4))

    assert numbers(0) == list(generator(Sampling(seed=3)).random(4))
    assert numbers(1) == numbers(1) != numbers(2)
