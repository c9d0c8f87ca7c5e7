"""Tests that compare the inverse frequencies of rotary embeddings with their formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlcbuild.models import rotary

PLAIN = [10000.0 ** (-2 * i / 64) for i in range(32)]


def close(actual: tuple[float, ...], expected: list[float]) -> None:
    assert actual == tuple(np.array(actual, np.float32).tolist()), "they are float32"
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_default_and_linear() -> None:
    plain = rotary.default(10000.0, 64)
    close(plain, PLAIN)
    close(rotary.linear(plain, 4.0), [value / 4 for value in PLAIN])


def test_llama3_divides_long_waves_keeps_short_ones_and_blends_between() -> None:
    def blended(value: float) -> float:
        turns = 2048 / (2 * math.pi / value)
        share = min(max((turns - 1) / (4 - 1), 0), 1)
        return (1 - share) * value / 8 + share * value

    actual = rotary.llama3(rotary.default(10000.0, 64), rotary.Llama3(8.0, 1.0, 4.0, 2048))
    close(actual, [blended(value) for value in PLAIN])
    assert actual[0] == 1.0 and actual[-1] == pytest.approx(PLAIN[-1] / 8)
    assert len({round(a / b, 3) for a, b in zip(actual, PLAIN, strict=True)}) > 2, "some lie between"


def test_yarn_interpolates_slow_dimensions() -> None:
    def dimension(turns: float) -> float:
        return 64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000))

    first, last = math.floor(dimension(32)), math.ceil(dimension(1))
    ramps = [min(max((i - first) / (last - first), 0), 1) for i in range(32)]
    expected = [value * (1 - ramp) + value / 16 * ramp for value, ramp in zip(PLAIN, ramps, strict=True)]
    close(rotary.yarn(10000.0, 64, rotary.Yarn(16.0, 4096)), expected)


def test_longrope_divides_each_by_its_factor() -> None:
    factors = [1.0 + i / 8 for i in range(32)]
    close(rotary.longrope(10000.0, factors), [v / f for v, f in zip(PLAIN, factors, strict=True)])


def test_factors_of_attention() -> None:
    assert rotary.yarn_attention(1.0, None, None) == 1.0
    assert rotary.yarn_attention(16.0, None, None) == pytest.approx(0.1 * math.log(16) + 1)
    assert rotary.yarn_attention(16.0, 2.0, 1.0) == pytest.approx(
        (0.2 * math.log(16) + 1) / (0.1 * math.log(16) + 1)
    )
    assert rotary.longrope_attention(32.0, 4096) == pytest.approx(
        math.sqrt(1 + math.log(32) / math.log(4096))
    )
    assert rotary.longrope_attention(1.0, 4096) == rotary.longrope_attention(4.0, 1) == 1.0
