"""Tests of sampling in the library, compared with its definition, and of its independence of the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlcbuild_format.errors import EngineError
from mlcbuild_runtime.executor.sampling_params import (
    Floats,
    Sample,
    Sampling,
    checked,
    generator,
)
from numpy.typing import NDArray


def frequencies(
    sample: Sample, logits: Floats, sampling: Sampling, count: int = 5_000
) -> NDArray[np.float64]:
    numbers = generator(sampling).random(count).tolist()
    actual = sample(
        np.repeat(logits[None], count, axis=0), [(*sampling.columns, number) for number in numbers], []
    )
    return np.bincount(actual, minlength=len(logits)) / count


def chi_squared(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float], total: int) -> float:
    """Returns how far observed counts are from expected ones: the chi-squared statistic minus its degrees of
    freedom, divided by sqrt(2 * degrees). It is about normally distributed if expected counts are at least 5.
    """
    common = {key: p for key, p in exact.items() if p * total >= 5}
    rest = 1 - sum(common.values())
    statistic = sum((counts[key] - p * total) ** 2 / (p * total) for key, p in common.items())
    if rest * total >= 5:
        observed = total - sum(counts[key] for key in common)
        statistic += (observed - rest * total) ** 2 / (rest * total)
    degrees = len(common) - (rest * total < 5)
    return float((statistic - degrees) / (2 * degrees) ** 0.5)


def kept(logits: Floats, sampling: Sampling) -> list[int]:
    """Returns the tokens that can be sampled from `logits`, the row of one position, computed plainly from
    the definitions of the filters top_k, min_p and top_p. sampling: the sampling parameters; its temperature
    must not be 0."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -logits[i])  # of equal probabilities, too
    if sampling.top_k:
        order = [i for i in order if p[i] >= p[order[min(sampling.top_k, len(p)) - 1]]]
    order = [i for i in order if p[i] >= sampling.min_p * p.max()]
    total, actual = p[order].sum(), list[int]()
    for i in order if sampling.top_p < 1 else ():
        if p[actual].sum() >= sampling.top_p * total - 1e-12 and logits[i] < logits[actual[-1]]:
            break
        actual.append(i)
    return actual or order


def one(sample: Sample, logits: Floats, sampling: Sampling, number: float = 0.5) -> int:
    return checked(sample(logits[None], [(*sampling.columns, number)], [])[0])


def test_temperature_zero_takes_the_most_likely(sample: Sample) -> None:
    logits = np.array([0.0, 3.0, 2.9], np.float32)
    assert one(sample, logits, Sampling(temperature=0), 0.5) == 1


@pytest.mark.parametrize("width", [5, 260, 4103])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_mask_lacks_is_not_chosen(sample: Sample, width: int, temperature: float) -> None:
    """Checks that a token which the mask excludes is never sampled. A mask may have more bits than a row,
    rows may start at any address, and a row without a mask is not changed."""
    random = np.random.default_rng(width)
    memory = random.standard_normal(1 + 3 * width).astype(np.float32)
    logits = memory[1:].reshape(3, width)
    masks = [(row, random.integers(0, 1 << 31, 1 + width // 32, dtype=np.int32)) for row in (2, 0)]
    expectation = logits.copy()
    for row, mask in masks:
        mask[0] |= 1
        expectation[row, np.unpackbits(mask.view(np.uint8), count=width, bitorder="little") == 0] = -np.inf
    way = *Sampling(temperature).columns, 0.7
    expected = sample(expectation.copy(), [way] * 3, [])
    assert sample(logits, [way] * 3, masks) == expected
    assert np.array_equal(logits, expectation)
    if temperature == 0:
        assert expected == expectation.argmax(axis=1).tolist()


def test_tiny_temperatures_are_as_zero(sample: Sample) -> None:
    logits = np.array([0.0, 3.0, 2.9], np.float32)
    assert frequencies(sample, logits, Sampling(temperature=5e-324), 20)[1] == 1


def test_frequencies_follow_the_softmax(sample: Sample) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    counts = frequencies(sample, logits, Sampling(seed=1))
    assert np.abs(counts - [0.5, 0.3, 0.15, 0.05]).max() < 0.03
    cooler = frequencies(sample, logits, Sampling(temperature=0.5, seed=1))
    squares = np.array([0.25, 0.09, 0.0225, 0.0025])
    assert np.abs(cooler - squares / squares.sum()).max() < 0.03


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 45),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 1 << 40),
)
@example(logits=[0.0, -1.1754943508222875e-38, 0.0], top_p=0.25, top_k=0, min_p=0.0, seed=0)
@example(logits=[0.0] * 5 + [1.0, 2.0, 2.5, 5.142434657634498e-39], top_p=0.8125, top_k=0, min_p=0.0, seed=0)
def test_only_kept_tokens_are_chosen(
    sample: Sample, logits: list[float], top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    array = np.array(logits, np.float32)
    sampling = Sampling(1.0, top_p, top_k, min_p, seed)
    random = generator(sampling)
    chosen = {one(sample, array, sampling, random.random()) for _ in range(20)}
    probable = kept(array, Sampling(1.0, min(1.0, top_p + 1e-9), top_k, min_p * (1 - 1e-9), seed))
    assert chosen <= set(probable)


def test_every_kept_token_can_be_chosen(sample: Sample) -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    for sampling, count in ((Sampling(top_p=0.65), 2), (Sampling(top_k=3), 3), (Sampling(min_p=0.45), 3)):
        assert frequencies(sample, logits, replace(sampling, seed=3)).nonzero()[0].tolist() == [*range(count)]
    counts = frequencies(sample, logits, Sampling(top_p=0.65, seed=3))
    assert abs(counts[0] - 4 / 7) < 0.03


def test_a_large_vocabulary_is_drawn_from_as_a_small_one(sample: Sample) -> None:
    """Checks sampling from a large vocabulary by its definition: the sampled token is the first one up to
    which the probabilities sum to more than the random number."""
    random = np.random.default_rng(8)
    logits = random.normal(0, 3, 1234).astype(np.float32)
    logits[random.random(1234) < 0.5] = -np.inf
    for sampling in (Sampling(0.7), Sampling(top_k=7), Sampling(top_p=0.6), Sampling(min_p=0.3)):
        probable = kept(logits, sampling)
        weights = np.exp(logits.astype(np.float64) / sampling.temperature)
        weights[[token for token in range(1234) if token not in probable]] = 0
        sums = np.cumsum(weights) / weights.sum()
        for number in (*random.random(200), 0.0, np.nextafter(1, 0)):
            token = one(sample, logits, sampling, float(number))
            assert weights[token] > 0
            assert (sums - weights / weights.sum())[token] - 1e-6 < number < sums[token] + 1e-6


def test_a_seed_gives_the_same_tokens_again(sample: Sample) -> None:
    logits = np.zeros(50, np.float32)
    for seed in (0, 7, -7, (1 << 63) - 1, -(1 << 63)):
        a, b = generator(Sampling(seed=seed)), generator(Sampling(seed=seed))
        first, second = ([one(sample, logits, Sampling(), g.random()) for _ in range(9)] for g in (a, b))
        assert first == second
    assert generator(Sampling()).random() != generator(Sampling()).random()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(sample: Sample, value: float) -> None:
    logits = np.array([0.0, value, 1.0], np.float32)
    for temperature in (0.0, 1.0):
        with pytest.raises(EngineError, match="logits are not numbers"):
            one(sample, logits, Sampling(temperature))


def test_all_logits_minus_infinity_are_an_error(sample: Sample) -> None:
    with pytest.raises(EngineError, match="logits are not numbers"):
        one(sample, np.full(3, -np.inf, np.float32), Sampling())


def test_one_impossible_token_is_never_chosen(sample: Sample) -> None:
    counts = frequencies(sample, np.array([0, -np.inf, 0], np.float32), Sampling(seed=5), 2000)
    assert counts[1] == 0
