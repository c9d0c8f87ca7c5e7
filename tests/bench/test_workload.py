"""Tests of the benchmark's random workloads: lengths of prompts and answers, arrival times, and seeds."""

from __future__ import annotations

import statistics
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild.bench.workload import Lengths, Load, Workload
from mlcbuild.errors import UsageError


@pytest.mark.parametrize(
    "text", ["0", "-3", "x", "uniform:9", "uniform:9,3", "poisson:3,4", "normal:nan,1", "", "normal:5,inf"]
)
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a length"):
        Lengths.of(text)


@given(st.sampled_from(["7", "uniform:3,9", "normal:5,30", "lognormal:40,2"]), st.integers())
def test_lengths_are_at_least_one_token(text: str, seed: int) -> None:
    lengths, random = Lengths.of(text), Random(seed)
    assert all(lengths.draw(random) >= 1 for _ in range(50))


def test_distributions_have_their_middle() -> None:
    random = Random(1)

    def drawn(text: str) -> list[int]:
        return [Lengths.of(text).draw(random) for _ in range(4000)]

    assert set(drawn("uniform:3,9")) == set(range(3, 10))
    assert statistics.mean(drawn("normal:100,20")) == pytest.approx(100, rel=0.03)
    assert statistics.stdev(drawn("normal:100,20")) == pytest.approx(20, rel=0.1)
    assert statistics.median(drawn("lognormal:100,1")) == pytest.approx(100, rel=0.1)


def test_arrivals() -> None:
    even = list(islice(Load(rate=4.0, even=True).arrivals(Random(1)), 5))
    assert even == [0.0, 0.25, 0.5, 0.75, 1.0]
    moments = list(islice(Load(rate=4.0).arrivals(Random(1)), 4001))
    gaps = np.diff(moments)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.1), "of an exponential distribution"


def test_one_seed_is_one_workload() -> None:
    def drawn(seed: int) -> list[object]:
        lengths = Lengths.of("uniform:1,99")
        return list(islice(Workload(lengths, lengths, None, seed=seed).demands(), 9))

    assert drawn(1) == drawn(1) != drawn(2)
