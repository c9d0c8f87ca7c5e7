"""Tests of sampling on the host, compared with a plain definition: from whole rows, and from the largest
logits only."""

from __future__ import annotations

from math import inf, log

import numpy as np
import pytest
from mlcbuild_format import abi
from mlcbuild_runtime.devices.host_sampling import apply_masks, draw, draw_from_top
from numpy.typing import NDArray

GREEDY = abi.SKIP._replace(inverse_temperature=0.0)
PLAIN = abi.SKIP._replace(inverse_temperature=1.0)
TOP = 64


def expected(logits: NDArray[np.float32], params: abi.SamplingParams) -> int:
    """Returns the token that sampling must choose from a row of logits, computed plainly, token by token,
    from the definition of the sampling parameters. logits: float32 [vocabulary]; params: temperature, filters
    and the random number."""
    weights = {token: float(value) for token, value in enumerate(logits)}
    order = sorted(weights, key=lambda token: -weights[token])
    if params.top_k:
        least = weights[order[: int(params.top_k)][-1]]
        weights = {token: value for token, value in weights.items() if value >= least}
    best = max(weights.values())
    weights = {token: value for token, value in weights.items() if value - best >= params.logit_drop}
    weights = {t: float(np.exp((v - best) * params.inverse_temperature)) for t, v in weights.items()}
    whole, mass, kept = sum(weights.values()), 0.0, 0.0
    for token in sorted(weights, key=lambda token: -weights[token]):
        mass, kept = mass + weights[token], weights[token]
        if mass > params.top_p * whole:
            break
    weights = {token: value for token, value in weights.items() if value >= kept}
    left = params.random * sum(weights.values())
    for token, value in weights.items():
        left -= value
        if left < 0:
            return token
    return max(weights)


def cases(seed: int) -> list[abi.SamplingParams]:
    rng = np.random.default_rng(seed)
    return [
        abi.SamplingParams(
            float(rng.choice([0.5, 1.0, 1.0, 2.0])),
            float(rng.choice([-inf, -1.0, log(0.05)])),
            float(rng.choice([1.0, 0.9, 0.3])),
            float(rng.choice([0, 1, 5, 40])),
            float(rng.random()),
        )
        for _ in range(40)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_those_of_the_definition(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 300).astype(np.float32)
    logits[::7] = -inf
    for params in cases(seed):
        assert draw(logits, params) == expected(logits, params), params


def test_rows_without_a_token() -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    assert draw(logits, GREEDY) == 1, "the first of equal ones"
    assert draw(logits, abi.SKIP) == abi.NO_TOKEN
    rows = [[-inf] * 4, [0, np.nan, 1, 2], [0, inf, 1, 2]]
    for invalid in np.array(rows, np.float32):
        assert draw(invalid, GREEDY) == draw(invalid, PLAIN) == abi.INVALID_TOKEN


def test_random_numbers_at_the_border() -> None:
    logits = np.array([0.0, -inf, 0.0], np.float32)
    assert [draw(logits, PLAIN._replace(random=value)) for value in (0.0, 0.49, 0.5, 0.99)] == [0, 0, 2, 2]


def test_masks_leave_other_rows_alone() -> None:
    logits = np.zeros((2, 40), np.float32)
    mask = np.array([0b101, 0b1], np.int32)
    apply_masks(logits, [(1, mask)])
    assert np.isfinite(logits[0]).all()
    assert np.flatnonzero(np.isfinite(logits[1])).tolist() == [0, 2, 32]


def largest(logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """Returns the output of the GPU kernel `top` for a row of logits: the largest logit, the sum of
    exponentials, and the 64 largest logits with their tokens."""
    best = logits.max()
    total = np.exp(logits.astype(np.float64) - best).sum()
    order = np.argsort(-logits, kind="stable")[:TOP]
    pairs = np.stack([logits[order].view(np.int32), order.astype(np.int32)], axis=1)
    return np.concatenate([np.array([best, total], np.float32).view(np.int32), pairs.ravel()])


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_the_largest_logits_decide_or_say_that_they_cannot(spread: float) -> None:
    decided = 0
    for seed in range(10):
        logits = np.random.default_rng(seed).normal(0, spread, 500).astype(np.float32)
        for params in cases(seed):
            token = draw_from_top(largest(logits), params)
            decided += token is not None
            assert token in (None, draw(logits, params)), params
    assert decided > 100, "filters that keep few tokens are decided without the whole row"


def test_the_largest_logits_of_invalid_rows() -> None:
    for best, total in ((np.nan, 1), (-inf, 1), (inf, 1), (3, np.nan)):
        top = np.zeros(2 + 2 * TOP, np.int32)
        top[:2] = np.array([best, total], np.float32).view(np.int32)
        assert draw_from_top(top, PLAIN) == abi.INVALID_TOKEN
