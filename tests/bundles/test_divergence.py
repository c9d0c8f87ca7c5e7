"""Tests of the KL divergence between next-token distributions, compared with sums over probabilities in plain
Python."""

from __future__ import annotations

import math

import numpy as np

from mlcbuild.bundles.divergence import divergence, log_softmax


def probabilities(logits: list[float]) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(value) / total for value in logits]


def test_it_is_the_sum_over_all_tokens() -> None:
    p, q = [[0.0, 1.0, 2.0], [3.0, -1.0, 0.5]], [[1.0, 1.0, 1.0], [3.0, -1.0, 0.0]]
    actual = divergence(log_softmax(np.array(p)), log_softmax(np.array(q)))
    expected = [
        sum(a * math.log(a / b) for a, b in zip(probabilities(x), probabilities(y), strict=True))
        for x, y in zip(p, q, strict=True)
    ]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    assert divergence(log_softmax(np.array(p)), log_softmax(np.array(p))).tolist() == [0.0, 0.0]


def test_large_logits_and_small_types() -> None:
    rows = log_softmax(np.array([[1000.0, 0.0], [-1000.0, -1000.0]], np.float32))
    assert rows.dtype == np.float64
    np.testing.assert_allclose(rows, [[0.0, -1000.0], [-math.log(2), -math.log(2)]])


def test_rounding_makes_no_divergence_negative() -> None:
    p = log_softmax(np.random.default_rng(1).normal(size=(500, 90)))
    assert (divergence(p, p + 1e-17) >= 0).all() and (divergence(p, np.nextafter(p, 0)) >= 0).all()
