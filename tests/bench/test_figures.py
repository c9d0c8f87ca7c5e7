"""Tests of the benchmark's statistics: percentiles, and the times of a request, computed from the arrival
times of its tokens."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild.bench.figures import LoadResult, Sample, percentile, rows
from mlcbuild.bench.plot import plot


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-9)


def test_times_count_from_when_a_request_was_due() -> None:
    late = Sample(due=1.0, sent=1.5, end=4.0, texts=(2.0, 3.0, 4.0), answer_tokens=5)
    assert late.values() == {"e2e": 3.0, "ttft": 1.0, "tpot": 0.5}
    assert late.gaps() == [1.0, 1.0]
    assert late.meets({"ttft": 1.0, "tpot": 0.5})
    assert not late.meets({"ttft": 0.9})


def test_text_that_arrives_together_has_no_time_between_its_tokens() -> None:
    burst = Sample(due=0.0, sent=0.0, end=1.0, texts=(0.5,) * 8, answer_tokens=8)
    assert burst.values() == {"e2e": 1.0, "ttft": 0.5} and burst.gaps() == []
    load = LoadResult("1 client", (burst,), 1.0, 0.0)
    document = load.to_json({})
    assert document["tpot"] is document["itl"] is None
    assert not [row for row in rows([document]) if row[0].startswith(("tpot", "itl"))]
    ET.fromstring(plot([load]))
    two = Sample(due=0.0, sent=0.0, end=4.0, texts=(1.0, 1.0, 3.0, 3.0), answer_tokens=5)
    assert two.gaps() == [2.0] and two.values()["tpot"] == 0.5


def test_a_plot_of_failures_only_is_still_a_picture() -> None:
    failed = LoadResult("1 client", (Sample(0.0, 0.0, 1.0, error="cut"),), 1.0, 0.0)
    ET.fromstring(plot([failed, failed]))
